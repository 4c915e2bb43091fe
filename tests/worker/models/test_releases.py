"""Released configurations are built at full size, without memory, and have as many parameters as was published."""

import pytest
import torch

from tests.releases import RELEASES
from worker.kv_cache.sharing import parse_sharing
from worker.layers.cache_format import CacheFormat
from worker.layers.weights import WeightFormat
from worker.models.config_reader import parse_config
from worker.models.model import Model, ModelContext

META = torch.device("meta")

# Billions, of the text model alone. Published counts may include encoders, prediction layers, and projections that
# sharing layers do not use: 0.98 and 0.02 of Gemma 3n E2B's 5.44, 13.5 of DeepSeek V3's 684.5.
PARAMETERS = {
    "Qwen3-8B": 8.19,
    "Gemma 3 4B": 3.88,
    "Gemma 3n E2B": 4.44,
    "Gemma 3n E4B": 6.84,
    "Gemma 4 E2B": 4.63,
    "Gemma 4 E4B": 7.46,
    "Gemma 4 31B": 30.7,
    "Gemma 4 26B-A4B": 25.2,
    "Hunyuan-Large": 389.0,
    "Hunyuan-A13B": 80.4,
    "Hymba-1.5B": 1.52,
    "DeepSeek V2-Lite": 15.7,
    "DeepSeek V2": 236.0,
    "DeepSeek V3": 671.0,
    "DeepSeek V3.2": 671.9,
    "Qwen3-Next-80B": 79.7,
}


def build(release: str, *, headless: bool) -> Model:
    context = ModelContext(
        weights=WeightFormat(torch.bfloat16, META),
        cache=CacheFormat(16, torch.bfloat16),
        sharing=parse_sharing("model"),
        max_model_len=2,
        headless=headless,
    )
    return parse_config(RELEASES[release]).build(context)


def parameters(model: Model) -> int:
    slots = list(model.slots())
    assert len({slot.name for slot in slots}) == len(slots)
    return sum(slot.destination.numel() for slot in slots)


@pytest.mark.parametrize("release", RELEASES)
def test_parameters_are_those_published(release: str) -> None:
    whole = parameters(build(release, headless=False))
    assert whole / 1e9 == pytest.approx(PARAMETERS[release], rel=0.002)
    assert parameters(build(release, headless=True)) < whole
