"""crosskv as a Ray job whose command runs on either node: there its front end listens."""

import json
from pathlib import Path

import httpx
import pytest

from tests.scale_out.conftest import PORT, START_SECONDS, Nodes, answers, until

pytestmark = pytest.mark.timeout(900)


@pytest.mark.parametrize("entrypoint", ["prefill", "decode"])
def test_a_job(entrypoint: str, nodes: Nodes, model: Path) -> None:
    """The code travels with it, to both nodes; nothing is left when it is stopped."""
    job = f"on-{entrypoint}"
    nodes.prefill.run(
        *("ray", "job", "submit", "--address", nodes.dashboard, "--no-wait", "--submission-id", job),
        *("--entrypoint-resources", json.dumps({f"job-{entrypoint}": 1}), "--working-dir", "."),
        *("--runtime-env-json", json.dumps({"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "60"}}), "--"),
        *("python", "-m", "cluster.cli", "serve", str(model), "--served-model-name", "tiny", "--ray-address", "auto"),
        *("--host", "0.0.0.0", "--port", str(PORT), "--placement", "role", "--dtype", "float32", "--threads", "1"),
        *("--kv-cache-memory", "4MiB"),
    )
    here = {"prefill": nodes.prefill, "decode": nodes.decode}[entrypoint]
    url = f"http://{here.address}:{PORT}"
    try:
        until(START_SECONDS, "an answer", lambda: answers(f"{url}/health"))
        body = {"model": "tiny", "prompt": list(range(4, 40)), "max_tokens": 5, "temperature": 0, "ignore_eos": True}
        usage = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()["usage"]
        assert usage["crosskv"]["payload_bytes"] == usage["crosskv"]["lower_bound_bytes"] > 0
        assert {rank["address"] for rank in nodes.ranks()} == {nodes.prefill.address, nodes.decode.address}
    finally:
        nodes.prefill.run("ray", "job", "stop", "--address", nodes.dashboard, job)
        print(nodes.prefill.run("ray", "job", "logs", "--address", nodes.dashboard, job))
    until(90, "the end of every actor", lambda: not nodes.ranks())
