"""Narrow weights as a GPU keeps them: what they stand for, by torch and by the kernel, and which can be kept."""

from __future__ import annotations

import itertools

import pytest
import torch

from chorus.ops.gemm.narrow_weights import NarrowWeight, is_kept, keep, keep_float4

from ...processes import run_python

CPU = torch.device("cpu")


def kept(
    outputs: int, inputs: int, *, bits: int, group: int, zeros: bool, dtype: torch.dtype, seed: int = 0
) -> tuple[NarrowWeight, torch.Tensor]:
    """Random whole numbers, kept, and the weight that they stand for, by its definition."""
    generator = torch.Generator().manual_seed(seed)
    half, groups = 1 << (bits - 1), -(-inputs // group)
    values = torch.randint(-half, half, (outputs, inputs), generator=generator, dtype=torch.int8)
    scales = torch.rand(outputs, groups, generator=generator) * 0.01 + 1e-3
    points = torch.randint(-half, half, (outputs, groups), generator=generator, dtype=torch.int16) if zeros else None
    group_of = torch.arange(inputs) // group
    whole = values.float() - (0 if points is None else points.float()[:, group_of])
    want = (whole * scales[:, group_of]).to(dtype)
    return keep(values, scales, points, bits=bits, group=group, dtype=dtype, device=CPU), want


def forms():
    """Bits, inputs and group: of whole rows, of even groups, and with a shorter last one."""
    shapes = ((64, 64), (256, 128), (224, 128), (96, 96), (200, 128), (40, 40), (320, 64))
    found = itertools.product((4, 8), shapes, (False, True), (torch.float32, torch.bfloat16, torch.float16))
    return [each for each in found if is_kept(each[1][0], each[0], each[1][1])]


@pytest.mark.parametrize(("bits", "shape", "zeros", "dtype"), forms())
def test_a_kept_weight_is_what_its_numbers_stand_for(bits, shape, zeros, dtype):
    inputs, group = shape
    weight, want = kept(24, inputs, bits=bits, group=group, zeros=zeros, dtype=dtype)
    assert (weight.shape, weight.dtype, len(weight), weight.device) == (want.shape, dtype, 24, CPU)
    assert torch.equal(weight.dense(), want)


def test_a_kept_weight_takes_its_bits():
    plain = 64 * 4096 * 2
    eights, _ = kept(64, 4096, bits=8, group=4096, zeros=False, dtype=torch.bfloat16)
    fours, _ = kept(64, 4096, bits=4, group=128, zeros=False, dtype=torch.bfloat16)
    assert eights.nbytes == plain // 2 + 64 * 4
    assert fours.nbytes == plain // 4 + 64 * 32 * 4


@pytest.mark.parametrize(
    ("inputs", "bits", "group", "expected"),
    [
        (4096, 4, 128, True),
        (4096, 8, 4096, True),
        (4096, 4, 32, False),  # a kernel multiplies 64 inputs at once, of one group
        (4096, 4, 1, False),  # in no order
        (48, 4, 48, False),  # two words would be left of four
        (42, 8, 42, False),
        (44, 8, 44, True),
        (4096, 2, 128, False),
    ],
)
def test_which_weights_can_be_kept(inputs, bits, group, expected):
    assert is_kept(inputs, bits, group) is expected


def kept_float8(outputs: int, inputs: int, group: int, dtype: torch.dtype) -> tuple[NarrowWeight, torch.Tensor]:
    """Every finite E4M3 value, kept, and the weight that they stand for, by its definition."""
    bits = torch.arange(outputs * inputs) % 256
    bits[bits % 128 == 127] = 0  # the two that are not numbers
    values = bits.to(torch.uint8).view(torch.float8_e4m3fn).view(outputs, inputs)
    scales = torch.rand(outputs, -(-inputs // group), generator=torch.Generator().manual_seed(1)) * 0.01 + 1e-3
    want = (values.float() * scales[:, torch.arange(inputs) // group]).to(dtype)
    return keep(values, scales, None, bits=8, group=group, dtype=dtype, device=CPU), want


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("inputs", "group"), [(256, 128), (200, 128), (40, 40)])
def test_a_kept_float8_weight_is_what_it_stands_for(inputs, group, dtype):
    weight, want = kept_float8(24, inputs, group, dtype)
    assert weight.data.dtype is torch.uint8
    assert torch.equal(weight.dense(), want)


def kept_float4(outputs: int, inputs: int, dtype: torch.dtype) -> NarrowWeight:
    """Every E2M1 value, kept as MXFP4, with the least power of 2, a subnormal number, and others."""
    numbers = torch.tensor((0, 1, 2, 3, 4, 6, 8, 12), dtype=torch.int8)
    numbers = torch.cat((numbers, -numbers)).repeat(outputs * inputs // 16).view(outputs, inputs)
    powers = torch.exp2(torch.arange(outputs * (inputs // 32)).float() % 20 - 12).view(outputs, -1)
    powers[0, 0] = 2.0**-127
    return keep_float4(numbers, powers, dtype=dtype, device=CPU)


def widen_all() -> None:
    """Run in a process that interprets."""
    from chorus.ops.gemm.narrow_weights_triton import widen, widen_float4

    def widened(it: NarrowWeight) -> torch.Tensor:
        out = torch.empty(it.shape, dtype=it.dtype)
        widen(out, it.data, it.scales, it.zeros, bits=it.bits, group=it.group, float8=it.float8)
        return out

    from ..bf16_interpreter import fix_bf16

    fix_bf16()
    for seed, (bits, (inputs, group), zeros, dtype) in enumerate(forms()):
        weight, want = kept(19, inputs, bits=bits, group=group, zeros=zeros, dtype=dtype, seed=seed)
        assert torch.equal(widened(weight), want), f"{bits} bits, {inputs} inputs in groups of {group}, zeros {zeros}"

    for (inputs, group), dtype in itertools.product(
        ((256, 128), (200, 128), (40, 40)), (torch.float32, torch.bfloat16)
    ):
        weight, want = kept_float8(19, inputs, group, dtype)
        assert torch.equal(widened(weight), want), f"FP8, {inputs} inputs in groups of {group}"

    for inputs, dtype in itertools.product((32, 64, 288), (torch.float32, torch.bfloat16, torch.float16)):
        weight = kept_float4(19, inputs, dtype)
        out = torch.empty(weight.shape, dtype=dtype)
        widen_float4(out, weight.data, weight.scales)
        assert torch.equal(out, weight.dense()), f"MXFP4, {inputs} inputs"


@pytest.mark.triton
def test_the_kernel_widens_to_the_same_bits():
    command = "from tests.ops.gemm.test_narrow_weights import *; widen_all()"
    result = run_python("-c", command, TRITON_INTERPRET="1")
    assert result.returncode == 0, result.stdout + result.stderr
