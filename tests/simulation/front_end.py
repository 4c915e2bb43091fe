"""The front end's part: places requests with the real router, follows their answers, goes on when a replica dies.

Every token that arrives is compared with the reference at once. A request whose replica died is asked again with prompt
and tokens so far; one of several choices from its beginning, and what is already there must come again.
"""

from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial

from cluster.router import REQUEST_COST_TOKENS, PrefixIndex, Target, choose
from tests.simulation.network import Network
from tests.simulation.replicas import DecodeReplica
from tests.simulation.shadow_model import EOS
from worker.events import Aborted, ClientArrived, ClientGone, Submitted
from worker.sampling_params import SamplingParams
from worker.wire import engine_pb2 as wire

NOBODY_SECONDS = 0.05
"""A request that finds no replica looks again after this."""


class End(Enum):
    """How a request has ended."""

    COMPLETE = auto()
    ABORTED = auto()
    TIMEOUT = auto()
    OVERLOADED = auto()
    BROKEN = auto()
    """By a step that failed."""


ERRORS = {
    wire.ERROR_KIND_TIMEOUT: End.TIMEOUT,
    wire.ERROR_KIND_OVERLOADED: End.OVERLOADED,
    wire.ERROR_KIND_INTERNAL: End.BROKEN,
}
"""Which errors a replica may tell. Any other is a bug: nothing else goes wrong here."""


@dataclass(eq=False, slots=True)
class Asked:
    """A client's request. ``expected`` and ``answers`` are by choice."""

    name: str
    prompt: list[int]
    salt: str
    sampling: SamplingParams
    expected: list[list[int]]
    deadline: float
    answers: list[list[int]] = field(default_factory=list)
    open: set[int] = field(default_factory=set)
    again: list[int] = field(default_factory=list)
    """Of each choice, the tokens that came since it was last asked for."""
    session: "Session | None" = None
    placements: int = 0
    end: End | None = None
    ended: float = 0.0


class Session:
    """The stream between the front end and one life of a decode replica. A ``worker.request.Client``."""

    def __init__(self, front_end: "FrontEnd", replica: DecodeReplica, client_id: str) -> None:
        self.client_id = client_id
        self.replica = replica
        self.load = wire.Load(free_blocks=1)
        self.open: dict[str, Asked] = {}
        self.broken = False
        self._front_end = front_end
        self._arrival = 0.0

    def send(self, message: wire.EngineMessage) -> None:
        """From the engine; messages keep their order."""
        network = self._front_end.network
        self._arrival = max(self._arrival, network.time.now + network.delay())
        network.time.at(self._arrival, partial(self._front_end.receive, self, message))


class FrontEnd:
    """See the module. ``bound`` is how late after its deadline a request may end, seconds."""

    def __init__(self, network: Network, bound: float) -> None:
        self.network = network
        self.requests: list[Asked] = []
        self.resubmissions = 0
        self.may_break = False
        """Whether some step was made to fail."""
        self._bound = bound
        self._index = PrefixIndex()
        self._sessions: dict[str, Session] = {}
        self._clients = 0

    @property
    def done(self) -> bool:
        """Whether every request has ended."""
        return all(request.end is not None for request in self.requests)

    # Replicas

    def connect(self, replica: DecodeReplica) -> None:
        """Open a session with a replica that the directory knows."""
        if not replica.loop.alive:
            return
        self._clients += 1
        session = Session(self, replica, f"front-end-{self._clients}")
        self._sessions[replica.incarnation] = session
        replica.loop.put(ClientArrived(session))

    def lost(self, session: Session) -> None:
        """A session has broken; its requests go on elsewhere."""
        if session.broken:
            return
        session.broken = True
        if self._sessions.get(session.replica.incarnation) is session:
            del self._sessions[session.replica.incarnation]
            self._index.forget(session.replica.incarnation)
        for request in list(session.open.values()):
            self._say(f"{request.name} lost {session.replica.incarnation}")
            request.session = None
            self.resubmissions += 1
            self.place(request)
        session.open.clear()

    def cut(self, session: Session) -> None:
        """The connection breaks and both ends live."""
        network, replica = self.network, session.replica
        network.time.after(network.noticed(), partial(replica.loop.put, ClientGone(session)))
        network.time.after(network.noticed(), partial(self.lost, session))
        network.time.after(1.0, partial(self.connect, replica))

    def sessions(self) -> list[Session]:
        """Those that are open."""
        return list(self._sessions.values())

    # Requests

    def ask(self, request: Asked) -> None:
        """A client asks."""
        request.answers = [[] for _ in request.expected]
        request.open = set(range(len(request.expected)))
        self.requests.append(request)
        self._say(
            f"{request.name} is asked: {request.prompt} salt {request.salt!r}, {len(request.expected)} choices, "
            f"until {request.deadline:.3f}"
        )
        self.place(request)
        self.network.time.at(request.deadline + self._bound, partial(self._require_end, request))

    def place(self, request: Asked) -> None:
        """Send it to the replica that the router chooses."""
        network = self.network
        if request.end is not None:
            return
        remaining = request.deadline - network.time.now
        if remaining <= 0:
            self._end(request, End.TIMEOUT)
            return
        if not self._sessions:
            network.time.after(NOBODY_SECONDS, partial(self.place, request))
            return
        targets = [
            Target(
                name,
                cost=len(session.open) * REQUEST_COST_TOKENS,
                room=session.load.free_blocks + session.load.cached_blocks > 0,
            )
            for name, session in self._sessions.items()
        ]
        single = len(request.expected) == 1
        known = request.prompt + (request.answers[0] if single else [])
        request.again = [len(request.answers[0])] if single else [0] * len(request.expected)
        session = self._sessions[choose(targets, self._index, known, request.salt)]
        request.session, session.open[request.name] = session, request
        request.placements += 1
        sampling = request.sampling
        submit = wire.Submit(
            request_id=request.name,
            token_ids=known,
            prompt_len=len(request.prompt),
            n=len(request.expected),
            cache_salt=request.salt,
            timeout_ms=max(1, int(remaining * 1e3)),
            sampling=wire.Sampling(
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                repetition_penalty=sampling.repetition_penalty,
                seed=sampling.seed,
                max_tokens=sampling.max_tokens,
                prompt_logprobs=sampling.prompt_logprobs,
            ),
        )
        self._say(f"{request.name} goes to {session.replica.incarnation} with {len(known)} tokens")
        submitted = Submitted(session, submit, network.time.now)
        network.time.after(network.delay(), partial(session.replica.loop.put, submitted))

    def abort(self, request: Asked) -> None:
        """Its client leaves."""
        if request.end is not None:
            return
        network, session = self.network, request.session
        self._end(request, End.ABORTED)
        if session is not None:
            network.time.after(network.delay(), partial(session.replica.loop.put, Aborted(session, request.name)))

    def receive(self, session: Session, message: wire.EngineMessage) -> None:
        """A message from a decode replica, unless the session broke before it came."""
        if session.broken:
            return
        session.load = message.load
        for output in message.outputs:
            request = session.open.get(output.request_id)
            if request is not None:
                self._take(request, output)

    def _take(self, request: Asked, output: wire.Output) -> None:
        if output.error.kind == wire.ERROR_KIND_UNAVAILABLE:
            assert request.session is not None
            self.lost(request.session)
            return
        if output.finish_reason == wire.FINISH_REASON_ERROR:
            assert output.error.kind in ERRORS, f"{request.name}: {output.error}"
            self._end(request, ERRORS[output.error.kind])
            assert request.end is not End.BROKEN or self.may_break, f"{request.name}: {output.error.message}"
            assert request.end is not End.TIMEOUT or self.network.time.now >= request.deadline - 0.01, "too early"
            return
        choice = output.choice
        expected, answer = request.expected[choice], request.answers[choice]
        for token in output.token_ids:
            position = request.again[choice]
            request.again[choice] += 1
            assert position < len(expected), f"{request.name}: choice {choice} goes on after {expected} with {token}"
            assert token == expected[position], (
                f"{request.name}: token {position} of choice {choice} is {token}, must be {expected[position]} "
                f"of {expected}"
            )
            if position == len(answer):
                answer.append(token)
        if output.finish_reason != wire.FINISH_REASON_UNSPECIFIED:
            assert request.again[choice] == len(expected), f"{request.name}: choice {choice} ends after {answer}"
            stop = expected[-1] == EOS and len(expected) >= request.sampling.min_tokens
            assert (output.finish_reason == wire.FINISH_REASON_STOP) == stop, f"{request.name}: {output}"
            request.open.discard(choice)
            if not request.open:
                self._end(request, End.COMPLETE)

    def _end(self, request: Asked, end: End) -> None:
        self._say(f"{request.name} ends: {end.name.lower()} {request.answers}")
        request.end, request.ended = end, self.network.time.now
        if request.session is not None:
            request.session.open.pop(request.name, None)
        request.session = None

    def _require_end(self, request: Asked) -> None:
        assert request.end is not None, f"{request.name} is stuck: {self._bound} s after its deadline it has not ended"

    def _say(self, line: str) -> None:
        if self.network.trace is not None:
            self.network.trace(line)
