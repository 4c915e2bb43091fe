"""The image's own command, which serves from one container, with its environment and a tiny model."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.ports import free_port
from tests.k8s.deployed.conftest import answers, complete, until
from tests.k8s.kubectl import K8S

pytestmark = pytest.mark.timeout(600)


def test_it_answers_and_ends_when_the_container_is_stopped(tiny_model: Path, tmp_path: Path) -> None:
    text = (K8S / "image" / "Dockerfile").read_text()
    words = json.loads(re.search(r"^CMD (\[.+\])$", text, re.M)[1])
    variables = dict(re.findall(r"^(?:ENV)? +([A-Z_]+)=(\S+)", text, re.M))
    assert {"RAY_AUTH_MODE", "CROSSKV_CACHE", "HF_HOME", "PATH"} <= variables.keys()
    environment = (
        os.environ
        | variables
        | {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "CROSSKV_CACHE": str(tmp_path / "crosskv"),
            "HF_HOME": str(tmp_path / "huggingface"),
        }
    )
    port = free_port()
    command = [str(tiny_model) if word == "smollm2" else word for word in words]
    # Settings that do not belong to the command are given as a container gets them.
    environment |= {"CROSSKV_PORT": str(port), "CROSSKV_SERVED_MODEL_NAME": "tiny", "CROSSKV_KV_CACHE_MEMORY": "8MiB"}
    log = tmp_path / "log"
    with log.open("w") as output:
        process = subprocess.Popen(command, env=environment, cwd=tmp_path, stdout=output, stderr=output)
        try:
            url = f"http://127.0.0.1:{port}"
            until(240, "/health", lambda: process.poll() is not None or answers(f"{url}/health"))
            assert process.poll() is None, log.read_text()
            complete(url)
            process.terminate()
            assert process.wait(60) == 0, log.read_text()
            assert not answers(f"{url}/health")
        finally:
            process.kill()
            print(log.read_text())
