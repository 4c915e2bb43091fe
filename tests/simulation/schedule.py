"""One random schedule: which replicas there are, what is asked of them, and what happens to them. A seed gives it."""

from dataclasses import dataclass
from functools import cache
from random import Random

from tests.simulation.network import CALM, Faults
from tests.simulation.replicas import ReplicaPlan
from tests.simulation.shadow_model import FAMILIES, VOCAB_SIZE, model_shape
from worker.config import EngineConfig, Role
from worker.kv_cache.groups import longest_sequence
from worker.sampling_params import SamplingParams

TRANSFER_TIMEOUT = 2.0
PATIENCE = 40.0
"""Seconds within which everything can be answered, whatever a schedule does."""


@dataclass(frozen=True, slots=True)
class Question:
    """What a client asks, when, and when it leaves if it does not stay. Times are seconds."""

    at: float
    prompt: tuple[int, ...]
    salt: str
    choices: int
    sampling: SamplingParams
    timeout: float
    leaves: float | None


@dataclass(frozen=True, slots=True)
class Kill:
    """A replica dies, if ``told`` not before it has given up everything; another life begins ``back`` seconds later."""

    at: float
    replica: int
    back: float
    told: bool


@dataclass(frozen=True, slots=True)
class Pause:
    """A replica's process is stopped for a while."""

    at: float
    replica: int
    seconds: float


@dataclass(frozen=True, slots=True)
class BreakStep:
    """A replica's next step fails halfway. Of one of several ranks that would be its end."""

    at: float
    replica: int


@dataclass(frozen=True, slots=True)
class CutStreams:
    """Every stream that is open between a prefill replica and a decode replica breaks."""

    at: float


@dataclass(frozen=True, slots=True)
class CutSession:
    """A front end's connection to some decode replica breaks."""

    at: float


@dataclass(frozen=True, slots=True)
class ClearCache:
    """An operator clears a replica's prefix cache."""

    at: float
    replica: int


Incident = Kill | Pause | BreakStep | CutStreams | CutSession | ClearCache


@dataclass(frozen=True, slots=True)
class Schedule:
    """``replicas`` begin with those that decode. A sequence has up to ``longest`` tokens, with ``prefix_tokens``."""

    seed: int
    family: str
    longest: int
    prefix_tokens: tuple[int, ...]
    replicas: tuple[ReplicaPlan, ...]
    questions: tuple[Question, ...]
    incidents: tuple[Incident, ...]
    faults: Faults


def draw_schedule(seed: int) -> Schedule:
    """The schedule of a seed."""
    random = Random(seed)
    family = random.choice(FAMILIES)
    prefix_tokens = (1, 2) if random.random() < 0.15 else ()
    longest = len(prefix_tokens) + random.choice((12, 16, 20))
    # Some prefill replicas take shorter prompts than decode replicas do.
    shorter = longest - 4 if random.random() < 0.1 else longest
    decoding = [
        _replica(random, family, Role.DECODE, longest, prefix_tokens) for _ in range(random.choice((1, 1, 1, 2, 2, 3)))
    ]
    prefilling = [
        _replica(random, family, Role.PREFILL, shorter, prefix_tokens) for _ in range(random.choice((1, 1, 1, 2, 2, 3)))
    ]
    replicas = (*decoding, *prefilling)
    rough = random.random() < 0.7
    return Schedule(
        seed=seed,
        family=family,
        longest=longest,
        prefix_tokens=prefix_tokens,
        replicas=replicas,
        questions=_questions(random, longest - len(prefix_tokens), rough),
        incidents=tuple(_incidents(random, len(replicas))) if rough else (),
        faults=_faults(random) if rough else CALM,
    )


def _replica(random: Random, family: str, role: Role, longest: int, prefix_tokens: tuple[int, ...]) -> ReplicaPlan:
    block_size = random.choice((1, 2, 2, 4))
    shape = model_shape(family, block_size)
    chunk = random.choice((3, 4, 8, 16))
    fewest = _fewest_blocks(family, block_size, chunk, longest)
    config = EngineConfig(
        model="",
        role=role,
        max_model_len=longest,
        block_size=block_size,
        max_batched_tokens=chunk,
        max_running_requests=random.choice((3, 3, 4, 6)),
        max_waiting_requests=random.choice((3, 50, 50)),
        prefix_caching=random.random() < 0.85,
        state_checkpoint_blocks=random.choice((1, 2)),
        local_prefill_threshold=random.choice((0, 0, 0, 4)),
        max_prefill_streams=random.choice((1, 2, 4)),
        min_piece_bytes=random.choice((8, 16, 1 << 10)),
        max_piece_bytes=random.choice((8, 16, 1 << 10)),
        max_staged_bytes=random.choice((32, 128, 1 << 20)),
        transfer_timeout=TRANSFER_TIMEOUT,
        tensor_parallel_size=2 if random.random() < 0.2 else 1,
    )
    # Hardly room for one sequence, or for several.
    num_blocks = int(fewest * random.choice((1.0, 1.0, 1.3, 1.6, 2.5)))
    return ReplicaPlan(config, shape, num_blocks, random.choice((0.001, 0.004)), prefix_tokens)


@cache
def _fewest_blocks(family: str, block_size: int, chunk: int, longest: int) -> int:
    plan = model_shape(family, block_size).plan
    return next(count for count in range(1, 1000) if longest_sequence(plan, count, longest, chunk) == longest)


def _questions(random: Random, longest: int, rough: bool) -> tuple[Question, ...]:
    stems = [[random.randrange(VOCAB_SIZE) for _ in range(longest)] for _ in range(2)]
    salts = random.choice((("",), ("", "a")))
    spread = random.choice((0.0, 0.02, 0.2))
    questions = []
    for _ in range(random.randint(2, 5) if random.random() < 0.95 else random.randint(8, 16)):
        answer = random.randint(1, 7)
        # A few are cut off by the longest sequence.
        length = random.randint(1, longest - (answer if random.random() < 0.9 else 1))
        length = min(length, longest - 1)
        shared = random.randint(0, length)
        prompt = random.choice(stems)[:shared] + [random.randrange(VOCAB_SIZE) for _ in range(length - shared)]
        sampled = random.random() < 0.2
        questions.append(
            Question(
                at=random.uniform(0.0, spread),
                prompt=tuple(prompt),
                salt=random.choice(salts),
                choices=random.choice((1, 1, 1, 1, 2, 3)),
                sampling=SamplingParams(
                    temperature=1.0 if sampled else 0.0,
                    seed=random.randrange(1 << 16) if sampled else 0,
                    max_tokens=answer,
                    prompt_logprobs=0 if random.random() < 0.05 else None,
                ),
                timeout=random.uniform(0.005, 0.3) if rough and random.random() < 0.1 else PATIENCE,
                leaves=random.expovariate(60.0) if random.random() < 0.2 else None,
            )
        )
    return tuple(sorted(questions, key=lambda question: question.at))


def _incidents(random: Random, replicas: int) -> list[Incident]:
    incidents: list[Incident] = []
    for _ in range(random.choice((0, 1, 1, 2, 3))):
        at, replica = random.expovariate(25.0), random.randrange(replicas)
        match random.randrange(7):
            case 0 | 1:
                incidents.append(Kill(at, replica, back=random.uniform(0.02, 1.0), told=random.random() < 0.3))
            case 2:
                incidents.append(Pause(at, replica, random.uniform(0.01, 0.8)))
            case 3:
                incidents.append(CutStreams(at))
            case 4:
                incidents.append(CutSession(at))
            case 5:
                incidents.append(ClearCache(at, replica))
            case 6:
                incidents.append(BreakStep(at, replica))
    return incidents


def _faults(random: Random) -> Faults:
    def sometimes(most: float) -> float:
        return random.uniform(0.0, most) if random.random() < 0.5 else 0.0

    return Faults(
        slow=sometimes(0.3),
        cut=sometimes(0.3),
        hang=sometimes(0.1),
        lose=sometimes(0.2),
        repeat=sometimes(0.3),
        linger=random.uniform(0.0, 1.0),
        mute=sometimes(0.05),
        busy=sometimes(0.2),
        unreachable=sometimes(0.2),
    )
