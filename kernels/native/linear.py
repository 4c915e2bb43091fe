"""A matrix that is packed once and then multiplied with, by the compiled kernels.

Packed, its numbers lie in the order in which a product reads them; see ``linear.cpp``. Weights stay in their own dtype
and are widened on the way into registers, so 16-bit weights cost half the memory traffic on any processor. A matrix
unit multiplies bfloat16 as it is; see ``unit_linear.cpp``.
"""

import ctypes

import torch

from kernels.huge_pages import empty_in_huge_pages
from kernels.native.kernel import INTEGER, POINTER, kernel
from kernels.native.library import has_matrix_unit, library


class PackedMatrix:
    """``hidden @ weight.T + bias`` for a ``weight`` ``[outputs, inputs]`` of float32, bfloat16 or float16.

    The weight's memory is not needed afterwards. ``bias`` is ``[outputs]`` or None. ``in_matrix_unit`` takes bfloat16
    only, and ``has_matrix_unit()`` must be true. There it may be ``gated``: half of the outputs are gates, the others
    what they are for, and the result is ``silu(gate) * other``, half as wide. A ``wide`` one's result is float32.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        in_matrix_unit: bool = False,
        gated: bool = False,
        wide: bool = False,
    ) -> None:
        assert not in_matrix_unit or has_matrix_unit(), "this process may not use a matrix unit"
        assert not gated or (in_matrix_unit and not wide), "only narrow products of a matrix unit are gated"
        unit = "_unit" if in_matrix_unit else ""
        form = f"_gated{unit}" if gated else unit
        self._outputs, self._inputs = weight.shape
        self._width = self._outputs // 2 if gated else self._outputs
        self._bias = None if bias is None else bias.float()
        rows = weight if weight.stride(1) == 1 else weight.contiguous()
        pack = kernel(f"pack{form}", weight.dtype, POINTER, INTEGER, INTEGER, INTEGER, POINTER)
        rows_kinds, weight_kinds = (POINTER, INTEGER, INTEGER), (POINTER, INTEGER, INTEGER)
        self._dtype = torch.float32 if wide else weight.dtype
        product = f"linear_wide{unit}" if wide else f"linear{form}"
        self._multiply = kernel(product, weight.dtype, *rows_kinds, *weight_kinds, POINTER, POINTER, POINTER)
        size = library()[f"packed{form}_size"]
        size.argtypes, size.restype = (ctypes.c_long, ctypes.c_long), ctypes.c_long
        self._packed = empty_in_huge_pages(size(self._outputs, self._inputs), weight.dtype)
        pack(rows.data_ptr(), rows.stride(0), self._outputs, self._inputs, self._packed.data_ptr())

    def __call__(self, hidden: torch.Tensor, added: torch.Tensor | None = None, /) -> torch.Tensor:
        """``[rows, inputs]`` of the weight's dtype to ``[rows, outputs]``; sums in float32.

        ``added`` is one summand more, shaped and typed as the result, if it is not gated.
        """
        if added is not None and not added.is_contiguous():
            added = added.contiguous()
        if hidden.stride(1) != 1:
            hidden = hidden.contiguous()
        assert hidden.dtype is self._packed.dtype, f"{hidden.dtype} rows for weights of {self._packed.dtype}"
        assert hidden.shape[1] == self._inputs, f"rows of {hidden.shape[1]} for weights of {self._inputs} inputs"
        out = hidden.new_empty(hidden.shape[0], self._width, dtype=self._dtype)
        assert added is None or (added.shape == out.shape and added.dtype is out.dtype), "what is added is not alike"
        self._multiply(
            hidden.data_ptr(),
            hidden.stride(0),
            hidden.shape[0],
            self._packed.data_ptr(),
            self._inputs,
            self._outputs,
            0 if self._bias is None else self._bias.data_ptr(),
            0 if added is None else added.data_ptr(),
            out.data_ptr(),
        )
        return out
