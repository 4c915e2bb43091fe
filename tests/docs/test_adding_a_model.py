"""docs/adding-a-model.md: its file, its line and its family, as they stand there, against transformers."""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.docs.documents import REPOSITORY, blocks
from tests.model_harness import ModelHarness
from tests.tiny_checkpoints import VOCAB_SIZE
from tests.tiny_families import Family, of_transformers
from worker.config import Role
from worker.models import config_reader, registry

PAGE = REPOSITORY / "docs" / "adding-a-model.md"
CODE, LINE, FAMILY = (block.content for block in blocks(PAGE) if block.language == "python")
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    file = tmp_path_factory.mktemp("models") / "smollm3.py"
    file.write_text(CODE)
    spec = spec_from_file_location("documented_smollm3", file)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def registered(model_file: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = eval(f"{{{LINE}}}", vars(registry) | vars(model_file))
    assert not entry.keys() & registry.ARCHITECTURES.keys(), "choose another model for the example"
    for module in (registry, config_reader):
        monkeypatch.setattr(module, "ARCHITECTURES", {**registry.ARCHITECTURES, **entry})


@pytest.fixture(scope="module")
def family() -> Family:
    ((_, family),) = eval(f"{{{FAMILY}}}", {"of_transformers": of_transformers}).items()
    return family


@pytest.fixture(scope="module")
def checkpoint(family: Family, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return family.write(tmp_path_factory.mktemp("smollm3"))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(4, VOCAB_SIZE, (length,), generator=generator).tolist() for length in (1, 17, 120)]


@pytest.mark.usefixtures("registered")
def test_logits_are_those_of_transformers(family: Family, checkpoint: Path, prompts: list[list[int]]) -> None:
    reference = family.load(checkpoint)
    for prompt, ours in zip(prompts, ModelHarness(checkpoint).prompt_logits(prompts, 50), strict=True):
        with torch.inference_mode():
            theirs = reference(torch.tensor([prompt]), use_cache=False).logits[0]
        assert (ours - theirs).abs().max().item() <= TOLERANCE


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("kv_sharing", ["model", "after:3", "after:4"])
def test_a_prefill_replica_stores_the_same(checkpoint: Path, prompts: list[list[int]], kv_sharing: str) -> None:
    """The last owner is once a layer that rotates and once one that does not."""
    whole, headless = (
        ModelHarness(checkpoint, role=role, kv_sharing=kv_sharing).stored(prompts, 50)
        for role in (Role.COLOCATED, Role.PREFILL)
    )
    for expected, stored in zip(whole, headless, strict=True):
        torch.testing.assert_close(stored, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("registered")
def test_what_is_not_computed_is_refused(family: Family) -> None:
    config = family.build().config.to_dict() | {"architectures": ["SmolLM3ForCausalLM"]}
    config_reader.parse_config(config)
    with pytest.raises(ValueError, match="use_sliding_window is True"):
        config_reader.parse_config(config | {"use_sliding_window": True, "sliding_window": 8})
