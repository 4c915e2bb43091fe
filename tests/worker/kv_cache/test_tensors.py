from itertools import count

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.worker.kv_cache.attention_layers import attention
from tests.worker.kv_cache.plans import StatedLayer, layered_plans, owners, sharer, state
from worker.kv_cache.groups import CachePlan, plan_cache
from worker.kv_cache.sharing import validate_targets
from worker.kv_cache.specs import FullAttentionSpec, IndexKeySpec, SparseMLASpec, TokenRegion
from worker.kv_cache.tensors import allocate_kv_cache_tensors, reshape_kv_cache_tensors

CPU = torch.device("cpu")


def test_only_owners_have_memory_and_sharing_layers_see_their_targets() -> None:
    layers = [attention(0), attention(1, shares=0), attention(2), attention(3, shares=0), attention(4, shares=2)]
    validate_targets(layers)
    plan = plan_cache(layers, 4)

    raw = allocate_kv_cache_tensors(plan, 10, CPU)
    views = reshape_kv_cache_tensors(raw, plan, layers, 10)

    assert [buffer.shared_by for buffer in raw] == [(layers[0].name,), (layers[2].name,)]
    page = 2 * 4 * 2 * 8 * 2
    assert sum(tensor.nbytes for tensor in raw.values()) == 2 * 10 * page
    assert len({tensor.untyped_storage().data_ptr() for tensor in raw.values()}) == 2
    assert set(views) == {layer.name for layer in layers}
    memory_of = {buffer.shared_by[0]: tensor for buffer, tensor in raw.items()}
    for layer in layers:
        (view,) = views[layer.name]
        owner = layer.kv_sharing_target_layer_name or layer.name
        assert view.shape == (10, 2, 2, 4, 8)
        assert view.dtype == torch.bfloat16
        assert view.is_contiguous()
        assert view.data_ptr() == memory_of[owner].data_ptr()
    # What an owner writes, a layer that shares it reads.
    views[layers[2].name][0][7, 1, 0, 3] = 5.0
    assert (views[layers[4].name][0][7, 1, 0, 3] == 5.0).all()
    assert not views[layers[1].name][0].any()


def test_layers_of_different_specs_have_views_of_different_shape() -> None:
    layers = [attention(0), attention(1, kv_heads=1, head_dim=16), attention(2, shares=1, kv_heads=1, head_dim=16)]
    plan = plan_cache(layers, 4)
    views = reshape_kv_cache_tensors(allocate_kv_cache_tensors(plan, 3, CPU), plan, layers, 3)
    assert views[layers[0].name][0].shape == (3, 2, 2, 4, 8)
    assert views[layers[2].name][0].shape == (3, 2, 1, 4, 16)
    assert views[layers[2].name][0].data_ptr() == views[layers[1].name][0].data_ptr()


def test_memory_is_filled_with_the_byte_that_was_asked_for() -> None:
    layers = [attention(0, dtype=torch.float32)]
    plan = plan_cache(layers, 4)
    raw = allocate_kv_cache_tensors(plan, 2, CPU, fill=0x4B)
    for tensor in raw.values():
        assert (tensor == 0x4B).all()
    (view,) = reshape_kv_cache_tensors(raw, plan, layers, 2)[layers[0].name]
    assert (view == view.flatten()[0]).all()
    assert 1e7 < float(view.flatten()[0]) < 2e7


@given(planned=layered_plans(), num_blocks=st.integers(1, 5), data=st.data())
@settings(max_examples=100)
def test_layers_that_use_different_blocks_never_touch_each_other(
    planned: tuple[list[StatedLayer], CachePlan], num_blocks: int, data: st.DataObject
) -> None:
    """Every block is given to one group, whose owners fill every region of it with numbers of their own."""
    layers, plan = planned
    raw = allocate_kv_cache_tensors(plan, num_blocks, CPU)
    views = reshape_kv_cache_tensors(raw, plan, layers, num_blocks)
    assert sum(tensor.nbytes for tensor in raw.values()) == num_blocks * plan.bytes_per_block

    spec_of = {name: spec for group in plan.groups for name, spec in zip(group.owners, group.specs, strict=True)}
    numbers = count(1)
    written: list[tuple[torch.Tensor, torch.Tensor]] = []
    user = [data.draw(st.integers(0, len(plan.groups) - 1)) for _ in range(num_blocks)]
    for block in data.draw(st.permutations(range(num_blocks))):
        group = plan.groups[user[block]]
        size = 0
        for name in group.owners:
            # What a layer itself owns comes last among its views.
            for region in views[name][-len(spec_of[name].regions) :]:
                content = torch.arange(region[block].numel()).remainder(97).add(97 * (next(numbers) % 2))
                content = content.view(region[block].shape).to(region.dtype)
                region[block] = content
                written.append((region[block], content))
                size += region[block].nbytes
        assert size == group.block_bytes <= plan.bytes_per_block
    for region, content in written:
        assert torch.equal(region, content)


@given(planned=layered_plans())
def test_views_have_the_shape_of_what_is_stored_and_the_storage_of_its_owner(
    planned: tuple[list[StatedLayer], CachePlan],
) -> None:
    layers, plan = planned
    raw = allocate_kv_cache_tensors(plan, 3, CPU)
    views = reshape_kv_cache_tensors(raw, plan, layers, 3)
    assert set(views) == {layer.name for layer in layers}
    spec_of = {name: spec for group in plan.groups for name, spec in zip(group.owners, group.specs, strict=True)}
    for layer in layers:
        own = views[layer.name]
        if layer.kv_sharing_target_layer_name is not None:
            theirs = views[layer.kv_sharing_target_layer_name]
            assert [view.data_ptr() for view in own[: len(theirs)]] == [view.data_ptr() for view in theirs]
            assert [view.stride() for view in own[: len(theirs)]] == [view.stride() for view in theirs]
            own = own[len(theirs) :]
        if layer.spec is None:
            assert own == ()
            continue
        spec = spec_of[layer.name]
        for view, region in zip(own, spec.regions, strict=True):
            tokens = isinstance(region, TokenRegion)
            shape = (region.parts, region.kv_heads, spec.tokens_per_block, region.head_dim) if tokens else region.shape
            assert view.shape == (3, *shape)
            assert view.dtype == region.dtype
            assert view[0].is_contiguous()
            assert any(view.untyped_storage().data_ptr() == tensor.data_ptr() for tensor in raw.values())


def test_the_two_regions_of_a_sparse_page_lie_side_by_side() -> None:
    (layer,) = layers = owners(SparseMLASpec(4, 40, torch.bfloat16, 32))
    plan = plan_cache(layers, 4)
    raw = allocate_kv_cache_tensors(plan, 3, CPU)
    latents, keys = reshape_kv_cache_tensors(raw, plan, layers, 3)[layer.name]
    assert latents.shape == (3, 1, 1, 4, 40)
    assert keys.shape == (3, 1, 1, 4, 32)
    latents.fill_(1.0)
    assert not keys.any()
    keys.fill_(2.0)
    assert (latents == 1.0).all()
    (memory,) = raw.values()
    assert memory.view(torch.bfloat16).tolist() == ([1.0] * 4 * 40 + [2.0] * 4 * 32) * 3


def test_a_layer_that_reads_anothers_latents_and_owns_index_keys_has_both() -> None:
    (target,) = owners(SparseMLASpec(4, 40, torch.bfloat16, 32))
    reader = sharer("reader", target, IndexKeySpec(4, 32, torch.bfloat16))
    layers = [target, reader]
    plan = plan_cache(layers, 4)
    views = reshape_kv_cache_tensors(allocate_kv_cache_tensors(plan, 2, CPU), plan, layers, 2)
    assert [view.shape[-1] for view in views[reader.name]] == [40, 32, 32]
    assert [v.data_ptr() for v in views[reader.name][:2]] == [v.data_ptr() for v in views[target.name]]
    views[reader.name][2].fill_(3.0)
    assert not any(view.any() for view in views[target.name])


def test_a_buffer_of_a_hybrid_model_is_one_allocation_for_all_its_layers() -> None:
    layers = owners(FullAttentionSpec(4, 1, 8, torch.bfloat16), *[state(32)] * 3)
    plan = plan_cache(layers, 4)
    raw = allocate_kv_cache_tensors(plan, 6, CPU)
    views = reshape_kv_cache_tensors(raw, plan, layers, 6)
    assert len(raw) == 1
    assert {view.data_ptr() for view in (views[layer.name][0] for layer in layers)} == {
        next(iter(raw.values())).data_ptr()
    }
