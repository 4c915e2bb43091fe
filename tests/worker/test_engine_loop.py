import threading
from pathlib import Path

import grpc
import pytest
import torch

from tests.tiny_checkpoints import write_tiny
from worker.config import EngineConfig, Role
from worker.cores import Cores
from worker.decode_engine import DecodeEngine
from worker.engine_loop import EngineLoop
from worker.inbox import Inbox
from worker.replica import Replica, Unhealthy
from worker.wire import engine_pb2 as wire
from worker.wire import engine_pb2_grpc

# A thread that ends with an exception is what some of these tests are about.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
SECONDS = 20.0


class Recorder:
    """An engine that notes what it is told and does what its events say."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.threads: set[int] = set()
        self.inference_mode = False
        self.stopped = 0
        self.steps = 0
        self.counters = wire.Counters()
        self.reached = threading.Event()
        self.go_on = threading.Event()

    @property
    def idle(self) -> bool:
        return True

    def handle(self, event: str, now: float) -> None:
        del now
        self.events.append(event)
        self.threads.add(threading.get_ident())
        if event == "fail":
            raise RuntimeError("broken event")

    def step(self, now: float) -> bool:
        del now
        self.steps += 1
        self.threads.add(threading.get_ident())
        self.inference_mode = torch.is_inference_mode_enabled()
        match self.events[-1:]:
            case ["fail in step"]:
                raise RuntimeError("broken step")
            case ["hang"]:
                self.reached.set()
                assert self.go_on.wait(SECONDS)
                self.events.append("went on")
            case ["last"]:
                self.reached.set()
        return False

    def stop(self, now: float) -> None:
        del now
        self.stopped += 1
        self.threads.add(threading.get_ident())


def run(*events: str) -> tuple[Recorder, EngineLoop[str]]:
    engine, inbox = Recorder(), Inbox[str]()
    loop = EngineLoop(engine, inbox, Cores())
    for event in events:
        inbox.put(event)
    loop.start()
    return engine, loop


def test_events_are_handled_in_order_on_one_thread() -> None:
    engine, loop = run("first", "second", "last")
    assert engine.reached.wait(SECONDS)
    loop.stop()
    assert engine.events == ["first", "second", "last"]
    assert engine.inference_mode
    assert engine.stopped == 1
    assert len(engine.threads) == 1
    assert threading.get_ident() not in engine.threads
    assert loop.failure is None
    assert not loop.alive


@pytest.mark.parametrize(("event", "message"), [("fail", "broken event"), ("fail in step", "broken step")])
def test_a_failure_ends_the_loop_and_stays_visible(event: str, message: str) -> None:
    _, loop = run(event)
    loop._thread.join(SECONDS)
    assert not loop.alive
    assert isinstance(loop.failure, RuntimeError)
    assert str(loop.failure) == message
    loop.stop()


def test_a_step_that_hangs_shows_as_a_growing_stall() -> None:
    engine, loop = run("hang")
    assert engine.reached.wait(SECONDS)
    assert loop.alive
    before = loop.stalled_for
    assert not loop._stopping.wait(0.05)
    assert loop.stalled_for >= before + 0.05
    loop.stop(timeout=0.05)
    assert loop.alive
    assert engine.stopped == 0
    engine.go_on.set()
    loop.stop()
    assert not loop.alive
    assert engine.stopped == 1


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny("llama", tmp_path_factory.mktemp("tiny-llama"), num_hidden_layers=1)


def colocated(model: Path, **settings: float) -> Replica:
    return Replica(EngineConfig(model=str(model), role=Role.COLOCATED, kv_cache_memory=1 << 20, **settings))


def require_hung_up(replica: Replica, reason: str) -> None:
    """Whoever has a session is told why it has ended."""
    with grpc.insecure_channel(replica.record.session_address) as channel:
        stub = engine_pb2_grpc.EngineStub(channel)
        with pytest.raises(grpc.RpcError, match=reason) as failure:
            for _ in stub.Session(iter(threading.Event().wait, True), timeout=SECONDS):
                pass
    assert failure.value.code() is grpc.StatusCode.UNAVAILABLE


def test_a_replica_whose_engine_has_failed_says_so(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(engine: DecodeEngine, now: float) -> bool:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(DecodeEngine, "step", fail)
    replica = colocated(model)
    try:
        replica._loop._thread.join(SECONDS)
        with pytest.raises(Unhealthy, match=rf"{replica.record.incarnation}: .*out of luck"):
            replica.require_health()
        require_hung_up(replica, "out of luck")
    finally:
        replica.stop(grace=0.0)


def test_a_replica_whose_engine_hangs_says_so(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also to those who are connected already, from beside the step that never ends."""
    go_on = threading.Event()
    replica = colocated(model, step_timeout=1.0)
    try:
        replica.require_health()
        monkeypatch.setattr(DecodeEngine, "step", lambda engine, now: go_on.wait(SECONDS))
        require_hung_up(replica, r"one step takes \d+ s")
        with pytest.raises(Unhealthy, match=r"one step takes \d+ s"):
            replica.require_health()
    finally:
        go_on.set()
        replica.stop(grace=0.0)
