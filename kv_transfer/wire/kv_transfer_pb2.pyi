from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Lifetime(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LIFETIME_UNSPECIFIED: _ClassVar[Lifetime]
    LIFETIME_EVERY_TOKEN: _ClassVar[Lifetime]
    LIFETIME_LAST_TOKENS: _ClassVar[Lifetime]
    LIFETIME_STATE: _ClassVar[Lifetime]
    LIFETIME_FIRST_TOKENS: _ClassVar[Lifetime]
LIFETIME_UNSPECIFIED: Lifetime
LIFETIME_EVERY_TOKEN: Lifetime
LIFETIME_LAST_TOKENS: Lifetime
LIFETIME_STATE: Lifetime
LIFETIME_FIRST_TOKENS: Lifetime

class HandshakeRequest(_message.Message):
    __slots__ = ("wire_version", "incarnation", "layout", "transport", "rank", "ranks")
    WIRE_VERSION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    wire_version: int
    incarnation: str
    layout: Layout
    transport: str
    rank: int
    ranks: int
    def __init__(self, wire_version: _Optional[int] = ..., incarnation: _Optional[str] = ..., layout: _Optional[_Union[Layout, _Mapping]] = ..., transport: _Optional[str] = ..., rank: _Optional[int] = ..., ranks: _Optional[int] = ...) -> None: ...

class HandshakeReply(_message.Message):
    __slots__ = ("wire_version", "incarnation", "layout", "max_streams", "transport", "rank", "ranks")
    WIRE_VERSION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    MAX_STREAMS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    wire_version: int
    incarnation: str
    layout: Layout
    max_streams: int
    transport: str
    rank: int
    ranks: int
    def __init__(self, wire_version: _Optional[int] = ..., incarnation: _Optional[str] = ..., layout: _Optional[_Union[Layout, _Mapping]] = ..., max_streams: _Optional[int] = ..., transport: _Optional[str] = ..., rank: _Optional[int] = ..., ranks: _Optional[int] = ...) -> None: ...

class Layout(_message.Message):
    __slots__ = ("fingerprint", "kv_dtype", "sections", "sharing_digest", "sharing_layers")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    KV_DTYPE_FIELD_NUMBER: _ClassVar[int]
    SECTIONS_FIELD_NUMBER: _ClassVar[int]
    SHARING_DIGEST_FIELD_NUMBER: _ClassVar[int]
    SHARING_LAYERS_FIELD_NUMBER: _ClassVar[int]
    fingerprint: str
    kv_dtype: str
    sections: _containers.RepeatedCompositeFieldContainer[Section]
    sharing_digest: str
    sharing_layers: int
    def __init__(self, fingerprint: _Optional[str] = ..., kv_dtype: _Optional[str] = ..., sections: _Optional[_Iterable[_Union[Section, _Mapping]]] = ..., sharing_digest: _Optional[str] = ..., sharing_layers: _Optional[int] = ...) -> None: ...

class Section(_message.Message):
    __slots__ = ("lifetime", "window", "owners", "sinks")
    LIFETIME_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    OWNERS_FIELD_NUMBER: _ClassVar[int]
    SINKS_FIELD_NUMBER: _ClassVar[int]
    lifetime: Lifetime
    window: int
    owners: _containers.RepeatedCompositeFieldContainer[Owner]
    sinks: int
    def __init__(self, lifetime: _Optional[_Union[Lifetime, str]] = ..., window: _Optional[int] = ..., owners: _Optional[_Iterable[_Union[Owner, _Mapping]]] = ..., sinks: _Optional[int] = ...) -> None: ...

class Owner(_message.Message):
    __slots__ = ("name", "kv_heads", "bytes_per_slot", "sharers")
    NAME_FIELD_NUMBER: _ClassVar[int]
    KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_SLOT_FIELD_NUMBER: _ClassVar[int]
    SHARERS_FIELD_NUMBER: _ClassVar[int]
    name: str
    kv_heads: int
    bytes_per_slot: int
    sharers: int
    def __init__(self, name: _Optional[str] = ..., kv_heads: _Optional[int] = ..., bytes_per_slot: _Optional[int] = ..., sharers: _Optional[int] = ...) -> None: ...

class PrefillRequest(_message.Message):
    __slots__ = ("request_id", "epoch", "prefill_incarnation", "token_ids", "lacking", "cache_salt", "timeout_ms", "decode_incarnation", "receiver", "receivers", "priority", "caller")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PREFILL_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LACKING_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    DECODE_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    RECEIVER_FIELD_NUMBER: _ClassVar[int]
    RECEIVERS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CALLER_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: int
    prefill_incarnation: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    lacking: _containers.RepeatedCompositeFieldContainer[SlotRange]
    cache_salt: str
    timeout_ms: int
    decode_incarnation: str
    receiver: int
    receivers: int
    priority: int
    caller: str
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[int] = ..., prefill_incarnation: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., lacking: _Optional[_Iterable[_Union[SlotRange, _Mapping]]] = ..., cache_salt: _Optional[str] = ..., timeout_ms: _Optional[int] = ..., decode_incarnation: _Optional[str] = ..., receiver: _Optional[int] = ..., receivers: _Optional[int] = ..., priority: _Optional[int] = ..., caller: _Optional[str] = ...) -> None: ...

class JoinRequest(_message.Message):
    __slots__ = ("decode_incarnation", "generation")
    DECODE_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    decode_incarnation: str
    generation: int
    def __init__(self, decode_incarnation: _Optional[str] = ..., generation: _Optional[int] = ...) -> None: ...

class StoreRequest(_message.Message):
    __slots__ = ("decode_incarnation", "generation", "key", "set", "get")
    DECODE_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    SET_FIELD_NUMBER: _ClassVar[int]
    GET_FIELD_NUMBER: _ClassVar[int]
    decode_incarnation: str
    generation: int
    key: str
    set: bytes
    get: int
    def __init__(self, decode_incarnation: _Optional[str] = ..., generation: _Optional[int] = ..., key: _Optional[str] = ..., set: _Optional[bytes] = ..., get: _Optional[int] = ...) -> None: ...

class StopRequest(_message.Message):
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

class FrameHeader(_message.Message):
    __slots__ = ("epoch", "piece", "end")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PIECE_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    piece: Piece
    end: End
    def __init__(self, epoch: _Optional[int] = ..., piece: _Optional[_Union[Piece, _Mapping]] = ..., end: _Optional[_Union[End, _Mapping]] = ...) -> None: ...

class Piece(_message.Message):
    __slots__ = ("layer_begin", "layer_end", "slot_begin", "slot_end", "payload_bytes", "section", "send")
    LAYER_BEGIN_FIELD_NUMBER: _ClassVar[int]
    LAYER_END_FIELD_NUMBER: _ClassVar[int]
    SLOT_BEGIN_FIELD_NUMBER: _ClassVar[int]
    SLOT_END_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    SECTION_FIELD_NUMBER: _ClassVar[int]
    SEND_FIELD_NUMBER: _ClassVar[int]
    layer_begin: int
    layer_end: int
    slot_begin: int
    slot_end: int
    payload_bytes: int
    section: int
    send: GroupSend
    def __init__(self, layer_begin: _Optional[int] = ..., layer_end: _Optional[int] = ..., slot_begin: _Optional[int] = ..., slot_end: _Optional[int] = ..., payload_bytes: _Optional[int] = ..., section: _Optional[int] = ..., send: _Optional[_Union[GroupSend, _Mapping]] = ...) -> None: ...

class GroupSend(_message.Message):
    __slots__ = ("generation", "sequence")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    generation: int
    sequence: int
    def __init__(self, generation: _Optional[int] = ..., sequence: _Optional[int] = ...) -> None: ...

class End(_message.Message):
    __slots__ = ("payload_bytes", "pieces", "cached_tokens", "queue_ms", "compute_ms")
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    PIECES_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_MS_FIELD_NUMBER: _ClassVar[int]
    payload_bytes: int
    pieces: int
    cached_tokens: int
    queue_ms: float
    compute_ms: float
    def __init__(self, payload_bytes: _Optional[int] = ..., pieces: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., queue_ms: _Optional[float] = ..., compute_ms: _Optional[float] = ...) -> None: ...
