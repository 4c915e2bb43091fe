"""Which arithmetic a model is served with."""

from collections.abc import Mapping

import torch

SERVED_DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""What a cluster's ``--dtype`` offers."""

DTYPES: Mapping[str, torch.dtype] = {
    **SERVED_DTYPES,
    # For checks of arithmetic: where float32 differs from a reference, float64 shows whether rounding is the reason.
    "float64": torch.float64,
}
"""What an engine can compute in."""


def choose_device(name: str) -> torch.device:
    """``auto`` is CUDA where there is one. Raises ``ValueError`` for CUDA where there is none."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"--device {name} was given, but PyTorch finds no CUDA device; use --device cpu")
    return torch.device(name)


def choose_dtype(name: str, own: torch.dtype, device: torch.device) -> torch.dtype:
    """Resolve ``--dtype``; ``auto`` is the checkpoint's own type where the device computes it natively.

    A CPU without 16-bit matrix instructions takes many times as long for 16-bit products as for float32 ones
    (``benchmarks/dtype.py`` measures it), so there ``auto`` is float32.
    """
    if name != "auto":
        return DTYPES[name]
    if device.type != "cpu" or own is torch.float32:
        return own
    native = {torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported}.get(
        own, torch.ops.mkldnn._is_mkldnn_fp16_supported
    )
    return own if native() else torch.float32
