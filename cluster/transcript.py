"""What has come back for one request, choice by choice, so that another replica can go on where one was lost.

One per request, kept by whoever asks replicas for it. Pure bookkeeping: it says what to submit, and takes every output.
"""

from collections.abc import Iterable, Sequence

from worker.wire.engine_pb2 import FINISH_REASON_UNSPECIFIED, Output, Submit


class Transcript:
    """See the module. ``submit`` is the request as its client has made it."""

    def __init__(self, submit: Submit) -> None:
        self.submit = submit
        self._tokens: dict[int, list[int]] = {submit.choice + index: [] for index in range(max(1, submit.n))}
        self._open = set(self._tokens)
        self._attempts = 0

    @property
    def open_choices(self) -> int:
        """How many choices have not ended."""
        return len(self._open)

    @property
    def begun(self) -> bool:
        """Whether anything has come that must not come again."""
        return len(self._open) < len(self._tokens) or any(self._tokens.values())

    def take(self, outputs: Iterable[Output]) -> None:
        """Note what has come. No output is an error."""
        for output in outputs:
            self._tokens[output.choice] += output.token_ids
            if output.finish_reason != FINISH_REASON_UNSPECIFIED:
                self._open.discard(output.choice)

    def submissions(self, timeout_ms: int) -> Sequence[Submit]:
        """What to ask of a replica so that every open choice comes to its end, each time under names of its own.

        Before anything has come that is the whole request. Afterwards each open choice is asked for by itself, behind
        its own tokens and under its own number, so that it goes on as it would have: the same random numbers, limits
        and penalties. What is known of the prompt is not asked for again.
        """
        self._attempts += 1
        name = self.submit.request_id if self._attempts == 1 else f"{self.submit.request_id}~{self._attempts}"
        if not self.begun:
            whole = Submit()
            whole.CopyFrom(self.submit)
            whole.request_id, whole.timeout_ms = name, timeout_ms
            return [whole]
        return [self._rest(choice, f"{name}.{choice}", timeout_ms) for choice in sorted(self._open)]

    def _rest(self, choice: int, name: str, timeout_ms: int) -> Submit:
        rest = Submit()
        rest.CopyFrom(self.submit)
        rest.token_ids.extend(self._tokens[choice])
        rest.request_id, rest.choice, rest.n, rest.timeout_ms = name, choice, 1, timeout_ms
        rest.sampling.ClearField("prompt_logprobs")
        return rest
