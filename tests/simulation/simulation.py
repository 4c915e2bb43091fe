"""Runs a schedule and checks it: everybody's text, that everybody is served in time, and that nothing is left over.

``simulate`` raises ``ScheduleFailed``, whose message has the seed and the whole story.
"""

import logging
from collections import Counter
from dataclasses import asdict
from functools import cache, partial
from random import Random

import torch

from tests.simulation.front_end import Asked, End, FrontEnd
from tests.simulation.network import CALM, Network
from tests.simulation.reference import Reference
from tests.simulation.replicas import DecodeReplica, PrefillReplica, Replica, start
from tests.simulation.schedule import (
    PATIENCE,
    BreakStep,
    ClearCache,
    CutSession,
    CutStreams,
    Incident,
    Kill,
    Pause,
    Schedule,
    draw_schedule,
)
from tests.simulation.virtual_time import Trace, VirtualTime
from worker.events import CacheCleared

BOUND = 2.0
"""Seconds after its deadline by which a request must have ended, whatever happens: the longest pause, and what it takes
to notice that a replica is gone."""
PROMPT = 2.0
"""Seconds in which a request ends where nothing goes wrong."""
MOST_EVENTS = 100_000
TOLD_SECONDS = 0.3
"""By then everybody knows what the directory knows."""

Statistics = Counter[str]


class ScheduleFailed(AssertionError):
    """What went wrong, with the seed."""


class _Cluster:
    """All replicas and their front end, in one schedule."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.time = VirtualTime()
        self.network = Network(self.time, Random(f"{schedule.seed} network"))
        self.network.faults = schedule.faults
        self.front_end = FrontEnd(self.network, BOUND)
        self.replicas: list[Replica | None] = [None] * len(schedule.replicas)
        self.statistics: Statistics = Counter()
        self._lives = 0

    def run(self) -> Statistics:
        for index in range(len(self.replicas)):
            self._start(index)
        self._tell_everybody(0.0)
        reference = _reference(self.schedule.family, self.schedule.prefix_tokens)
        limit = self.schedule.longest
        for number, question in enumerate(self.schedule.questions):
            prompt = list(question.prompt)
            asked = Asked(
                name=f"r{number}",
                prompt=prompt,
                salt=question.salt,
                sampling=question.sampling,
                expected=[
                    reference.answer(prompt, question.salt, question.sampling, choice, limit)
                    for choice in range(question.choices)
                ],
                deadline=question.at + question.timeout,
            )
            self.time.at(question.at, partial(self.front_end.ask, asked))
            if question.leaves is not None:
                self.time.at(question.at + question.leaves, partial(self.front_end.abort, asked))
        for incident in self.schedule.incidents:
            self.time.at(incident.at, partial(self._happen, incident))
        while self.time.advance():
            assert self.time.events < MOST_EVENTS, "it goes on for ever"
        assert len(self.front_end.requests) == len(self.schedule.questions)
        assert self.front_end.done
        self._require_patience_was_enough()
        for replica in self.replicas:
            assert replica is not None
            replica.require_rest()
            self._count(replica)
        self._summarize()
        self._require_fewest_bytes()
        return self.statistics

    def _require_fewest_bytes(self) -> None:
        """Where nothing went wrong, exactly what had to move has moved."""
        disturbances = ("kill", "breakstep", "cutstreams", "cutsession", "aborted", "timeout", "refused")
        if not any(self.statistics[name] for name in (*disturbances, "transfers_failed")):
            moved, bound = self.statistics["payload_bytes"], self.statistics["lower_bound_bytes"]
            assert moved == bound, f"{moved} bytes were received, and {bound} were lacking"
            self.statistics["undisturbed"] += 1

    def _require_patience_was_enough(self) -> None:
        calm = self.schedule.faults == CALM and not self.schedule.incidents
        for request, question in zip(self.front_end.requests, self.schedule.questions, strict=True):
            assert request.end is not End.TIMEOUT or question.timeout < PATIENCE, f"{request.name} took too long"
            taken = request.ended - question.at
            assert taken < PROMPT or not calm, f"nothing went wrong, and {request.name} took {taken:.3f} s"

    def _start(self, index: int) -> None:
        plan = self.schedule.replicas[index]
        self._lives += 1
        replica = self.replicas[index] = start(plan, f"{plan.config.role.value}-{index}.{self._lives}", self.network)
        self._say(
            f"{replica.incarnation} starts: {plan.num_blocks} blocks of {plan.config.block_size}, "
            f"{plan.config.tensor_parallel_size} ranks, prefix caching {plan.config.prefix_caching}"
        )

    def _tell_everybody(self, within: float) -> None:
        """The directory has changed; each decode replica and the front end hear of it in their own time."""
        random = self.network.random
        for replica in self.replicas:
            if isinstance(replica, DecodeReplica):
                self.time.after(random.uniform(0.0, within), partial(self._tell, replica))
                if all(session.replica is not replica for session in self.front_end.sessions()):
                    self.time.after(random.uniform(0.0, within), partial(self._tell_front_end, replica))

    def _tell(self, replica: DecodeReplica) -> None:
        prefilling = {r.incarnation: r.addresses for r in self.replicas if isinstance(r, PrefillReplica)}
        replica.follow(prefilling)

    def _tell_front_end(self, replica: DecodeReplica) -> None:
        if all(session.replica is not replica for session in self.front_end.sessions()):
            self.front_end.connect(replica)

    def _happen(self, incident: Incident) -> None:
        self._say(str(incident))
        self.statistics[type(incident).__name__.lower()] += 1
        random = self.network.random
        match incident:
            case Kill():
                self._kill(incident)
            case Pause():
                replica = self.replicas[incident.replica]
                if replica is not None:
                    replica.loop.pause(incident.seconds)
            case BreakStep():
                replica = self.replicas[incident.replica]
                if replica is not None and self.schedule.replicas[incident.replica].config.tensor_parallel_size == 1:
                    replica.runner.broken = self.front_end.may_break = True
            case CutStreams():
                for stream in self.network.open_streams():
                    stream.cut("the network broke")
            case CutSession():
                sessions = self.front_end.sessions()
                if sessions:
                    self.front_end.cut(random.choice(sessions))
            case ClearCache():
                replica = self.replicas[incident.replica]
                if replica is not None:
                    replica.loop.put(CacheCleared(lambda: None))

    def _kill(self, kill: Kill) -> None:
        replica = self.replicas[kill.replica]
        if replica is None:
            return
        self._count(replica)
        if kill.told:
            # Then it holds nothing, whatever it did.
            replica.engine.stop(self.time.now)
            assert replica.engine.idle
            replica.cache.require_rest()
            self.statistics["stop"] += 1
        replica.kill()
        self.replicas[kill.replica] = None
        for session in self.front_end.sessions():
            if session.replica is replica:
                self.time.after(self.network.noticed(), partial(self.front_end.lost, session))
        self._tell_everybody(TOLD_SECONDS)
        self.time.after(kill.back, partial(self._return, kill.replica))

    def _return(self, index: int) -> None:
        self._start(index)
        self._tell_everybody(TOLD_SECONDS)

    def _count(self, replica: Replica) -> None:
        counters = replica.status().counters
        if isinstance(replica, DecodeReplica):
            for name in ("steps", "preemptions", "transfers", "transfers_failed", "stale_pieces", "local_prefills"):
                self.statistics[name] += getattr(counters, name)
            self.statistics["retransmitted_bytes"] += counters.retransmitted_bytes
            self.statistics["payload_bytes"] += counters.payload_bytes
            self.statistics["lower_bound_bytes"] += counters.lower_bound_bytes
            self.statistics["forks"] += replica.cache.forks
            self.statistics["decode_prefix_hits"] += counters.prefix_hits
        else:
            self.statistics["prefill_steps"] += counters.steps
            self.statistics["prefill_prefix_hits"] += counters.prefix_hits
        self.statistics["turns"] += replica.loop.turns

    def _summarize(self) -> None:
        statistics = self.statistics
        statistics["split_replicas"] += sum(p.config.tensor_parallel_size > 1 for p in self.schedule.replicas)
        statistics["events"] += self.time.events
        statistics["virtual_ms"] += int(self.time.now * 1e3)
        statistics["resubmissions"] += self.front_end.resubmissions
        for name, count in asdict(self.network.counts).items():
            statistics[name] += count
        for request in self.front_end.requests:
            assert request.end is not None
            statistics["requests"] += 1
            statistics[request.end.name.lower()] += 1
            statistics["tokens"] += sum(map(len, request.answers))
            statistics["choices"] += len(request.expected)

    def _say(self, line: str) -> None:
        if self.network.trace is not None:
            self.network.trace(line)


def simulate(seed: int) -> Statistics:
    """Run a seed's schedule; on failure run it again to tell how it came to that."""
    # Warnings are wanted in a story only.
    logging.disable(logging.CRITICAL)
    try:
        with torch.inference_mode():
            return _Cluster(draw_schedule(seed)).run()
    except Exception as error:
        raise ScheduleFailed(f"seed {seed}: {error!r}\n{tell(seed)}") from error
    finally:
        logging.disable(logging.NOTSET)


def tell(seed: int) -> str:
    """The story of a seed's schedule, a line per event, up to its end or its failure."""
    lines: list[str] = []
    schedule = draw_schedule(seed)
    cluster = _Cluster(schedule)

    def trace(line: str) -> None:
        lines.append(f"{cluster.time.now * 1e3:10.3f} ms  {line}")

    cluster.network.trace = trace
    handler = _Told(trace)
    logging.disable(logging.NOTSET)
    logging.getLogger().addHandler(handler)
    lines.append(f"seed {seed}: a {schedule.family} model, {schedule.faults}")
    try:
        with torch.inference_mode():
            statistics = cluster.run()
        lines.append(f"as it must be: {summary(statistics, 1)}")
    except Exception as error:
        trace(f"{type(error).__name__}: {error}")
    finally:
        logging.getLogger().removeHandler(handler)
    return "\n".join(lines)


class _Told(logging.Handler):
    """Makes the engines' own log part of the story."""

    def __init__(self, trace: Trace) -> None:
        super().__init__(logging.WARNING)
        self._trace = trace

    def emit(self, record: logging.LogRecord) -> None:
        error = f": {record.exc_info[1]!r}" if record.exc_info else ""
        self._trace(f"log: {record.getMessage()}{error}")


def summary(statistics: Statistics, schedules: int) -> str:
    """What happened, per 1,000 schedules."""
    return ", ".join(f"{name} {count * 1000 // schedules}" for name, count in sorted(statistics.items()))


@cache
def _reference(family: str, prefix_tokens: tuple[int, ...]) -> Reference:
    return Reference(family, prefix_tokens)
