"""Products of rows with the matrices that they go to, on a CPU: each matrix has rows of its own.

By the native library, in one call for all matrices of a shape, each in the model's dtype or as whole numbers with
scales; where it isn't there, or can't pack a matrix, by oneDNN.

Tests: tests/ops/moe/test_expert_gemms.py
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import c_int64, c_void_p
from dataclasses import dataclass

import torch
from torch.nn.functional import linear

from ..gemm import packed_gemm
from ..library import native_model
from ..library.native_descriptors import ELEMENT_OF
from ..library.native_integers import IntegerPanels, integers_of_each, unpack_integers
from ..library.native_library import available, library


@dataclass(frozen=True, slots=True)
class Panels:
    """A matrix `[outputs, inputs]` packed for the native library."""

    data: torch.Tensor
    """See `native_model.pack`."""
    outputs: int
    inputs: int


Matrix = torch.Tensor | Panels | IntegerPanels
"""Packed; a tensor: for oneDNN, or as it is where torch has none."""

Pack = Callable[[torch.Tensor], Matrix]
Take = Callable[..., torch.Tensor]
"""`take(shape, dtype=…)`: memory for a tensor."""


def pack(weight: torch.Tensor, take: Take = torch.empty) -> Matrix:
    """Pack a weight `[out, in]` for `multiply_each`. bfloat16 by the native library needs an even number of inputs.

    take: where the native library's panels go.
    """
    outputs, inputs = weight.shape
    if not available(weight.dtype) or inputs * weight.dtype.itemsize % 4:
        return packed_gemm.pack(weight)
    shape = native_model.packed_shape(outputs, inputs, weight.dtype)
    return Panels(native_model.pack(weight, take(shape, dtype=weight.dtype)), outputs, inputs)


def unpack(weight: Matrix) -> torch.Tensor:
    """Return a weight in row-major order: a copy if it was packed. Whole numbers become float32."""
    if isinstance(weight, IntegerPanels):
        return unpack_integers(weight)
    if isinstance(weight, Panels):
        return native_model.unpack(weight.data, weight.outputs, weight.inputs)
    return packed_gemm.unpack(weight)


def multiply_each(
    x: torch.Tensor, ends: Sequence[int], matrices: Sequence[Matrix], biases: Sequence[torch.Tensor] | None = None
) -> torch.Tensor:
    """Multiply rows `[rows, in]` by matrices of one shape: those from `ends[i - 1]` up to `ends[i]` by the i-th, and
    add its bias `[out]`. Returns `[rows, out]` in x's dtype. A row's bits depend on no other row, unless a matrix is
    plain: then torch's BLAS multiplies it, by kernels that depend on the number of rows (MKL's do on AMD processors).

    Whole numbers are multiplied as `native/integers.h` says.

    Raises RuntimeError if matrices were packed for the native library, and it is no longer in use.
    """
    if matrices and all(isinstance(each, Panels | IntegerPanels) for each in matrices):
        return _by_library(x, ends, matrices, biases)  # type: ignore[arg-type]
    begins = (0, *ends)
    products = [
        _gemm(x[begin:end], matrix, None if biases is None else biases[index])
        for index, (begin, end, matrix) in enumerate(zip(begins, ends, matrices, strict=False))
    ]
    return products[0] if len(products) == 1 else torch.cat(products)


def _by_library(
    x: torch.Tensor,
    ends: Sequence[int],
    matrices: Sequence[Panels | IntegerPanels],
    biases: Sequence[torch.Tensor] | None,
) -> torch.Tensor:
    found, count = library(), len(matrices)
    if found is None:
        raise RuntimeError("matrices were packed for the native library, which is no longer in use; pack them again")
    outputs, inputs = matrices[0].outputs, matrices[0].inputs
    rows, y = x.float().contiguous(), torch.empty(len(x), outputs)
    dtype = next((each.data.dtype for each in matrices if isinstance(each, Panels)), x.dtype)
    added = None if biases is None else [bias.float().contiguous() for bias in biases]
    found.chorus_multiply(
        torch.get_num_threads(),
        ELEMENT_OF[dtype],
        count,
        (c_int64 * count)(*ends),
        (c_void_p * count)(*(matrix.data.data_ptr() for matrix in matrices)),
        integers_of_each(matrices),
        None if added is None else (c_void_p * count)(*(bias.data_ptr() for bias in added)),
        outputs,
        inputs,
        rows.data_ptr(),
        y.data_ptr(),
    )
    return y.to(x.dtype)


def _gemm(x: torch.Tensor, weight: Matrix, bias: torch.Tensor | None) -> torch.Tensor:
    """`x @ weightᵀ + bias`. Of one row alone, oneDNN may take another kernel, which adds up in another order."""
    if isinstance(weight, Panels | IntegerPanels):
        raise TypeError("matrices of one call must be packed alike")
    rows = x if len(x) > 1 else x.expand(2, -1).contiguous()
    return (packed_gemm.packed_linear if weight.is_mkldnn else linear)(rows, weight, bias)[: len(x)]
