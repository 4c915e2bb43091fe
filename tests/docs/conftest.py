"""A directory with the files that documents name, and a server that was started as they say."""

import json
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import trustme

import cluster.demo
import cluster.running_cluster
import cluster.serve
from cluster.application import READY_SECONDS, require_deployable
from cluster.config import ClusterConfig
from cluster.ports import free_port
from tests.cluster.command_line import command_line
from tests.cluster.system.processes import MARK, require_none_left
from tests.docs.claims import BIN, ReadyToStart, Stage
from tests.docs.documents import DOCUMENTS, blocks
from tests.releases import RELEASES
from tests.tiny_checkpoints import write_tiny

TINY = {
    "CROSSKV_SERVED_MODEL_NAME": "smollm2",
    "CROSSKV_DTYPE": "float32",
    "CROSSKV_KV_CACHE_MEMORY": "16MiB",
    "CROSSKV_THREADS": "1",
}


@pytest.fixture(scope="session")
def documented_files(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """What a reader has by the time that a document names it."""
    directory = tmp_path_factory.mktemp("documented")
    # As many layers, heads and positions as the real one has, for what commands say of them.
    heads = {
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "hidden_size": 72,
        "head_dim": 8,
        "intermediate_size": 96,
    }
    write_tiny("llama", directory / "smollm2", num_hidden_layers=30, max_position_embeddings=8192, **heads)
    (directory / "my-model").symlink_to(tiny_model)
    for name, release in (("qwen3-8b", "Qwen3-8B"), ("Qwen3-Next-80B", "Qwen3-Next-80B"), ("gemma-3n", "Gemma 3n E2B")):
        (directory / name).mkdir()
        (directory / name / "config.json").write_text(json.dumps(RELEASES[release]))
    (shown,) = (
        block.content
        for document in DOCUMENTS
        for block in blocks(document)
        if block.language == "yaml" and block.content.startswith("# cluster.yaml")
    )
    (directory / "cluster.yaml").write_text(shown.replace("smollm2", str(directory / "smollm2")))
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    certificate.private_key_pem.write_to_path(str(directory / "key.pem"))
    certificate.cert_chain_pems[0].write_to_path(str(directory / "certificate.pem"))
    return directory


@pytest.fixture
def stage(
    documented_files: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    pytestconfig: pytest.Config,
) -> Stage:
    """Commands run in a directory of their own, and start no cluster."""

    def running_cluster(config: ClusterConfig, *_: object, **__: object) -> None:
        require_deployable(config)
        raise ReadyToStart

    for module in (cluster.running_cluster, cluster.serve, cluster.demo):
        monkeypatch.setattr(module, "running_cluster", running_cluster)
    run = command_line(monkeypatch, capsys)
    monkeypatch.chdir(documented_files)
    monkeypatch.setenv("CROSSKV_PORT", str(free_port("127.0.0.1")))
    return Stage(documented_files, run, pytestconfig._parser._opt2dest)


@pytest.fixture(scope="module")
def served_address(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """``crosskv serve smollm2`` as a process, until Ctrl-C; nothing of it may be left behind."""
    port, mark = free_port("127.0.0.1"), uuid.uuid4().hex
    environment = {name: value for name, value in os.environ.items() if not name.startswith("CROSSKV_")}
    environment |= TINY | {"CROSSKV_PORT": str(port), MARK: mark, "PATH": f"{BIN}:{os.environ['PATH']}"}
    log = tmp_path_factory.mktemp("serve") / "log"
    command = [str(BIN / "crosskv"), "serve", str(tiny_model)]
    with log.open("w") as output, subprocess.Popen(command, env=environment, stdout=output, stderr=output) as server:
        try:
            _wait_for(f"http://127.0.0.1:{port}/health", server, log)
            yield f"127.0.0.1:{port}"
        finally:
            server.send_signal(signal.SIGINT)
            code = server.wait(120)
            print(log.read_text())
    assert code in (0, 130)
    require_none_left(mark)


def _wait_for(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while True:
        assert server.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        try:
            if httpx.get(url, timeout=2).status_code == httpx.codes.OK:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
