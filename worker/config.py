"""What one engine is told before it starts. The cluster builds an ``EngineConfig``; it never changes afterwards."""

from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from kv_transfer.cluster_token import ClusterToken
from kv_transfer.transport import Transport
from worker.text_config import ReadConfig


class Role(StrEnum):
    """What an engine does for the cluster.

    A prefill engine computes prompts for others and never samples. A decode engine generates; it prefills by itself
    only what the prefill side need not or cannot do. A colocated engine does both phases for its own requests.
    """

    PREFILL = "prefill"
    DECODE = "decode"
    COLOCATED = "colocated"


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """One engine's settings.

    ``model`` is a local directory (config.json and safetensors) or a ``.gguf`` file. ``dtype`` is one of
    ``worker.dtype.DTYPES`` or ``auto`` (the checkpoint's own). ``kv_sharing`` is ``model`` (what the checkpoint
    declares), ``none``, ``every:N``, ``after:N`` or the path of a JSON file. Sizes of memory are bytes, times seconds.
    ``transport`` is how payloads travel between prefill and decode replicas. The model is split over
    ``tensor_parallel_size`` ranks, each a process; sizes of memory and ``threads`` are of each. ``block_size`` is the
    smallest of any KV cache group: those of hybrid models get multiples of it. Of a recurrent state, one in
    ``state_checkpoint_blocks`` blocks of tokens is kept for prefix caching. Layers' KV leaves a prefill replica while
    later ones are computed, in pieces of ``min_piece_bytes`` or more. ``token`` is what callers of every port must
    have; whoever carries the engine reads it from ``cluster_token_file``, if there is one, on the engine's machine.
    A request that is not admitted within ``queue_timeout`` is refused. A replica that is to end finishes what it has
    within ``drain_seconds``. ``decode_graphs`` allows ``worker.decode_graphs``; ``bind_cores`` asks for
    ``worker.cores``. ``read_config`` is the model's configuration, if whoever made this has read it; otherwise the
    checkpoint's is read.
    """

    model: str
    role: Role
    dtype: str = "auto"
    device: str = "auto"
    decode_graphs: bool = True
    kv_sharing: str = "model"
    block_size: int = 16
    kv_cache_memory: int = 1 << 30
    max_model_len: int | None = None
    max_batched_tokens: int = 1024
    max_running_requests: int = 64
    max_waiting_requests: int = 1024
    prefix_caching: bool = True
    state_checkpoint_blocks: int = 4
    local_prefill_threshold: int = 0
    max_prefill_streams: int = 16
    min_piece_bytes: int = 256 << 10
    max_piece_bytes: int = 4 << 20
    max_staged_bytes: int = 64 << 20
    request_timeout: float = 600.0
    queue_timeout: float | None = None
    transfer_timeout: float = 120.0
    token_timeout: float = 120.0
    step_timeout: float = 120.0
    drain_seconds: float = 30.0
    threads: int | None = None
    bind_cores: bool = False
    advertised_host: str = "127.0.0.1"
    transport: Transport = Transport.GRPC
    tensor_parallel_size: int = 1
    token: ClusterToken | None = None
    cluster_token_file: Path | None = None
    read_config: ReadConfig | None = None

    def with_model(self, model: str) -> "EngineConfig":
        """The same settings for a model that has been found on this machine."""
        return replace(self, model=model)

    def with_threads(self, threads: int) -> "EngineConfig":
        """The same settings with a number of CPU threads."""
        return replace(self, threads=threads)
