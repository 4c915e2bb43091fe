import torch

from tests.worker.kv_cache.attention_layers import attention
from worker.kv_cache.groups import group_layers
from worker.kv_cache.sharing import validate_targets
from worker.kv_cache.tensors import allocate_kv_cache_tensors, reshape_kv_cache_tensors

CPU = torch.device("cpu")


def test_only_owners_have_memory_and_sharing_layers_see_their_targets() -> None:
    layers = [attention(0), attention(1, shares=0), attention(2), attention(3, shares=0), attention(4, shares=2)]
    validate_targets(layers)
    groups = group_layers(layers)

    raw = allocate_kv_cache_tensors(groups, 10, CPU)
    views = reshape_kv_cache_tensors(raw, layers, groups, 10)

    assert list(raw) == [layers[0].name, layers[2].name]
    page = 2 * 4 * 2 * 8 * 2
    assert sum(tensor.nbytes for tensor in raw.values()) == 2 * 10 * page
    assert len({tensor.untyped_storage().data_ptr() for tensor in raw.values()}) == 2
    assert set(views) == {layer.name for layer in layers}
    for layer in layers:
        view = views[layer.name]
        owner = layer.kv_sharing_target_layer_name or layer.name
        assert view.shape == (10, 2, 2, 4, 8)
        assert view.dtype == torch.bfloat16
        assert view.is_contiguous()
        assert view.data_ptr() == raw[owner].data_ptr()
    # What an owner writes, a layer that shares it reads.
    views[layers[2].name][7, 1, 0, 3] = 5.0
    assert (views[layers[4].name][7, 1, 0, 3] == 5.0).all()
    assert not views[layers[1].name].any()


def test_layers_of_different_specs_have_views_of_different_shape() -> None:
    layers = [attention(0), attention(1, kv_heads=1, head_dim=16), attention(2, shares=1, kv_heads=1, head_dim=16)]
    groups = group_layers(layers)
    views = reshape_kv_cache_tensors(allocate_kv_cache_tensors(groups, 3, CPU), layers, groups, 3)
    assert views[layers[0].name].shape == (3, 2, 2, 4, 8)
    assert views[layers[2].name].shape == (3, 2, 1, 4, 16)
    assert views[layers[2].name].data_ptr() == views[layers[1].name].data_ptr()


def test_memory_is_filled_with_the_byte_that_was_asked_for() -> None:
    layers = [attention(0, dtype=torch.float32)]
    groups = group_layers(layers)
    (raw,) = allocate_kv_cache_tensors(groups, 2, CPU, fill=0x4B).values()
    assert (raw == 0x4B).all()
    view = reshape_kv_cache_tensors({layers[0].name: raw}, layers, groups, 2)[layers[0].name]
    assert (view == view.flatten()[0]).all()
    assert 1e7 < float(view.flatten()[0]) < 2e7
