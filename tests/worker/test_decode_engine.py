from collections import defaultdict
from typing import Any

import pytest
import torch

from tests.worker.scripted_runner import VOCAB_SIZE, ScriptedRunner, logits_after
from worker.config import EngineConfig, Role
from worker.decode_engine import DecodeEngine
from worker.events import Aborted, ClientArrived, ClientGone, DrainStarted, LoadWanted, Submitted
from worker.ranks.rank import Rank
from worker.ranks.team import RankTeam
from worker.replica_load import ReplicaLoad
from worker.wire import engine_pb2 as wire


class FrontEnd:
    """A session; keeps outputs by request and choice."""

    def __init__(self, client_id: str = "front-end") -> None:
        self.client_id = client_id
        self.outputs: defaultdict[str, list[wire.Output]] = defaultdict(list)

    def send(self, message: wire.EngineMessage) -> None:
        for output in message.outputs:
            self.outputs[output.request_id].append(output)

    def tokens(self, name: str, choice: int = 0) -> list[int]:
        return [token for output in self.outputs[name] if output.choice == choice for token in output.token_ids]

    def error(self, name: str) -> str:
        """The kind of the one error that was sent, and nothing after it."""
        assert [o.finish_reason for o in self.outputs[name]].count(wire.FINISH_REASON_ERROR) == 1
        assert self.outputs[name][-1].finish_reason == wire.FINISH_REASON_ERROR
        return wire.ErrorKind.Name(self.outputs[name][-1].error.kind).removeprefix("ERROR_KIND_")


class Engine:
    """A colocated engine over a scripted model, driven by hand."""

    def __init__(
        self, *, num_blocks: int = 32, block_size: int = 4, prefix_tokens: tuple[int, ...] = (), **config: Any
    ) -> None:
        settings = EngineConfig(model="", role=Role.COLOCATED, block_size=block_size, **config)
        self.runner = ScriptedRunner(settings, num_blocks, prefix_tokens=prefix_tokens)
        team = RankTeam(Rank(self.runner))  # type: ignore[arg-type]
        self.engine = DecodeEngine(
            settings,
            self.runner,  # type: ignore[arg-type]
            team,
            "colocated-1",
            clock=lambda: self.now,
        )
        self.front_end = self.connect("front-end")
        self.now = 0.0

    def connect(self, client_id: str) -> FrontEnd:
        client = FrontEnd(client_id)
        self.engine.handle(ClientArrived(client), 0.0)
        return client

    def submit(
        self,
        name: str,
        prompt: list[int],
        *,
        client: FrontEnd | None = None,
        arrived: float | None = None,
        **fields: Any,
    ) -> None:
        sampling = wire.Sampling(top_p=1.0, repetition_penalty=1.0, max_tokens=fields.pop("max_tokens", 3))
        sampling.MergeFrom(wire.Sampling(**fields.pop("sampling", {})))
        message = wire.Submit(request_id=name, token_ids=prompt, prompt_len=len(prompt), n=1, sampling=sampling)
        message.MergeFrom(wire.Submit(**fields))
        self.engine.handle(
            Submitted(client or self.front_end, message, self.now if arrived is None else arrived), self.now
        )

    def step(self) -> None:
        self.now += 1.0
        self.engine.step(self.now)

    def run(self) -> None:
        for _ in range(500):
            if self.engine.idle:
                break
            self.step()
        assert self.engine.idle
        counts = self.engine.status()
        assert counts.held_blocks == 0
        assert counts.load.free_blocks + counts.load.cached_blocks == counts.load.total_blocks


def greedy(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(logits_after(tokens).argmax()))
    return tokens[len(prompt) :]


def prompt_logprobs(prompt: list[int]) -> list[tuple[int, float]]:
    return [
        (token, torch.log_softmax(logits_after(prompt[:index]), -1)[token].item())
        for index, token in enumerate(prompt)
        if index
    ]


def reported_prompt_logprobs(front_end: FrontEnd, name: str) -> list[tuple[int, Any]]:
    (info,) = (output.prompt_info for output in front_end.outputs[name] if output.HasField("prompt_info"))
    return [(entry.token_id, pytest.approx(entry.logprob, abs=1e-5)) for entry in info.prompt_logprobs]


def test_every_choice_gets_its_tokens_and_one_end() -> None:
    engine = Engine()
    engine.submit("r", [5, 6, 7], n=3, max_tokens=4)
    engine.run()
    for choice in range(3):
        assert engine.front_end.tokens("r", choice) == greedy([5, 6, 7], 4)
    reasons = [output.finish_reason for output in engine.front_end.outputs["r"]]
    assert reasons.count(wire.FINISH_REASON_LENGTH) == 3
    assert sum(output.HasField("prompt_info") for output in engine.front_end.outputs["r"]) == 1


def test_a_request_says_how_long_it_waited_and_its_prompt_was_computed() -> None:
    engine = Engine(max_batched_tokens=4, max_running_requests=1)
    compute = engine.runner.execute

    def slowly(*arguments: Any) -> Any:
        engine.now += 0.25
        return compute(*arguments)

    engine.runner.execute = slowly  # type: ignore[method-assign]
    # It came half a second before the engine had time for it.
    engine.submit("first", list(range(10)), max_tokens=1, arrived=-0.5)
    engine.submit("second", [1])
    engine.run()
    # Steps begin a second apart and take a quarter: at 1, 2.25 and 3.5.
    expected = {
        "first": wire.Phases(queue_ms=1500, start_ms=1500, prefill_ms=2750, first_token_ms=4250),
        "second": wire.Phases(queue_ms=4750, start_ms=4750, prefill_ms=250, first_token_ms=5000),
    }
    for name, phases in expected.items():
        (info,) = (output.prompt_info for output in engine.front_end.outputs[name] if output.HasField("prompt_info"))
        assert info.phases == phases


@pytest.mark.parametrize(("max_tokens", "choices"), [(3, 1), (3, 2), (0, 1), (0, 2)])
@pytest.mark.parametrize("prompt", [[9], [9, 8], list(range(20))])
def test_prompt_logprobs(prompt: list[int], max_tokens: int, choices: int) -> None:
    engine = Engine(max_batched_tokens=6)
    engine.submit("r", prompt, n=choices, max_tokens=max_tokens, sampling={"prompt_logprobs": 0})
    engine.run()
    assert reported_prompt_logprobs(engine.front_end, "r") == prompt_logprobs(prompt)
    for choice in range(choices):
        assert engine.front_end.tokens("r", choice) == greedy(prompt, max_tokens)


def test_a_models_own_first_tokens_are_computed_and_never_shown() -> None:
    own, prompt = [31, 30, 29], [9, 8, 7, 6, 5, 4]
    engine = Engine(max_batched_tokens=6, prefix_tokens=tuple(own))
    # Of the two full blocks of four that are found again, three tokens are the model's.
    for name, cached, sampling in (("first", 0, {"prompt_logprobs": 0}), ("again", 5, {})):
        engine.submit(name, prompt, max_tokens=4, sampling=sampling)
        engine.run()
        assert engine.front_end.tokens(name) == greedy([*own, *prompt], 4)
        (info,) = (output.prompt_info for output in engine.front_end.outputs[name] if output.HasField("prompt_info"))
        assert info.cached_tokens == cached
    reported = reported_prompt_logprobs(engine.front_end, "first")
    assert reported == prompt_logprobs([*own, *prompt])[len(own) :]
    assert [token for token, _ in reported] == prompt[1:]
    assert engine.engine.status().counters.prompt_tokens == 2 * len(prompt)


def test_prompt_logprobs_of_a_prompt_that_was_preempted_halfway() -> None:
    engine = Engine(num_blocks=10, block_size=2, max_batched_tokens=2)
    engine.submit("first", [1], max_tokens=15)
    engine.step()
    prompt = list(range(16))
    engine.submit("second", prompt, max_tokens=2, sampling={"prompt_logprobs": 0})
    engine.run()
    assert engine.engine.status().counters.preemptions > 0
    assert reported_prompt_logprobs(engine.front_end, "second") == prompt_logprobs(prompt)
    assert engine.front_end.tokens("second") == greedy(prompt, 2)
    assert engine.front_end.tokens("first") == greedy([1], 15)


def test_a_failed_step_ends_the_requests_in_it_and_no_other() -> None:
    engine = Engine(max_running_requests=2)
    for name in ("a", "b", "c"):
        engine.submit(name, [ord(name) % VOCAB_SIZE] * 3)
    engine.step()
    engine.runner.broken = True
    engine.step()
    engine.runner.broken = False
    engine.run()
    assert (engine.front_end.error("a"), engine.front_end.error("b")) == ("INTERNAL", "INTERNAL")
    assert engine.front_end.tokens("c") == greedy([ord("c") % VOCAB_SIZE] * 3, 3)


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt_len": 9},
        {"n": 1000},
        {"token_ids": [VOCAB_SIZE]},
        {"token_ids": [0] * 200},
        {"sampling": {"temperature": float("nan")}},
        {"sampling": {"top_p": float("inf")}},
        {"sampling": {"min_tokens": 2**32 - 1}},
        {"sampling": {"stop_token_ids": [VOCAB_SIZE]}},
        {"sampling": {"logit_bias": {2**32 - 1: 1.0}}},
        {"name": "x" * 1000},
    ],
    ids=str,
)
def test_a_request_that_cannot_be_served_costs_no_other(fields: dict[str, Any]) -> None:
    engine = Engine()
    engine.submit("good", [1, 2, 3], max_tokens=5)
    engine.step()
    other = engine.connect("other")
    name = fields.get("name", "bad")
    engine.submit(client=other, **{"name": name, "prompt": [1, 2, 3], **fields})
    engine.step()
    assert other.error(name) == "INVALID"
    engine.run()
    assert engine.front_end.tokens("good") == greedy([1, 2, 3], 5)


def test_deadlines_full_queues_and_a_stop_are_told() -> None:
    engine = Engine(max_running_requests=1, max_waiting_requests=1, prefix_caching=False)
    engine.submit("slow", [1], max_tokens=100, timeout_ms=2500)
    engine.step()
    engine.submit("queued", [2], max_tokens=100)
    engine.submit("refused", [3])
    for _ in range(3):
        engine.step()
    assert engine.front_end.error("slow") == "TIMEOUT"
    assert engine.front_end.error("refused") == "OVERLOADED"
    assert engine.front_end.outputs["refused"][0].error.retry_after_ms > 0
    engine.engine.stop(engine.now)
    assert engine.front_end.error("queued") == "UNAVAILABLE"
    assert engine.engine.idle
    assert engine.engine.status().held_blocks == 0


def test_refusals_say_when_the_queue_will_have_moved_on() -> None:
    engine = Engine(max_running_requests=1, max_waiting_requests=4)
    for number in range(40):
        engine.submit(f"r{number}", [1, number % 30], max_tokens=2)
        engine.step()
    refused = [name for name in engine.front_end.outputs if engine.front_end.outputs[name][0].HasField("error")]
    # One a step comes, one in two steps of a second each is served; four wait.
    assert len(refused) == pytest.approx(18, abs=3)
    assert engine.front_end.outputs[refused[-1]][0].error.retry_after_ms == pytest.approx(4 * 2000, rel=0.2)
    counters = engine.engine.status().counters
    assert counters.requests_refused == len(refused)
    assert dict(counters.failures) == {"queue_full": len(refused)}
    engine.run()


def test_what_would_begin_after_its_deadline_is_refused_at_once() -> None:
    engine = Engine(max_running_requests=1)
    for number in range(8):
        engine.submit(f"r{number}", [1, number], max_tokens=5)
    for _ in range(11):
        engine.step()
    # Two were served in ten steps; five wait.
    engine.submit("hasty", [3], timeout_ms=15_000)
    engine.submit("patient", [4], timeout_ms=60_000)
    engine.step()
    assert engine.front_end.error("hasty") == "OVERLOADED"
    assert engine.front_end.outputs["hasty"][0].error.reason == "queue_slow"
    assert "must start within 15.0 s" in engine.front_end.outputs["hasty"][0].error.message
    engine.run()
    assert engine.front_end.tokens("patient") == greedy([4], 3)


def test_a_request_may_wait_no_longer_than_it_is_configured() -> None:
    engine = Engine(max_running_requests=1, queue_timeout=3.0)
    engine.submit("running", [1], max_tokens=8)
    engine.step()
    engine.submit("waiting", [2])
    engine.run()
    assert engine.front_end.tokens("running") == greedy([1], 8)
    assert engine.front_end.error("waiting") == "OVERLOADED"
    assert "within 3 s" in engine.front_end.outputs["waiting"][0].error.message


def test_a_full_queue_of_one_caller_has_room_for_another() -> None:
    engine = Engine(max_running_requests=1, max_waiting_requests=3)
    engine.submit("running", [1], max_tokens=3, caller="flood")
    engine.step()
    for number in range(4):
        engine.submit(f"flood-{number}", [2, number], caller="flood")
    engine.submit("small", [3], caller="small")
    engine.step()
    assert engine.front_end.error("flood-3") == engine.front_end.error("flood-2") == "OVERLOADED"
    engine.run()
    assert engine.front_end.tokens("small") == greedy([3], 3)
    order = [name for name in engine.front_end.outputs if engine.front_end.tokens(name)]
    assert order == ["running", "small", "flood-0", "flood-1"]


def test_lower_priorities_first() -> None:
    engine = Engine(max_running_requests=1)
    engine.submit("running", [1])
    engine.step()
    for name, priority in (("b", 0), ("c", 7), ("a", -7)):
        engine.submit(name, [2], priority=priority)
    engine.run()
    assert list(engine.front_end.outputs) == ["running", "a", "b", "c"]


def test_a_report_says_which_requests_it_counts() -> None:
    reports: list[wire.EngineMessage] = []
    engine = Engine(max_running_requests=1, max_waiting_requests=2)
    engine.front_end.send = reports.append  # type: ignore[method-assign]
    for number in range(5):
        engine.submit(f"r{number}", [1, number], max_tokens=30)
    engine.step()
    last = reports[-1]
    assert (last.submits, last.load.running_requests, last.load.waiting_requests) == (5, 1, 2)
    assert last.load.queue_limit == 2


def test_draining_finishes_what_was_taken_and_hands_back_the_rest() -> None:
    engine = Engine(max_running_requests=1)
    loads: list[wire.Load] = []
    engine.submit("running", [1], max_tokens=4)
    engine.step()
    engine.submit("waiting", [2])
    drained: list[bool] = []
    send = engine.front_end.send

    def receive(message: wire.EngineMessage) -> None:
        loads.append(message.load)
        send(message)

    engine.front_end.send = receive  # type: ignore[method-assign]
    engine.engine.handle(DrainStarted(lambda: drained.append(True)), engine.now)
    engine.submit("late", [3])
    engine.step()
    assert loads[0].draining
    assert engine.front_end.error("late") == "UNAVAILABLE"
    assert not drained
    engine.run()
    assert engine.front_end.tokens("running") == greedy([1], 4)
    assert engine.front_end.tokens("waiting") == greedy([2], 3)
    assert drained


def test_its_load_is_what_it_holds_and_what_others_wait_for() -> None:
    """Of 32 blocks of 4 tokens a prompt of 62 takes half: two hold all, and two wait for as much."""
    engine = Engine(max_running_requests=3)
    loads: list[ReplicaLoad] = []
    for name, prompt in (("a", [1] * 62), ("b", [2] * 62), ("c", [3] * 62), ("d", [4] * 62)):
        engine.submit(name, prompt, max_tokens=20)
        engine.step()
        engine.engine.handle(LoadWanted(loads.append), engine.now)
        if name == "a":
            assert loads[0].occupancy == pytest.approx(16 / 32)
    assert max(load.occupancy for load in loads) > 1
    assert not any(load.queued_prompt_tokens for load in loads)
    engine.run()
    engine.engine.handle(LoadWanted(loads.append), engine.now)
    assert loads[-1] == ReplicaLoad()


def test_leaving_takes_along_ones_own_requests_only() -> None:
    engine = Engine()
    other = engine.connect("other")
    # Two front ends may use the same name.
    engine.submit("r", [1], max_tokens=50)
    engine.submit("r", [2], max_tokens=5, client=other)
    engine.submit("gone", [3], max_tokens=50, client=other)
    engine.step()
    engine.engine.handle(Aborted(other, "gone"), engine.now)
    engine.engine.handle(Aborted(other, "unknown"), engine.now)
    engine.engine.handle(ClientGone(engine.front_end), engine.now)
    engine.run()
    assert other.tokens("r") == greedy([2], 5)
    assert len(other.tokens("gone")) == 1
    assert len(engine.front_end.tokens("r")) == 1
    assert engine.engine.status().counters.requests_aborted == 2


@pytest.mark.parametrize("known", [1, 4, 7])
def test_a_choice_that_is_resumed_goes_on_as_it_would_have(known: int) -> None:
    """Another engine gets prompt and first tokens, and the choice's number; penalties and limits count as before."""
    sampling = {
        "temperature": 1.5,
        "seed": 77,
        "frequency_penalty": 1.5,
        "min_tokens": 6,
        "stop_token_ids": [3, 4],
        "logprobs": 1,
    }
    first = Engine()
    first.submit("r", [5, 6, 7], n=3, max_tokens=9, sampling=sampling)
    first.run()
    for choice in range(3):
        tokens = first.front_end.tokens("r", choice)
        if known >= len(tokens):
            continue
        other = Engine()
        rest = {"token_ids": tokens[:known], "choice": choice}
        other.submit("rest", [5, 6, 7], max_tokens=9, sampling=sampling, **rest)
        other.run()
        assert other.front_end.tokens("rest", choice) == tokens[known:]
        expected = [output for output in first.front_end.outputs["r"] if output.choice == choice]
        assert other.front_end.outputs["rest"][-1].finish_reason == expected[-1].finish_reason
        logprobs = [entry.logprob for output in other.front_end.outputs["rest"] for entry in output.logprobs]
        assert logprobs == pytest.approx([o.logprobs[0].logprob for o in expected[known:]], abs=1e-5)
    # Choices differ, or the number would not have mattered.
    assert len({tuple(first.front_end.tokens("r", choice)) for choice in range(3)}) == 3


def test_a_request_goes_without_a_token_no_longer_than_it_may() -> None:
    """The later of two that do not fit side by side is preempted, and comes back too late."""
    engine = Engine(num_blocks=6, token_timeout=4.0)
    engine.submit("first", [5, 6, 7], max_tokens=16)
    engine.submit("second", [8, 9, 10], max_tokens=16)
    engine.run()
    assert engine.engine.status().counters.preemptions > 0
    assert engine.front_end.tokens("first") == greedy([5, 6, 7], 16)
    assert engine.front_end.error("second") == "TIMEOUT"
    assert "--token-timeout" in engine.front_end.outputs["second"][-1].error.message
