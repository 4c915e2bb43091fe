import dataclasses
import io
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from cluster.bench import transfer
from cluster.bench.load import Distribution
from cluster.bench.prompts import prompts_from_file, random_prompts
from cluster.bench.report import Environment, TransferReport
from cluster.bench.transfer import Ranks, TransferPlan, TransferRun, run_transfer_bench
from cluster.config import ClusterConfig, Mode
from cluster.errors import CrosskvError
from kv_transfer.transport import Transport

BYTES_PER_TOKEN = {"none": 200, "every:2": 100, "after:14": 150}


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake server's counters are never late."""
    monkeypatch.setattr(transfer, "_STABLE_SECONDS", 0.0)


class FakeCluster:
    """Serves every deployment from one fake server whose bytes follow the sharing rule and the decode ranks.

    As if there were a single KV head, which every decode rank holds.
    """

    def __init__(self, server: Any) -> None:
        self.server = server
        self.configs: list[ClusterConfig] = []
        self.later: list[ClusterConfig] = []
        self.stopped = False

    @property
    def base_url(self) -> str:
        return self.server.base_url

    def redeploy(self, config: ClusterConfig) -> None:
        self.configs.append(config)
        self.server.bytes_per_token = BYTES_PER_TOKEN[config.kv_sharing] * config.tensor_parallel_size
        self.server.unshared_bytes_per_token = BYTES_PER_TOKEN["none"] * config.tensor_parallel_size
        # New replicas count from zero.
        self.server.payload_bytes = self.server.wire_bytes = 0

    @contextmanager
    def start(
        self, config: ClusterConfig, progress: Callable[[str], None], later: Sequence[ClusterConfig]
    ) -> Iterator["FakeCluster"]:
        self.later = list(later)
        self.redeploy(config)
        try:
            yield self
        finally:
            self.stopped = True


PLAN = TransferPlan(
    sharing=("none", "every:2", "after:14"),
    transports=(Transport.GRPC,),
    ranks=(Ranks(1, 1),),
    prompt_tokens=(4, 9),
    requests=3,
    concurrency=2,
    output_tokens=2,
)
CONFIG = ClusterConfig(model="m", mode=Mode.COLOCATED, local_prefill_threshold=99, max_running_requests=5)


def bench(server: Any, **changes: Any) -> tuple[FakeCluster, list[TransferRun]]:
    plan = dataclasses.replace(PLAN, **changes)
    cluster = FakeCluster(server)
    return cluster, run_transfer_bench(plan, plan.deployments(CONFIG), 1000, cluster.start, lambda text: None)


def test_every_layout_gets_the_same_prompts_and_its_own_bytes(fake_server: Any) -> None:
    _, runs = bench(fake_server)
    assert [(run.sharing, run.prompt_tokens) for run in runs] == [
        (sharing, length) for sharing in BYTES_PER_TOKEN for length in (4, 9)
    ]
    for run in runs:
        tokens = 3 * (run.prompt_tokens - 1)
        assert run.payload_bytes == run.lower_bound_bytes == tokens * BYTES_PER_TOKEN[run.sharing]
        assert run.unshared_bytes == tokens * 200
        assert run.bytes_saved == run.unshared_bytes - run.payload_bytes
        # The warm-up's bytes are not counted, nor the decode replica's.
        assert run.wire_bytes == run.payload_bytes + 3 * fake_server.framing_bytes
        assert (run.errors, run.requests) == (0, 3)
        assert run.transfer_ms.p99 == 2.5
    # 3 layouts of 2 lengths of 1 + 3 prompts; the second and third layout repeat the first.
    prompts = [json.dumps(body["prompt"]) for body in fake_server.bodies]
    assert len(prompts) == 24
    assert sorted(prompts[:8]) == sorted(prompts[8:16]) == sorted(prompts[16:])
    assert len({body["prompt"][0] for body in fake_server.bodies}) == 8


def test_layouts_are_disaggregated_and_without_prefix_cache(fake_server: Any) -> None:
    cluster, _ = bench(fake_server, requests=1, prompt_tokens=(2,))
    assert [config.kv_sharing for config in cluster.configs] == list(BYTES_PER_TOKEN)
    for config in cluster.configs:
        assert config.mode is Mode.DISAGGREGATED
        assert config.prefix_caching is False
        assert config.local_prefill_threshold == 0
        assert config.max_running_requests == 5
    assert cluster.stopped


def test_every_combination_is_deployed_once_and_gets_every_length(fake_server: Any) -> None:
    transports, ranks = (Transport.TORCH, Transport.GRPC), (Ranks(1, 1), Ranks(3, 1), Ranks(1, 3))
    cluster, runs = bench(fake_server, sharing=("none", "every:2"), transports=transports, ranks=ranks, requests=1)
    combinations = list(itertools.product(("none", "every:2"), transports, ranks))
    assert [(config.kv_sharing, config.transport, Ranks.of(config)) for config in cluster.configs] == combinations
    # Whoever starts the first one knows how large the others are.
    assert cluster.later == cluster.configs[1:]
    assert [(run.sharing, run.transport, run.ranks, run.prompt_tokens) for run in runs] == [
        (*combination, length) for combination in combinations for length in (4, 9)
    ]
    assert all(run.errors == 0 for run in runs)
    for run in runs:
        assert run.payload_bytes == (run.prompt_tokens - 1) * BYTES_PER_TOKEN[run.sharing] * run.ranks.decode
    assert len(fake_server.bodies) == 12 * 2 * 2


def test_the_extent_is_what_will_be_sent(fake_server: Any) -> None:
    changes: dict[str, Any] = {"ranks": (Ranks(1, 1), Ranks(2, 1)), "requests": 4}
    bench(fake_server, **changes)
    prompts = [body["prompt"] for body in fake_server.bodies]
    assert (len(prompts) // 6, sum(map(len, prompts)) // 6) == (10, 65)
    assert dataclasses.replace(PLAN, **changes).extent() == (
        "6 deployments, each for 10 requests (2 of them to warm up) of 65 prompt tokens in all"
    )


def test_more_bytes_than_the_bound_is_an_error(fake_server: Any) -> None:
    fake_server.excess_bytes = 1
    _, runs = bench(fake_server, sharing=("none",), prompt_tokens=(4,), requests=2)
    assert runs[0].errors == 2
    assert runs[0].error_messages == ("601 payload bytes sent, lower bound 600",) * 2


def test_fewer_bytes_on_the_wire_than_claimed_is_an_error(fake_server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "_POLL_LIMIT_SECONDS", 0.3)
    fake_server.framing_bytes = -1
    _, runs = bench(fake_server, sharing=("none",), prompt_tokens=(4,), requests=2)
    assert runs[0].errors == 1
    assert "1,198" in runs[0].error_messages[0]
    assert "1,200" in runs[0].error_messages[0]


def test_sending_nothing_is_an_error(fake_server: Any) -> None:
    cluster = FakeCluster(fake_server)
    plan = dataclasses.replace(PLAN, sharing=("none",), prompt_tokens=(4,), requests=2)

    @contextmanager
    def local_prefill(
        config: ClusterConfig, progress: Callable[[str], None], later: Sequence[ClusterConfig]
    ) -> Iterator[FakeCluster]:
        fake_server.bytes_per_token = 0
        yield cluster

    [run] = run_transfer_bench(plan, plan.deployments(CONFIG), 1000, local_prefill, lambda text: None)
    assert run.errors == 2
    assert run.error_messages[0] == "no KV was sent for a prompt of 4 tokens (lower bound 0 bytes)"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"prompt_tokens": (64, 1)}, "--prompt-tokens 1"),
        ({"requests": 0}, "--requests 0"),
        ({"concurrency": -1}, "--concurrency -1"),
        ({"output_tokens": 0}, "--output-tokens 0"),
        ({"sharing": ()}, "--sharing"),
        ({"transports": ()}, "--transports"),
        ({"ranks": ()}, "--ranks"),
        ({"ranks": (Ranks(1, 2), Ranks(1, 1), Ranks(1, 2))}, "--ranks 1:2,1:1,1:2"),
        ({"prompt_tokens": (64, 64)}, "--prompt-tokens 64,64"),
    ],
)
def test_a_plan_that_measures_nothing_is_refused(change: dict[str, Any], named: str) -> None:
    with pytest.raises(CrosskvError, match=named):
        dataclasses.replace(PLAN, **change)


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=4, unique=True),
    count=st.integers(1, 12),
    vocabulary=st.integers(1, 200),
    seed=st.integers(0, 5),
)
def test_prompts_begin_differently_and_repeat_by_seed(
    lengths: list[int], count: int, vocabulary: int, seed: int
) -> None:
    if len(lengths) * count > vocabulary:
        with pytest.raises(CrosskvError, match=str(vocabulary)):
            random_prompts(lengths, count, vocabulary, seed)
        return
    prompts = random_prompts(lengths, count, vocabulary, seed)
    assert {length: [len(prompt) for prompt in prompts[length]] for length in lengths} == {
        length: [length] * count for length in lengths
    }
    everything = [prompt for length in lengths for prompt in prompts[length]]
    assert len({prompt[0] for prompt in everything}) == len(everything)
    assert all(0 <= token < vocabulary for prompt in everything for token in prompt)
    assert prompts == random_prompts(lengths, count, vocabulary, seed)


def test_prompts_from_a_file_repeat_when_they_run_out(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("one\n\ntwo\n")
    assert prompts_from_file(path, 3) == ("one", "two", "one")
    path.write_text("\n")
    with pytest.raises(CrosskvError, match=r"prompts\.txt"):
        prompts_from_file(path, 1)
    with pytest.raises(CrosskvError, match="absent"):
        prompts_from_file(tmp_path / "absent", 1)


def test_the_report_holds_every_run_for_programs_and_people(fake_server: Any, tmp_path: Path) -> None:
    _, runs = bench(fake_server, prompt_tokens=(4, 2))
    environment = Environment.here("crosskv bench transfer", "fake-model")
    report = TransferReport(environment, tuple(runs))
    files = report.write(tmp_path / "new" / "results")
    content = json.loads((tmp_path / "new" / "results" / "report.json").read_text())
    assert len(content["runs"]) == 6
    for written, run in zip(content["runs"], runs, strict=True):
        assert written["sharing"] == run.sharing
        assert written["payload_bytes"] == written["lower_bound_bytes"] == run.payload_bytes
        assert set(written["ttft_ms"]) >= {"p50", "p90", "p99"}
        assert set(written["itl_ms"]) >= {"p50", "p90", "p99"}
        assert written["wire_bytes"] == run.wire_bytes
        assert written["errors"] == 0
    text = (tmp_path / "new" / "results" / "report.md").read_text()
    assert f"| every:2 | grpc | 1:1 | 4 | 3 | {3 * 3 * 100:,} | {3 * 3 * 100:,} | yes |" in text
    assert "## Errors" not in text
    for path in files:
        if path.suffix == ".png":
            assert path.read_bytes().startswith(b"\x89PNG")
            assert f"({path.name})" in text
    assert sum(path.suffix == ".png" for path in files) >= 2


def test_the_report_names_what_went_wrong(fake_server: Any, tmp_path: Path) -> None:
    fake_server.refusal = (500, {"error": {"message": "broken"}})
    _, runs = bench(fake_server, sharing=("none",), prompt_tokens=(4,), requests=2)
    report = TransferReport(Environment.here("c", "m"), tuple(runs))
    report.write(tmp_path)
    assert report.errors == ("none, grpc, 1:1, 4 tokens: 2 × HTTP 500: broken",)
    assert "- none, grpc, 1:1, 4 tokens: 2 × HTTP 500: broken" in (tmp_path / "report.md").read_text()
    assert json.loads((tmp_path / "report.json").read_text())["runs"][0]["itl_ms"]["p50"] is None


def rendered(runs: Sequence[TransferRun], columns: int = 80) -> list[str]:
    output = io.StringIO()
    Console(file=output, width=columns).print(TransferReport(Environment.here("c", "m"), tuple(runs)).table())
    return output.getvalue().splitlines()


def test_the_terminal_table_fits_whatever_the_figures_are(fake_server: Any) -> None:
    _, [first, *_] = bench(fake_server)
    runs = [
        dataclasses.replace(
            first,
            sharing=sharing,
            transport=transport,
            ranks=ranks,
            prompt_tokens=length,
            payload_bytes=1_473_822_720 + 10_000 * length,
            lower_bound_bytes=1_473_822_720 + 640_000,
            wire_bytes=1_500_000_000,
            unshared_bytes=3_000_000_000 + length,
            bytes_saved=1_500_000_000 if transport is Transport.GRPC else -1_500_000_000,
            ttft_ms=Distribution.of([12_345.6 + length]),
            itl_ms=Distribution.of([1_234.5 * ranks.prefill]),
            transfer_ms=Distribution.of([98_765.4 - length]),
            errors=10 + length,
        )
        for sharing in ("none", "after:14")
        for transport in Transport
        for ranks in (Ranks(1, 1), Ranks(3, 1))
        for length in (64, 16_384)
    ]
    lines = rendered(runs)
    assert max(map(len, lines)) <= 80
    # A row each, not cut and not wrapped.
    [row] = [line.split() for line in lines if line.split()[:4] == ["after:14", "torch", "3:1", "16384"]]
    assert row[4:] == ["1.64", "GB", "≠", "sent", "-50%", "0.9159", "82381", "28730", "3704", "16394"]
    assert not any("…" in line for line in lines)
    assert sum(line.startswith(("none", "after:14")) for line in lines) == len(runs)


def test_what_is_the_same_in_every_row_is_said_once(fake_server: Any) -> None:
    _, runs = bench(fake_server, ranks=(Ranks(1, 1), Ranks(1, 2)), sharing=("every:2",), prompt_tokens=(4,))
    title, *lines, same = [line.rstrip() for line in rendered(runs) if line.strip()]
    assert "3 requests" in title
    for text in ("sharing every:2", "via grpc", "prompt tokens 4", "lower bound = sent", "saved 50%", "errors 0"):
        assert text in " ".join([*lines[-2:], same])
    assert [line.split()[:3] for line in lines if line.split()[0] in ("1:1", "1:2")] == [
        ["1:1", "900", "B"],
        ["1:2", "1.80", "kB"],
    ]
