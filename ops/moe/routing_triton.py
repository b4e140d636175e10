"""Routing of tokens to experts on a GPU: logits, choice, tiles, and the weighted sum of what comes back, a launch each.

With pdl, a kernel waits for the previous launch before it reads or writes anything but the router's weights.

Import this module lazily: it needs triton.

Tests: tests/ops/moe/test_routing_interpreted.py, tests/ops/moe/test_routing_gpu.py
"""

# A kernel is Triton's language in Python's syntax, so type checkers misread its arguments and loops.

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch
import triton
import triton.language as tl
import triton.language.extra.cuda as cuda

from .. import dependent_launch
from ..gemm.small_gemm_triton import _prefetch, form_of
from ..launch_triton import KernelLauncher
from .expert_tiles import ExpertTiles, Stack
from .expert_tiles_schedule import TILE_ROWS, has_few_pairs, most_rows, num_tiles, tile_rows
from .routing import Scoring
from .routing_schedule import (
    SUM_BLOCK,
    ChoiceConstants,
    RouterConstants,
    SortConstants,
    SumConstants,
    choice_options,
    router_constants,
    router_options,
    sort_block,
    sort_options,
    sum_options,
)

_SOFTMAX, _SIGMOID = tl.constexpr(Scoring.SOFTMAX.value), tl.constexpr(Scoring.SIGMOID.value)
_OF_CHOSEN = tl.constexpr(Scoring.SOFTMAX_OF_CHOSEN.value)
_SIGMOID_OF_CHOSEN = tl.constexpr(Scoring.SIGMOID_OF_CHOSEN.value)
_SPARSE_MIXER = tl.constexpr(Scoring.SPARSE_MIXER.value)


@triton.jit(do_not_specialize=["rows"])
def multiply_router(y, x, weight, bias, rows, x_stride, C: tl.constexpr):
    """y[t, e] = Σ_k x[t, k] · weight[e, k] + bias[e], in float32.

    Grid (blocks of rows, blocks of experts). y: [rows, experts], x: [rows, d_in], rows x_stride apart. weight:
    [experts, d_in], bias: [experts] float32, contiguous. C: `RouterConstants`. The inputs are summed in order, and a
    block is padded with zeros, so a row's bits don't depend on its company.
    """
    BLOCK_T: tl.constexpr = C.block_t
    BLOCK_N: tl.constexpr = C.block_n
    BLOCK_K: tl.constexpr = C.block_k
    D_IN: tl.constexpr = C.d_in
    EXPERTS: tl.constexpr = C.experts
    row = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    expert = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    own_row, own_expert = row < rows, expert < EXPERTS
    if C.pdl:
        cuda.gdc_launch_dependents()
        if BLOCK_T == 16:
            LINE: tl.constexpr = 32 if C.wide else 64  # elements of a cache line
            lines = tl.arange(0, 16)[None, :] * LINE
            its = weight + tl.minimum(expert, EXPERTS - 1)[:, None] * D_IN
            for step in range(0, D_IN, 16 * LINE):
                _prefetch(its + tl.minimum(step + lines, D_IN - 1))
        cuda.gdc_wait()
    k = tl.arange(0, BLOCK_K)
    values = x + row[:, None] * x_stride + k[None, :]
    columns = weight + expert[None, :] * D_IN + k[:, None]
    total = tl.zeros((BLOCK_T, BLOCK_N), dtype=tl.float32)
    for step in tl.range(0, D_IN, BLOCK_K, num_stages=C.stages):
        inside = step + k < D_IN
        value = tl.load(values + step, mask=own_row[:, None] & inside[None, :], other=0.0)
        w = tl.load(columns + step, mask=inside[:, None] & own_expert[None, :], other=0.0)
        if C.wide:
            value = value.to(tl.float32)
        total = tl.dot(value, w, total, input_precision="ieee")
    if C.bias:
        total += tl.load(bias + expert, mask=own_expert, other=0.0)[None, :]
    out = y + row[:, None] * EXPERTS + expert[None, :]
    tl.store(out, total, mask=own_row[:, None] & own_expert[None, :])


def logits(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """A router's logits `[rows, experts]` float32 of x `[rows, inputs]`.

    weight: `[experts, inputs]`, float32 or of x's dtype, contiguous; bias: `[experts]` float32.
    """
    if x.stride(1) != 1 or not weight.is_contiguous():
        raise ValueError("rows of x, and the router, must be contiguous")
    experts, d_in = weight.shape
    y = torch.empty(len(x), experts, dtype=torch.float32, device=x.device)
    if not len(x):
        return y
    wide, early = weight.dtype == torch.float32, dependent_launch.begins_early(x.device)
    constants = router_constants(d_in, experts, len(x), bias=bias is not None, wide=wide, pdl=early)
    grid = -(-len(x) // constants.block_t), -(-experts // constants.block_n), 1
    _router(constants)(grid, (y, x, weight, y if bias is None else bias), (len(x),), (x.stride(0),))
    return y


@cache
def _router(constants: RouterConstants) -> KernelLauncher:
    options = {**router_options(constants), **dependent_launch.options(constants.pdl)}
    return KernelLauncher(multiply_router, {"C": constants, **options})


@triton.jit
def choose_experts(chosen, weights, logits, correction, C: tl.constexpr):
    """Choose the best experts of a row, best first, and weigh them. Of equal scores the first expert is chosen.

    Grid (rows,). chosen: int64, weights: float32, [rows, per_token]. logits: [rows, experts], correction: [experts],
    float32. C: `ChoiceConstants`.
    """
    EXPERTS: tl.constexpr = C.experts
    SIZE: tl.constexpr = C.group_size
    BLOCK_S: tl.constexpr = C.block_s
    BLOCK_K: tl.constexpr = C.block_k
    LANES: tl.constexpr = C.block_g * BLOCK_S
    PER_TOKEN: tl.constexpr = C.per_token
    KEPT: tl.constexpr = C.kept_groups
    NONE: tl.constexpr = float("-inf")
    if C.pdl:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    group, member = tl.arange(0, C.block_g), tl.arange(0, BLOCK_S)
    expert = group[:, None] * SIZE + member[None, :]
    own = (group[:, None] < C.groups) & (member[None, :] < SIZE)
    scores = tl.load(logits + row * EXPERTS + expert, mask=own, other=NONE)
    if C.scoring == _SOFTMAX:
        scores = tl.exp(scores - tl.max(tl.max(scores, 1), 0))
        scores = scores / tl.sum(tl.sum(scores, 1), 0)
    elif C.scoring == _SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-scores))
    ranked = scores
    if C.corrected:
        ranked += tl.load(correction + expert, mask=own, other=0.0)
    ranked = tl.where(own, ranked, NONE)
    if C.groups > 1:
        of_group = tl.max(ranked, 1)
        if C.group_best == 2:
            best = tl.argmax(ranked, 1)
            of_group += tl.max(tl.where(member[None, :] == best[:, None], NONE, ranked), 1)
        of_group = tl.where(group < C.groups, of_group, NONE)
        kept = group < 0
        for _ in tl.static_range(KEPT):
            is_best = group == tl.argmax(of_group, 0)
            kept = kept | is_best
            of_group = tl.where(is_best, NONE, of_group)
        if C.masked_score == 0:
            ranked = tl.where(own, tl.where(kept[:, None], ranked, 0.0), NONE)
        else:
            ranked = tl.where(kept[:, None], ranked, NONE)
    ranked = tl.reshape(ranked, (LANES,))
    scores = tl.reshape(scores, (LANES,))
    lane, slot = tl.arange(0, LANES), tl.arange(0, BLOCK_K)
    found = tl.zeros((BLOCK_K,), dtype=tl.int32)
    weight = tl.zeros((BLOCK_K,), dtype=tl.float32)
    for place in tl.static_range(PER_TOKEN):
        score, best = tl.max(ranked, 0, return_indices=True)
        is_best = lane == best
        if C.corrected:
            score = tl.sum(tl.where(is_best, scores, 0.0), 0)
        if C.scoring == _SPARSE_MIXER:
            is_far = (score - scores) / tl.maximum(tl.abs(scores), score) > 2 * C.jitter
            score = 1.0 / tl.sum(tl.where(is_far, 0.0, tl.exp(ranked - score)), 0)
        found = tl.where(slot == place, best // BLOCK_S * SIZE + best % BLOCK_S, found)
        weight = tl.where(slot == place, score, weight)
        ranked = tl.where(is_best, NONE, ranked)
    own_slot = slot < PER_TOKEN
    if C.scoring == _OF_CHOSEN:
        weight = tl.where(own_slot, weight, NONE)
        weight = tl.exp(weight - tl.max(weight, 0))
        weight = weight / tl.sum(weight, 0)
    elif C.scoring == _SIGMOID_OF_CHOSEN:
        weight = 1.0 / (1.0 + tl.exp(-weight))
    if C.renormalised:
        weight = tl.where(own_slot, weight, 0.0)
        weight = weight / (tl.sum(weight, 0) + C.epsilon)
    if C.factor != 1.0:
        weight = weight * C.factor
    at = row * PER_TOKEN + slot
    # scores that are not numbers must not lead out of the experts
    tl.store(chosen + at, tl.minimum(found, EXPERTS - 1).to(tl.int64), mask=own_slot)
    tl.store(weights + at, weight, mask=own_slot)


def choose(
    logits: torch.Tensor, correction: torch.Tensor | None, constants: ChoiceConstants
) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts of each row, `[rows, per_token]` int64, the best first, and their weights, float32.

    logits: `[rows, experts]` float32, contiguous. correction: `[experts]` float32, where `constants.corrected`.
    """
    if not logits.is_contiguous():
        raise ValueError("logits must be contiguous")
    shape = len(logits), constants.per_token
    chosen = torch.empty(shape, dtype=torch.int64, device=logits.device)
    weights = torch.empty(shape, dtype=torch.float32, device=logits.device)
    if len(logits):
        added = logits if correction is None else correction
        launch = _choice(constants, dependent_launch.begins_early(logits.device))
        launch((len(logits), 1, 1), (chosen, weights, logits, added), (), ())
    return chosen, weights


@cache
def _choice(constants: ChoiceConstants, early: bool) -> KernelLauncher:
    options = {**choice_options(), **dependent_launch.options(early)}
    return KernelLauncher(choose_experts, {"C": replace(constants, pdl=early), **options})


@triton.jit(do_not_specialize=["num_pairs"])
def sort_pairs(pairs, expert_of, first_of, end_of, chosen, num_pairs, C: tl.constexpr):
    """Write the pairs of an expert, in the order of rows, and its tiles.

    Grid (experts,). See `ExpertTiles`. chosen: [pairs] int64, the expert of each pair. C: `SortConstants`. With few
    pairs, an expert's tiles begin where its pairs do; with many, expert e's begin at `(pairs of those before it) //
    block_t + e`. Those up to the next expert's that it doesn't need are empty.
    """
    BLOCK: tl.constexpr = C.block
    BLOCK_T: tl.constexpr = C.block_t
    if C.pdl:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    expert = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    begin = expert * 0
    count = expert * 0
    for start in tl.range(0, num_pairs, BLOCK):
        its = tl.load(chosen + start + lane, mask=start + lane < num_pairs, other=C.experts)
        begin += tl.sum((its < expert).to(tl.int32), 0)
        count += tl.sum((its == expert).to(tl.int32), 0)
    end = begin + count
    place = begin
    for start in tl.range(0, num_pairs, BLOCK):
        its = tl.load(chosen + start + lane, mask=start + lane < num_pairs, other=C.experts)
        own = (its == expert).to(tl.int32)
        tl.store(pairs + place + tl.cumsum(own, 0) - 1, start + lane, mask=own > 0)
        place += tl.sum(own, 0)
    if C.few:
        tile, next_tile = begin, end
    else:
        tile, next_tile = begin // BLOCK_T + expert, end // BLOCK_T + expert + 1
    entry = tl.arange(0, C.entries)
    for start in tl.range(0, next_tile - tile, C.entries):
        own_entry = tile + start + entry < next_tile
        first = tl.minimum(begin + (start + entry) * BLOCK_T, end)
        tl.store(expert_of + tile + start + entry, tl.zeros_like(first) + expert, mask=own_entry)
        tl.store(first_of + tile + start + entry, first, mask=own_entry)
        tl.store(end_of + tile + start + entry, tl.minimum(first + BLOCK_T, end), mask=own_entry)


def tiles_of(chosen: torch.Tensor, experts: int, *stacks: Stack) -> ExpertTiles:
    """The tiles of products with these matrices: see `ExpertTiles.of`; empty ones are between. chosen: contiguous."""
    count = chosen.numel()
    forms = [form_of(each.data, each.data.shape[2]) for each in stacks]
    block_t = tile_rows(len(chosen), count, experts, min(map(most_rows, forms), default=TILE_ROWS[-1]))
    made = num_tiles(count, experts, block_t)
    parts = [torch.empty(size, dtype=torch.int32, device=chosen.device) for size in (count, made, made, made)]
    if count:
        early = dependent_launch.begins_early(chosen.device)
        few, block = has_few_pairs(count, experts, block_t), sort_block(count)
        launch = _sort(SortConstants(experts, block_t, few, block, pdl=early))
        launch((experts, 1, 1), (*parts, chosen), (count,), ())
    return ExpertTiles(block_t, *parts)


@cache
def _sort(constants: SortConstants) -> KernelLauncher:
    options = {**sort_options(constants), **dependent_launch.options(constants.pdl)}
    return KernelLauncher(sort_pairs, {"C": constants, **options})


@triton.jit
def add_experts(out, outputs, weights, shared, gates, C: tl.constexpr):
    """out[t] = Σ_j weights[t, j] · outputs[t, j] + sigmoid(gates[t]) · shared[t], in float32, rounded at the end.

    Grid (rows, blocks of columns). out, shared: [rows, width]; outputs: [rows, per_token, width]; weights: [rows,
    per_token], gates: [rows], float32; contiguous. C: `SumConstants`. Experts are added up in order.
    """
    WIDTH: tl.constexpr = C.width
    BLOCK: tl.constexpr = C.block
    PER_TOKEN: tl.constexpr = C.per_token
    if C.pdl:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    own = column < WIDTH
    pair = row * PER_TOKEN
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for place in tl.static_range(PER_TOKEN):
        value = tl.load(outputs + (pair + place) * WIDTH + column, mask=own, other=0.0).to(tl.float32)
        total += value * tl.load(weights + pair + place)
    if C.shared:
        value = tl.load(shared + row * WIDTH + column, mask=own, other=0.0).to(tl.float32)
        if C.gated:
            value = value * (1.0 / (1.0 + tl.exp(-tl.load(gates + row))))
        total += value
    tl.store(out + row * WIDTH + column, total.to(out.dtype.element_ty), mask=own)


def add_up(
    outputs: torch.Tensor,
    weights: torch.Tensor,
    shared: torch.Tensor | None = None,
    gates: torch.Tensor | None = None,
) -> torch.Tensor:
    """The weighted sum of experts' outputs `[rows, per_token, width]`: `[rows, width]` in their dtype.

    weights: `[rows, per_token]` float32. shared: `[rows, width]`, of the shared expert; gates: `[rows, 1]` float32, of
    which the sigmoid is multiplied with it.
    """
    rows, per_token, width = outputs.shape
    out = torch.empty(rows, width, dtype=outputs.dtype, device=outputs.device)
    given = outputs, weights, *(outputs if each is None else each for each in (shared, gates))
    if not all(each.is_contiguous() for each in given):
        raise ValueError("outputs and weights must be contiguous")
    if rows:
        early = dependent_launch.begins_early(outputs.device)
        launch = _sum(SumConstants(width, per_token, shared is not None, gates is not None, pdl=early))
        launch((rows, -(-width // SUM_BLOCK), 1), (out, *given), (), ())
    return out


@cache
def _sum(constants: SumConstants) -> KernelLauncher:
    options = {**sum_options(), **dependent_launch.options(constants.pdl)}
    return KernelLauncher(add_experts, {"C": constants, **options})


# Rules for type checkers are at the end, so that kernels keep their lines.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportPossiblyUnboundVariable=false, reportAssignmentType=false
# pyright: reportOperatorIssue=false, reportArgumentType=false
