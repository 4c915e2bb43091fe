"""What the leading rank of a replica tells every rank to do, itself included, in one order.

The leader's engine decides; a command says everything that a rank needs to carry it out, so that ranks know nothing of
requests, queues or free blocks. Because the order is one, a page is never written for a transfer that was closed before
its blocks went to somebody else.
"""

from dataclasses import dataclass

from kernels.pages import IntArray
from kv_transfer.layout import SlotRange
from kv_transfer.prefill_server import TransferName
from worker.kv_cache.block_pool import BlockId
from worker.kv_cache.group_blocks import BlockCopy


@dataclass(frozen=True, slots=True, eq=False)
class SequenceRows:
    """Consecutive tokens of one sequence, from position ``first`` on; the last ``logit_rows`` of them need logits.

    ``token_ids`` is int64 ``[rows]``; ``tables`` are the sequence's block tables, one per KV cache group. On a prefill
    rank what these rows store belongs to ``transfer``.
    """

    token_ids: IntArray
    first: int
    logit_rows: int
    tables: tuple[IntArray, ...]
    transfer: TransferName | None = None

    @property
    def rows(self) -> int:
        """How many tokens."""
        return len(self.token_ids)

    @property
    def context(self) -> int:
        """Tokens of the sequence that the last row sees, itself included."""
        return self.first + self.rows


@dataclass(frozen=True, slots=True)
class Compute:
    """One step."""

    rows: tuple[SequenceRows, ...]


@dataclass(frozen=True, slots=True)
class ClearBlocks:
    """Zero whole blocks."""

    blocks: tuple[BlockId, ...]


@dataclass(frozen=True, slots=True)
class CopyBlocks:
    """Copy whole blocks."""

    copies: tuple[BlockCopy, ...]


@dataclass(frozen=True, slots=True)
class OpenOutgoing:
    """On a prefill rank: ``lacking`` slots of a prompt will be wanted by a decode replica of ``receivers`` ranks.

    ``prompt_len`` counts the last token, which is not computed here. ``seconds`` from now nobody wants them any more.
    """

    name: TransferName
    receivers: int
    prompt_len: int
    lacking: tuple[SlotRange, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class Summary:
    """What the prefill replica tells about a prompt when all of it is sent. Times are seconds."""

    cached_tokens: int
    queue_seconds: float
    compute_seconds: float


@dataclass(frozen=True, slots=True, eq=False)
class SendComputed:
    """On a prefill rank: ``computed`` tokens of a prompt are in the cache. With a ``summary`` they are all."""

    name: TransferName
    computed: int
    tables: tuple[IntArray, ...]
    summary: Summary | None


@dataclass(frozen=True, slots=True)
class CloseOutgoing:
    """On a prefill rank: give a transfer up. ``code`` is a gRPC status code's number."""

    name: TransferName
    code: int
    message: str


@dataclass(frozen=True, slots=True)
class ConnectPeer:
    """On a decode rank: a prefill replica is at these addresses, one per rank.

    No two ``attempt``s are alike: an answer that comes late belongs to an earlier one.
    """

    incarnation: str
    addresses: tuple[str, ...]
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class ForgetPeer:
    """On a decode rank: a prefill replica is gone."""

    incarnation: str


@dataclass(frozen=True, slots=True, eq=False)
class OpenIncoming:
    """On a decode rank: blocks are reserved for a transfer; ask for its KV and write what comes.

    ``token_ids`` are the prompt's without its last; they and what follows them are empty but for the leader.
    """

    request_id: str
    epoch: int
    incarnation: str
    lacking: tuple[SlotRange, ...]
    tables: tuple[IntArray, ...]
    seconds: float
    token_ids: tuple[int, ...] = ()
    cache_salt: str = ""
    caller: str = ""
    priority: int = 0


@dataclass(frozen=True, slots=True)
class CloseIncoming:
    """On a decode rank: nothing is wanted of a transfer any more, whatever still comes."""

    epoch: int


Command = (
    Compute
    | ClearBlocks
    | CopyBlocks
    | OpenOutgoing
    | SendComputed
    | CloseOutgoing
    | ConnectPeer
    | ForgetPeer
    | OpenIncoming
    | CloseIncoming
)
