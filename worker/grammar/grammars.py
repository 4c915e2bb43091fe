"""The grammars of one engine's requests: has them compiled, and follows sequences, on threads of its own.

Made with a generating engine and closed with it. Called on the engine's thread, and never for longer than
``PATIENCE_SECONDS``: that a grammar is ready is put into the engine's inbox, and what may follow a token is known in a
later step if it takes long to find out. A slow grammar delays its own request only.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING

from worker.grammar.grammar import Grammar
from worker.grammar.vocabulary import VocabularySource
from worker.sequence import RequestId, Sequence, SequenceState

if TYPE_CHECKING:
    # They import XGrammar, and with it transformers: only once a grammar comes.
    import xgrammar

    from worker.grammar.compiler import GrammarCompiler
    from worker.grammar.constraint import Constraint, Next

PATIENCE_SECONDS = 0.005
"""How long a step waits for what is to be known. Who was late once is not waited for again."""
_THREADS = 4
"""For following. A slow grammar takes one of them, for not much more than a second in all."""


@dataclass(frozen=True, slots=True)
class GrammarReady:
    """A request's grammar is compiled, or what is wrong with it."""

    request_id: RequestId
    outcome: "Constraint | Exception"


@dataclass(frozen=True, slots=True)
class CannotGoOn:
    """Why a sequence cannot."""

    sequence: Sequence
    error: BaseException


@dataclass(frozen=True, slots=True)
class _Following:
    sequence: Sequence
    constraint: "Constraint"
    future: "Future[Next]"


class Grammars:
    """See the module. ``vocab_size`` is the model's."""

    def __init__(self, vocabulary: VocabularySource, vocab_size: int, deliver: Callable[[GrammarReady], None]) -> None:
        self._vocabulary = vocabulary
        self._vocab_size = vocab_size
        self._deliver = deliver
        self._compiler: GrammarCompiler | None = None
        self._compiling = ThreadPoolExecutor(1, "grammar-compiler")
        self._following = ThreadPoolExecutor(_THREADS, "grammar")
        self._under_way: list[_Following] = []

    def prepare(self, sequence: Sequence, grammar: Grammar) -> None:
        """Get a new sequence's grammar ready, behind what was generated before if it is resumed."""
        # Copied here: the sequence is the engine's thread's.
        request_id, ends, prompt_len = sequence.request_id, sequence.end_tokens, sequence.prompt_len
        generated = tuple(sequence.tokens[prompt_len:])

        def start(compiled: "xgrammar.CompiledGrammar") -> None:
            from worker.grammar.constraint import Constraint  # noqa: PLC0415

            constraint = Constraint(compiled, self._vocab_size, ends, prompt_len)
            constraint.next = constraint.follow(generated)
            self._deliver(GrammarReady(request_id, constraint))

        def compile_first() -> None:
            compiled = self._compile(grammar)
            self._submit(self._following, request_id, lambda: start(compiled))

        kept = None if self._compiler is None else self._compiler.kept(grammar)
        if kept is not None:
            self._submit(self._following, request_id, lambda: start(kept))
        else:
            self._submit(self._compiling, request_id, compile_first)

    def follow(self, sequence: Sequence) -> None:
        """Find out what may follow a sequence that has got a token."""
        constraint = sequence.constraint
        assert constraint is not None
        constraint.next = None
        future = self._following.submit(constraint.follow, sequence.tokens[constraint.followed :])
        self._under_way.append(_Following(sequence, constraint, future))

    def settle(self) -> list[CannotGoOn | Sequence]:
        """Let sequences go on of which is known what may follow; returns those that are complete or cannot.

        Called before every step.
        """
        if not self._under_way:
            return []
        wait([f.future for f in self._under_way if not f.constraint.late], PATIENCE_SECONDS)
        ended: list[CannotGoOn | Sequence] = []
        under_way: list[_Following] = []
        for following in self._under_way:
            if not following.future.done():
                following.constraint.late = True
                under_way.append(following)
            elif following.sequence.state is SequenceState.FINISHED:
                pass
            elif (error := following.future.exception()) is not None:
                ended.append(CannotGoOn(following.sequence, error))
            else:
                following.constraint.next = following.future.result()
                if following.constraint.next.complete:
                    ended.append(following.sequence)
        self._under_way = under_way
        return ended

    def close(self) -> None:
        """Give up what is under way."""
        self._compiling.shutdown(wait=False, cancel_futures=True)
        self._following.shutdown(wait=False, cancel_futures=True)
        if self._compiler is not None:
            self._compiler.close()

    def _compile(self, grammar: Grammar) -> "xgrammar.CompiledGrammar":
        if self._compiler is None:
            from worker.grammar.compiler import GrammarCompiler  # noqa: PLC0415

            self._compiler = GrammarCompiler(self._vocabulary(), self._vocab_size)
        return self._compiler.compile(grammar)

    def _submit(self, pool: ThreadPoolExecutor, request_id: RequestId, work: Callable[[], None]) -> None:
        def run() -> None:
            try:
                work()
            except Exception as error:
                self._deliver(GrammarReady(request_id, error))

        pool.submit(run)
