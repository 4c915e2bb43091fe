import itertools
import math
import pickle
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from worker.sampling_params import SamplingParams
from worker.sequence import RequestId, Sequence
from worker.waiting_queue import GENERATED_TOKEN_COST, WaitingQueue

_numbers = itertools.count()


def request(caller: str = "", priority: int = 0, tokens: int = 1, choice: int = 0) -> Sequence:
    return Sequence(
        request_id=RequestId(f"request-{next(_numbers)}"),
        choice=choice,
        tokens=[0] * tokens,
        prompt_len=tokens,
        sampling=SamplingParams(),
        salt="",
        arrival=0.0,
        deadline=math.inf,
        caller=caller,
        priority=priority,
    )


def serve(queue: WaitingQueue, count: int, cost: float = 1.0) -> list[Sequence]:
    """Take ``count`` and charge each."""
    taken = []
    for _ in range(count):
        sequence = queue.pop()
        sequence.admitted = True
        queue.charge(sequence.caller, cost)
        taken.append(sequence)
    return taken


class QueueMachine(RuleBasedStateMachine):
    """What is taken is compared with everything that waits, in the order in which it came."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = WaitingQueue()
        self.arrived: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.away: list[Sequence] = []

    @rule(caller=st.sampled_from("abc"), priority=st.integers(-1, 1), tokens=st.integers(1, 9))
    def arrive(self, caller: str, priority: int, tokens: int) -> None:
        sequence = request(caller, priority, tokens)
        self.queue.push(sequence)
        self.arrived.append(sequence)
        self.waiting.append(sequence)

    @precondition(lambda self: self.away)
    @rule(data=st.data())
    def come_back(self, data: st.DataObject) -> None:
        sequence = self.away.pop(data.draw(st.integers(0, len(self.away) - 1)))
        sequence.tokens.append(0)
        self.queue.push(sequence)
        self.waiting.append(sequence)

    @precondition(lambda self: self.waiting)
    @rule(cost=st.floats(0, 50), returns=st.booleans())
    def take(self, cost: float, returns: bool) -> None:
        head = self.queue.head
        taken = self.queue.pop()
        assert taken is head
        self.waiting.remove(taken)
        own = [other for other in self.waiting if other.caller == taken.caller]
        assert all(taken.priority <= other.priority for other in own)
        same = [other for other in own if other.priority == taken.priority]
        assert all(taken.admitted or not other.admitted for other in same)
        alike = [other for other in same if other.admitted == taken.admitted]
        assert all(self.arrived.index(taken) < self.arrived.index(other) for other in alike)
        self.queue.charge(taken.caller, cost)
        taken.admitted = True
        if returns:
            self.away.append(taken)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        self.queue.remove(self.waiting.pop(data.draw(st.integers(0, len(self.waiting) - 1))))

    @invariant()
    def nothing_is_lost(self) -> None:
        assert set(self.queue) == set(self.waiting)
        assert len(self.queue) == len(self.waiting)
        assert self.queue.tokens == sum(len(sequence.tokens) for sequence in self.waiting)

    def teardown(self) -> None:
        while len(self.queue):
            self.take(1.0, False)


TestQueue = QueueMachine.TestCase
TestQueue.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), seats=st.integers(1, 4), callers=st.integers(2, 4))
def test_callers_that_always_wait_get_equal_shares(data: st.DataObject, seats: int, callers: int) -> None:
    """The bound that the algorithm's authors prove for two callers that never run out of requests."""
    queue = WaitingQueue()
    names = [str(number) for number in range(callers)]
    prompts = {name: data.draw(st.integers(1, 30), "prompt") for name in names}
    answers = {name: data.draw(st.integers(1, 20), "answer") for name in names}
    bound = 2 * max(*prompts.values(), GENERATED_TOKEN_COST * seats * max(answers.values()))
    waiting: Counter[str] = Counter()
    served: Counter[str] = Counter()
    running: list[tuple[str, int]] = []
    for _ in range(300):
        for name in names:
            while waiting[name] < seats + 1:
                queue.push(request(name, tokens=prompts[name]))
                waiting[name] += 1
        while len(running) < seats:
            name = queue.pop().caller
            waiting[name] -= 1
            queue.charge(name, prompts[name])
            served[name] += prompts[name]
            running.append((name, answers[name]))
        for name, _ in running:
            queue.charge(name, GENERATED_TOKEN_COST)
            served[name] += GENERATED_TOKEN_COST
        running = [(name, left - 1) for name, left in running if left > 1]
        assert max(served.values()) - min(served[name] for name in names) <= bound


@given(flood=st.integers(1, 200), served=st.integers(0, 150), cost=st.floats(1, 1000))
def test_nobody_waits_behind_anothers_flood(flood: int, served: int, cost: float) -> None:
    queue = WaitingQueue()
    for _ in range(flood + served):
        queue.push(request("flood"))
    serve(queue, served, cost)
    queue.push(request("small"))
    assert "small" in {sequence.caller for sequence in serve(queue, min(2, len(queue)), cost)}


@given(idle=st.integers(0, 100))
def test_idling_earns_nothing(idle: int) -> None:
    queue = WaitingQueue()
    queue.push(request("sleeper"))
    serve(queue, 1)
    for _ in range(idle):
        queue.push(request("busy"))
    serve(queue, idle)
    for name in ["busy", "sleeper"] * 20:
        queue.push(request(name))
    shares = Counter(sequence.caller for sequence in serve(queue, 20))
    assert abs(shares["busy"] - shares["sleeper"]) <= 2


def test_a_callers_priorities_are_its_own_affair() -> None:
    queue = WaitingQueue()
    for _ in range(10):
        queue.push(request("loud", priority=-100))
        queue.push(request("modest", priority=100))
    assert Counter(sequence.caller for sequence in serve(queue, 10)) == {"loud": 5, "modest": 5}


def test_what_comes_back_goes_before_all_that_is_new() -> None:
    queue = WaitingQueue()
    first, second = request("a"), request("a")
    queue.push(first)
    queue.push(second)
    assert serve(queue, 2) == [first, second]
    queue.push(request("b"))
    queue.push(second)
    queue.push(first)
    assert serve(queue, 2) == [first, second]


def test_a_full_queue_has_room_for_who_has_less_than_others() -> None:
    queue = WaitingQueue()
    assert queue.displaced_by("a") is None
    mine = [request("a", priority) for priority in (3, 0, 3, 1)]
    for sequence in mine:
        queue.push(sequence)
    assert queue.displaced_by("a") is None
    assert queue.displaced_by("b") is mine[2]
    # A second of b's for a third of a's would only turn the two around.
    for _ in range(3):
        queue.push(request("b"))
    assert queue.displaced_by("b") is None
    for sequence in mine:
        sequence.admitted = True
        queue.remove(sequence)
        queue.push(sequence)
    assert queue.displaced_by("c") is None


def test_who_is_ahead_of_a_newcomer() -> None:
    queue = WaitingQueue()
    assert queue.ahead_of("a", 0) == 0
    for priority in (-1, 0, 0, 5):
        queue.push(request("a", priority))
    for _ in range(10):
        queue.push(request("b"))
    assert queue.ahead_of("c", 0) == 2
    assert queue.ahead_of("a", -5) == 0 + 1
    assert queue.ahead_of("a", 0) == 3 + 4
    assert queue.ahead_of("a", 9) == 4 + 5
    assert queue.ahead_of("b", 0) == 10 + 4


def test_callers_that_are_gone_are_forgotten() -> None:
    queue = WaitingQueue()
    for number in range(1000):
        queue.push(request(f"caller-{number}"))
        serve(queue, 1)
        # What still runs for it is charged later.
        queue.charge(f"caller-{number}", 5.0)
        queue.push(request("regular"))
        serve(queue, 1, cost=10.0)
    assert len(pickle.dumps(queue)) < 2000
