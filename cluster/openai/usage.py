"""What a request used: tokens, as OpenAI counts them, and KV bytes that moved for it."""

from dataclasses import asdict, dataclass
from typing import Any

from worker.wire.engine_pb2 import PromptInfo


@dataclass(frozen=True, slots=True)
class Moved:
    """What moved for a request: sums of bytes and attempts, the longest times."""

    payload_bytes: int
    lower_bound_bytes: int
    unshared_bytes: int
    retransmitted_bytes: int
    attempts: int
    resumptions: int
    queue_ms: float
    transfer_ms: float
    prefill_cached_tokens: int
    prefill_replica: str


class Usage:
    """Counts along with one request, over all its prompts and choices."""

    def __init__(self, prompt_tokens: int) -> None:
        self.prompt_tokens = prompt_tokens
        self.completion_tokens = 0
        self.resumptions = 0
        self._prompts: list[PromptInfo] = []
        self._again: list[PromptInfo] = []

    def add_prompt(self, info: PromptInfo) -> None:
        """Take what the engine says about one prompt."""
        self._prompts.append(info)

    def add_resumption(self, info: PromptInfo) -> None:
        """Take what another replica says, which goes on where the one before was lost."""
        self.resumptions += 1
        self._again.append(info)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that decode replicas had cached."""
        return sum(info.cached_tokens for info in self._prompts)

    @property
    def moved(self) -> Moved:
        """What moved so far. What moved once more, for a resumption, was sent again."""
        transfers = [info.transfer for info in self._prompts]
        again = [info.transfer for info in self._again]
        return Moved(
            payload_bytes=sum(transfer.payload_bytes for transfer in transfers),
            lower_bound_bytes=sum(transfer.lower_bound_bytes for transfer in transfers),
            unshared_bytes=sum(transfer.unshared_bytes for transfer in transfers),
            retransmitted_bytes=sum(transfer.retransmitted_bytes for transfer in transfers)
            + sum(transfer.payload_bytes + transfer.retransmitted_bytes for transfer in again),
            attempts=sum(transfer.attempts for transfer in (*transfers, *again)),
            resumptions=self.resumptions,
            queue_ms=max((transfer.queue_ms for transfer in transfers), default=0.0),
            transfer_ms=max((transfer.transfer_ms for transfer in transfers), default=0.0),
            prefill_cached_tokens=sum(info.prefill_cached_tokens for info in self._prompts),
            prefill_replica=",".join(sorted({t.prefill_replica for t in transfers if t.prefill_replica})),
        )

    def as_dict(self) -> dict[str, Any]:
        """Return OpenAI's ``usage`` object, with what moved as ``crosskv`` in it."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "crosskv": asdict(self.moved),
        }
