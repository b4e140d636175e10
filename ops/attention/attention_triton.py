"""Paged attention for decoding sequences in Triton: one launch per layer, captured in the graph of its bucket.

PyTorch computes prefill chunks. Keys and values in FP8 are widened to the queries' dtype, which holds them exactly. For
the query heads h of KV head g, over the tokens t in the sequence's pages:
    out[h] = Σ_t softmax_t(q[h] · k[t, g] / √head_dim) · v[t, g]
`attention_schedule` divides the tokens of a sequence among programs. Import this module lazily: it needs triton.
"""

# A kernel is Triton's language in Python's syntax, so type checkers misread its arguments and loops.

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
import triton.language.extra.cuda as cuda

from .. import dependent_launch
from ..launch_triton import KernelLauncher
from .attention import Attention, AttentionSetup, HeadTerms, KvCache, PagedAttention, PlannedRows, Scores
from .attention_plan import PlanBuffers
from .attention_schedule import (
    BLOCK_H,
    LEAST_FLOAT8,
    PARTS,
    AttentionConstants,
    attention_constants,
    attention_options,
    attention_splits,
)
from .latent_attention import LatentAttention
from .latents import LatentHeads

_BLOCK_H, _PARTS = tl.constexpr(BLOCK_H), tl.constexpr(PARTS)


@triton.jit
def _joined(top, total, value, part_top, part_total, part_value):
    """Merge two partial softmaxes: the largest score, the sum of weights and the weighted sum of values."""
    highest = tl.maximum(top, part_top)
    own, other = tl.exp2(top - highest), tl.exp2(part_top - highest)
    return highest, total * own + part_total * other, value * own[:, None] + part_value * other[:, None]


@triton.jit
def _widened(stored, dtype: tl.constexpr):
    """Keys or values in the queries' dtype: exactly, as E4M3 has fewer bits than any.

    Of uint8, the bits of E4M3, a 256th of them: as bits of float16, subnormal ones, too. Compute capability 8.0 has no
    instruction for E4M3.
    """
    if stored.dtype == tl.uint8:
        wide = stored.to(tl.uint16)
        half = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
        half = tl.where((wide & 0x7F) == 0x7F, 0x7E00, half)
        return half.to(tl.uint16).to(tl.float16, bitcast=True).to(dtype)
    return stored.to(dtype)


class Planned(NamedTuple):
    """The pages of a step's sequences, as one argument, int32; see `PlanBuffers`."""

    indptr: torch.Tensor
    last_page_len: torch.Tensor
    indices: torch.Tensor


class Partial(NamedTuple):
    """Softmaxes of parts of a sequence, as one argument; float32, and arrived int32.

    sums: of values, [rows, kv_heads, PARTS, group, block_d]. tops, totals: [rows, kv_heads, PARTS, group]. arrived:
    [rows, kv_heads], 0 between launches.
    """

    sums: torch.Tensor
    tops: torch.Tensor
    totals: torch.Tensor
    arrived: torch.Tensor


@triton.jit(do_not_specialize=["least"])
def attend_rows(
    out,
    q,
    k_cache,
    v_cache,
    planned,
    partial,
    sinks,
    scale,
    softcap,
    v_scale,
    least,
    page_stride,
    token_stride,
    head_stride,
    C: tl.constexpr,
):
    """Attention of one token per sequence over its pages; see the module for the equation.

    Grid (kv_heads, rows, the most programs that share a row); a row is one sequence.

    out, q: [rows, heads, head_dim], contiguous. k_cache, v_cache: [pages, block_tokens, kv_heads, head_dim] with the
    given strides; in FP8 (C.float8) of float8_e4m3fn, or of uint8, see `_widened`. Of latents (C.tail) q has `head_dim
    + tail` elements a head, as has k_cache, whose first `head_dim` are values, too; kv_heads counts the programs that
    share the query heads, and `head_stride` is 0. planned: see `Planned`. partial: see `Partial`; rows that several
    programs share use it. scale: of the scores, times log2(e) unless C.caps: then scores s become softcap · tanh(s /
    softcap). v_scale: of values in FP8; that of keys is part of `scale`. sinks: [heads], with C.sinks: a score of each
    head that has no value. least: the least number of tiles of a program. C: `AttentionConstants`.

    Each program that shares a row writes its parts and then adds 1 to `arrived`. The program that arrives last sees
    all earlier writes and adds the parts in a fixed order.

    A key with a non-finite element is stored as NaN, with a value of 0 (`rotate_and_write_heads`), so heads that see it
    become NaN. Nothing is loaded after a row's last token, because an earlier owner of the page may have left NaN
    there.
    """
    HEADS: tl.constexpr = C.heads
    KV_HEADS: tl.constexpr = C.kv_heads
    HEAD_DIM: tl.constexpr = C.head_dim
    BLOCK_TOKENS: tl.constexpr = C.block_tokens
    BLOCK_H: tl.constexpr = _BLOCK_H
    BLOCK_D: tl.constexpr = C.block_d
    TILE: tl.constexpr = C.tile
    PARTS: tl.constexpr = _PARTS
    WINDOW: tl.constexpr = C.window
    TAIL: tl.constexpr = C.tail
    CAPS: tl.constexpr = C.caps
    PDL: tl.constexpr = C.pdl
    indices, values, tops, totals = planned.indices, partial.sums, partial.tops, partial.totals
    head, row, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    first = tl.load(planned.indptr + row)
    length = (tl.load(planned.indptr + row + 1) - first - 1) * BLOCK_TOKENS + tl.load(planned.last_page_len + row)
    begin = tl.maximum(length - WINDOW, 0) if WINDOW else 0
    length -= begin
    tiles = tl.cdiv(length, TILE)
    per_part = tl.cdiv(tiles, PARTS)
    parts = tl.cdiv(tiles, per_part)
    run = tl.maximum(tl.cdiv(parts, tl.num_programs(2)), tl.cdiv(least, per_part))  # the number of parts per program
    sharing = tl.cdiv(parts, run)
    if PDL:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    if split >= sharing:
        return
    column = tl.arange(0, BLOCK_D)
    own = column < HEAD_DIM
    group = tl.arange(0, BLOCK_H)
    of_head = (row.to(tl.int64) * HEADS + head * GROUP + group)[:, None]
    is_group = group < GROUP
    is_head = is_group[:, None] & own[None, :]
    query = tl.load(q + of_head * (HEAD_DIM + TAIL) + column[None, :], mask=is_head, other=0.0)
    if TAIL:
        behind = tl.arange(0, C.block_tail)
        is_tail = behind[None, :] < TAIL
        of_query = of_head * (HEAD_DIM + TAIL) + HEAD_DIM + behind[None, :]
        query_tail = tl.load(q + of_query, mask=is_group[:, None] & is_tail, other=0.0)
    slot = (row * KV_HEADS + head).to(tl.int64)
    top = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    value = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    part_top, part_total, part_value = top, total, value
    for tile in range(split * run * per_part, tl.minimum((split + 1) * run * per_part, tiles)):
        token = tile * TILE + tl.arange(0, TILE)
        is_there = token < length
        place_of = begin + token
        page = tl.load(indices + first + place_of // BLOCK_TOKENS, mask=is_there, other=0).to(tl.int64)
        of_token = page * page_stride + (place_of % BLOCK_TOKENS) * token_stride + head * head_stride
        at = of_token[:, None] + column[None, :]
        mask = is_there[:, None] if BLOCK_D == HEAD_DIM else is_there[:, None] & own[None, :]
        k = tl.load(k_cache + at, mask=mask, other=0.0)
        if C.float8:
            k = _widened(k, query.dtype)
        scores = tl.dot(query, tl.trans(k), input_precision="ieee")
        if TAIL:
            at_tail = of_token[:, None] + HEAD_DIM + behind[None, :]
            tail = tl.load(k_cache + at_tail, mask=is_there[:, None] & is_tail, other=0.0)
            scores = tl.dot(query_tail, tl.trans(tail), scores, input_precision="ieee")
        scores *= scale
        if CAPS:
            tanh = 2 / (1 + tl.exp2(scores * (-2 * 1.4426950408889634 / softcap))) - 1
            scores = softcap * 1.4426950408889634 * tanh
        scores = tl.where(is_there[None, :], scores, float("-inf"))
        highest = tl.maximum(part_top, tl.max(scores, axis=1))
        weights = tl.exp2(scores - highest[:, None])
        fading = tl.exp2(part_top - highest)
        part_total = part_total * fading + tl.sum(weights, axis=1)
        v = k
        if not TAIL:
            v = tl.load(v_cache + at, mask=mask, other=0.0)
            if C.float8:
                v = _widened(v, query.dtype)
        part_value = tl.dot(weights.to(v.dtype), v, part_value * fading[:, None], input_precision="ieee")
        part_top = highest
        if ((tile + 1) % per_part == 0) | (tile + 1 == tiles):
            if sharing > 1:
                at_part = (slot * PARTS + tile // per_part) * GROUP + group
                tl.store(values + at_part[:, None] * BLOCK_D + column[None, :], part_value, mask=is_group[:, None])
                tl.store(tops + at_part, part_top, mask=is_group)
                tl.store(totals + at_part, part_total, mask=is_group)
            else:
                top, total, value = _joined(top, total, value, part_top, part_total, part_value)
            part_top = tl.full([BLOCK_H], float("-inf"), tl.float32)
            part_total = tl.zeros([BLOCK_H], tl.float32)
            part_value = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    if sharing > 1:
        tl.debug_barrier()  # all warps have written
        if tl.atomic_add(partial.arrived + slot, 1, sem="acq_rel", scope="gpu") < sharing - 1:
            return
        tl.store(partial.arrived + slot, 0)
        for index in range(parts):
            at_part = (slot * PARTS + index) * GROUP + group
            # bypass the multiprocessor's own cache, which does not see the writes of others
            part_top = tl.load(tops + at_part, mask=is_group, other=0.0, cache_modifier=".cg")
            part_total = tl.load(totals + at_part, mask=is_group, other=1.0, cache_modifier=".cg")
            at = at_part[:, None] * BLOCK_D + column[None, :]
            part_value = tl.load(values + at, mask=is_group[:, None], other=0.0, cache_modifier=".cg")
            top, total, value = _joined(top, total, value, part_top, part_total, part_value)
    if C.sinks:
        sink = tl.load(sinks + head * GROUP + group, mask=is_group, other=0.0).to(tl.float32) * 1.4426950408889634
        nothing = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
        top, total, value = _joined(top, total, value, sink, tl.full([BLOCK_H], 1.0, tl.float32), nothing)
    value = value / total[:, None]
    if C.float8:
        value = value * v_scale
    tl.store(out + of_head * HEAD_DIM + column[None, :], value.to(out.dtype.element_ty), mask=is_head)


class TritonBackend:
    """Makes the attention objects of one executor, which share buffers.

    A plan is valid until any of them plans again. All of them run on one stream.
    """

    captures = True
    name = f"triton {triton.__version__}"

    def __init__(
        self,
        setup: AttentionSetup,
        num_sms: int,
        *,
        reason: str,
        fix: str = "",
        new_event: Callable[[], Any] | None = None,
    ) -> None:
        """num_sms: multiprocessors of the device. new_event: for tests."""
        num_heads, _, _, block_tokens = self.heads = setup.heads
        max_rows, value_dim = setup.max_rows, setup.value_dim
        self._itemsize = itemsize = setup.dtype.itemsize
        self.reason, self.fix = reason, fix
        self.device = setup.device
        self.buffers = PlanBuffers(max_rows, setup.max_pages_per_row, block_tokens, self.device)
        self.event = (torch.cuda.Event if new_event is None else new_event)()
        constants = replace(attention_constants(*self.heads, itemsize, value_dim), float8=setup.float8_kv)
        self.has_latents, self._kv_heads = value_dim is not None, constants.kv_heads
        self._reads_bits = setup.float8_kv and not _has_float8(self.device)
        shape = self._kv_heads, setup.max_pages_per_row * block_tokens, constants.tile, num_sms
        self._splits = [attention_splits(rows, *shape) for rows in range(1, max_rows + 1)]
        shared = max((rows for rows, (splits, _) in enumerate(self._splits, start=1) if splits > 1), default=0)
        # each tensor starts at a multiple of 16 bytes, else Triton treats it as unaligned
        parts = shared * num_heads * PARTS or 4
        sizes = {"sums": parts * constants.block_d, "tops": parts, "totals": parts}
        self._partial = Partial(
            **{name: setup.scratch.zeros(name, size, torch.float32, self.device) for name, size in sizes.items()},
            arrived=setup.scratch.zeros("arrived", max_rows * self._kv_heads, torch.int32, self.device),
        )
        self._planned = Planned(self.buffers.indptr, self.buffers.last_page_len, self.buffers.indices)
        self._launches = {scores: self._new_launch(scores, constants) for scores in setup.scores}

    def _new_launch(self, scores: Scores, constants: AttentionConstants) -> tuple[KernelLauncher, float, float]:
        """The kernel for layers with such scores, its `scale` and its `softcap`."""
        scale = self.heads.head_dim**-0.5 if scores.scale is None else scores.scale
        early, caps = dependent_launch.begins_early(self.device), scores.softcap is not None
        own = replace(constants, window=scores.window or 0, caps=caps, sinks=scores.has_sinks, pdl=early)
        options = {**attention_options(constants.head_dim, self._itemsize), **dependent_launch.options(early)}
        to_log2 = 1.0 if caps else math.log2(math.e)
        return KernelLauncher(attend_rows, {"C": own, **options}), scale * to_log2, scores.softcap or 0.0

    def ragged(self) -> TritonRaggedAttention:
        """Attention for steps with sequences of any length, run eagerly."""
        return TritonRaggedAttention(self)

    def decode(self, bucket: int) -> TritonDecodeAttention:
        """Attention for `bucket` sequences of one token each; `run` may be captured."""
        return TritonDecodeAttention(self, bucket)

    def plan(
        self, page_table: torch.Tensor, kv_lens: Sequence[int], tables: Sequence[Sequence[int]] | None = None
    ) -> None:
        """Upload the plan of sequences with one token each; see `PlanBuffers.write`."""
        self.event.synchronize()
        self.buffers.write(page_table, kv_lens, tables=tables)
        self.buffers.upload()
        self.event.record()

    def run(
        self,
        q: torch.Tensor,
        cache: KvCache,
        out: torch.Tensor,
        scores: Scores,
        sinks: torch.Tensor | None = None,
    ) -> None:
        """Attend with the planned sequences. q, out: `[rows, heads, head_dim]`. sinks: see `Attention.run`."""
        k_cache, v_cache, scales = cache
        k_scale, v_scale = scales
        if self._reads_bits:
            k_cache, v_cache = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
            k_scale, v_scale = 256 * k_scale, 256 * v_scale
        if k_cache.stride() != v_cache.stride() or k_cache.stride(3) != 1 or not q.is_contiguous():
            raise ValueError("K and V must have the same strides; q and the heads of the cache must be contiguous")
        splits, least = self._splits[len(q) - 1]
        launch, scale, softcap = self._launches[scores]
        launch(
            (self._kv_heads, len(q), splits),
            (out, q, k_cache, v_cache, self._planned, self._partial, q if sinks is None else sinks),
            (scale * k_scale, softcap, v_scale, least),
            (*k_cache.stride()[:2], 0 if self.has_latents else k_cache.stride(2)),
        )


def _has_float8(device: torch.device) -> bool:
    """True if Triton can read E4M3 on the device."""
    if device.type != "cuda":
        return False
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor >= LEAST_FLOAT8


class TritonRaggedAttention(Attention):
    """Eager attention for sequences of any length: prefill chunks first, by PyTorch, then sequences of one token."""

    supports_sinks = True

    def __init__(self, backend: TritonBackend) -> None:
        self._backend = backend
        self._prefill = (LatentAttention if backend.has_latents else PagedAttention)(backend.heads, backend.device)
        self._prefill_tokens = self._num_tokens = 0

    def _plan(self, rows: PlannedRows) -> None:
        qo_indptr, page_table, kv_lens, *_ = rows
        split = rows.num_prefills
        self._prefill_tokens, self._num_tokens = qo_indptr[split], qo_indptr[-1]
        if split:
            self._prefill.plan(qo_indptr[: split + 1], page_table[:split], kv_lens[:split], parts=split)
        if split < len(kv_lens):
            self._backend.plan(page_table[split:], kv_lens[split:])

    def _attend(self, q: torch.Tensor, cache: KvCache, out: torch.Tensor, scores: Scores, terms: HeadTerms) -> None:
        split = self._prefill_tokens
        if split:
            self._prefill.run(q[:split], cache.k, cache.v, out[:split], scores, terms.sinks, kv_scales=cache.scales)
        if split < self._num_tokens:
            self._backend.run(q[split:], cache, out[split:], scores, terms.sinks)

    def _attend_latents(
        self,
        q: torch.Tensor,
        cache: torch.Tensor,
        heads: LatentHeads,
        out: torch.Tensor,
        scores: Scores,
        chosen: torch.Tensor | None,
        sinks: torch.Tensor | None,
    ) -> None:
        split = self._prefill_tokens
        if split:
            self._prefill.run_latents(q[:split], cache, heads, out[:split], scores, sinks=sinks)
        if split < self._num_tokens:
            rows = heads.absorb(q[split:], split)
            found = rows.new_empty(*rows.shape[:2], heads.kv_rank)
            self._backend.run(rows, KvCache(cache, cache), found, scores, sinks)
            heads.expand(found, out[split:], split)


class TritonDecodeAttention(Attention):
    """Attention for a bucket of sequences with one token each, over static buffers.

    Call `plan` before every replay; `run` is captured in the graph.
    """

    supports_sinks = True

    def __init__(self, backend: TritonBackend, bucket: int) -> None:
        self._backend = backend
        self._bucket = bucket

    def _plan(self, rows: PlannedRows) -> None:
        rows.check_bucket(self._bucket)
        self._backend.plan(rows.page_table, rows.kv_lens, rows.tables)

    def _attend(self, q: torch.Tensor, cache: KvCache, out: torch.Tensor, scores: Scores, terms: HeadTerms) -> None:
        self._backend.run(q, cache, out, scores, terms.sinks)


# Rules for type checkers are at the end, so that kernels keep their lines.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false
