"""Replicas that are split over ranks, before anything is started: what is refused, what each rank stores, what fits."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cluster import application
from cluster.config import ClusterConfig
from cluster.errors import CrosskvError
from cluster.inspect_model import inspect_model, require_servable
from tests.cluster.command_line import Run, refused
from tests.cluster.smollm2_config import SMOLLM2
from tests.cluster.tiny_tokenizer import write_checkpoint
from tests.releases import RELEASES
from worker.models.config_checks import UnsupportedModel

MEMORY = 1 << 30
TOKEN = 2 * 64 * 2
"""Bytes of one head's key and value in bfloat16."""


@pytest.fixture
def smollm2(tmp_path: Path) -> Path:
    """The configuration, and files of a tokenizer; no weights."""
    write_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**SMOLLM2, "eos_token_id": 2}))
    return tmp_path


@pytest.fixture
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail a test in which a replica is started."""

    def start(config: ClusterConfig, progress: Callable[[str], None]) -> None:
        application.require_deployable(config)
        pytest.fail("a replica was started")

    for module in ("cluster.serve", "cluster.running_cluster", "cluster.demo"):
        monkeypatch.setattr(f"{module}.running_cluster", start)


FLAGS = ("--tensor-parallel-size", "--prefill-tensor-parallel-size")


def is_refusal(message: str, flag: str, size: int) -> bool:
    return f" {flag} {size}: num_attention_heads is 9, " in f" {message.removeprefix('error: ')}" and message.endswith(
        "possible for this model: 1, 3"
    )


@pytest.mark.usefixtures("no_cluster")
@pytest.mark.parametrize("size", [2, 4, 6])
@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize("command", ["serve", "bench"])
def test_commands_refuse_what_cannot_be_split(
    crosskv: Run, smollm2: Path, monkeypatch: pytest.MonkeyPatch, command: str, flag: str, size: int
) -> None:
    monkeypatch.chdir(smollm2)
    arguments = {"serve": ("serve", str(smollm2)), "bench": ("bench", "transfer", "--model", str(smollm2))}[command]
    code, _, err = crosskv(*arguments, flag, str(size))
    assert code == 2
    assert is_refusal(err.splitlines()[-1], flag, size)


@pytest.mark.usefixtures("no_cluster")
@pytest.mark.parametrize("flag", FLAGS)
def test_demo_and_inspect_refuse_it(crosskv: Run, smollm2: Path, monkeypatch: pytest.MonkeyPatch, flag: str) -> None:
    monkeypatch.setenv("CROSSKV_" + flag.removeprefix("--").replace("-", "_").upper(), "2")
    code, _, err = crosskv("demo", "--model", str(smollm2))
    assert code == 2
    assert is_refusal(err.splitlines()[-1], flag, 2)
    assert is_refusal(refused(crosskv("inspect", str(smollm2))), flag, 2)


@pytest.mark.parametrize("flag", FLAGS)
def test_build_refuses_it(smollm2: Path, flag: str) -> None:
    field = flag.removeprefix("--").replace("-", "_")
    config = ClusterConfig.load(model=str(smollm2), dtype="bfloat16", **{field: 2})
    with pytest.raises(UnsupportedModel) as refusal:
        application.build(config)
    assert is_refusal(str(refusal.value), flag, 2)


def test_inspect_refuses_its_own_flag(crosskv: Run, smollm2: Path) -> None:
    assert is_refusal(refused(crosskv("inspect", str(smollm2), "--tensor-parallel-size", "2")), FLAGS[0], 2)


def inspected(crosskv: Run, path: Path, *arguments: str) -> dict[str, Any]:
    code, out, err = crosskv("inspect", str(path), "--json", "--dtype", "bfloat16", *arguments)
    assert code == 0, err
    summary: dict[str, Any] = json.loads(out)
    return summary


def test_a_third_of_the_heads_is_three_times_the_tokens(crosskv: Run, smollm2: Path) -> None:
    whole, split = (inspected(crosskv, smollm2, "--tensor-parallel-size", size) for size in ("1", "3"))
    assert split["tensor_parallel_size"] == 3
    assert (whole["bytes_per_token"], split["bytes_per_token"]) == (30 * 3 * TOKEN, 30 * TOKEN)
    assert (whole["bytes_per_block"], split["bytes_per_block"]) == (16 * 30 * 3 * TOKEN, 16 * 30 * TOKEN)
    assert split["num_blocks"] == MEMORY // (16 * 30 * TOKEN)
    assert split["cache_tokens"] == 16 * split["num_blocks"]
    assert split["requests"] == split["num_blocks"] // (8192 // 16)
    assert {layer["copies"] for layer in split["layers"]} == {1}
    # What a prefill replica computes does not depend on how many share the work.
    assert split["prefill_flops_per_token"] == whole["prefill_flops_per_token"]


@pytest.mark.parametrize(
    ("release", "ranks", "copies", "kv_heads"),
    [
        ("Qwen3-8B", 4, {1}, 2),
        ("Qwen3-8B", 16, {2}, 1),
        # A latent belongs to all heads.
        ("DeepSeek V3", 8, {8}, 1),
        ("DeepSeek V3.2", 2, {2}, 1),
    ],
)
def test_ranks_that_store_the_same(
    crosskv: Run, tmp_path: Path, release: str, ranks: int, copies: set[int], kv_heads: int
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**RELEASES[release], "num_hidden_layers": 4}))
    whole = inspected(crosskv, tmp_path)
    split = inspected(crosskv, tmp_path, "--tensor-parallel-size", str(ranks))
    (copy,) = copies
    assert split["bytes_per_token"] * ranks == whole["bytes_per_token"] * copy
    assert {layer["copies"] for layer in split["layers"]} == copies
    _, out, _ = crosskv("inspect", str(tmp_path), "--tensor-parallel-size", str(ranks))
    text = " ".join(out.split())
    assert (f"the same on {copy} ranks" in text) == (copy > 1)
    assert f"bytes of each of {ranks} ranks" in text


def test_recurrent_states_are_split_and_kv_heads_repeated(crosskv: Run, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**RELEASES["Qwen3-Next-80B"], "num_hidden_layers": 4}))
    split = inspected(crosskv, tmp_path, "--tensor-parallel-size", "4")
    found = {(layer["spec"], layer["copies"]) for layer in split["layers"]}
    assert found == {("full_attention", 2), ("recurrent_state", 1)}


def front_end_limit(config: ClusterConfig, monkeypatch: pytest.MonkeyPatch) -> int:
    """The longest request that the front end of a cluster accepts."""
    limits: list[int] = []

    def keep(config: ClusterConfig, front_end: Any, *rest: Any) -> None:
        limits.append(front_end.model.max_model_len)

    monkeypatch.setattr(application, "build_application", keep)
    application.build(config)
    return limits[0]


SMALL = 3 * 30 * TOKEN * 16 * 100
"""Bytes of 100 blocks of all heads."""


@pytest.mark.parametrize(
    ("ranks", "prefill_ranks", "tokens"), [(1, 1, 1600), (3, 3, 4800), (3, 1, 1600), (1, 3, 1600), (3, None, 4800)]
)
def test_requests_are_no_longer_than_either_side_can_hold(
    smollm2: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, prefill_ranks: int | None, tokens: int
) -> None:
    config = ClusterConfig.load(
        model=str(smollm2),
        dtype="bfloat16",
        kv_cache_memory=SMALL,
        tensor_parallel_size=ranks,
        prefill_tensor_parallel_size=prefill_ranks,
    )
    assert front_end_limit(config, monkeypatch) == tokens
    require_servable(config, inspect_model(config))
    longer = config.replace(max_model_len=tokens + 1)
    with pytest.raises(CrosskvError) as refusal:
        require_servable(longer, inspect_model(longer))
    side = "prefill" if (ranks, prefill_ranks) == (3, 1) else "decode"
    for part in ("--kv-cache-memory", "--max-model-len", f"{tokens} tokens", f"{side} replica", str(tokens + 1)):
        assert part in str(refusal.value)


def test_a_colocated_cluster_has_no_prefill_side(smollm2: Path) -> None:
    config = ClusterConfig.load(
        model=str(smollm2), mode="colocated", tensor_parallel_size=3, prefill_tensor_parallel_size=2
    )
    summary = inspect_model(config)
    assert summary.longest_request == summary.cache_tokens


def test_a_colocated_cluster_has_no_ranks_of_prefill_replicas(smollm2: Path) -> None:
    config = ClusterConfig.load(model=str(smollm2), mode="colocated", prefill_tensor_parallel_size=3)
    with pytest.raises(CrosskvError, match="--prefill-tensor-parallel-size 3: with --mode colocated there are no"):
        require_servable(config, inspect_model(config))
    require_servable(config.replace(mode="disaggregated"), inspect_model(config))
