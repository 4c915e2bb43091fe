"""What ``crosskv inspect`` says of released configurations, against figures that were published or worked out by hand.

The expectations are formulas over the releases' sizes, written without our specs and plans. Bytes are of bfloat16.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from cluster.config import ClusterConfig
from cluster.inspect_model import inspect_model
from tests.cluster.command_line import Run, refused
from tests.releases import FULL, RELEASES, SLIDING, Config, pattern
from tests.tiny_families import FAMILIES

SIZE = 2
MEMORY = 40 * 2**30
PLAIN = "model.layers.{}.self_attn.attn".format
HYMBA = "model.layers.{}.mamba.self_attn.attn".format
NAMES = {"Hymba-1.5B": HYMBA}


@dataclass(frozen=True)
class Figures:
    """Bytes per token with and without sharing, bytes of state per request; layers that attend, own KV, own a state."""

    bytes_per_token: int
    unshared: int
    attention: int
    owners: int
    state_bytes: int = 0
    states: int = 0


FIGURES = {
    "Qwen3-8B": Figures(147_456, 147_456, 36, 36),
    "Gemma 3 4B": Figures(139_264, 139_264, 34, 34),
    "Gemma 3n E2B": Figures(40_960, 61_440, 30, 20),
    "Gemma 3n E4B": Figures(40_960, 71_680, 35, 20),
    "Gemma 4 E2B": Figures(18_432, 43_008, 35, 15),
    "Gemma 4 E4B": Figures(57_344, 100_352, 42, 24),
    "Gemma 4 31B": Figures(901_120, 901_120, 60, 60),
    "Gemma 4 26B-A4B": Figures(225_280, 225_280, 30, 30),
    "Hunyuan-Large": Figures(81_920, 163_840, 64, 32),
    "Hunyuan-A13B": Figures(131_072, 131_072, 32, 32),
    # With heads of 64 for keys and values alike it would be 21,760 and 40,960, as sometimes computed from
    # hidden_size / num_attention_heads. But the release's v_head_dim is 128: a value is a slice of the 3,200 channels
    # that its in_proj gives each of 25 heads (modeling_hymba.py of nvidia/Hymba-1.5B-Base).
    "Hymba-1.5B": Figures(32_640, 61_440, 32, 17, 7_168_000, 32),
    "DeepSeek V2-Lite": Figures(31_104, 31_104, 27, 27),
    "DeepSeek V2": Figures(69_120, 69_120, 60, 60),
    "DeepSeek V3": Figures(70_272, 70_272, 61, 61),
    "DeepSeek V3.2": Figures(85_888, 85_888, 61, 61),
    "Qwen3-Next-80B": Figures(24_576, 24_576, 12, 12, 77_266_944, 36),
}


def last_owner_of_the_same_type(types: list[str], shared: int) -> dict[int, int]:
    """Gemma: each of the last ``shared`` layers uses the last one before them that attends alike."""
    first = len(types) - shared
    last = {kind: max(i for i in range(first) if types[i] == kind) for kind in set(types)}
    return {index: last[types[index]] for index in range(first, len(types))}


SHARING: Mapping[str, Mapping[int, int]] = {
    "Gemma 3n E2B": last_owner_of_the_same_type(pattern(4, 30), 10),
    "Gemma 3n E4B": last_owner_of_the_same_type(pattern(4, 35), 15),
    "Gemma 4 E2B": last_owner_of_the_same_type(pattern(4, 35), 20),
    "Gemma 4 E4B": last_owner_of_the_same_type(pattern(5, 42), 18),
    "Hunyuan-Large": {index: index - 1 for index in range(1, 64, 2)},
    # Pairs from 1 to 14 and from 19 to 30, three in the middle; 0, 15 and 31 are full attention.
    "Hymba-1.5B": {i: i - 1 for i in (2, 4, 6, 8, 10, 12, 14, 17, 20, 22, 24, 26, 28, 30)} | {18: 16},
}


def latent(block: int) -> int:
    return block * (512 + 64) * SIZE


def keys_and_values(heads: int, width: int) -> Callable[[int], int]:
    return lambda block: 2 * block * heads * width * SIZE


PAGES: Mapping[str, Mapping[str, Callable[[int], int]]] = {
    "Qwen3-8B": {"full_attention": keys_and_values(8, 128)},
    "Gemma 3 4B": dict.fromkeys(("full_attention", "sliding_window"), keys_and_values(4, 256)),
    "Gemma 3n E2B": dict.fromkeys(("full_attention", "sliding_window"), keys_and_values(2, 256)),
    "Gemma 3n E4B": dict.fromkeys(("full_attention", "sliding_window"), keys_and_values(2, 256)),
    "Gemma 4 E2B": {"full_attention": keys_and_values(1, 512), "sliding_window": keys_and_values(1, 256)},
    "Gemma 4 E4B": {"full_attention": keys_and_values(2, 512), "sliding_window": keys_and_values(2, 256)},
    "Gemma 4 31B": {"full_attention": keys_and_values(4, 512), "sliding_window": keys_and_values(16, 256)},
    "Gemma 4 26B-A4B": {"full_attention": keys_and_values(2, 512), "sliding_window": keys_and_values(8, 256)},
    "Hunyuan-Large": {"full_attention": keys_and_values(8, 6400 // 80)},
    "Hunyuan-A13B": {"full_attention": keys_and_values(8, 128)},
    "Hymba-1.5B": {
        **dict.fromkeys(("full_attention", "sliding_window"), lambda block: block * 5 * (64 + 128) * SIZE),
        # A matrix in float32, and the last three inputs of a convolution over as many channels.
        "recurrent_state": lambda block: 3200 * 16 * 4 + 3200 * 3 * SIZE,
    },
    "DeepSeek V2-Lite": {"mla": latent},
    "DeepSeek V2": {"mla": latent},
    "DeepSeek V3": {"mla": latent},
    "DeepSeek V3.2": {"sparse_mla": lambda block: latent(block) + block * 128 * SIZE},
    "Qwen3-Next-80B": {
        "full_attention": keys_and_values(2, 256),
        "recurrent_state": lambda block: 32 * 128 * 128 * 4 + (2 * 16 * 128 + 32 * 128) * 3 * SIZE,
    },
}


@dataclass(frozen=True)
class Hybrid:
    """Groups that the layers of a hybrid are cut into: how many of each kind, and tokens per block of tokens."""

    full_block: int
    full: int = 1
    windows: int = 0
    window: int = 0
    window_block: int = 1
    sinks: int = 0
    states: int = 0
    prefix: int = 0


HYBRIDS = {
    # 4 full, 16 sliding.
    "Gemma 3n E2B": Hybrid(16, windows=4, window=512, window_block=16),
    "Gemma 3n E4B": Hybrid(16, windows=4, window=512, window_block=16),
    # 3 and 12, 4 and 20; full heads are twice as wide, so sliding blocks are twice as long.
    "Gemma 4 E2B": Hybrid(16, windows=4, window=512, window_block=32),
    "Gemma 4 E4B": Hybrid(16, windows=5, window=512, window_block=32),
    # 3 full, 14 sliding, 32 states, so groups of 3; 128 tokens fill at least the 224,000 bytes of a state. A token also
    # sees itself and 1,024 before it, and the first 128.
    "Hymba-1.5B": Hybrid(128, windows=5, window=1025, window_block=128, sinks=128, states=11, prefix=128),
    # 12 full, 36 states; 1,056 is the first multiple of 16 whose 2,048 bytes each fill 2,146,304.
    "Qwen3-Next-80B": Hybrid(1056, states=3),
}


def blocks(hybrid: Hybrid, tokens: int, step: int) -> int:
    """Blocks of one request: all that exist, or what a window and the tokens of a step may touch."""
    whole = tokens + hybrid.prefix
    every = -(-whole // hybrid.full_block)
    size = hybrid.window_block
    # What the first of a step's tokens still sees before itself, and these; at worst they begin in the middle.
    visible = hybrid.window - 1 + step
    touched = max((offset + visible - 1) // size + 1 for offset in range(size))
    seen = min(-(-whole // size), touched + -(-hybrid.sinks // size))
    return hybrid.full * every + hybrid.windows * seen + hybrid.states


Inspect = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def summaries() -> dict[tuple[object, ...], dict[str, Any]]:
    """What was said of which configuration and settings."""
    return {}


@pytest.fixture
def inspect(crosskv: Run, tmp_path: Path, summaries: dict[tuple[object, ...], dict[str, Any]]) -> Inspect:
    """What ``crosskv inspect`` says of a configuration's cache, with 40 GiB. The same question is asked once.

    Counting what a prefill replica computes, which takes most of the command's time, is left out.
    """
    del crosskv  # there are no settings from the environment

    def run(content: Config, *, request_tokens: int | None = None, **settings: Any) -> dict[str, Any]:
        path = write(content, tmp_path)
        question = (json.dumps(content), request_tokens, *settings.items())
        if question not in summaries:
            config = ClusterConfig.load(model=path, kv_cache_memory=MEMORY, dtype="bfloat16", **settings)
            summaries[question] = asdict(inspect_model(config, request_tokens=request_tokens))
        return summaries[question]

    return run


def write(content: Mapping[str, Any], directory: Path) -> str:
    (directory / "config.json").write_text(json.dumps(content))
    return str(directory)


def test_every_release_has_its_figures() -> None:
    assert RELEASES.keys() == FIGURES.keys() == PAGES.keys()


@pytest.mark.parametrize("release", RELEASES)
def test_bytes_and_layers(inspect: Inspect, release: str) -> None:
    summary, expected = inspect(RELEASES[release]), FIGURES[release]
    assert summary["bytes_per_token"] == expected.bytes_per_token
    assert summary["bytes_per_token_unshared"] == expected.unshared
    assert summary["state_bytes_per_request"] == expected.state_bytes
    layers = (summary["total_layers"], summary["owner_layers"], summary["state_layers"])
    assert layers == (expected.attention, expected.owners, expected.states)


@pytest.mark.parametrize("release", RELEASES)
def test_the_whole_sharing_map(inspect: Inspect, release: str) -> None:
    name = NAMES.get(release, PLAIN)
    found = {layer["name"]: layer["target"] for layer in inspect(RELEASES[release])["layers"] if layer["target"]}
    assert found == {name(layer): name(target) for layer, target in SHARING.get(release, {}).items()}


@pytest.mark.parametrize("release", RELEASES)
def test_pages(inspect: Inspect, release: str) -> None:
    owners = [layer for layer in inspect(RELEASES[release])["layers"] if layer["spec"]]
    assert {layer["spec"] for layer in owners} == PAGES[release].keys()
    for layer in owners:
        assert layer["page_size_bytes"] == PAGES[release][layer["spec"]](layer["block_size"])


UNIFORM = [release for release in RELEASES if len(PAGES[release]) == 1]


@pytest.mark.parametrize("release", UNIFORM)
def test_blocks_of_uniform_models(inspect: Inspect, release: str) -> None:
    summary = inspect(RELEASES[release])
    (page,) = PAGES[release].values()
    per_block = FIGURES[release].owners * page(16)
    assert summary["bytes_per_block"] == summary["bytes_per_block_separate"] == per_block
    assert summary["num_blocks"] == MEMORY // per_block
    assert summary["num_blocks_unshared"] == MEMORY // (FIGURES[release].attention * page(16))
    assert summary["padding_bytes_per_block"] == 0
    assert summary["blocks_per_request"] == -(-summary["longest_context"] // 16)
    assert summary["requests"] == summary["num_blocks"] // summary["blocks_per_request"]


@pytest.mark.parametrize("release", ["Qwen3-8B", "Hunyuan-A13B", "DeepSeek V2"])
@pytest.mark.parametrize("share", [2, 3, 4])
def test_fewer_owners_are_as_many_more_blocks(inspect: Inspect, release: str, share: int) -> None:
    summary = inspect(RELEASES[release], kv_sharing=f"every:{share}", block_size=32)
    owners = -(-FIGURES[release].attention // share)
    (page,) = PAGES[release].values()
    assert summary["owner_layers"] == owners
    assert summary["num_blocks"] == MEMORY // (owners * page(32))
    assert summary["bytes_per_token"] * FIGURES[release].attention == summary["bytes_per_token_unshared"] * owners


@pytest.mark.parametrize("release", HYBRIDS)
@pytest.mark.parametrize("tokens", [100, 4096, 8064])
def test_requests_that_fit_into_a_hybrid(inspect: Inspect, release: str, tokens: int) -> None:
    summary, hybrid = inspect(RELEASES[release], request_tokens=tokens), HYBRIDS[release]
    assert len(summary["groups"]) == hybrid.full + hybrid.windows + hybrid.states
    assert summary["blocks_per_request"] == blocks(hybrid, tokens, summary["step_tokens"])
    assert summary["requests"] == MEMORY // summary["bytes_per_block"] // summary["blocks_per_request"]
    if release in SHARING and tokens > 100:
        # With few tokens only the states of Hymba count, and these nobody shares.
        assert summary["requests"] > summary["requests_unshared"]


@pytest.mark.parametrize("release", [release for release in RELEASES if len(PAGES[release]) > 1])
def test_memory_of_a_hybrid_is_its_owners_pages_and_padding(inspect: Inspect, release: str) -> None:
    summary = inspect(RELEASES[release])
    groups = summary["groups"]
    assert sum(group["owners"] for group in groups) == summary["owner_layers"] + summary["state_layers"]
    assert sum(group["members"] for group in groups) == len(summary["layers"])
    assert sum(group["block_bytes"] for group in groups) == sum(layer["page_size_bytes"] for layer in summary["layers"])
    assert {group["block_bytes"] + group["padding_bytes"] for group in groups} == {summary["bytes_per_block"]}
    assert summary["padding_bytes_per_block"] == max(group["padding_bytes"] for group in groups)
    assert summary["buffers"] == max(group["owners"] for group in groups)


def test_qwen3_next_takes_half_of_what_separate_buffers_take(inspect: Inspect, crosskv: Run, tmp_path: Path) -> None:
    summary = inspect(RELEASES["Qwen3-Next-80B"])
    shared, separate = summary["bytes_per_block"], summary["bytes_per_block_separate"]
    assert shared == 12 * 1056 * 2048
    assert separate == shared + 12 * (32 * 128 * 128 * 4 + 8192 * 3 * SIZE)
    assert separate / shared == pytest.approx(2, rel=0.01)
    code, out, _ = crosskv("inspect", str(tmp_path), "--memory", "40GiB")
    assert code == 0
    assert f"{shared:,}" in out
    assert f"{separate:,}" in out


@pytest.mark.parametrize("release", RELEASES)
def test_for_people_in_80_columns(crosskv: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, release: str) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = crosskv(
        "inspect", write(RELEASES[release], tmp_path), "--dtype", "bfloat16", "--request-tokens", "500"
    )
    assert code == 0
    lines = out.splitlines()
    assert max(map(len, lines)) <= 80
    assert "…" not in "".join(line for line in lines if not line.startswith(" … "))
    expected, text = FIGURES[release], " ".join(out.split())
    assert f"{expected.owners} of {expected.attention}" in text
    assert f"bytes per token {expected.bytes_per_token:,} {expected.unshared:,}" in text
    assert f"state bytes per request {expected.state_bytes:,}" in text
    assert "requests of 500 tokens in them" in text
    name = NAMES.get(release, PLAIN)
    for layer, target in SHARING.get(release, {}).items():
        assert f"{name(layer)} that of {name(target)}" in text


def test_a_group_at_a_glance(crosskv: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = crosskv("inspect", write(RELEASES["Hymba-1.5B"], tmp_path))
    rows = [" ".join(line.split()) for line in out.splitlines()]
    page = 128 * 5 * (64 + 128) * SIZE
    state = 3200 * 16 * 4 + 3200 * 3 * SIZE
    for row in (
        f"full_attention: 3 × 5 × 64 3 0 128 {page:,}",
        f"sliding_window: 3 × 5 × 64 14 15 128 {page:,}",
        f"recurrent_state: [3200,16] + [3200,3] 32 0 – {state:,}",
        f"1 every token 3 128 {3 * page:,} 0",
        f"2–11 last state 10 × 3 – {3 * state:,} {3 * (page - state):,}",
        f"12 last state 2 – {2 * state:,} {3 * page - 2 * state:,}",
        f"13–16 last 1,025 tokens, first 128 4 × 3 128 {3 * page:,} 0",
        f"17 last 1,025 tokens, first 128 2 128 {2 * page:,} {page:,}",
    ):
        assert row in rows


@pytest.mark.parametrize("family", ["gemma3n", "hunyuan_large_cla", "hymba", "mistral_large4"])
def test_a_checkpoint_without_the_weights_to_do_without_sharing(crosskv: Run, tmp_path: Path, family: str) -> None:
    """What it would take without sharing is worked out all the same; names and shapes of its tensors are checked."""
    FAMILIES[family].write(tmp_path)
    code, out, err = crosskv("inspect", str(tmp_path), "--json")
    assert code == 0, err
    summary = json.loads(out)
    assert summary["bytes_per_token"] < summary["bytes_per_token_unshared"]


def text_config(release: str, **changes: Any) -> Config:
    content = RELEASES[release]
    return {**content, "text_config": {**content["text_config"], **changes}}


@pytest.mark.parametrize(
    ("content", "sharing", "named"),
    [
        (RELEASES["Gemma 3n E2B"], {PLAIN(3): PLAIN(5)}, [PLAIN(3), PLAIN(5), "earlier"]),
        (RELEASES["Hymba-1.5B"], {HYMBA(1): HYMBA(2)}, [HYMBA(1), HYMBA(2), "earlier"]),
        (RELEASES["Gemma 3n E2B"], {PLAIN(9): PLAIN(8)}, [PLAIN(9), PLAIN(8), "full attention", "512"]),
        (RELEASES["Hymba-1.5B"], {HYMBA(16): HYMBA(15)}, [HYMBA(16), HYMBA(15), "sliding window of 1025"]),
        (RELEASES["Gemma 3n E2B"], {PLAIN(2): PLAIN(1), PLAIN(1): PLAIN(0)}, [PLAIN(2), PLAIN(1), "owns no cache"]),
        (RELEASES["Gemma 3n E2B"], {PLAIN(2): "model.layers.1"}, [PLAIN(2), "model.layers.1"]),
        (RELEASES["Gemma 3n E2B"], {"model.layers.2": PLAIN(1)}, ["model.layers.2 ", "not an attention layer"]),
    ],
)
def test_a_map_that_a_model_cannot_honour(
    crosskv: Run, tmp_path: Path, content: Config, sharing: Mapping[str, str], named: list[str]
) -> None:
    rule = tmp_path / "sharing.json"
    rule.write_text(json.dumps(sharing))
    message = refused(crosskv("inspect", write(content, tmp_path), "--kv-sharing", str(rule)))
    for part in named:
        assert part in message


@pytest.mark.parametrize(
    ("content", "rule", "named"),
    [
        # Layers of one type share, those of another window do not.
        (RELEASES["Hymba-1.5B"], "every:2", [HYMBA(1), HYMBA(0), "attention types differ"]),
        (RELEASES["Gemma 3 4B"], "after:5", [PLAIN(6), PLAIN(5), "attention types differ"]),
        (
            text_config("Gemma 3n E2B", layer_types=[SLIDING] * 29 + ["chunked_attention"]),
            "model",
            ["chunked_attention"],
        ),
        (text_config("Gemma 3n E2B", num_kv_shared_layers=27), "model", ["num_kv_shared_layers is 27", FULL]),
        (
            {**RELEASES["Qwen3-Next-80B"], "layer_types": ["linear_attention", SLIDING] * 24},
            "model",
            ["layer_types[1] is 'sliding_attention'"],
        ),
        (
            text_config("Gemma 4 31B", per_layer_config={"1": {"num_key_value_heads": 8}}),
            "model",
            ["layer 1", "8 KV heads of 256", "16 of 256"],
        ),
        ({**RELEASES["Hymba-1.5B"], "layer_type": ["h"] * 31 + ["m"]}, "model", ["layer_type"]),
        ({**RELEASES["Hymba-1.5B"], "kv_reuse_group": [[15, 16]]}, "model", [HYMBA(16), HYMBA(15)]),
        ({**RELEASES["Hunyuan-Large"], "cla_share_factor": 0}, "model", ["cla_share_factor"]),
    ],
)
def test_a_configuration_that_cannot_be_honoured(
    crosskv: Run, tmp_path: Path, content: Config, rule: str, named: list[str]
) -> None:
    message = refused(crosskv("inspect", write(content, tmp_path), "--kv-sharing", rule))
    for part in named:
        assert part in message


@pytest.fixture
def mistral_large4(tmp_path: Path) -> Path:
    """A small one, because no release's layers are published; the configuration only."""
    FAMILIES["mistral_large4"].write(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    return tmp_path


def test_a_source_that_would_be_ignored(crosskv: Run, mistral_large4: Path) -> None:
    """Layer 5 names layer 0, but layer 3 stores latents of the same kind later, for layer 4."""
    content = json.loads((mistral_large4 / "config.json").read_text())
    content["text_config"] |= {"no_rope_layers": [1, 0, 1, 1, 1, 1], "kv_source_layers": [0, 1, 0, 3, 3, 0]}
    message = refused(crosskv("inspect", write(content, mistral_large4)))
    assert "kv_source_layers[5] is 0" in message
    assert "layer 3" in message


def test_a_target_with_another_head_size(crosskv: Run, mistral_large4: Path) -> None:
    """Every second layer has no rotary part in its latents."""
    message = refused(crosskv("inspect", str(mistral_large4), "--kv-sharing", "every:2"))
    assert f"{PLAIN(1)} cannot use the cache of {PLAIN(0)}" in message
    assert "24 against 1 of 32" in message
