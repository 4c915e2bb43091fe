"""Prefill and decode replicas on nodes that reach each other only over a network."""

import itertools
import random
import re
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.scale_out.conftest import Nodes, Serve, Serving, alive_nodes, until

pytestmark = pytest.mark.timeout(900)

CLIENTS = 4


def prompts() -> list[list[int]]:
    numbers = random.Random(4)
    return [[numbers.randrange(4, 512) for _ in range(length)] for length in (2, 17, 130, 600)]


def texts(serving: Serving, **more: object) -> list[str]:
    return [serving.complete(prompt, **more)["choices"][0]["text"] for prompt in prompts()]


def sent(serving: Serving) -> list[tuple[int, int]]:
    """Payload and lower bound of every prompt."""
    usages = [serving.complete(prompt, cache_salt="sent")["usage"]["crosskv"] for prompt in prompts()]
    return [(usage["payload_bytes"], usage["lower_bound_bytes"]) for usage in usages]


@pytest.fixture(scope="module")
def alone(serve: Serve) -> list[str]:
    """Answers of one engine that does both phases, so that nothing is sent."""
    with serve("--mode", "colocated") as serving:
        assert sent(serving) == [(0, 0) for _ in prompts()]
        return texts(serving)


def needed(prompt: list[int]) -> int:
    """4 owner layers × K and V × 2 KV heads × 16 × 4 bytes for every token but the last."""
    return (len(prompt) - 1) * 4 * 2 * 2 * 16 * 4


def host_of(address: str) -> str:
    return address.rsplit(":", 1)[0]


@pytest.mark.parametrize(("transport", "ranks"), [("grpc", 2), ("torch", 1), ("torch", 2)])
def test_a_pair(transport: str, ranks: int, serve: Serve, nodes: Nodes, alone: list[str]) -> None:
    """It answers over the network, and every rank of a replica is on the node of the others."""
    with serve("--placement", "role", "--transport", transport, "--tensor-parallel-size", str(ranks)) as serving:
        assert texts(serving) == alone
        assert sent(serving) == [(needed(prompt), needed(prompt)) for prompt in prompts()]
        records = {record["role"]: record for record in serving.records()}
        assert [host_of(address) for address in records["prefill"]["kv_addresses"]] == ranks * [nodes.prefill.address]
        assert host_of(records["decode"]["session_address"]) == nodes.decode.address
        assert Counter(rank["address"] for rank in nodes.ranks()) == {
            nodes.prefill.address: ranks,
            nodes.decode.address: ranks,
        }


def test_a_prefill_replica_that_is_killed(serve: Serve, nodes: Nodes, alone: list[str]) -> None:
    """Two of each role, wherever Ray puts them. Under load no request fails, and a successor gets its share."""
    flags = ("--prefill-replicas", "2", "--decode-replicas", "2")
    with serve(*flags) as serving, ThreadPoolExecutor(CLIENTS) as clients:
        assert {rank["address"] for rank in nodes.ranks()} == {nodes.prefill.address, nodes.decode.address}
        ended = threading.Event()

        def ask(client: int) -> None:
            for number in itertools.count():
                assert texts(serving, cache_salt=f"{client}.{number}") == alone
                if ended.is_set():
                    return

        load = [clients.submit(ask, client) for client in range(CLIENTS)]
        try:
            until(60, "work for both", lambda: len(senders(serving)) == 2)
            before = senders(serving)
            kill_a_prefill_replica(serving, nodes)
            until(60, "the end of one", lambda: len(before & senders(serving)) == 1)
            until(180, "work for a successor", lambda: len(senders(serving) - before) == 1)
        finally:
            ended.set()
        for asked in load:
            asked.result(120)


def kill_a_prefill_replica(serving: Serving, nodes: Nodes) -> None:
    address = next(record["session_address"] for record in serving.records() if record["role"] == "prefill")
    node = next(node for node in (nodes.prefill, nodes.decode) if node.address == host_of(address))
    listening = node.run("ss", "--no-header", "--listening", "--tcp", "--processes", f"src {address}")
    (process,) = re.findall(r"pid=(\d+)", listening)
    node.run("kill", "-9", process)


def test_a_replica_that_is_larger_than_a_node(serve: Serve, nodes: Nodes, alone: list[str]) -> None:
    with serve("--mode", "colocated", "--tensor-parallel-size", "2", "--threads", "5") as serving:
        assert {rank["address"] for rank in nodes.ranks()} == {nodes.prefill.address, nodes.decode.address}
        assert texts(serving) == alone
        logs = nodes.prefill.run(
            "grep", "-rhs", "on 2 nodes", str(nodes.prefill.directory), str(nodes.decode.directory)
        )
        assert "the 2 ranks of this replica are on 2 nodes" in logs


def test_a_node_with_room_for_all_ranks(serve: Serve, nodes: Nodes) -> None:
    """Neither replica is torn apart, although the first leaves room for one rank of the second."""
    with serve("--tensor-parallel-size", "2", "--prefill-tensor-parallel-size", "1", "--threads", "3") as serving:
        assert sent(serving) == [(needed(prompt), needed(prompt)) for prompt in prompts()]
        replicas = {(rank["placement_group_id"], rank["address"]) for rank in nodes.ranks()}
        assert {address for _, address in replicas} == {nodes.prefill.address, nodes.decode.address}
        assert len(replicas) == 2


def test_a_node_that_is_lost(serve: Serve, nodes: Nodes, alone: list[str]) -> None:
    """The last test of all, since the node stays lost: answers come from the other, which gets the successors."""
    with serve("--prefill-replicas", "2", "--decode-replicas", "2") as serving:
        texts(serving)
        nodes.decode.run("ip", "link", "set", "eth0", "down")

        def succeeded() -> bool:
            assert texts(serving, cache_salt=str(time.monotonic_ns())) == alone
            return alive_nodes(nodes) == 1 and len(serving.statuses()) == 4

        until(300, "a successor of every replica", succeeded)


def senders(serving: Serving) -> set[str]:
    """Prefill replicas that have sent something."""
    statuses = [status for status in serving.statuses() if status["role"] == "prefill"]
    return {status["replica_id"] for status in statuses if int(status["counters"]["payload_bytes"]) > 0}
