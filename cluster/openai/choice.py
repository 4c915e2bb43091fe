"""One choice of one prompt while it is generated: from the engine's token ids to the text that the client may see."""

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.openai.sampling import StopRule
from cluster.text.detokenizer import Detokenizer
from cluster.text.stop_strings import StopStringMatcher
from worker.wire.engine_pb2 import FINISH_REASON_LENGTH, FINISH_REASON_UNSPECIFIED, Output, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Delta:
    """What one engine message adds to a choice.

    ``text_offsets`` is, for each token, the length of the choice's text before it. ``stop_reason`` is the stop string
    or the stop token id that ended the choice.
    """

    choice: int
    text: str
    token_ids: Sequence[int] = ()
    logprobs: Sequence[TokenLogprobs] = ()
    text_offsets: Sequence[int] = ()
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class Choice:
    """Made with its request, fed with the engine's outputs in order; after ``finished`` nothing more counts."""

    def __init__(
        self, index: int, detokenizer: Detokenizer, stop_rule: StopRule, eos_token_ids: frozenset[int]
    ) -> None:
        self._index = index
        self._detokenizer = detokenizer
        self._stop_rule = stop_rule
        self._matcher = (
            StopStringMatcher(stop_rule.strings, include_in_output=stop_rule.include_in_output)
            if stop_rule.strings
            else None
        )
        self._eos_token_ids = eos_token_ids
        self._length = 0
        self.tokens = 0
        self.finished = False

    def push(self, output: Output) -> Delta:
        """Take the next output. It is not an error; whoever feeds the choice has looked."""
        token_ids: Sequence[int] = output.token_ids
        ended = output.finish_reason != FINISH_REASON_UNSPECIFIED
        hidden = self._hidden_end(output) if ended else None
        texts: list[str] = []
        offsets: list[int] = []
        for position, token_id in enumerate(token_ids):
            offsets.append(self._length)
            self.tokens += 1
            if position != hidden:
                texts.append(self._examined(self._detokenizer.push(token_id)))
            if self._matcher is not None and self._matcher.matched is not None:
                return self._stopped(self._matcher.matched, texts, offsets, output)
        if ended:
            texts.append(self._examined(self._detokenizer.finish()))
            if self._matcher is not None:
                if self._matcher.matched is not None:
                    return self._stopped(self._matcher.matched, texts, offsets, output)
                texts.append(self._matcher.finish())
            self.finished = True
        return Delta(
            self._index,
            "".join(texts),
            token_ids,
            output.logprobs,
            offsets,
            finish_reason=_finish_reason(output) if ended else None,
            stop_reason=self._stop_reason(output) if ended else None,
        )

    def _stop_reason(self, output: Output) -> int | None:
        """The model's own end is no stop of the caller's."""
        ours = not output.HasField("stop_token_id") or output.stop_token_id in self._eos_token_ids
        return None if ours else output.stop_token_id

    def _examined(self, text: str) -> str:
        self._length += len(text)
        if self._matcher is None or self.tokens <= self._stop_rule.min_tokens:
            return text
        return self._matcher.push(text)

    def _hidden_end(self, output: Output) -> int | None:
        """Return the position of the token that ended the choice: like a stop string, it is not part of the text."""
        if self._stop_rule.include_in_output or output.finish_reason == FINISH_REASON_LENGTH or not output.token_ids:
            return None
        last = output.token_ids[-1]
        stopped = output.HasField("stop_token_id") and output.stop_token_id == last
        return len(output.token_ids) - 1 if stopped or last in self._eos_token_ids else None

    def _stopped(self, string: str, texts: list[str], offsets: list[int], output: Output) -> Delta:
        self.finished = True
        count = len(offsets)
        return Delta(
            self._index,
            "".join(texts),
            output.token_ids[:count],
            output.logprobs[:count],
            offsets,
            finish_reason="stop",
            stop_reason=string,
        )


def _finish_reason(output: Output) -> str:
    return "length" if output.finish_reason == FINISH_REASON_LENGTH else "stop"
