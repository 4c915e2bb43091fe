"""Who has no cluster token, at every port of a replica."""

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import grpc
import psutil
import pytest

from kv_transfer import channel_options
from kv_transfer.cluster_token import ClusterToken, metadata_of
from kv_transfer.transport import Transport
from tests.conftest import EngineProcesses
from tests.engine_client import EngineClient
from tests.engine_process import TOKEN, EngineProcess, RankProcesses
from tests.kv_transfer.connection import eventually
from tests.replicas import connected, disaggregated
from tests.strangers import listening_at
from tests.tiny_checkpoints import write_tiny
from worker.config import EngineConfig, Role
from worker.ranks import followers
from worker.wire import engine_pb2_grpc

METHODS = (
    "/crosskv.engine.v1.Engine/Session",
    "/crosskv.engine.v1.Engine/Status",
    *(value for name, value in vars(channel_options).items() if name.endswith("_METHOD")),
    *(value for name, value in vars(followers).items() if name.endswith("_METHOD")),
)
# Of what is no gRPC server.
SILENCE = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}
OTHERS = ClusterToken("the-token-of-somebody-else")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    model = write_tiny("llama", tmp_path_factory.mktemp("tiny-llama"))
    return EngineConfig(model=str(model), role=Role.COLOCATED, dtype="float32", kv_cache_memory=1 << 20)


def listening(process: EngineProcess) -> set[int]:
    return {port for _, port in listening_at([psutil.Process(process.pid)])}


def refusals(port: int, token: ClusterToken | None) -> set[grpc.StatusCode]:
    """What each method says to whoever has another token, or none, whatever is sent."""
    codes = set()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        for method in METHODS:
            for call in (channel.unary_unary(method), channel.unary_stream(method)):
                try:
                    list(call(b"\x0a\x00", timeout=2, metadata=metadata_of(token)))
                    codes.add(grpc.StatusCode.OK)
                except grpc.RpcError as error:
                    codes.add(error.code())
                if codes <= SILENCE:
                    return codes
    return codes


@contextlib.contextmanager
def prefill_of_two_ranks(
    rank_pool: list[EngineProcess], config: EngineConfig, transport: Transport
) -> Iterator[dict[str, set[int]]]:
    prefill = RankProcesses(rank_pool[:2])
    with disaggregated(prefill, rank_pool[2], replace(config, transport=transport)) as pair:
        ports = [listening(process) for process in rank_pool[:3]]
        yield {"leader": ports[0], "follower": ports[1], "decode": ports[2]}
        answer = pair.decode.generate(range(3, 40), max_tokens=4)
        assert answer.prompt_info.transfer.payload_bytes > 0
        # Every method was called as one and as many, by two callers: at the decode replica's one port, and the leader's
        # three.
        calls = 2 * 2 * len(METHODS)
        assert [client.status().counters.strangers for client in (pair.decode, pair.prefill)] == [calls, 3 * calls]


@pytest.mark.parametrize("transport", Transport)
def test_every_port_of_a_replica_refuses_strangers(
    transport: Transport, rank_pool: list[EngineProcess], config: EngineConfig
) -> None:
    """Gloo's own sockets do not speak gRPC; nothing that they are sent hurts."""
    with prefill_of_two_ranks(rank_pool, config, transport) as ports:
        asked = [(process, port, token) for process, own in ports.items() for port in own for token in (None, OTHERS)]
        # What does not speak gRPC takes its time to say nothing.
        with ThreadPoolExecutor(len(asked)) as pool:
            answers = list(pool.map(refusals, *zip(*((port, token) for _, port, token in asked), strict=True)))
        spoken = dict.fromkeys(ports, 0)
        for (process, port, _), codes in zip(asked, answers, strict=True):
            assert codes == {grpc.StatusCode.UNAUTHENTICATED} or codes <= SILENCE, (process, port)
            spoken[process] += codes == {grpc.StatusCode.UNAUTHENTICATED}
        # The leader's sessions, KV and commands; the follower's KV; the decode replica's sessions.
        assert spoken == {"leader": 6, "follower": 2, "decode": 2}


def test_a_front_end_with_another_token_gets_nothing(engine_processes: EngineProcesses, config: EngineConfig) -> None:
    record = engine_processes.first.start(replace(config, token=OTHERS))
    try:
        with grpc.insecure_channel(record.session_address) as channel:
            session = engine_pb2_grpc.EngineStub(channel).Session(iter(()), timeout=20)
            with pytest.raises(grpc.RpcError) as refusal:
                next(session)
            assert refusal.value.code() is grpc.StatusCode.UNAUTHENTICATED
        with connected(record) as client, pytest.raises(ConnectionError, match="--cluster-token-file"):
            client.generate([1, 2, 3])
        member = EngineClient(record.session_address, OTHERS)
        assert member.status().counters.strangers == 2
        member.close()
    finally:
        engine_processes.first.stop_replica()


def test_a_decode_replica_says_which_prefill_replica_keeps_it_out(
    engine_processes: EngineProcesses, config: EngineConfig
) -> None:
    first, second = engine_processes.first, engine_processes.second
    prefill = first.start(replace(config, role=Role.PREFILL, token=OTHERS))
    try:
        decode = second.start(replace(config, role=Role.DECODE, token=TOKEN))
        second.use_prefill_replicas(prefill)
        with connected(decode) as client:
            assert eventually(lambda: "--cluster-token-file" in client.status().prefill_error)
    finally:
        second.stop_replica()
        first.stop_replica()
