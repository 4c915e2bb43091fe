from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class HandshakeRequest(_message.Message):
    __slots__ = ("wire_version", "incarnation", "layout")
    WIRE_VERSION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    wire_version: int
    incarnation: str
    layout: Layout
    def __init__(self, wire_version: _Optional[int] = ..., incarnation: _Optional[str] = ..., layout: _Optional[_Union[Layout, _Mapping]] = ...) -> None: ...

class HandshakeReply(_message.Message):
    __slots__ = ("wire_version", "incarnation", "layout", "max_streams")
    WIRE_VERSION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    MAX_STREAMS_FIELD_NUMBER: _ClassVar[int]
    wire_version: int
    incarnation: str
    layout: Layout
    max_streams: int
    def __init__(self, wire_version: _Optional[int] = ..., incarnation: _Optional[str] = ..., layout: _Optional[_Union[Layout, _Mapping]] = ..., max_streams: _Optional[int] = ...) -> None: ...

class Layout(_message.Message):
    __slots__ = ("fingerprint", "kv_dtype", "owners", "sharing_digest", "sharing_layers")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    KV_DTYPE_FIELD_NUMBER: _ClassVar[int]
    OWNERS_FIELD_NUMBER: _ClassVar[int]
    SHARING_DIGEST_FIELD_NUMBER: _ClassVar[int]
    SHARING_LAYERS_FIELD_NUMBER: _ClassVar[int]
    fingerprint: str
    kv_dtype: str
    owners: _containers.RepeatedCompositeFieldContainer[Owner]
    sharing_digest: str
    sharing_layers: int
    def __init__(self, fingerprint: _Optional[str] = ..., kv_dtype: _Optional[str] = ..., owners: _Optional[_Iterable[_Union[Owner, _Mapping]]] = ..., sharing_digest: _Optional[str] = ..., sharing_layers: _Optional[int] = ...) -> None: ...

class Owner(_message.Message):
    __slots__ = ("name", "kv_heads", "bytes_per_token")
    NAME_FIELD_NUMBER: _ClassVar[int]
    KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    name: str
    kv_heads: int
    bytes_per_token: int
    def __init__(self, name: _Optional[str] = ..., kv_heads: _Optional[int] = ..., bytes_per_token: _Optional[int] = ...) -> None: ...

class PrefillRequest(_message.Message):
    __slots__ = ("request_id", "epoch", "prefill_incarnation", "token_ids", "held_tokens", "cache_salt", "timeout_ms")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PREFILL_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    HELD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: int
    prefill_incarnation: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    held_tokens: int
    cache_salt: str
    timeout_ms: int
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[int] = ..., prefill_incarnation: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., held_tokens: _Optional[int] = ..., cache_salt: _Optional[str] = ..., timeout_ms: _Optional[int] = ...) -> None: ...

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
    __slots__ = ("layer_begin", "layer_end", "token_begin", "token_end", "payload_bytes")
    LAYER_BEGIN_FIELD_NUMBER: _ClassVar[int]
    LAYER_END_FIELD_NUMBER: _ClassVar[int]
    TOKEN_BEGIN_FIELD_NUMBER: _ClassVar[int]
    TOKEN_END_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    layer_begin: int
    layer_end: int
    token_begin: int
    token_end: int
    payload_bytes: int
    def __init__(self, layer_begin: _Optional[int] = ..., layer_end: _Optional[int] = ..., token_begin: _Optional[int] = ..., token_end: _Optional[int] = ..., payload_bytes: _Optional[int] = ...) -> None: ...

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
