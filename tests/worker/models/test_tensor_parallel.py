"""A model split over ranks, each a thread with weights and KV memory of its own, against the model on one rank."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from torch._C._distributed_c10d import HashStore

from tests.model_harness import ModelHarness
from tests.releases import RELEASES
from tests.tiny_checkpoints import VOCAB_SIZE, write_tiny, write_tiny_gguf
from tests.tiny_families import FAMILIES
from worker.checkpoint.checkpoint import open_checkpoint
from worker.config import Role
from worker.kv_cache.sharing import ModelDeclared
from worker.kv_cache.specs import LastTokens, LayerName, StateRegion
from worker.layers.attention import Attention
from worker.layers.cache_format import CacheFormat
from worker.layers.weights import WeightFormat
from worker.models.config_checks import UnsupportedModel
from worker.models.config_reader import parse_config
from worker.models.model import Model, ModelContext
from worker.models.outline import outline_model
from worker.models.registry import valid_rank_counts
from worker.ranks.process_group import TorchRankGroup
from worker.ranks.rank_group import DescribedRank, RankGroup
from worker.sequence import Sequence as EngineSequence

META = torch.device("meta")
TOLERANCE = 1e-4
PROMPT_LENGTHS = (1, 17, 45)
CHUNK, DECODED = 7, 4
"""Prompts are computed in chunks, their last tokens one by one."""

CHOOSY = ("deepseek_v32", "mistral_large4", "mistral_large4_latents_last")
"""What attends to chosen tokens only is computed in float64: in float32 rounding alone chooses others."""

SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}
NINE_HEADS: Mapping[str, Any] = {
    "hidden_size": 72,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 96,
    "attention_bias": True,
    "mlp_bias": True,
    "tie_word_embeddings": True,
}

WRITERS: Mapping[str, Callable[[Path], Path]] = {
    **{name: family.write for name, family in FAMILIES.items() if name != "hymba"},
    "llama": partial(write_tiny, "llama"),
    "llama_nine_heads": partial(write_tiny, "llama", **NINE_HEADS),
    "qwen2": partial(write_tiny, "qwen2"),
    "qwen3": partial(write_tiny, "qwen3"),
    # A rank's columns begin and end within the blocks of a quantized row, and rows of heads are interleaved.
    "gguf": lambda directory: write_tiny_gguf(directory, "llama", "Q5_1"),
}
SPLITS = [(name, size) for name in WRITERS for size in ((3,) if name == "llama_nine_heads" else (2, 4))]

T = TypeVar("T")


def on_every_rank(size: int, work: Callable[[RankGroup], T]) -> list[T]:
    """What ``work`` makes of each rank's group, all ranks at once."""
    store = HashStore()

    def run(rank: int) -> T:
        return work(TorchRankGroup(store, rank, size, torch.device("cpu"), "127.0.0.1"))

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


Stored = dict[tuple[LayerName, int], torch.Tensor]
"""What each region of each owner holds of a sequence: ``[parts, heads, tokens, head_dim]``, or a state."""


@dataclass(frozen=True)
class Outcome:
    """Of every prompt: float32 logits ``[tokens, vocab]``, none where a rank does not lead, and what is stored."""

    logits: list[torch.Tensor]
    stored: list[Stored]


def stored(harness: ModelHarness, sequence: EngineSequence) -> Stored:
    """Without tokens that no later one can see."""
    found: Stored = {}
    for group, table in zip(harness.runner.cache.groups, sequence.tables, strict=True):
        for name, spec in zip(group.owners, group.specs, strict=True):
            views = harness.runner.kv_caches[name][-len(spec.regions) :]
            for index, (region, view) in enumerate(zip(spec.regions, views, strict=True)):
                if isinstance(region, StateRegion):
                    found[name, index] = view[table.blocks[-1]].clone()
                    continue
                first = 0
                if isinstance(group.retention, LastTokens):
                    first = max(0, sequence.computed - group.retention.window + 1)
                skipped = first // group.block_size
                pages = view[table.blocks[skipped:]].permute(1, 2, 0, 3, 4).flatten(2, 3)
                begin = skipped * group.block_size
                found[name, index] = pages[:, :, first - begin : sequence.computed - begin]
    return found


def compute(harness: ModelHarness, prompts: Sequence[Sequence[int]]) -> Outcome:
    """All prompts side by side."""
    sequences = [harness.sequence(prompt, len(prompt)) for prompt in prompts]
    logits: list[list[torch.Tensor]] = [[] for _ in prompts]
    while live := [index for index, sequence in enumerate(sequences) if sequence.pending]:
        rows = [max(1, min(CHUNK, sequences[index].pending - DECODED)) for index in live]
        parts = harness.step(list(zip((sequences[index] for index in live), rows, strict=True)))
        for index, part in zip(live, parts, strict=bool(parts)):
            logits[index].append(part)
    return Outcome(
        [torch.cat(parts) for parts in logits if parts], [stored(harness, sequence) for sequence in sequences]
    )


@dataclass(frozen=True)
class Case:
    checkpoint: Path
    dtype: str
    prompts: list[list[int]]
    expected: Outcome

    def harness(self, ranks: RankGroup, role: Role = Role.COLOCATED) -> ModelHarness:
        return ModelHarness(self.checkpoint, dtype=self.dtype, ranks=ranks, role=role)


@pytest.fixture(scope="module")
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    name = request.param
    checkpoint = WRITERS[name](tmp_path_factory.mktemp(name))
    dtype = "float64" if name in CHOOSY else "float32"
    generator = torch.Generator().manual_seed(7)
    prompts = [torch.randint(4, VOCAB_SIZE, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS]
    return Case(checkpoint, dtype, prompts, compute(ModelHarness(checkpoint, dtype=dtype), prompts))


def share(whole: torch.Tensor, dimension: int, ranks: RankGroup) -> torch.Tensor:
    """A rank's heads of all of them: an equal number, or one that several ranks have."""
    heads = whole.shape[dimension]
    if heads < ranks.size:
        return whole.narrow(dimension, ranks.rank * heads // ranks.size, 1)
    return whole.chunk(ranks.size, dimension)[ranks.rank]


def require_share(actual: list[Stored], whole: list[Stored], ranks: RankGroup) -> None:
    """Pages of this rank's heads of all tokens, and states of its heads, and nothing else."""
    for mine, everything in zip(actual, whole, strict=True):
        assert mine.keys() == everything.keys()
        for place, values in everything.items():
            is_state = place[0].endswith("state")
            expected = share(values, 0 if is_state else 1, ranks)
            torch.testing.assert_close(mine[place], expected, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize(("case", "size"), SPLITS, indirect=["case"])
def test_ranks_compute_together_what_one_computes(case: Case, size: int) -> None:
    """Logits of chunks and of single rows; each rank stores its heads' share, with a head of the model or without."""

    def work(ranks: RankGroup) -> list[torch.Tensor]:
        outcome = compute(case.harness(ranks), case.prompts)
        require_share(outcome.stored, case.expected.stored, ranks)
        headless = case.harness(ranks, Role.PREFILL)
        sequences = headless.store(case.prompts, CHUNK)
        require_share([stored(headless, s) for s in sequences], case.expected.stored, ranks)
        return outcome.logits

    leader, *others = on_every_rank(size, work)
    assert others == [[]] * (size - 1)
    for logits, expected in zip(leader, case.expected.logits, strict=True):
        assert logits.shape == expected.shape
        error = (logits - expected).abs().max().item()
        assert error <= TOLERANCE, f"off by {error:.2e}"


SPLIT_NAMES = re.compile(
    r"(embed_tokens|tok_embeddings|lm_head|^output"
    r"|\.(q|q_b|k|v|kv_b|gate|up)_proj|\.(wq|wkv_b|w1|w3)|\.in_proj_(qkvz|ba)|conv1d)\.(weight|bias)$"
    r"|\.(o|down|out)_proj\.weight$|\.(wo|w2)\.weight$|\.experts\.(gate_up|down)_proj$"
    r"|\.(A_log|dt_bias)$|(?<!indexer)\.ssmax_scaling\.[sb]$"
)
"""Tensors of which a rank has a part, by their names in checkpoints. Of all others every rank has everything."""


def described(checkpoint: Path, ranks: RankGroup) -> Model:
    context = ModelContext(
        weights=WeightFormat(torch.float32, META, ranks),
        cache=CacheFormat(16, torch.float32),
        sharing=ModelDeclared(),
        max_model_len=2,
    )
    return parse_config(open_checkpoint(checkpoint).config).build(context)


def repetitions(model: Model, name: str, size: int) -> int:
    """How many ranks have the same part of a split tensor: of keys' and values', as many as share a KV head."""
    layer = re.search(r"layers\.(\d+)\..*\.[kv]_proj\.", name)
    if layer is None:
        return 1
    attention = model.cached_layers[int(layer[1])]
    assert isinstance(attention, Attention)
    return max(1, size // attention.kv_heads)


@pytest.mark.parametrize(("name", "size"), SPLITS)
def test_every_element_is_held_by_as_many_ranks_as_it_should(name: str, size: int, tmp_path: Path) -> None:
    checkpoint = WRITERS[name](tmp_path)
    whole = described(checkpoint, DescribedRank(0, 1))
    holders = {slot.name: np.zeros(slot.shape, dtype=int) for slot in whole.slots()}
    for rank in range(size):
        slots = {slot.name: slot for slot in described(checkpoint, DescribedRank(rank, size)).slots()}
        assert slots.keys() == holders.keys()
        for slot in slots.values():
            assert slot.shape == holders[slot.name].shape
            for destination, part in slot.reads():
                held = holders[slot.name][part or ()]
                assert held.shape == destination.shape
                held += 1
    for tensor, count in holders.items():
        wanted = repetitions(whole, tensor, size) if SPLIT_NAMES.search(tensor) else size
        assert (count == wanted).all(), f"{tensor}: {np.unique(count).tolist()} ranks hold it, not {wanted}"


def rank_counts(config: Mapping[str, object], upto: int = 16) -> tuple[int, ...]:
    return valid_rank_counts(parse_config(config), upto)


@pytest.mark.parametrize(
    ("release", "counts"),
    [
        ("Qwen3-8B", (1, 2, 4, 8, 16)),
        # 8 heads.
        ("Gemma 3n E2B", (1, 2, 4, 8)),
        # 80 heads, of which 8 are KV heads.
        ("Hunyuan-Large", (1, 2, 4, 8, 16)),
        ("Hymba-1.5B", (1,)),
        # Experts are 1408 wide, and there are 16 heads.
        ("DeepSeek V2-Lite", (1, 2, 4, 8, 16)),
        # 16 key heads of delta nets.
        ("Qwen3-Next-80B", (1, 2, 4, 8, 16)),
    ],
)
def test_numbers_of_ranks_that_released_models_can_have(release: str, counts: tuple[int, ...]) -> None:
    assert rank_counts(RELEASES[release]) == counts


def test_heads_decide() -> None:
    assert rank_counts(SMOLLM2, 8) == (1, 3)
    # KV heads are repeated, query heads are not.
    assert rank_counts(SMOLLM2 | {"num_attention_heads": 4, "num_key_value_heads": 2}, 8) == (1, 2, 4)
    assert rank_counts(SMOLLM2 | {"num_attention_heads": 12, "num_key_value_heads": 4}, 12) == (1, 2, 4, 12)


@pytest.mark.parametrize(
    ("config", "size", "named"),
    [
        (SMOLLM2, 2, "num_attention_heads is 9, .*: 1, 3$"),
        (SMOLLM2, 9, "intermediate_size is 1536, .*: 1, 3$"),
        (
            SMOLLM2 | {"num_attention_heads": 12, "num_key_value_heads": 4},
            6,
            "num_key_value_heads is 4, .*: 1, 2, 4, 12$",
        ),
        (RELEASES["Qwen3-Next-80B"] | {"moe_intermediate_size": 510}, 4, "moe_intermediate_size is 510, .*: 1, 2$"),
        (RELEASES["Qwen3-Next-80B"] | {"linear_num_key_heads": 2}, 4, "linear_num_key_heads is 2, .*: 1, 2$"),
        (RELEASES["Hymba-1.5B"], 2, "the architecture is HymbaForCausalLM, .*: 1$"),
    ],
)
def test_what_ranks_cannot_share_is_refused_by_field_and_value(
    config: Mapping[str, object], size: int, named: str, tmp_path: Path
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match=f"--tensor-parallel-size {size}: {named}"):
        outline_model(file, kv_sharing="model", dtype="float32", block_size=16, tensor_parallel_size=size)


def test_the_outline_of_a_split_model_is_that_of_one_rank(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(SMOLLM2))
    whole, third = (
        outline_model(file, kv_sharing="model", dtype="float32", block_size=16, tensor_parallel_size=size).cache
        for size in (1, 3)
    )
    assert third.bytes_per_token * 3 == whole.bytes_per_token
