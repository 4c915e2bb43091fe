"""Stored GGUF values as floating-point tensors."""

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf.constants import GGMLQuantizationType

FLOAT_TYPES = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}
"""The types that hold values as they are."""

SUPPORTED_TYPES = frozenset(FLOAT_TYPES) | {
    GGMLQuantizationType.Q8_0,
    GGMLQuantizationType.Q4_0,
    GGMLQuantizationType.Q4_1,
    GGMLQuantizationType.Q5_0,
    GGMLQuantizationType.Q5_1,
    GGMLQuantizationType.Q4_K,
    GGMLQuantizationType.Q5_K,
    GGMLQuantizationType.Q6_K,
}


def dequantize(rows: npt.NDArray[np.uint8], type_: GGMLQuantizationType) -> torch.Tensor:
    """``[rows, bytes]`` of whole blocks as ``[rows, values]``: float32, or the stored type if that is a float.

    ``rows`` must be contiguous and writable; unquantized values share its memory.
    """
    if type_ in FLOAT_TYPES:
        return torch.from_numpy(rows).view(FLOAT_TYPES[type_])
    # gguf works through 16 rows at a time, which is slow when they are short. Blocks do not depend on each other:
    # as one long row they are dequantized at once.
    return torch.from_numpy(gguf.dequantize(rows.reshape(1, -1), type_).reshape(len(rows), -1))
