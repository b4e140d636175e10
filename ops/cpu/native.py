"""The native CPU decoder: a whole step of a model in one call.

If the library is not available (`native_library`), torch operators serve; both give the same tokens.

Tests: tests/ops/cpu/test_native_head.py, tests/ops/cpu/test_native_layer_paths.py
"""

from __future__ import annotations

import ctypes
import os
from array import array
from collections.abc import Collection, Mapping, Sequence
from ctypes import Structure, c_int32, c_void_p
from dataclasses import asdict
from itertools import accumulate
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import numpy as np
import torch

from ..attention.blocks import BlockSpans
from ..library.described_adapters import described
from ..library.described_ops import DescribedOps, described_registers
from ..library.native_descriptors import (
    ELEMENT_OF,
    described_gemm_shapes,
)
from ..library.native_integers import IntegerPanels, described_integers
from ..library.native_layout import layout_of
from ..library.native_library import required
from ..library.native_model import NativeModel
from ..library.native_program import NativeOp
from ..lora.sgmv import AdapterRows, Segments
from ..moe.native_mixture import NativeMixtureLora
from ..ranks.ranks import Ranks
from ..sampling.sampling import RowLogprobs, RowSamplingParams, inverse_temperature
from .lora_offload import Offloading, OffloadTables

CHECKS_STEPS = os.environ.get("CHORUS_CHECK_STEPS") == "1"
"""True if `check_step` checks every step, as in tests. Without the check, a wrong index reads arbitrary memory."""


class NativeStates(Protocol):
    """Pages of the states of a step's sequences; see `core.model.paged_states`."""

    @property
    def read(self) -> torch.Tensor:
        """`[sequences, pages]` int64."""
        ...

    @property
    def written(self) -> torch.Tensor: ...

    @property
    def fresh(self) -> torch.Tensor:
        """`[sequences]` bool: those that begin with a state of zeros."""
        ...

    @property
    def accepted(self) -> Sequence[int]:
        """For each sequence, the drafts of the step before whose inputs its state takes in first."""
        ...

    @property
    def drafts(self) -> Sequence[int]:
        """For each sequence, the last of its tokens, whose inputs are kept beside its state."""
        ...


class NativeRows:
    """A step's sequences for the native decoder, with the `plan` signature of `PagedAttention`."""

    __slots__ = ("blocks", "kv_lens", "page_table", "qo_indptr")

    def plan(
        self,
        qo_indptr: Sequence[int],
        page_table: torch.Tensor,
        kv_lens: Sequence[int],
        *,
        blocks: BlockSpans | None = None,
    ) -> None:
        """See `PagedAttention.plan`; here sequences may come in any order."""
        self.qo_indptr = array("i", qo_indptr)  # int32; making a tensor of a few numbers takes ten times as long
        self.kv_lens = array("i", kv_lens)
        self.page_table = page_table
        self.blocks = blocks


def _without_added(token_ids: torch.Tensor, vocab: int, segments: Segments | None) -> torch.Tensor:
    """The tokens, with the first of the model's for those beyond them of which an adapter has rows."""
    if segments is None or not len(beyond := (token_ids >= vocab).nonzero()):
        return token_ids
    known = token_ids.clone()
    for at in beyond[:, 0].tolist():
        own = (rows.token_ids for begin, end, rows in segments if begin <= at < end)
        if any(int(token_ids[at]) in ids for ids in own):
            known[at] = 0
    return known


def check_step(
    model: NativeModel,
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    page: torch.Tensor,
    offset: torch.Tensor,
    rows: NativeRows,
    logit_tokens: torch.Tensor,
) -> None:
    """Raise IndexError if a step would read or write outside the model's tensors, the arena or its own tokens."""
    block, table, groups = model.block_tokens, rows.page_table.tolist(), model.page_groups
    last = [length - 1 for length in rows.kv_lens] if groups else []
    table = table if groups else []
    width = rows.page_table.shape[1] // max(1, groups)
    read = [page for row, at in zip(table, last, strict=True) for page in row[: groups * (at // block + 1)]]
    for name, values, limit in (
        ("token id", token_ids.flatten().tolist(), len(model.embed)),
        ("position", positions.flatten().tolist(), model.positions),
        ("page that is written", page.flatten().tolist(), len(model.arena)),
        ("offset in a page", offset.flatten().tolist(), block),
        ("last position of a row", last, width * block),
        ("page that is read", read, len(model.arena)),
        ("token that has logits", logit_tokens.flatten().tolist(), len(token_ids)),
    ):
        _check(name, values, limit)


def _media(tokens: int, places: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The row of each token `[tokens]` int32, -1 where it has none, and the rows in float32."""
    row_of = torch.full((tokens,), -1, dtype=torch.int32)
    row_of[places] = torch.arange(len(places), dtype=torch.int32)
    return row_of, rows.float().contiguous()


def _check(name: str, values: Sequence[int], limit: int) -> None:
    if values and not 0 <= min(values) <= max(values) < limit:
        wrong = next(value for value in values if not 0 <= value < limit)
        raise IndexError(f"a step's {name} is {wrong}; it must be from 0 to {limit - 1}")


class _LogitsRoom:
    """Memory for rows of logits, as many as were needed at once so far."""

    def __init__(self) -> None:
        self._whole = torch.empty(0)

    def first(self, rows: int, width: int) -> torch.Tensor:
        """Return its first `rows` rows of `width` values, uninitialized; reallocates if there are too few."""
        count = rows * width
        if len(self._whole) < count:
            self._whole = torch.empty(count)
        return self._whole[:count].view(rows, width)


class NativeDecoder:
    """Runs steps on its own team of threads, including the caller's. One step at a time."""

    def __init__(self, model: NativeModel, threads: int, ranks: Ranks | None = None) -> None:
        """ranks: the TP ranks that compute shares of each layer with this one; then the model's vocabulary is a share,
        too.
        """
        self._library = found = required()
        self._model = model  # keeps the tensors alive
        self._adapters: WeakKeyDictionary[AdapterRows, tuple[Structure, tuple[torch.Tensor, ...]]] = WeakKeyDictionary()
        self._layout = layout_of(found)
        self._merged: DescribedOps | None = None  # of `use_merged`
        self._ops = ops = DescribedOps(model.ops, self._layout)
        registers = described_registers(model.registers, self._layout)
        gemm_shapes = described_gemm_shapes(model.gemm_shapes)
        shape, pages = model.recurrent or (None, None)
        description = self._layout.filled(
            "ModelDesc",
            hidden=model.hidden, layers=model.num_layers, vocab=model.vocab, block_tokens=model.block_tokens,
            page_groups=model.page_groups, num_gemm_shapes=len(model.gemm_shapes), eps=model.eps,
            norm_kind=model.norm_kind, embedding_multiplier=model.embedding_multiplier,
            head_bias=_pointer_or_null(model.head_bias),
            embedding_norm=_pointer_or_null(model.embedding_norm),
            position_table=_pointer_or_null(model.position_table),
            logits_scale=model.logits_scale, logits_softcap=model.logits_softcap,
            ops=ops.address, num_ops=ops.count,
            registers=ctypes.addressof(registers), num_registers=len(model.registers),
            gemm_shapes=ctypes.addressof(gemm_shapes),
            embed=_pointer(model.embed), lm_head=_data_of(model.lm_head),
            lm_head_integers=described_integers(model.lm_head), norm=_pointer(model.norm),
            arena=_pointer(model.arena), page_elems=model.arena.shape[1],
            page_bytes=model.arena.shape[1] * model.arena.itemsize, float8_kv=model.float8_kv,
            embed_module=model.embed_module, head_module=model.head_module,
            embed_rows_module=model.embed_rows_module, head_rows_module=model.head_rows_module,
            first_token=model.first_token,
            delta={} if shape is None else asdict(shape), **({} if pages is None else asdict(pages)),
        )  # fmt: skip
        self._handle = None  # until it is made, which may fail
        self.best: list[int] = []
        self.kept: Sequence[int] | None = None
        self.row_params: Mapping[int, RowSamplingParams] = {}
        self.offloading: Offloading | None = None
        self._step = self._layout.filled("StepDesc")
        self._logits, self._prompt_logits = _LogitsRoom(), _LogitsRoom()
        self._step.logits_width = model.vocab
        self._segments: tuple[Segments | None, tuple[Any, ...]] = (None, ())
        self._model_segments: tuple[Segments | None, tuple[Any, ...]] = (None, ())
        self._mixture_segments: tuple[Segments | None, tuple[Any, ...]] = (None, ())
        self._handle = self._library.chorus_decoder_create(
            ELEMENT_OF[model.embed.dtype], ctypes.addressof(description), threads
        )
        self.sampling = NativeSampling(self._library, self._handle)
        self._ranks = ranks  # kept alive
        if ranks is not None:
            self._library.chorus_decoder_join(self._handle, ranks.handle, len(model.embed))

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        page: torch.Tensor,
        offset: torch.Tensor,
        rows: NativeRows,
        logit_tokens: torch.Tensor,
        segments: Segments,
        max_stall: float = 0.0,
        kept_tokens: torch.Tensor | None = None,
        merged: bool = False,
        states: NativeStates | None = None,
        model_segments: Segments | None = None,
        mixture_segments: Segments | None = None,
        media: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Compute a step and write its KV; return logits `[kept, vocab + added]` float32, in memory that the next step
        overwrites. The first rank has columns of the tokens that adapters of the step add to the model's: -inf in rows
        of adapters that have no such token.

        token_ids, positions, offset: `[tokens]` int64. page: `[page groups, tokens]` int64.
        logit_tokens: `[logits]` int64, the tokens to compute logits for; `kept` names those to return, None: all.
        kept_tokens: `[kept]` int64, the tokens whose hidden states are kept, for `prompt_logits` and `hidden_states`
        afterwards; those of prompt log-probabilities come first. max_stall: total seconds to wait for adapters being
        loaded. merged: use the weights of `use_merged`. states: needed by a model with Gated DeltaNet. model_segments:
        of adapters of the model's own modules, mixture_segments: of those of mixtures of experts; None: there are none.
        media: rows that are some tokens' embeddings, see `MediaRows`.

        Afterwards `best` has a token for each logit token: the argmax (the first of equal ones; -1 if a logit is NaN or
        +inf) or, for tokens in `row_params`, a sampled one. Logits that sampling needs and that were not kept are
        recomputed. With several TP ranks, the logits are this rank's columns, `best` on the first rank is over all
        ranks, and none samples.
        """
        step = self._step
        offloaded = None
        if self._segments[0] is not segments or step.segment_ready:
            offloaded = self._set_segments(segments)
        if self._model_segments[0] is not model_segments or step.model_ready:
            self._set_model_segments(model_segments)
        if self._mixture_segments[0] is not mixture_segments or step.mixture_ready:
            self._set_mixture_segments(mixture_segments)
        wanted, kept = len(logit_tokens), self.kept
        rows_kept = None
        if kept is not None and 0 < len(kept) < wanted:
            rows_kept = array("i", [-1]) * wanted
            for index, at in enumerate(kept):
                rows_kept[at] = index
        logits = self._logits.first(wanted if kept is None else len(kept), step.logits_width)
        if kept_tokens is not None:
            logit_tokens = torch.cat((logit_tokens, kept_tokens))
        if CHECKS_STEPS:
            check_step(
                self._model,
                token_ids=_without_added(token_ids, len(self._model.embed), model_segments),
                positions=positions,
                page=page,
                offset=offset,
                rows=rows,
                logit_tokens=logit_tokens,
            )
        best = array("q", bytes(8 * wanted))
        step.tokens, step.rows, step.logits_wanted = len(token_ids), len(rows.kv_lens), wanted
        step.token_ids, step.positions = _pointer(token_ids), _pointer(positions)
        step.offset, step.page, step.page_stride = _pointer(offset), page.data_ptr(), page.stride(0)
        step.qo_indptr, step.kv_lens = rows.qo_indptr.buffer_info()[0], rows.kv_lens.buffer_info()[0]
        step.page_table, step.table_stride = rows.page_table.data_ptr(), rows.page_table.stride(0)
        step.logit_tokens = _pointer(logit_tokens)
        step.states_wanted = len(logit_tokens) - wanted
        step.logits = logits.data_ptr() if len(logits) else None
        step.logit_rows = None if rows_kept is None else rows_kept.buffer_info()[0]
        step.best = best.buffer_info()[0]
        rows_to_sample = None
        if self.row_params:
            sampled = self.sampling.described(self.row_params.values())
            rows_to_sample = np.zeros(wanted, sampled.dtype)
            rows_to_sample[list(self.row_params)] = sampled
        step.samples = None if rows_to_sample is None else rows_to_sample.ctypes.data
        if self._model.recurrent is not None:
            self._set_states(states, len(rows.kv_lens))
        step.max_stall_ns = int(max_stall * 1e9)
        row_of, media_rows = (None, None) if media is None else _media(len(token_ids), *media)
        step.media = None if row_of is None else _pointer(row_of)
        step.media_rows = None if media_rows is None else _pointer(media_rows)
        step.media_stride = 0 if media_rows is None else media_rows.shape[1]
        step.block_before = None if rows.blocks is None else rows.blocks.before.ctypes.data
        step.block_behind = None if rows.blocks is None else rows.blocks.behind.ctypes.data
        step.ops = self._merged.address if merged and self._merged is not None else None
        step.offloaded = None if offloaded is None else offloaded.address
        self._library.chorus_decoder_forward(self._handle, ctypes.addressof(step))
        if offloaded is not None:
            offloaded.note_offloaded()
        if step.segment_ready:
            late = self._segments[1][-1]
            segments.late = [index for index in range(step.segments.count) if late[index]]
        if step.model_ready and model_segments is not None:
            late = self._model_segments[1][-1]
            model_segments.late = [index for index in range(step.model_segments.count) if late[index]]
        if step.mixture_ready and mixture_segments is not None:
            late = self._mixture_segments[1][-1]
            mixture_segments.late = [index for index, is_late in enumerate(late) if is_late]
        self.best = best.tolist()
        return logits

    def prompt_logits(self, begin: int, end: int) -> torch.Tensor:
        """Logits `[end - begin, vocab + added]` of some of the last step's kept tokens, as of `forward`, valid until
        the next call.

        Raises RuntimeError if the step kept fewer.
        """
        self._check_kept(end)
        logits = self._prompt_logits.first(end - begin, self._step.logits_width)
        self._library.chorus_decoder_prompt_logits(self._handle, begin, end - begin, logits.data_ptr())
        return logits

    def hidden_states(self, begin: int, end: int) -> torch.Tensor:
        """Final hidden states `[end - begin, hidden]` float32 of some of the last step's kept tokens.

        Raises RuntimeError if the step kept fewer.
        """
        self._check_kept(end)
        states = torch.empty(end - begin, self._model.hidden)
        first = self._step.logits_wanted + begin
        self._library.chorus_decoder_hidden_states(self._handle, first, end - begin, states.data_ptr())
        return states

    def _check_kept(self, end: int) -> None:
        if end > self._step.states_wanted:
            raise RuntimeError(f"the last step kept the hidden states of {self._step.states_wanted} tokens, not {end}")

    def merge(
        self,
        layer: int,
        product: str,
        rows: Sequence[AdapterRows],
        origin: torch.Tensor | IntegerPanels,
        out: torch.Tensor,
    ) -> float:
        """Write `origin + Σ scale·B·A` of one of a layer's products into `out`, packed in the model's dtype; not
        during a step.

        Returns the largest factor by which the norm of a row grows; infinity if a sum is not finite.
        """
        parts = (c_void_p * len(rows))(*(ctypes.addressof(self._descriptor(part)) for part in rows))
        merge = self._layout.filled(
            "MergeDesc",
            origin=_data_of(origin),
            integers=described_integers(origin),
            to=_pointer(out),
            shape=self._model.gemm_shape_of[layer][product],
            layer=layer,
            parts=ctypes.addressof(parts),
            count=len(rows),
        )
        return self._library.chorus_decoder_merge(self._handle, ctypes.addressof(merge))

    def use_merged(self, ops: Sequence[NativeOp] | None) -> None:
        """Have steps that say so run these ops, the model's with other weights, in its own's place; None: there are
        none.
        """
        self._merged = None if ops is None else DescribedOps(ops, self._layout)

    def _set_states(self, states: NativeStates | None, count: int) -> None:
        """Describe the states of a step's sequences, which are `count`."""
        if states is None or len(states.fresh) != count:
            raise RuntimeError(f"a step of {count} sequences has no states for them")
        if CHECKS_STEPS:
            for pages in (states.read, states.written):
                _check("page of a state", pages.flatten().tolist(), len(self._model.arena))
        step = self._step
        step.state_read, step.state_written = _pointer(states.read), _pointer(states.written)
        step.state_fresh, step.state_stride = _pointer(states.fresh), states.read.shape[1]
        accepted, drafts = array("i", accumulate(states.accepted, initial=0)), array("i", states.drafts)
        step.state_accepted, step.state_drafts = accepted.buffer_info()[0], drafts.buffer_info()[0]
        self._state_counts = accepted, drafts  # the step has their addresses

    def _set_segments(self, segments: Segments) -> OffloadTables | None:
        """Describe a step's segments, once for all steps with the same ones; return the offloaded ones."""
        step = self._step
        step.segments, kept = self._described_segments(segments)
        adapters, *_, ready, late = kept
        step.segment_ready = None if ready is None else ctypes.addressof(ready)
        step.segment_late = ctypes.addressof(late)
        self._segments = segments, kept
        offloaded = None if ready is None or self.offloading is None else self.offloading.begin(segments)
        return None if offloaded is None else OffloadTables(offloaded, segments.rows, adapters)

    def _set_model_segments(self, segments: Segments | None) -> None:
        """As `_set_segments`, of the model's own modules; none of them is offloaded."""
        step = self._step
        step.logits_width = self._model.vocab + self._num_added(segments)
        if segments is None or not segments.rows:
            step.model_segments = self._layout.filled("Segments")
            step.model_ready = step.model_late = None
            self._model_segments = segments, ()
            return
        step.model_segments, kept = self._described_segments(segments)
        *_, ready, late = kept
        step.model_ready = None if ready is None else ctypes.addressof(ready)
        step.model_late = ctypes.addressof(late)
        self._model_segments = segments, kept

    def _set_mixture_segments(self, segments: Segments | None) -> None:
        """As `_set_model_segments`, of mixtures of experts."""
        step = self._step
        if segments is None or not segments.rows:
            step.mixture = step.mixture_ready = step.mixture_late = None
            self._mixture_segments = segments, ()
            return
        lora = NativeMixtureLora(self._model.arena, segments)
        ready, late = _arrivals(segments)
        step.mixture = ctypes.addressof(lora.description)
        step.mixture_ready = None if ready is None else ctypes.addressof(ready)
        step.mixture_late = ctypes.addressof(late)
        self._mixture_segments = segments, (lora, ready, late)

    def _num_added(self, segments: Segments | None) -> int:
        """The most tokens beyond the model's that an adapter has rows of the head for. The first rank computes them."""
        module, vocab = self._model.head_rows_module, len(self._model.embed)
        if segments is None or module < 0 or (self._ranks is not None and self._ranks.rank):
            return 0
        last = (rows.token_ids[-1] for rows in segments.rows if rows.token_ids and rows.a_offset[module] >= 0)
        return max((token + 1 - vocab for token in last if token >= vocab), default=0)

    def _described_segments(self, segments: Segments) -> tuple[Structure, tuple[Any, ...]]:
        """A step's segments, and what is to be kept alive as long as the step points to it: with the adapters first,
        then the counts of arrived layers, if any is still coming, and room for those that are late.
        """
        count = len(segments.rows)
        adapters = (c_void_p * count)(*(ctypes.addressof(self._descriptor(rows)) for rows in segments.rows))
        begin, end = (c_int32 * count)(*segments.begin), (c_int32 * count)(*segments.end)
        level = (c_int32 * count)(*segments.level) if any(segments.level) else None
        ready, late = _arrivals(segments)
        found = self._layout.filled(
            "Segments",
            count=count,
            begin=ctypes.addressof(begin),
            end=ctypes.addressof(end),
            adapters=ctypes.addressof(adapters),
            level=None if level is None else ctypes.addressof(level),
            vectors=bool(segments.vectors),
            undoes=any(segments.rows[index].scale < 0 for index in segments.vectors),
        )
        return found, (adapters, begin, end, level, ready, late)

    @property
    def threads(self) -> int:
        """Number of threads that the next step uses: all, or fewer while other processes keep the processors busy."""
        return self._library.chorus_decoder_threads(self._handle)

    def close(self) -> None:
        if self._handle is not None:
            self._library.chorus_decoder_destroy(self._handle)
            self._handle = None

    def __del__(self) -> None:
        self.close()

    def _descriptor(self, rows: AdapterRows) -> Structure:
        found = self._adapters.get(rows)
        if found is None:
            found = self._adapters[rows] = described(rows)
        return found[0]


class NativeSampling:
    """Samples and computes log-probabilities from rows of logits, on a decoder's threads, between its steps; see
    `sampling`.
    """

    def __init__(self, library: ctypes.CDLL, decoder: int) -> None:
        self._run = library.chorus_decoder_sample
        layout = layout_of(library)
        self._samples, self._logprobs = layout.record("SampleRow"), layout.record("LogprobRow")
        self._decoder = decoder

    def described(self, row_params: Collection[RowSamplingParams]) -> np.ndarray:
        """Rows of the library's `SampleRow`, one per sampled token; their logits are set later."""
        found = np.zeros(len(row_params), self._samples)
        temperature, found["u"], found["top_k"], found["top_p"], found["min_p"] = zip(*row_params, strict=True)
        found["inverse_temperature"] = [inverse_temperature(it) for it in temperature]
        return found

    def sample(self, logits: torch.Tensor, rows: Sequence[int], row_params: Sequence[RowSamplingParams]) -> list[int]:
        """Sample a token for each of `rows` of the logits; -1 if no logit is above -inf, or one is NaN or +inf."""
        first, stride = _rows_of(logits)
        rows_to_sample = self.described(row_params)
        rows_to_sample["logits"] = first + np.asarray(rows) * stride
        self._run(self._decoder, rows_to_sample.ctypes.data, len(rows_to_sample), None, 0, logits.shape[1])
        return rows_to_sample["token"].tolist()

    def row_logprobs(
        self, logits: torch.Tensor, rows: Sequence[int], tokens: Sequence[int], counts: Sequence[int]
    ) -> RowLogprobs:
        """Log-probability of a token for each of `rows`, and of as many of its most likely tokens as `counts` says."""
        most = min(max(counts), logits.shape[1])
        logprobs = np.empty(len(rows), self._logprobs)
        ids, values = np.empty((len(rows), most), np.int64), np.empty((len(rows), most))
        first, stride = _rows_of(logits)
        logprobs["logits"] = first + np.asarray(rows) * stride
        logprobs["token"], logprobs["count"] = tokens, counts
        logprobs["ids"] = ids.ctypes.data + 8 * most * np.arange(len(rows))
        logprobs["values"] = values.ctypes.data + 8 * most * np.arange(len(rows))
        self._run(self._decoder, None, 0, logprobs.ctypes.data, len(logprobs), logits.shape[1])
        return RowLogprobs(logprobs["own"].tolist(), ids.tolist(), values.tolist())


def _rows_of(logits: torch.Tensor) -> tuple[int, int]:
    """Address of the first row, and bytes from row to row."""
    if logits.dtype != torch.float32 or logits.stride(1) != 1:
        raise ValueError("logits must be contiguous rows of float32")
    return logits.data_ptr(), 4 * logits.stride(0)


def _arrivals(segments: Segments) -> tuple[Any, Any]:
    """Addresses of the counts of arrived layers, by segment, if any adapter is still coming, and room for those that
    are late.
    """
    count = len(segments.rows)
    return (c_void_p * count)(*segments.ready) if any(segments.ready) else None, (c_int32 * count)()


def _data_of(weights: torch.Tensor | IntegerPanels | None) -> int | None:
    return _pointer_or_null(weights.data if isinstance(weights, IntegerPanels) else weights)


def _pointer_or_null(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else _pointer(tensor)


def _pointer(tensor: torch.Tensor) -> int:
    if not tensor.is_contiguous():
        raise ValueError("the native decoder needs contiguous tensors")
    return tensor.data_ptr()
