"""A cluster with keys, TLS and a token of its own, whose every port has strangers at it while a load runs."""

import ipaddress
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
import ray
import trustme
from ray.experimental import internal_kv

from cluster.client import ApiClient
from cluster.ports import free_port
from kv_transfer.cluster_token import ClusterToken
from tests.cluster.system.test_serving import body, prompts
from tests.serving import STATES, Serving
from tests.strangers import bothered, listening_at

SECONDS = 12.0
CLIENTS = 4
KEY, TOKEN = "key-canary-8d3f02c1", ClusterToken("token-canary-8d3f02c1")
TEXT = "prompt-canary-8d3f02c1"
pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def authority(redeployed: Serving, tmp_path: Path) -> Path:
    """The session's cluster is as a public one would be; this is the certificate of who issued its own."""
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    files = {name: tmp_path / name for name in ("keys", "token", "certificate", "key", "authority")}
    files["keys"].write_text(f"alice:{KEY}\n")
    files["token"].write_text(TOKEN.value)
    files["certificate"].write_bytes(issued.cert_chain_pems[0].bytes())
    issued.private_key_pem.write_to_path(files["key"])
    authority.cert_pem.write_to_path(files["authority"])
    redeployed.require(
        redeployed.config.replace(
            port=free_port("127.0.0.1"),
            prefill_replicas=1,
            decode_replicas=1,
            api_key_file=files["keys"],
            cluster_token=None,
            cluster_token_file=files["token"],
            tls_certificate=files["certificate"],
            tls_key=files["key"],
        )
    )
    return files["authority"]


def our_processes() -> list[psutil.Process]:
    """Those that carry front ends and ranks; Ray's own are not ours to guard."""
    return [
        process
        for process in psutil.Process().children(recursive=True)
        if "".join(process.cmdline()[:1]).startswith(("ray::ReplicaActor", "ray::ServeReplica:crosskv:front-end"))
    ]


def everything() -> list[psutil.Process]:
    """Ray's processes as well, but for Serve's replicas: each opens a port of Serve's own on every interface."""
    children = psutil.Process().children(recursive=True)
    return [process for process in children if not "".join(process.cmdline()[:1]).startswith("ray::ServeReplica")]


def test_replicas_do_not_give_way(serving: Serving) -> None:
    assert {process.nice() for process in our_processes()} == {psutil.Process().nice()}


def on_loopback(host: str) -> bool:
    address = ipaddress.ip_address(host)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def stream(client: httpx.Client, prompt: list[int]) -> str:
    """The text of a streamed completion, which must end as it should."""
    with client.stream("POST", "/v1/completions", json=body(prompt, stream=True)) as response:
        assert response.status_code == 200, response.read()
        events = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert events[-1] == "[DONE]", events[-1]
    return "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])


def logs() -> Iterator[tuple[Path, str]]:
    directory = Path(ray._private.worker.global_worker.node.get_session_dir_path()) / "logs"
    for path in directory.rglob("*"):
        if path.is_file():
            yield path, path.read_text(errors="replace")


def ray_records() -> Iterator[bytes]:
    """What Ray's control plane keeps of Serve and its deployments."""
    for namespace in (None, b"serve"):
        for key in internal_kv._internal_kv_list(b"", namespace=namespace):
            yield internal_kv._internal_kv_get(key, namespace=namespace) or b""


def test_a_load_does_not_notice_strangers(redeployed: Serving, authority: Path, tmp_path: Path) -> None:
    asked = prompts(8, 300, seed=31)
    url = redeployed.base_url
    assert url.startswith("https://")
    with httpx.Client(verify=str(authority)) as stranger:
        assert stranger.post(f"{url}/v1/completions", json=body(asked[0])).status_code == 401
        assert stranger.get(f"{url}/health").status_code == 200
    headers = {"Authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=url, headers=headers, verify=str(authority), timeout=60) as client:
        expected = [stream(client, prompt) for prompt in asked]
        for sent in ({"prompt": TEXT}, {"prompt": TEXT, "temperature": TEXT}, {"prompt": [TEXT]}):
            client.post("/v1/completions", json={"model": "tiny", "max_tokens": 2} | sent)
        before = {status["replica_id"] for status in client.get("/cluster").json()}
    processes = our_processes()
    addresses = listening_at(processes)
    print(*addresses, sep="\n")
    # The front end's; sessions of two replicas; KV; and those of Ray in the same processes.
    assert len(processes) == 3
    assert len(addresses) >= 4
    others_reach = [at for at in listening_at(everything()) if not on_loopback(at[0])]
    assert others_reach == []
    failures: list[str] = []
    done = [0] * CLIENTS
    deadline = time.monotonic() + SECONDS

    def load(number: int) -> None:
        try:
            with httpx.Client(base_url=url, headers=headers, verify=str(authority), timeout=60) as client:
                while time.monotonic() < deadline:
                    index = done[number] % len(asked)
                    assert stream(client, asked[index]) == expected[index], index
                    done[number] += 1
        except Exception as error:
            failures.append(repr(error))

    with bothered(addresses) as visits:
        threads = [threading.Thread(target=load, args=(number,)) for number in range(CLIENTS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert visits() > 10 * len(addresses)
    assert failures == []
    assert min(done) >= 1
    with ApiClient(url, KEY, ca=authority) as client:
        settle = time.monotonic() + 20
        while any(sum(getattr(s.load, f"{state}_requests") for state in STATES) for s in client.status()):
            assert time.monotonic() < settle
            time.sleep(0.1)
        for status in client.status():
            assert status.load.free_blocks + status.load.cached_blocks == status.load.total_blocks
        assert {status.replica_id for status in client.status()} == before, "a replica was replaced"
    recorded = b"".join(ray_records())
    # Where the files lie is there; without that, the absence of what they hold would mean nothing.
    assert tmp_path.name.encode() in recorded
    assert not any(secret.encode() in recorded for secret in (KEY, TOKEN.value))
    for process in processes:
        assert process.is_running()
        assert not any(secret in " ".join(process.cmdline()) for secret in (KEY, TOKEN.value))
    for path, text in logs():
        for secret in (KEY, TOKEN.value, TEXT):
            assert secret not in text, path
