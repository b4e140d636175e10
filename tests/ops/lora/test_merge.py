"""Adapters in the weights: matrices against exact sums, and whole steps against unmerged ones in float32."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from chorus.core.model.lora.lora_state import LoraState
from chorus.ops.gemm.packed_gemm import unpack
from chorus.ops.lora.sgmv import Segments

from ...tables import LAYER_MATRICES
from ..cpu.test_native_sgmv import (
    BF16_BOUND,
    F32_BOUND,
    LAYERS,
    SHAPES,
    base,
    distance,
    mixed_step,
    random_parts,
    random_step,
)

__all__ = ["base"]

pytestmark = pytest.mark.wide

KERNELS = ["torch", "native"]


def step_of_one(seed, base, lengths):
    """A step whose tokens all have one adapter, and its parts."""
    step = random_step(seed, base, lengths)
    step.add_adapter(0, sum(lengths), random_parts(random.Random(seed)))
    return step, list(step.segments.rows)


def unpacked(matrix):
    """[outputs, inputs] of a matrix in panels or in oneDNN's layout; the last panel's may be more."""
    matrix = unpack(matrix)
    return matrix if matrix.dim() == 2 else matrix.transpose(1, 2).reshape(-1, matrix.shape[1] * matrix.shape[3])


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", range(4))
def test_a_matrix_is_the_exact_sum_rounded_once(base, shape, kernels, dtype, seed):
    step, parts = step_of_one(seed, base(shape), [1])
    step.logits(dtype, kernels)  # puts the adapter into the arena
    executor = step.base.executor(dtype, kernels)
    lora = LoraState(executor.config, executor.arena.pages)
    widths = {name: shape[1] for name, shape in zip(LAYER_MATRICES, native_shapes(executor.config), strict=True)}
    for layer in range(LAYERS):
        for name in LAYER_MATRICES:
            here = [part for part in parts if part.first_elem[layer] >= 0]
            origin = executor.decoder.layers[layer][name]
            out = torch.full_like(unpack(origin), float("nan"))
            with torch.inference_mode():
                growth = executor.decoder.merge(layer, name, here, origin, out)
            want = unpacked(origin).double()
            before = want.norm(dim=1)
            for part in here:
                for module, column, width in lora.columns(layer, name):
                    a, b = part.matrices(executor.arena.pages, layer, module, widths[name], width)
                    if a is not None:
                        want[column : column + width] += part.scale * b.double().T @ a.double()
            got = unpacked(out).double()
            eps = torch.finfo(dtype).eps
            assert bool(((got - want).abs() <= 0.51 * eps * want.abs() + 1e-5).all())
            ratio = torch.where(before > 0, want.norm(dim=1) / before, 0.0).max()
            assert max(growth, 1.0) == pytest.approx(
                max(float(ratio), 1.0), rel=1e-2 if dtype is torch.bfloat16 else 1e-4
            )
            if not here:
                assert torch.equal(unpacked(out), unpacked(origin))


def native_shapes(config):
    q, kv = config.q_size, config.kv_size
    return [
        (q + 2 * kv, config.hidden_size),
        (config.hidden_size, q),
        (2 * config.intermediate_size, config.hidden_size),
        (config.hidden_size, config.intermediate_size),
    ]


@pytest.mark.native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_threads_leave_no_trace_in_a_matrix(base, dtype):
    step, parts = step_of_one(3, base("usual"), [1])
    found = []
    for threads in (1, 2, 3):
        step.logits(dtype, "native", threads)
        decoder = step.base.executor(dtype, "native", threads).decoder
        out = torch.empty_like(unpack(decoder.layers[0]["gate_up"]))
        decoder.merge(
            0, "gate_up", [part for part in parts if part.first_elem[0] >= 0], decoder.layers[0]["gate_up"], out
        )
        found.append(out)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("kernels", KERNELS)
def test_what_is_not_finite_is_told(base, kernels):
    step, parts = step_of_one(1, base("usual"), [1])
    step.logits(torch.float32, kernels)
    decoder = step.base.executor(torch.float32, kernels).decoder
    part = next(part for part in parts if part.a_offset[0] >= 0)
    layer = next(layer for layer in range(LAYERS) if part.first_elem[layer] >= 0)
    origin = decoder.layers[layer]["qkv"]
    huge = replace(part, scale=3e38)
    assert decoder.merge(layer, "qkv", [huge], origin, torch.empty_like(unpack(origin))) == float("inf")


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("lengths", [[1], [1] * 9, [3, 2, 1], [60, 1, 1], [200, 17, 1]], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_merged_and_unmerged_steps_keep_one_bound(base, shape, lengths, kernels):
    step, parts = step_of_one(len(lengths), base(shape), lengths)
    expected = step.logits(torch.float32, "torch")
    step_of = replace(step, segments=Segments())
    assert distance(step_of.logits(torch.float32, kernels, merged=parts), expected) < F32_BOUND
    for merged, one in (((), step), (parts, step_of)):
        assert distance(one.logits(torch.bfloat16, kernels, merged=merged), expected) < BF16_BOUND
    assert distance(step_of.logits(torch.float32, kernels), expected) > 20 * F32_BOUND, "the adapter does nothing"


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("lengths", [[1] * 9, [3, 2, 1], [60, 1, 1], [200, 17, 1]], ids=str)
@pytest.mark.parametrize("shape", ["usual", "odd widths", "gate and up in panels of their own"])
def test_a_mixture_keeps_the_bound(base, shape, lengths, kernels):
    """The merged adapter is taken off the rows of others, all at once, before theirs is added."""
    step = mixed_step(len(lengths), base(shape), lengths)
    expected = step.logits(torch.float32, "torch")
    own, tokens = step.segments, sum(lengths)
    step.segments = Segments()
    step.add_adapter(0, tokens, random_parts(random.Random(7)))
    parts = list(step.segments.rows)
    step.segments = Segments()
    for part in parts:
        step.segments.add(0, tokens, replace(part, scale=-part.scale))
    for begin, end, rows in own:
        step.segments.add(begin, end, rows)
    assert max(step.segments.level) >= 1
    assert distance(step.logits(torch.float32, kernels, merged=parts), expected) < F32_BOUND
    assert distance(step.logits(torch.bfloat16, kernels, merged=parts), expected) < BF16_BOUND
