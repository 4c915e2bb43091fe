"""How payloads travel from a prefill to a decode replica. One choice for a whole cluster."""

from enum import StrEnum


class Transport(StrEnum):
    """``grpc``: in the frames of the Prefill stream. ``torch``: over a torch.distributed process group of the pair."""

    GRPC = "grpc"
    TORCH = "torch"
