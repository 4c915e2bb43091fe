import torch
from hypothesis import given

from kv_transfer.layout import Lifetime, OwnerLayer, Section
from tests.worker.kv_cache.plans import StatedLayer, full, layered_plans, owners, sharer, state, window
from worker.kv_cache.groups import CachePlan, plan_cache
from worker.kv_cache.specs import (
    EveryToken,
    FullAttentionSpec,
    LastState,
    LastTokens,
    RecurrentStateSpec,
    SparseMLASpec,
    StateRegion,
)
from worker.kv_cache.transfer_layout import transfer_layout

BF16 = torch.bfloat16


def test_a_section_per_retention_with_owners_in_producing_order() -> None:
    # Two sliding groups of two, whose owners alternate; one layer shares a sliding one, two a full one.
    layers = owners(*[window(2, 8), window(2, 8), full(2, 3)] * 2)
    layers += [sharer("a", layers[1]), sharer("b", layers[2]), sharer("c", layers[2])]
    plan = plan_cache(layers, 2)
    layout, places = transfer_layout(plan, layers, BF16, "model")

    assert layout.sections == (
        Section(Lifetime.LAST_TOKENS, 8, 0, tuple(OwnerLayer(f"layers.{i}", 1, 4, int(i == 1)) for i in (0, 1, 3, 4))),
        Section(Lifetime.EVERY_TOKEN, 0, 0, (OwnerLayer("layers.2", 1, 12, 2), OwnerLayer("layers.5", 1, 12, 0))),
    )
    assert (layout.fingerprint, layout.kv_dtype, layout.sharing_layers) == ("model", "bfloat16", 3)
    assert [[place.name for place in each] for each in places] == [
        [owner.name for owner in section.owners] for section in layout.sections
    ]
    for each in places:
        for place in each:
            assert place.name in plan.groups[place.group].owners
    assert len({place.group for place in places[0]}) == 2


def test_sinks_and_states_and_index_keys() -> None:
    latent = SparseMLASpec(2, 40, BF16, 32)
    layers = owners(latent, window(2, 8, sinks=3), state(5))
    layout, places = transfer_layout(plan_cache(layers, 2), layers, torch.float32, "model")
    sliding = (OwnerLayer("layers.1", 1, 4, 0),)
    assert layout.sections == (
        Section(Lifetime.EVERY_TOKEN, 0, 0, (OwnerLayer("layers.0", 1, (40 + 32) * 2, 0),)),
        Section(Lifetime.FIRST_TOKENS, 0, 3, sliding),
        Section(Lifetime.LAST_TOKENS, 8, 3, sliding),
        Section(Lifetime.STATE, 0, 0, (OwnerLayer("layers.2", 5, 20, 0),)),
    )
    assert places[1] == places[2]
    assert layout.kv_dtype == "float32"
    assert len(layout.owners) == 3


@given(planned=layered_plans())
def test_every_owner_moves_all_that_it_stores(planned: tuple[list[StatedLayer], CachePlan]) -> None:
    layers, plan = planned
    layout, places = transfer_layout(plan, layers, BF16, "model")
    specs = {layer.name: layer.spec for layer in layers if layer.spec is not None}
    assert sorted(owner.name for owner in layout.owners) == sorted(specs)
    for section, each in zip(layout.sections, places, strict=True):
        for owner, place in zip(section.owners, each, strict=True):
            spec = specs[place.name]
            kind = {EveryToken: Lifetime.EVERY_TOKEN, LastTokens: Lifetime.LAST_TOKENS, LastState: Lifetime.STATE}
            assert section.lifetime is kind[type(spec.retention)]
            # A block of one token holds exactly what moves of a token; a state moves whole.
            assert owner.bytes_per_slot == spec.with_block_size(1).page_size_bytes
            # As many ranks can share it as divide what each of its tensors has of heads.
            counts = [r.shape[0] if isinstance(r, StateRegion) else r.kv_heads for r in spec.regions]
            assert owner.kv_heads == max(n for n in range(1, 20) if all(count % n == 0 for count in counts))
            assert owner.sharers == sum(layer.kv_sharing_target_layer_name == place.name for layer in layers)


def test_another_map_of_sharing_layers_is_another_digest() -> None:
    first, second = layers = owners(full(2), full(2))
    digests = {
        transfer_layout(plan_cache(every, 2), every, BF16, "model")[0].sharing_digest
        for every in (layers, [*layers, sharer("a", first)], [*layers, sharer("a", second)])
    }
    assert len(digests) == 3


def test_block_and_page_sizes_are_nobodys_business() -> None:
    layouts = set()
    for size in (2, 16):
        layers = owners(
            FullAttentionSpec(size, 2, 8, BF16), RecurrentStateSpec(state(300).tensors), window(size, 100, 4)
        )
        layouts.add(transfer_layout(plan_cache(layers, size), layers, BF16, "model")[0])
    assert len(layouts) == 1
