from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Report(_message.Message):
    __slots__ = ("hello", "connected", "received", "totals", "leaving")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    CONNECTED_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    TOTALS_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    connected: Connected
    received: Received
    totals: Totals
    leaving: Leaving
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., connected: _Optional[_Union[Connected, _Mapping]] = ..., received: _Optional[_Union[Received, _Mapping]] = ..., totals: _Optional[_Union[Totals, _Mapping]] = ..., leaving: _Optional[_Union[Leaving, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("rank", "ranks", "num_blocks", "kv_address", "incarnation")
    RANK_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    KV_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    rank: int
    ranks: int
    num_blocks: int
    kv_address: str
    incarnation: str
    def __init__(self, rank: _Optional[int] = ..., ranks: _Optional[int] = ..., num_blocks: _Optional[int] = ..., kv_address: _Optional[str] = ..., incarnation: _Optional[str] = ...) -> None: ...

class Leaving(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Connected(_message.Message):
    __slots__ = ("incarnation", "max_streams", "error", "final", "attempt")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    MAX_STREAMS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    FINAL_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    max_streams: int
    error: str
    final: bool
    attempt: int
    def __init__(self, incarnation: _Optional[str] = ..., max_streams: _Optional[int] = ..., error: _Optional[str] = ..., final: _Optional[bool] = ..., attempt: _Optional[int] = ...) -> None: ...

class Received(_message.Message):
    __slots__ = ("request_id", "epoch", "received_bytes", "error", "busy")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    BUSY_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: int
    received_bytes: int
    error: str
    busy: bool
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[int] = ..., received_bytes: _Optional[int] = ..., error: _Optional[str] = ..., busy: _Optional[bool] = ...) -> None: ...

class Totals(_message.Message):
    __slots__ = ("sent_bytes", "received_bytes", "stale_pieces", "wire_bytes", "backlogged")
    SENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    STALE_PIECES_FIELD_NUMBER: _ClassVar[int]
    WIRE_BYTES_FIELD_NUMBER: _ClassVar[int]
    BACKLOGGED_FIELD_NUMBER: _ClassVar[int]
    sent_bytes: int
    received_bytes: int
    stale_pieces: int
    wire_bytes: int
    backlogged: _containers.RepeatedCompositeFieldContainer[TransferName]
    def __init__(self, sent_bytes: _Optional[int] = ..., received_bytes: _Optional[int] = ..., stale_pieces: _Optional[int] = ..., wire_bytes: _Optional[int] = ..., backlogged: _Optional[_Iterable[_Union[TransferName, _Mapping]]] = ...) -> None: ...

class Command(_message.Message):
    __slots__ = ("compute", "clear_blocks", "copy_blocks", "open_outgoing", "send_computed", "close_outgoing", "connect_peer", "forget_peer", "open_incoming", "close_incoming")
    COMPUTE_FIELD_NUMBER: _ClassVar[int]
    CLEAR_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    COPY_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    OPEN_OUTGOING_FIELD_NUMBER: _ClassVar[int]
    SEND_COMPUTED_FIELD_NUMBER: _ClassVar[int]
    CLOSE_OUTGOING_FIELD_NUMBER: _ClassVar[int]
    CONNECT_PEER_FIELD_NUMBER: _ClassVar[int]
    FORGET_PEER_FIELD_NUMBER: _ClassVar[int]
    OPEN_INCOMING_FIELD_NUMBER: _ClassVar[int]
    CLOSE_INCOMING_FIELD_NUMBER: _ClassVar[int]
    compute: Compute
    clear_blocks: Blocks
    copy_blocks: BlockCopies
    open_outgoing: OpenOutgoing
    send_computed: SendComputed
    close_outgoing: CloseOutgoing
    connect_peer: ConnectPeer
    forget_peer: ForgetPeer
    open_incoming: OpenIncoming
    close_incoming: CloseIncoming
    def __init__(self, compute: _Optional[_Union[Compute, _Mapping]] = ..., clear_blocks: _Optional[_Union[Blocks, _Mapping]] = ..., copy_blocks: _Optional[_Union[BlockCopies, _Mapping]] = ..., open_outgoing: _Optional[_Union[OpenOutgoing, _Mapping]] = ..., send_computed: _Optional[_Union[SendComputed, _Mapping]] = ..., close_outgoing: _Optional[_Union[CloseOutgoing, _Mapping]] = ..., connect_peer: _Optional[_Union[ConnectPeer, _Mapping]] = ..., forget_peer: _Optional[_Union[ForgetPeer, _Mapping]] = ..., open_incoming: _Optional[_Union[OpenIncoming, _Mapping]] = ..., close_incoming: _Optional[_Union[CloseIncoming, _Mapping]] = ...) -> None: ...

class Compute(_message.Message):
    __slots__ = ("rows",)
    ROWS_FIELD_NUMBER: _ClassVar[int]
    rows: _containers.RepeatedCompositeFieldContainer[SequenceRows]
    def __init__(self, rows: _Optional[_Iterable[_Union[SequenceRows, _Mapping]]] = ...) -> None: ...

class SequenceRows(_message.Message):
    __slots__ = ("token_ids", "first", "logit_rows", "tables", "transfer")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    LOGIT_ROWS_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    token_ids: bytes
    first: int
    logit_rows: int
    tables: _containers.RepeatedScalarFieldContainer[bytes]
    transfer: TransferName
    def __init__(self, token_ids: _Optional[bytes] = ..., first: _Optional[int] = ..., logit_rows: _Optional[int] = ..., tables: _Optional[_Iterable[bytes]] = ..., transfer: _Optional[_Union[TransferName, _Mapping]] = ...) -> None: ...

class Blocks(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, blocks: _Optional[_Iterable[int]] = ...) -> None: ...

class BlockCopies(_message.Message):
    __slots__ = ("sources", "destinations")
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    DESTINATIONS_FIELD_NUMBER: _ClassVar[int]
    sources: _containers.RepeatedScalarFieldContainer[int]
    destinations: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, sources: _Optional[_Iterable[int]] = ..., destinations: _Optional[_Iterable[int]] = ...) -> None: ...

class TransferName(_message.Message):
    __slots__ = ("decode_incarnation", "request_id", "epoch")
    DECODE_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    decode_incarnation: str
    request_id: str
    epoch: int
    def __init__(self, decode_incarnation: _Optional[str] = ..., request_id: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class SlotRange(_message.Message):
    __slots__ = ("begin", "end")
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    begin: int
    end: int
    def __init__(self, begin: _Optional[int] = ..., end: _Optional[int] = ...) -> None: ...

class OpenOutgoing(_message.Message):
    __slots__ = ("name", "receivers", "prompt_len", "lacking", "seconds")
    NAME_FIELD_NUMBER: _ClassVar[int]
    RECEIVERS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LEN_FIELD_NUMBER: _ClassVar[int]
    LACKING_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    name: TransferName
    receivers: int
    prompt_len: int
    lacking: _containers.RepeatedCompositeFieldContainer[SlotRange]
    seconds: float
    def __init__(self, name: _Optional[_Union[TransferName, _Mapping]] = ..., receivers: _Optional[int] = ..., prompt_len: _Optional[int] = ..., lacking: _Optional[_Iterable[_Union[SlotRange, _Mapping]]] = ..., seconds: _Optional[float] = ...) -> None: ...

class SendComputed(_message.Message):
    __slots__ = ("name", "computed", "tables", "summary")
    NAME_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    name: TransferName
    computed: int
    tables: _containers.RepeatedScalarFieldContainer[bytes]
    summary: Summary
    def __init__(self, name: _Optional[_Union[TransferName, _Mapping]] = ..., computed: _Optional[int] = ..., tables: _Optional[_Iterable[bytes]] = ..., summary: _Optional[_Union[Summary, _Mapping]] = ...) -> None: ...

class Summary(_message.Message):
    __slots__ = ("cached_tokens", "queue_seconds", "compute_seconds")
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    cached_tokens: int
    queue_seconds: float
    compute_seconds: float
    def __init__(self, cached_tokens: _Optional[int] = ..., queue_seconds: _Optional[float] = ..., compute_seconds: _Optional[float] = ...) -> None: ...

class CloseOutgoing(_message.Message):
    __slots__ = ("name", "code", "message")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    name: TransferName
    code: int
    message: str
    def __init__(self, name: _Optional[_Union[TransferName, _Mapping]] = ..., code: _Optional[int] = ..., message: _Optional[str] = ...) -> None: ...

class ConnectPeer(_message.Message):
    __slots__ = ("incarnation", "addresses", "attempt")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    addresses: _containers.RepeatedScalarFieldContainer[str]
    attempt: int
    def __init__(self, incarnation: _Optional[str] = ..., addresses: _Optional[_Iterable[str]] = ..., attempt: _Optional[int] = ...) -> None: ...

class ForgetPeer(_message.Message):
    __slots__ = ("incarnation",)
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    def __init__(self, incarnation: _Optional[str] = ...) -> None: ...

class OpenIncoming(_message.Message):
    __slots__ = ("request_id", "epoch", "incarnation", "lacking", "tables", "seconds")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LACKING_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: int
    incarnation: str
    lacking: _containers.RepeatedCompositeFieldContainer[SlotRange]
    tables: _containers.RepeatedScalarFieldContainer[bytes]
    seconds: float
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[int] = ..., incarnation: _Optional[str] = ..., lacking: _Optional[_Iterable[_Union[SlotRange, _Mapping]]] = ..., tables: _Optional[_Iterable[bytes]] = ..., seconds: _Optional[float] = ...) -> None: ...

class CloseIncoming(_message.Message):
    __slots__ = ("epoch",)
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    def __init__(self, epoch: _Optional[int] = ...) -> None: ...
