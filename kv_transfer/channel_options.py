"""gRPC settings of KV connections, chosen for large messages on few streams.

What a side receives is bounded by what it can be sent; a length beyond that is refused before memory is taken for it.
Keepalive notices a host that vanished without closing its connections, and a decode replica that was stopped, for which
nothing is kept then. A process that hangs answers pings all the same and is noticed otherwise.
"""

CHANNEL_OPTIONS: tuple[tuple[str, int | str], ...] = (
    ("grpc.max_send_message_length", -1),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 16 << 20),
    ("grpc.http2.max_frame_size", (1 << 24) - 1),
    ("grpc.http2.write_buffer_size", 8 << 20),
    ("grpc.experimental.tcp_read_chunk_size", 1 << 20),
    ("grpc.experimental.tcp_min_read_chunk_size", 256 << 10),
    ("grpc.experimental.tcp_max_read_chunk_size", 4 << 20),
    ("grpc.optimization_target", "throughput"),
    ("grpc.keepalive_time_ms", 3_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # This is what ends a connection whose pings are not answered; without it gRPC waits for a minute. On a slow network
    # a ping waits behind pieces.
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    ("grpc.use_local_subchannel_pool", 1),
)

MAX_REQUEST_BYTES = 16 << 20
"""Of what a server is asked: the longest is a prompt, at three bytes a token or so."""
_HANDSHAKE_MS = 10_000
"""How long a connection may take to become an HTTP/2 connection."""


def client_options(max_receive: int) -> tuple[tuple[str, int | str], ...]:
    """Return the settings of a side that receives messages of up to ``max_receive`` bytes."""
    return (*CHANNEL_OPTIONS, ("grpc.max_receive_message_length", max_receive))


def server_options() -> tuple[tuple[str, int | str], ...]:
    """Return the settings of a server."""
    return (*client_options(MAX_REQUEST_BYTES), ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS))


HANDSHAKE_METHOD = "/crosskv.kv.v1.KVTransfer/Handshake"
PREFILL_METHOD = "/crosskv.kv.v1.KVTransfer/Prefill"
JOIN_METHOD = "/crosskv.kv.v1.KVTransfer/Join"
STORE_METHOD = "/crosskv.kv.v1.KVTransfer/Store"
PULSE_METHOD = "/crosskv.kv.v1.KVTransfer/Pulse"
STOP_METHOD = "/crosskv.kv.v1.KVTransfer/Stop"
