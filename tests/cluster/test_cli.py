import json
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cluster import demo, running_cluster, serve
from cluster.application import require_deployable, require_weights
from cluster.config import SECRETS, ClusterConfig, flag_of
from cluster.ports import free_port, is_loopback, require_free_port
from tests.cluster.command_line import Run, refused
from tests.releases import QWEN3_8B
from worker.checkpoint.checkpoint_error import CheckpointError
from worker.models.registry import ARCHITECTURES


@pytest.fixture
def qwen3_8b(tmp_path: Path) -> Path:
    directory = tmp_path / "qwen3-8b"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(QWEN3_8B))
    return directory


def test_help_comes_at_once_and_names_every_command() -> None:
    # A process of its own, because this one has imported everything already. Imports are what makes help slow.
    code = (
        "import sys; sys.argv = ['crosskv', '--help']\n"
        "from cluster.cli import app\n"
        "try: app()\n"
        "except SystemExit: pass\n"
        "print(sorted({name.partition('.')[0] for name in sys.modules} & "
        "{'torch', 'transformers', 'ray', 'matplotlib', 'numpy', 'fastapi', 'grpc'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    *shown, modules = done.stdout.splitlines()
    assert modules == "[]"
    for command in ("fetch", "serve", "chat", "status", "trace", "inspect", "models", "bench", "demo"):
        assert re.search(rf"\b{command}\b", "\n".join(shown))


@pytest.mark.parametrize("command", [("serve",), ("bench", "transfer")])
def test_every_setting_is_a_flag(crosskv: Run, command: tuple[str, ...]) -> None:
    code, out, _ = crosskv(*command, "--help")
    assert code == 0
    own = {"mode", "kv_sharing", "prefix_caching", "local_prefill_threshold"} if command[0] == "bench" else set()
    own |= SECRETS  # everybody on a machine can read command lines
    for name in ClusterConfig.model_fields:
        assert (re.search(rf"{flag_of(name)}(?![\w-])", out) is not None) == (name not in own), name


def test_inspect_counts_what_a_shared_model_keeps(crosskv: Run, qwen3_8b: Path) -> None:
    code, out, _ = crosskv("inspect", str(qwen3_8b), "--kv-sharing", "after:18", "--memory", "40GiB", "--json")
    assert code == 0
    summary = json.loads(out)
    assert (summary["owner_layers"], summary["total_layers"]) == (19, 36)
    assert (summary["bytes_per_token"], summary["bytes_per_token_unshared"]) == (77824, 147456)
    page = 2 * 16 * 8 * 128 * 2
    assert summary["num_blocks"] == 40 * 2**30 // (19 * page)
    assert summary["num_blocks_unshared"] == 40 * 2**30 // (36 * page)
    assert summary["state_bytes_per_request"] == 0
    assert [layer["name"] for layer in summary["layers"]] == [f"model.layers.{i}.self_attn.attn" for i in range(36)]
    for index, layer in enumerate(summary["layers"]):
        if index <= 18:
            assert (layer["target"], layer["spec"], layer["page_size_bytes"]) == (None, "full_attention", page)
        else:
            assert (layer["target"], layer["spec"]) == ("model.layers.18.self_attn.attn", None)
            assert layer["page_size_bytes"] == 0


@pytest.mark.parametrize(("dtype", "size"), [("auto", 2), ("float16", 2), ("float32", 4)])
def test_inspect_takes_the_file_itself_and_another_dtype(crosskv: Run, qwen3_8b: Path, dtype: str, size: int) -> None:
    path = str(qwen3_8b / "config.json")
    code, out, _ = crosskv("inspect", path, "--dtype", dtype, "--block-size", "32", "--json")
    assert code == 0
    summary = json.loads(out)
    assert summary["bytes_per_token"] == summary["bytes_per_token_unshared"] == 36 * 2 * 8 * 128 * size
    assert summary["num_blocks"] == 2**30 // (36 * 2 * 32 * 8 * 128 * size)


def test_inspect_with_a_sharing_file(crosskv: Run, qwen3_8b: Path) -> None:
    name = "model.layers.{}.self_attn.attn".format
    rule = qwen3_8b / "sharing.json"
    rule.write_text(json.dumps({name(35): name(3), name(20): name(19)}))
    code, out, _ = crosskv("inspect", str(qwen3_8b), "--kv-sharing", str(rule), "--json")
    assert code == 0
    targets = {layer["name"]: layer["target"] for layer in json.loads(out)["layers"] if layer["target"]}
    assert targets == {name(35): name(3), name(20): name(19)}


def test_inspect_for_people_shows_whole_names_and_totals(
    crosskv: Run, qwen3_8b: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = crosskv("inspect", str(qwen3_8b), "--kv-sharing", "after:18")
    assert code == 0
    assert "model.layers.35.self_attn.attn  that of model.layers.18.self_attn.attn" in out
    assert "19 of 36" in out
    assert "77,824" in out
    assert "147,456" in out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--kv-sharing", "after:36"), "after:36"),
        (("--kv-sharing", "every:0"), "every:0"),
        (("--kv-sharing", "nowhere.json"), "nowhere.json"),
        (("--memory", "lots"), "--memory"),
        (("--memory", "-3"), "No such option"),
        (("--memory", "0"), "--memory"),
        (("--dtype", "fp4"), "fp4"),
        (("--block-size", "0"), "--block-size"),
    ],
)
def test_inspect_refuses_bad_flags(crosskv: Run, qwen3_8b: Path, arguments: tuple[str, str], expected: str) -> None:
    code, out, err = crosskv("inspect", str(qwen3_8b), *arguments)
    if expected == "No such option":
        assert code == 2
        assert "Traceback" not in err
        return
    assert expected in refused((code, out, err))


def test_inspect_refuses_what_it_does_not_know(crosskv: Run, qwen3_8b: Path) -> None:
    assert "/nowhere" in refused(crosskv("inspect", "/nowhere"))
    (qwen3_8b / "config.json").write_text(json.dumps(QWEN3_8B | {"architectures": ["BertModel"]}))
    assert "BertModel" in refused(crosskv("inspect", str(qwen3_8b)))
    (qwen3_8b / "config.json").write_text("{")
    assert "config.json" in refused(crosskv("inspect", str(qwen3_8b)))
    (qwen3_8b / "config.json").unlink()
    assert "config.json" in refused(crosskv("inspect", str(qwen3_8b)))


def test_a_sharing_rule_that_breaks_a_rule_names_both_layers(crosskv: Run, qwen3_8b: Path) -> None:
    name = "model.layers.{}.self_attn.attn".format
    rule = qwen3_8b / "sharing.json"
    for layer, target in ((2, 5), (2, 2)):
        rule.write_text(json.dumps({name(layer): name(target)}))
        message = refused(crosskv("inspect", str(qwen3_8b), "--kv-sharing", str(rule)))
        assert name(layer) in message
        assert name(target) in message


def test_models_lists_the_registry(crosskv: Run) -> None:
    assert crosskv("models") == (0, "".join(f"{name}\n" for name in sorted(ARCHITECTURES)), "")


@pytest.fixture
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail a test in which a replica is started."""

    def start(config: ClusterConfig, progress: Callable[[str], None]) -> None:
        require_deployable(config)
        pytest.fail("a replica was started")

    for module in (running_cluster, serve, demo):
        monkeypatch.setattr(module, "running_cluster", start)


@pytest.mark.usefixtures("no_cluster")
def test_serve_refuses_bad_settings_before_a_replica_starts(crosskv: Run, qwen3_8b: Path, tmp_path: Path) -> None:
    port = str(free_port())
    model = str(qwen3_8b)
    assert "--model" in refused(crosskv("serve"))
    assert "--block-size" in refused(crosskv("serve", model, "--block-size", "-1"))
    assert "no_such.yaml" in refused(crosskv("serve", model, "--config", "no_such.yaml"))
    config = tmp_path / "crosskv.yaml"
    config.write_text("block_sise: 3\n")
    assert "block_size" in refused(crosskv("serve", model, "--config", str(config)))
    assert "/nowhere" in refused(crosskv("serve", "/nowhere", "--port", port))
    # Weights and tokenizer are missing.
    assert "tokenizer.json" in refused(crosskv("serve", model, "--port", port))
    (qwen3_8b / "tokenizer.json").write_text("{}")
    assert "after:36" in refused(crosskv("serve", model, "--port", port, "--kv-sharing", "after:36"))
    message = refused(crosskv("serve", model, "--port", port, "--max-model-len", "50000"))
    assert "50000" in message
    assert "40960" in message
    message = refused(crosskv("serve", model, "--port", port, "--kv-cache-memory", "1MiB"))
    assert "--kv-cache-memory" in message
    message = refused(crosskv("serve", model, "--port", port, "--kv-cache-memory", "99999TiB"))
    assert "--kv-cache-memory" in message
    assert "2 ranks" in message
    assert "--max-prefill-replicas" in refused(
        crosskv("serve", model, "--port", port, "--prefill-replicas", "3", "--max-prefill-replicas", "2")
    )
    for flag in ("--api-key-file", "--cluster-token-file"):
        assert "missing" in refused(crosskv("serve", model, "--port", port, flag, str(tmp_path / "missing")))
    assert "--tls-key" in refused(crosskv("serve", model, "--port", port, "--tls-certificate", str(config)))
    code, _, err = crosskv("serve", model, "--model", "another")
    assert code == 2
    assert "another" in err


def test_a_cluster_on_this_machine_needs_the_weights_here(qwen3_8b: Path) -> None:
    (qwen3_8b / "tokenizer.json").write_text("{}")
    here = ClusterConfig(model=str(qwen3_8b))
    with pytest.raises(CheckpointError, match=r"\.safetensors") as raised:
        require_weights(here)
    assert str(qwen3_8b) in str(raised.value)
    # Machines that join have their own.
    require_weights(here.replace(ray_address="ray://elsewhere:10001"))


@pytest.mark.usefixtures("no_cluster")
def test_serve_refuses_a_port_in_use(crosskv: Run, qwen3_8b: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        message = refused(crosskv("serve", str(qwen3_8b), "--port", str(port)))
    assert str(port) in message
    assert "--port" in message


def test_a_free_port_is_free() -> None:
    port = free_port()
    require_free_port("127.0.0.1", port)
    with socket.create_server(("127.0.0.1", port)):
        pass


def test_debug_shows_where_an_error_came_from(crosskv: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CROSSKV_DEBUG", "1")
    with pytest.raises(ValueError, match="/nowhere"):
        crosskv("inspect", "/nowhere")


def test_chat_asks_one_question_and_prints_the_answer(crosskv: Run, fake_server: Any) -> None:
    code, out, err = crosskv(
        "chat", "Hi [bold]you[/bold]", "--base-url", fake_server.base_url, "--system", "Be brief.", "--temperature", "0"
    )
    assert (code, out, err) == (0, "You said: Hi [bold]you[/bold]\n", "")
    [body] = fake_server.bodies
    assert body["model"] == "fake-model"
    assert body["temperature"] == 0
    assert "seed" not in body
    assert body["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi [bold]you[/bold]"},
    ]


def test_chat_keeps_the_history_until_reset(crosskv: Run, fake_server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = iter(["one", "", "two", "/reset", "three"])

    def typed(prompt: str = "") -> str:
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", typed)
    code, out, _ = crosskv("chat", "--base-url", fake_server.base_url)
    assert code == 0
    assert "You said: two" in out
    asked = [[message["content"] for message in body["messages"]] for body in fake_server.bodies]
    assert asked == [["one"], ["one", "You said: one", "two"], ["three"]]


def test_a_failed_question_does_not_end_a_conversation(
    crosskv: Run, fake_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = iter(["too long", "short"])

    def typed(prompt: str = "") -> str:
        line = next(lines, None)
        fake_server.refusal = (400, {"error": {"message": "the prompt is too long"}}) if line == "too long" else None
        if line is None:
            raise EOFError
        return line

    monkeypatch.setattr("builtins.input", typed)
    code, out, _ = crosskv("chat", "--base-url", fake_server.base_url)
    assert code == 0
    assert "HTTP 400: the prompt is too long" in out
    assert [message["content"] for message in fake_server.bodies[-1]["messages"]] == ["short"]


@pytest.mark.parametrize("command", [("chat", "hi"), ("status",), ("trace", "cmpl-x"), ("bench", "serve")])
def test_no_server_is_one_clear_error(crosskv: Run, command: tuple[str, ...]) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    assert url in refused(crosskv(*command, "--base-url", url))


def test_status_shows_replicas_for_people_and_programs(
    crosskv: Run, fake_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    fake_server.payload_bytes, fake_server.wire_bytes = 2_000_000, 2_010_000
    code, out, _ = crosskv("status", "--base-url", fake_server.base_url)
    assert code == 0
    # Two tables, prefill first in both.
    rows = [line.split() for line in out.splitlines() if line.strip().startswith(("p0", "d0"))]
    assert [row[0] for row in rows] == ["p0", "d0", "p0", "d0"]
    assert rows[1] == ["d0", "3", "0", "0", "61", "1", "2", "64"]
    assert rows[2] == ["p0", "15/30", "0", "0", "–", "2.0", "MB", "–", "2.0", "MB"]
    assert rows[3][4:] == ["25%", "0", "bytes", "0", "bytes", "–"]
    code, out, _ = crosskv("status", "--base-url", fake_server.base_url, "--json")
    replies = json.loads(out)
    assert code == 0
    assert [reply["replica_id"] for reply in replies] == ["p0", "d0"]
    assert int(replies[0]["counters"]["wire_bytes"]) == 2_010_000
    # What is zero is there too.
    assert replies[0]["load"]["waiting_requests"] == 0


def test_bench_serve_measures_any_server(crosskv: Run, fake_server: Any, tmp_path: Path) -> None:
    path = tmp_path / "new" / "serve.json"
    code, out, _ = crosskv(
        *("bench", "serve", "--base-url", fake_server.base_url, "--num-prompts", "5", "--input-len", "7"),
        *("--output-len", "3", "--concurrency", "2", "--seed", "9", "--output", str(path)),
    )
    assert code == 0
    report = json.loads(path.read_text())
    assert report["summary"]["completed"] == 5
    assert report["summary"]["prompt_tokens"] == 35
    assert report["summary"]["output_tokens"] == 15
    assert report["arrivals"] == {"concurrency": 2}
    assert "5 of 5" in out
    # One more for warming up, none like another.
    assert len({json.dumps(body["prompt"]) for body in fake_server.bodies}) == 6
    assert all(len(body["prompt"]) == 7 for body in fake_server.bodies)


def test_bench_serve_with_texts_and_poisson_arrivals(crosskv: Run, fake_server: Any, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("first\nsecond\n")
    code, _, _ = crosskv(
        *("bench", "serve", "--base-url", fake_server.base_url, "--num-prompts", "3", "--output-len", "1"),
        *("--request-rate", "500", "--prompt-file", str(prompts), "--no-ignore-eos", "--model", "other"),
    )
    assert code == 0
    assert sorted(body["prompt"] for body in fake_server.bodies) == ["first", "first", "second", "second"]
    assert {body["model"] for body in fake_server.bodies} == {"other"}
    assert not any("ignore_eos" in body for body in fake_server.bodies)


def test_bench_serve_fails_when_requests_do(crosskv: Run, fake_server: Any) -> None:
    fake_server.refusal = (503, {"error": {"message": "no replica"}})
    code, out, _ = crosskv("bench", "serve", "--base-url", fake_server.base_url, "--num-prompts", "2")
    assert code == 1
    assert "2 × HTTP 503: no replica" in out


@pytest.mark.usefixtures("no_cluster")
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--sharing", "none,after:99"), "after:99"),
        (("--prompt-tokens", "64,many"), "many"),
        (("--prompt-tokens", "1"), "--prompt-tokens 1"),
        (("--prompt-tokens", "64,50000"), "50016"),
        (("--requests", "0"), "--requests 0"),
        (("--kv-cache-memory", "4MiB"), "--kv-cache-memory"),
        (("--sharing", "none,most"), "--sharing most: --kv-sharing = 'most': must be"),
        (("--transports", "grpc,smoke"), "--transports 'grpc,smoke': must be of grpc and torch"),
        (("--ranks", "1:1,2"), "--ranks '1:1,2': must be prefill:decode"),
        (("--ranks", "1:1,0:1"), "--ranks 0:1: --prefill-tensor-parallel-size = 0: input should be greater"),
        (("--ranks", "1:1,1:3"), "--ranks 1:3: --tensor-parallel-size 3"),
        (("--ranks", "5:1"), "--ranks 5:1: --prefill-tensor-parallel-size 5"),
    ],
)
def test_bench_transfer_checks_every_deployment_first(
    crosskv: Run, qwen3_8b: Path, tmp_path: Path, arguments: tuple[str, str], expected: str
) -> None:
    code, _, err = crosskv("bench", "transfer", "--model", str(qwen3_8b), "--output", str(tmp_path / "out"), *arguments)
    assert code == 2
    assert expected in err
    assert "Traceback" not in err


class FakeCluster:
    """In place of a cluster: the fake server, whose bytes follow the layout."""

    def __init__(self, server: Any) -> None:
        self.server = server
        self.layouts: list[str] = []
        self.stopped = False

    @contextmanager
    def start(
        self, config: ClusterConfig, progress: Callable[[str], None], later: Sequence[ClusterConfig] = ()
    ) -> Iterator[Any]:
        self.redeploy(config)
        yield SimpleNamespace(base_url=self.server.base_url, redeploy=self.redeploy)
        self.stopped = True

    def redeploy(self, config: ClusterConfig) -> None:
        self.layouts.append(config.kv_sharing)
        self.server.bytes_per_token = 100 if config.kv_sharing == "every:2" else 200


def test_the_demo_compares_two_layouts_and_stops(
    crosskv: Run, qwen3_8b: Path, fake_server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = FakeCluster(fake_server)
    monkeypatch.setattr(demo, "running_cluster", cluster.start)
    (qwen3_8b / "tokenizer.json").write_text("{}")
    path = tmp_path / "demo.json"
    code, out, _ = crosskv("demo", "--model", str(qwen3_8b), "--question", "Why?", "--json", str(path))
    assert code == 0
    assert cluster.layouts == ["model", "every:2"]
    assert cluster.stopped
    first, second = json.loads(path.read_text())
    assert (first["payload_bytes"], second["payload_bytes"]) == (800, 400)
    assert (first["bytes_saved"], second["bytes_saved"]) == (0, 400)
    assert (first["owner_layers"], second["owner_layers"]) == (36, 18)
    assert first["answer"] == "You said: Why?"
    assert first["ttft_ms"] > 0
    assert out.count("You said: Why?") == 2
    assert "not trained to share" in out


def test_the_demo_fails_when_the_bytes_are_wrong(
    crosskv: Run, qwen3_8b: Path, fake_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = FakeCluster(fake_server)
    monkeypatch.setattr(demo, "running_cluster", cluster.start)
    (qwen3_8b / "tokenizer.json").write_text("{}")
    fake_server.excess_bytes = 8
    code, out, _ = crosskv("demo", "--model", str(qwen3_8b))
    assert code == 1
    assert "808" in out
    assert cluster.stopped


def test_bench_transfer_writes_its_report(
    crosskv: Run, qwen3_8b: Path, fake_server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = FakeCluster(fake_server)
    monkeypatch.setattr(running_cluster, "running_cluster", cluster.start)
    arguments = ("bench", "transfer", "--model", str(qwen3_8b), "--sharing", "none,every:2", "--prompt-tokens", "4")
    arguments += ("--requests", "2", "--concurrency", "2", "--output-tokens", "2", "--output", str(tmp_path / "out"))
    code, out, _ = crosskv(*arguments)
    assert code == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    none, every_second = report["runs"]
    assert none["payload_bytes"] == 2 * every_second["payload_bytes"] == 2 * 3 * 200
    assert report["environment"]["command"].startswith("crosskv bench transfer --model ")
    assert "report.md" in out
    assert "2 deployments, each for 3 requests" in out
    fake_server.excess_bytes = 1
    assert crosskv(*arguments)[0] == 1


@pytest.mark.parametrize(
    ("host", "alone"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("0.0.0.0", False), ("::", False), ("10.0.0.1", False)],
)
def test_which_addresses_only_this_machine_reaches(host: str, alone: bool) -> None:
    assert is_loopback(host) == alone
