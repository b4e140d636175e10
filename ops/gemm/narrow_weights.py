"""Weights of 4 or 8 bits with scales, as a GPU keeps and multiplies them.

Tests: tests/ops/gemm/test_narrow_weights.py, tests/ops/gemm/test_small_gemm_triton.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

BITS = (4, 8)
"""Bits of a kept weight."""

MULTIPLE = 64
"""A group's inputs must be a multiple of it, unless a row is one group: inputs that a kernel multiplies at once."""

FLOAT4_GROUP = 32
"""Inputs that share a power of 2 in MXFP4."""

#: Twice the numbers of E2M1 by their lower three bits; the highest bit is the sign.
_DOUBLES = (0, 1, 2, 3, 4, 6, 8, 12)


@dataclass(frozen=True, slots=True)
class NarrowWeight:
    """A projection's weights: `weight[i, j] = (data[i, j] - zeros[i, g]) · scales[i, g]` for group `g = j // group`, or
    `data[i, j] · scales[i, g]` of FP8 and MXFP4, multiplied in float32 and rounded once to `dtype`.

    A stack of matrices has their dimension before these in all tensors. Where a tensor is only asked for its shape,
    dtype and device, it may stand for the tensor.
    """

    data: torch.Tensor
    """uint8 `[out, in · bits / 8]`: integers, or the bits of E4M3 or E2M1.

    Those of 4 bits lie in words of 32 bits as a GPU widens and multiplies them. Four words have 32 inputs: word t has
    inputs 2·t and 2·t + 1 of each eight, as one thread needs them, the first in its lower half, the second in the
    upper, those of the first eight in the lowest bits.
    """

    scales: torch.Tensor
    """float32 `[out, groups]`; of MXFP4 uint8, exponents of 2 with a bias of 127."""

    zeros: torch.Tensor | None
    """float32 `[out, groups]`, integers. None: all are `2^(bits - 1)`."""

    bits: int
    group: int
    """Inputs that share a scale."""

    dtype: torch.dtype
    """Of the weights as they are multiplied."""

    float8: bool = False
    """The weights are FP8 (E4M3)."""

    float4: bool = False
    """The weights are MXFP4: FP4 (E2M1), in groups of `FLOAT4_GROUP`."""

    rounds_inputs: bool = False
    """Rows that are multiplied with it are rounded to FP8 first: see `float8_rows`."""

    multiplies_float8: bool = False
    """The library multiplies these rows in FP8, with the weights as they are; else both are widened for it."""

    @property
    def shape(self) -> torch.Size:
        """`[out, in]`."""
        return torch.Size((*self.data.shape[:-1], self.data.shape[-1] * 8 // self.bits))

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return sum(each.nbytes for each in (self.data, self.scales, self.zeros) if each is not None)

    def is_contiguous(self) -> bool:
        """Whether rows lie one after the other."""
        return self.data.is_contiguous()

    def __len__(self) -> int:
        return len(self.data)

    def dense(self) -> torch.Tensor:
        """The weight `[out, in]` in `dtype`: on a GPU in one launch, elsewhere by torch."""
        *outer, inputs = self.shape
        if self.data.is_cuda:
            from .narrow_weights_triton import widen, widen_float4  # needs triton

            out = torch.empty(math.prod(outer), inputs, dtype=self.dtype, device=self.device)
            if self.float4:
                widen_float4(out, self.data, self.scales)
            else:
                widen(out, self.data, self.scales, self.zeros, bits=self.bits, group=self.group, float8=self.float8)
            return out.view(self.shape)
        values = self.data
        if self.bits == 4:
            values = _unpacked(values)
        group_of = torch.arange(inputs, device=self.device) // self.group
        if self.float4:
            doubles = torch.tensor((*_DOUBLES, *(-each for each in _DOUBLES)), device=self.device)[values.long()]
            bits = self.scales.int() << 23  # of a float32, but for the least power, which is subnormal
            powers = torch.where(self.scales == 0, 1 << 22, bits).view(torch.float32)
            return (doubles / 2 * powers[..., group_of]).to(self.dtype)
        if self.float8:
            return (values.view(torch.float8_e4m3fn).float() * self.scales[..., group_of]).to(self.dtype)
        zeros = 1 << (self.bits - 1) if self.zeros is None else self.zeros[..., group_of]
        return ((values.float() - zeros) * self.scales[..., group_of]).to(self.dtype)


def kept_bits(bits: int) -> int:
    """The fewest bits in which values of so many can be kept; more than any if there are none."""
    return next((each for each in BITS if bits <= each), bits)


def is_kept(inputs: int, bits: int, group: int) -> bool:
    """True if a weight with rows of `inputs` in groups of `group` can be kept in so many bits."""
    return bits in BITS and not inputs % (128 // bits if bits < 8 else 4) and (group >= inputs or not group % MULTIPLE)


def keep(
    values: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    *,
    bits: int,
    group: int,
    dtype: torch.dtype,
    device: torch.device,
) -> NarrowWeight:
    """Move a weight to a device. See `is_kept`, which it must be.

    values: float8_e4m3fn, or int8 from -2^(bits-1) to 2^(bits-1) - 1, `[out, in]`. scales: float32 `[out, groups]`;
    zeros: integers of that shape, or None if all are 0.
    """
    scales = scales.to(device).contiguous()
    if values.is_floating_point():
        data = _in_memory_of_its_own(values.view(torch.uint8).to(device))
        return NarrowWeight(data, scales, None, bits, group=group, dtype=dtype, float8=True)
    half = 1 << (bits - 1)
    data = values.to(device).view(torch.uint8) + half  # modulo 256, which takes no wider copy
    shifted = None if zeros is None else zeros.to(device, torch.float32) + half
    data = _packed(data) if bits == 4 else data.contiguous()
    return NarrowWeight(data, scales, shifted, bits, group=group, dtype=dtype)


def _packed(values: torch.Tensor) -> torch.Tensor:
    """Words of numbers of 4 bits, uint8 `[..., in]`, as `NarrowWeight.data` has them."""
    eights = values.unflatten(-1, (-1, 2, 2, 4, 2))  # two and two eights, words, halves
    pairs = (eights.select(-3, 1) << 4).bitwise_or_(eights.select(-3, 0))
    return pairs.movedim(-3, -1).flatten(-4).contiguous()


def _unpacked(data: torch.Tensor) -> torch.Tensor:
    """What `_packed` packed."""
    pairs = data.unflatten(-1, (-1, 4, 2, 2)).movedim(-1, -3)
    return torch.stack((pairs & 15, pairs >> 4), dim=-3).flatten(-5)


def _in_memory_of_its_own(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, copied if it is a part of a larger one, which it would keep alive."""
    return (
        tensor
        if tensor.untyped_storage().nbytes() == tensor.nbytes
        else tensor.clone(memory_format=torch.contiguous_format)
    )


def keep_float4(
    values: torch.Tensor, scales: torch.Tensor, *, dtype: torch.dtype, device: torch.device
) -> NarrowWeight:
    """Move a weight in MXFP4 to a device.

    values: twice its numbers, int8 `[out, in]`, a multiple of 32 inputs. scales: powers of 2 from 2^-127 to 2^127,
    float32 `[out, ⌈in / FLOAT4_GROUP⌉]`.
    """
    values, scales = values.to(device), scales.to(device)
    codes = values.abs()  # of 0 to 4 they are the numbers; an index by numbers would take eight bytes for each
    codes = codes - (codes > 4).to(torch.int8) - (codes > 6).to(torch.int8) - 3 * (codes > 8).to(torch.int8)
    data = codes.view(torch.uint8) | (values < 0).to(torch.uint8) << 3
    _, exponents = torch.frexp(scales)  # of halves
    scales = (exponents + 126).to(torch.uint8)
    return NarrowWeight(_packed(data), scales, None, bits=4, group=FLOAT4_GROUP, dtype=dtype, float4=True)


def stack(weights: Sequence[NarrowWeight]) -> NarrowWeight | None:
    """Matrices of one shape as a stack; None if they don't lie in memory alike. Where only some have zero points, all
    get them.
    """
    first = weights[0]
    if len({(each.bits, each.group, each.float8, each.float4, each.shape) for each in weights}) > 1:
        return None
    zeros = None
    if any(each.zeros is not None for each in weights):
        middle = torch.full_like(first.scales, 1 << (first.bits - 1))
        zeros = torch.stack([middle if each.zeros is None else each.zeros for each in weights])
    data, scales = (torch.stack([getattr(each, name) for each in weights]) for name in ("data", "scales"))
    return replace(first, data=data, scales=scales, zeros=zeros)
