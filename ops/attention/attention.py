"""Paged attention with FlashInfer's plan/run split: `plan` once a step on host data, `run` once a layer.

This is torch's, for a CPU and for models that FlashInfer does not take; rows are prefill chunks first, then decode
rows of one token each. `attention_backend` says which implementation serves.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, overload

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from ..elementwise.float8_kv import DTYPE as FLOAT8
from ..elementwise.float8_kv import UNSCALED, KvScales
from ..upload import on_device
from .blocks import BlockMask, BlockSpans
from .latents import LatentHeads
from .relative import Relative

#: Makes keys of means `[blocks, key]` of blocks that begin at some places `[blocks]`.
KeysOf = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Scores:
    """How a layer turns q · k into weights: `softmax(cap(scale · q · k))` over the keys that a query sees."""

    scale: float | None = None
    """None: head_dim^-0.5."""

    window: int | None = None
    """Keys that a query sees, its own included; None: all up to its own."""

    softcap: float | None = None
    """`cap(s) = softcap · tanh(s / softcap)`."""

    has_sinks: bool = False
    """Each head has a sink, which `Attention.run` takes: one more score in the softmax, of a value of zeros."""

    blocks: BlockMask = BlockMask.NONE
    """What a query sees of its token's block, where a step has blocks."""

    has_slopes: bool = False
    """Each head has a slope, which `Attention.run` takes: a score loses it for each token between its key and the query
    (ALiBi, arXiv 2108.12409).
    """

    top_k: int | None = None
    """Keys that a query attends to, of those that it sees, as `Attention.choose` or `choose_blocks` gives them; None:
    all.
    """

    key_block: int = 0
    """Keys of a block, where blocks of them are chosen; 0: single ones are."""

    has_relative: bool = False
    """Numbers that `Attention.run` takes are added to scores: see `Relative`."""

    @property
    def needs_places(self) -> bool:
        """True if what scores lose or win depends on how far away a key is."""
        return self.has_slopes or self.has_relative


#: Scores that are made at once where attention makes them, which soft caps, sinks, slopes and latents ask for: in
#: float32 256 MiB.
MOST_SCORES = 1 << 26

PLAIN = Scores()
"""Attention as in "Attention Is All You Need", causal."""


class HeadTerms(NamedTuple):
    """What a layer has for each of its query heads, `[heads]`; None where it has none."""

    sinks: torch.Tensor | None = None
    slopes: torch.Tensor | None = None
    relative: Relative | None = None
    """Of its queries, besides."""

    def of_chunk(self, tokens: slice) -> HeadTerms:
        """Of a chunk's tokens."""
        return self if self.relative is None else self._replace(relative=self.relative.of_chunk(tokens))

    def of_rows(self, first: int) -> HeadTerms:
        """Of rows of one token, from the token `first` on."""
        return self if self.relative is None else self._replace(relative=self.relative.of_rows(first))

    def split(self, tokens: int, parts: int) -> list[HeadTerms]:
        """Of so many tokens at a time."""
        if self.relative is None:
            return [self] * parts
        return [self._replace(relative=each) for each in self.relative.split(tokens)]


class KeyBlocks(NamedTuple):
    """Blocks of keys, and how many of them a query attends to."""

    size: int
    """Keys of a block."""

    top: int
    local: int
    """The last blocks that a query sees, its own first, which are always among them."""


class HeadShape(NamedTuple):
    """Heads of a layer, and tokens of a page."""

    num_heads: int
    kv_heads: int
    head_dim: int
    block_tokens: int

    @property
    def group(self) -> int:
        """Heads that share a KV head."""
        return self.num_heads // self.kv_heads


class Scratch:
    """Device memory that one launch uses at a time. Backends that share it run on one stream."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, int], torch.Tensor] = {}

    def zeros(self, name: str, size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """`size` elements, which are 0 at first; the same tensor for the same name and size."""
        if (name, size) not in self._made:
            self._made[name, size] = torch.zeros(size, dtype=dtype, device=device)
        return self._made[name, size]


@dataclass(frozen=True, slots=True)
class AttentionSetup:
    """Sizes that a backend is made for."""

    heads: HeadShape
    dtype: torch.dtype
    device: torch.device
    max_rows: int
    """The most sequences of a step."""
    max_pages_per_row: int
    """The most pages of a sequence."""
    scores: tuple[Scores, ...] = (PLAIN,)
    """The different ones of the layers that it serves; they have the same window."""
    scratch: Scratch = field(default_factory=Scratch)
    """For all backends of an executor."""
    float8_kv: bool = False
    """Keys and values are in FP8; see `float8_kv`."""
    value_dim: int | None = None
    """Of latents, whose values are the first elements of keys; None: values are kept by themselves."""

    @property
    def kv_dtype(self) -> torch.dtype:
        """Of the cache."""
        return FLOAT8 if self.float8_kv else self.dtype


class PlannedRows(NamedTuple):
    """A step's rows; see `Attention.plan`."""

    qo_indptr: Sequence[int]
    page_table: torch.Tensor
    kv_lens: Sequence[int]
    tables: Sequence[Sequence[int]] | None = None
    parts: int | None = None
    """Rows at the beginning that are parts of chunks of prompts, of any length; None: those with several tokens."""
    blocks: BlockSpans | None = None
    """None: the step has none."""

    @property
    def num_prefills(self) -> int:
        """Rows at the beginning that are chunks of prompts; each of the others has one token. ValueError where rows are
        in another order.
        """
        return count_prefills(self.qo_indptr, len(self.kv_lens)) if self.parts is None else self.parts

    def seen(self, window: int, block_tokens: int) -> PlannedRows:
        """As if each row began with the block of the first token that its tokens see."""
        counts = np.diff(self.qo_indptr)
        lens = np.array(self.kv_lens)
        firsts = np.maximum(0, lens - counts - window + 1) // block_tokens
        lens = lens - firsts * block_tokens
        width = self.page_table.shape[1]
        places = firsts[:, None] + np.arange(min(width, -(-int(lens.max(initial=1)) // block_tokens)))
        table = self.page_table.gather(1, torch.from_numpy(places.clip(max=width - 1)))
        return PlannedRows(self.qo_indptr, table, lens.tolist(), blocks=self.blocks)

    def in_chunks(self, chunk: int, block_tokens: int) -> PlannedRows:
        """As if each row's tokens of a chunk of the text were a row of their own, which begins with that chunk."""
        if self.blocks is not None:
            raise NotImplementedError("blocks of tokens that see each other, in layers that attend to chunks")
        indptr, lens = np.array(self.qo_indptr), np.array(self.kv_lens)
        firsts = lens - np.diff(indptr)
        counts = np.maximum(1, (lens - 1) // chunk - firsts // chunk + 1)
        row = np.repeat(np.arange(len(lens)), counts)
        begins = (firsts[row] // chunk + np.arange(len(row)) - np.repeat(counts.cumsum() - counts, counts)) * chunk
        ends = np.minimum(begins + chunk, lens[row])
        tokens = ends - np.maximum(begins, firsts[row])
        width = self.page_table.shape[1]
        places = np.arange(min(width, -(-int((ends - begins).max(initial=1)) // block_tokens)))
        places = torch.from_numpy((begins[:, None] // block_tokens + places).clip(max=width - 1))
        table = self.page_table[torch.from_numpy(row)].gather(1, places)
        parts = int(counts[: self.num_prefills].sum())
        return PlannedRows([0, *tokens.cumsum().tolist()], table, (ends - begins).tolist(), parts=parts)

    def check_bucket(self, bucket: int) -> None:
        """ValueError where the step is not of exactly `bucket` rows of one token."""
        rows = len(self.kv_lens)
        if rows != bucket or self.qo_indptr[-1] != bucket or self.num_prefills:
            raise ValueError(f"the bucket has {bucket} rows of one token, the step {rows} rows")


class KvCache(NamedTuple):
    """A layer's K and V, `[num_pages, block_tokens, kv_heads, head_dim]`, any strides; of latents both are the keys.

    scales: factors of the stored values; of FP8.
    """

    k: torch.Tensor
    v: torch.Tensor
    scales: KvScales = UNSCALED


class Attention(ABC):
    """Causal grouped-query attention over a paged KV cache."""

    supports_sinks = False
    """Whether it serves layers with sinks."""
    supports_slopes = False
    """Whether it serves layers with slopes."""
    supports_relative = False
    """Whether it serves layers that add numbers of queries and distances to scores."""
    supports_blocks = False
    """Whether it serves steps with blocks."""
    supports_chosen = False
    """Whether it serves layers whose queries attend to chosen tokens alone."""

    def plan(
        self,
        qo_indptr: Sequence[int],
        page_table: torch.Tensor,
        kv_lens: Sequence[int],
        tables: Sequence[Sequence[int]] | None = None,
        parts: int | None = None,
        blocks: BlockSpans | None = None,
    ) -> None:
        """Prepare a step.

        qo_indptr: row i has tokens `qo_indptr[i]:qo_indptr[i+1]`, the last of its `kv_lens[i]` tokens.
        page_table: `[rows, max_pages]` int64, in host memory wherever the cache is; entries past a row's pages must be
        valid page ids (the dummy page). tables: the block tables that page_table was filled from, for implementations
        that keep their results for the last step's; they are lists that only ever grow.
        Rows with more than one token come first, unless `parts` says how many do: see `PlannedRows`. blocks: of the
        step's tokens, where layers have masks for them.
        """
        if blocks is not None and not self.supports_blocks:
            raise NotImplementedError(f"{type(self).__name__} has no blocks of tokens that see each other")
        self._plan(PlannedRows(qo_indptr, page_table, kv_lens, tables, parts, blocks))

    def run(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        out: torch.Tensor | None = None,
        scores: Scores = PLAIN,
        sinks: torch.Tensor | None = None,
        kv_scales: KvScales = UNSCALED,
        slopes: torch.Tensor | None = None,
        chosen: torch.Tensor | None = None,
        relative: Relative | None = None,
    ) -> torch.Tensor:
        """Attend with one layer's cache.

        q: `[tokens, heads, head_dim]`; k_cache, v_cache, kv_scales: see `KvCache`. out: of q's shape, to write to.
        scores: of the layer, among those of `AttentionSetup`. sinks, slopes: `[heads]`, where the layer has them.
        chosen: of `choose_blocks`, where queries attend to chosen blocks alone. relative: of all tokens, where the
        layer has it. Returns `[tokens, heads · head_dim]`.
        """
        out = torch.empty_like(q) if out is None else out
        cache = KvCache(k_cache, v_cache, kv_scales)
        if sinks is not None and not self.supports_sinks:
            raise NotImplementedError(f"{type(self).__name__} has no attention sinks; use attention triton or torch")
        if slopes is not None and not self.supports_slopes:
            raise NotImplementedError(f"{type(self).__name__} has no slopes of ALiBi; use attention torch")
        if relative is not None and not self.supports_relative:
            raise NotImplementedError(f"{type(self).__name__} has no relative attention; use attention torch")
        if chosen is None:
            self._attend(q, cache, out, scores, HeadTerms(sinks, slopes, relative))
        else:
            self._attend_blocks(q, cache, out, scores, chosen)
        return out.view(len(q), -1)

    def run_latents(
        self,
        q: torch.Tensor,
        cache: torch.Tensor,
        heads: LatentHeads,
        out: torch.Tensor | None = None,
        scores: Scores = PLAIN,
        chosen: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend with one layer's latents.

        q: `[tokens, heads, key + rotated]`; cache: `[num_pages, block_tokens, 1, kv_rank + rotated]`. out: `[tokens,
        heads, value]`, to write to. chosen: of `choose`, where queries attend to chosen tokens alone. sinks: see
        `run`. Returns `[tokens, heads · value]`.
        """
        if chosen is not None and not self.supports_chosen:
            raise NotImplementedError(f"{type(self).__name__} has no attention to chosen tokens; use attention torch")
        if sinks is not None and not self.supports_sinks:
            raise NotImplementedError(f"{type(self).__name__} has no attention sinks; use attention triton or torch")
        out = q.new_empty(*q.shape[:2], heads.value_dim) if out is None else out
        self._attend_latents(q, cache, heads, out, scores, chosen, sinks)
        return out.view(len(q), -1)

    def choose(
        self,
        q: torch.Tensor,
        weights: torch.Tensor,
        cache: torch.Tensor,
        top_k: int,
        out: torch.Tensor | None = None,
        biases: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the positions, in its row, of the tokens that an indexer chooses for each query, rising: `[tokens,
        top_k]` int32, in `out` if that is given. Nothing is written for a row of at most `top_k` tokens: its queries
        attend to all.

        q: `[tokens, heads, key]`; weights: `[tokens, heads]`; cache: the indexer's keys, `[num_pages, block_tokens, 1,
        key]`. biases: of pools of tokens that are chosen together. See `indexer.chosen_places` and `chosen_pools`.
        """
        raise NotImplementedError(f"{type(self).__name__} has no indexer; use attention torch")

    def choose_blocks(self, q: torch.Tensor, cache: KvCache, blocks: KeyBlocks) -> torch.Tensor:
        """The blocks of its row that an indexer chooses for each query of each head of keys and values: `[tokens,
        kv_heads, top]`. Blocks of a row of at most `top` are not written: queries attend to all.

        q: `[tokens, kv_heads, key]`; cache: the indexer's keys, in halves behind keys and values: see `key_blocks`.
        """
        raise NotImplementedError(f"{type(self).__name__} has no indexer of blocks; use attention torch")

    def choose_means(self, q: torch.Tensor, cache: KvCache, blocks: KeyBlocks, keys_of: KeysOf) -> torch.Tensor:
        """As `choose_blocks`, of blocks by the mean of their keys, `[tokens, kv_heads, top + 1]`, which all heads of
        keys and values have alike: see `mean_blocks.chosen_means`.
        """
        raise NotImplementedError(f"{type(self).__name__} has no indexer of blocks; use attention torch")

    def _attend_blocks(
        self, q: torch.Tensor, cache: KvCache, out: torch.Tensor, scores: Scores, chosen: torch.Tensor
    ) -> None:
        """Write to `out`: attention to chosen blocks."""
        raise NotImplementedError(f"{type(self).__name__} has no attention to chosen blocks; use attention torch")

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
        """Write to `out`: attention over the latents themselves. chosen, sinks: None unless the class takes them."""
        rows = heads.absorb(q)
        found = rows.new_empty(*rows.shape[:2], heads.kv_rank)
        self._attend(rows, KvCache(cache, cache), found, scores, HeadTerms(sinks))
        heads.expand(found, out)

    @abstractmethod
    def _plan(self, rows: PlannedRows) -> None: ...

    @abstractmethod
    def _attend(self, q: torch.Tensor, cache: KvCache, out: torch.Tensor, scores: Scores, terms: HeadTerms) -> None:
        """Write to `out`. terms: those which the class takes."""


class PagedAttention(Attention):
    """Attention on PyTorch's operators, in any dtype. Not to be captured: a plan makes new tensors.

    The host waits for nothing on a GPU, and there no mask or scores of a chunk are made: they would take the chunk's
    tokens times all that it sees.
    """

    supports_sinks = supports_slopes = supports_relative = supports_blocks = True

    def __init__(self, heads: HeadShape, device: torch.device | str = "cpu") -> None:
        self._device = torch.device(device)
        self._on_host = self._device.type == "cpu"
        num_heads, self._kv_heads, self._head_dim, self._block_tokens = heads
        self._gqa = num_heads != self._kv_heads
        self._prefills: list[Prefill] = []
        self._first_decode_token = 0
        self._decode_pages = torch.empty(0, 0, dtype=torch.long)
        self._decode_lens = torch.empty(0, 1, dtype=torch.long)
        self._decode_masks: dict[int | None, torch.Tensor] = {}
        self._decode_tail = torch.empty(0, dtype=torch.long)

    def _plan(self, rows: PlannedRows) -> None:
        qo_indptr, page_table, kv_lens, *_ = rows
        self._prefills.clear()
        num_prefills = rows.num_prefills
        if num_prefills:
            pages = on_device(page_table[:num_prefills], self._device)
            for row in range(num_prefills):
                tokens, kv_len = slice(qo_indptr[row], qo_indptr[row + 1]), kv_lens[row]
                self._prefills.append(
                    Prefill(tokens, pages[row, : -(-kv_len // self._block_tokens)], kv_len, self._device, rows.blocks)
                )
        self._first_decode_token = qo_indptr[num_prefills]
        if num_prefills < len(kv_lens):
            self._decode_lens = torch.tensor(kv_lens[num_prefills:])[:, None]
            num_blocks = -(-int(self._decode_lens.max()) // self._block_tokens)
            self._decode_pages = on_device(page_table[num_prefills:, :num_blocks], self._device)
            visible = torch.arange(num_blocks * self._block_tokens) < self._decode_lens
            self._decode_masks = {None: on_device(visible[:, None, None, :], self._device)}
            self._decode_tail = on_device((~visible).flatten().nonzero()[:, 0], self._device)
        else:
            self._decode_pages = page_table[:0]

    def _attend(self, q: torch.Tensor, cache: KvCache, out: torch.Tensor, scores: Scores, terms: HeadTerms) -> None:
        caches, scales = (cache.k, cache.v), cache.scales
        if scales.k != 1:
            scale = self._head_dim**-0.5 if scores.scale is None else scores.scale
            scores = replace(scores, scale=scale * scales.k)
        for prefill in self._prefills:
            k, v = (self._gather(each, prefill.pages, prefill.kv_len).to(q.dtype) for each in caches)
            broken = self._broken(k, v)
            if broken is not None:
                k, v = k.masked_fill(broken, 0), v.masked_fill(broken, 0)
            rows = q[prefill.tokens].transpose(0, 1).unsqueeze(0)
            if self._gqa and not self._on_host and q.dtype == torch.float32:
                # no kernel takes these with fewer heads of k and v, but one that makes all scores
                k, v = (each.repeat_interleave(q.shape[1] // self._kv_heads, dim=1) for each in (k, v))
            own = prefill.own if scores.needs_places else None
            further = terms.of_chunk(prefill.tokens)
            attended = attend_by_scores(rows, k, v, prefill.mask(scores), scores, further, own)
            if broken is not None:
                if prefill.has_blocks(scores):
                    seen = (broken.transpose(2, 3) & prefill.seen_with_blocks(scores)).any(-1, keepdim=True)
                    seen = seen.repeat_interleave(attended.shape[1] // seen.shape[1], dim=1)
                else:
                    seen = self._who_sees(broken, attended.shape, scores.window)
                attended = attended.masked_fill(seen, torch.nan)
            out[prefill.tokens] = attended[0].transpose(0, 1)
        if len(self._decode_pages):
            count = len(self._decode_pages)
            k, v = (self._gather_decode(each, q.dtype) for each in caches)
            k = k.view(count, -1, self._kv_heads, self._head_dim).transpose(1, 2)
            v = v.view(count, -1, self._kv_heads, self._head_dim).transpose(1, 2)
            rows = q[self._first_decode_token :].unsqueeze(2)
            own = on_device(self._decode_lens - 1, self._device) if scores.needs_places else None
            further = terms.of_rows(self._first_decode_token)
            attended = attend_by_scores(rows, k, v, self._decode_mask(scores.window), scores, further, own)
            out[self._first_decode_token :] = attended[:, :, 0]
        if scales.v != 1:
            out *= scales.v

    @property
    def _decode_places(self) -> int:
        """Places of the longest of the decode rows' tables."""
        return self._decode_pages.shape[1] * self._block_tokens

    def _decode_mask(self, window: int | None) -> torch.Tensor:
        """True where a decode row `[rows, 1, 1, places]` sees a place; made once a plan for each window."""
        if (mask := self._decode_masks.get(window)) is None:
            visible = self._decode_masks[None]
            begin = on_device(self._decode_lens - (window or 0), self._device)[:, None, None]
            mask = visible & (torch.arange(visible.shape[-1], device=self._device) >= begin)
            self._decode_masks[window] = mask
        return mask

    def _broken(self, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor | None:
        """True for places `[1, kv_heads, kv_len, 1]` with a key or value that is not finite; None where the host sees
        at once that there is none.
        """
        if self._on_host and (k.sum() + v.sum()).isfinite():
            return None
        return ~(k.isfinite() & v.isfinite()).all(-1, keepdim=True)

    @staticmethod
    def _who_sees(broken: torch.Tensor, shape: torch.Size, window: int | None) -> torch.Tensor:
        """True for heads `[1, heads, tokens, 1]` of a chunk that see a `broken` key `[1, kv_heads, kv_len, 1]`.

        Neither a masked score nor a weight of 0 undoes NaN: such keys are taken out, and put back where they are seen.
        """
        count = broken.cumsum(2)
        if window is not None and window < broken.shape[2]:
            count[:, :, window:] -= count[:, :, :-window].clone()
        seen = count[:, :, -shape[2] :] > 0
        return seen.repeat_interleave(shape[1] // seen.shape[1], dim=1)

    def _decode_parts(self, width: int) -> Iterator[slice]:
        """The decode rows, so many at a time as have `MOST_SCORES` elements, of `width` for each of their places."""
        most, count = max(1, MOST_SCORES // (width * self._decode_places)), len(self._decode_pages)
        return (slice(first, min(first + most, count)) for first in range(0, count, most))

    def _decode_keys(self, cache: torch.Tensor, rows: slice) -> torch.Tensor:
        """An indexer's keys of some decode rows `[rows, places, elems]`, also those that a row does not see."""
        return _pages_of(cache, self._decode_pages[rows]).flatten(1, 2).flatten(2)

    def _gather_decode(self, cache: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The decode rows' cache `[rows · places, kv_heads, head_dim]` in `dtype`, zero where nothing is visible.

        Values that an earlier owner left in a page may be NaN or infinite, and masking a score does not undo that.
        """
        places = _pages_of(cache, self._decode_pages).view(-1, *cache.shape[2:]).to(dtype)
        return places.index_fill_(0, self._decode_tail, 0)

    def _gather(self, cache: torch.Tensor, pages: torch.Tensor, kv_len: int) -> torch.Tensor:
        """One row's cache `[1, kv_heads, kv_len, head_dim]`."""
        return _pages_of(cache, pages).view(-1, *cache.shape[2:])[:kv_len].transpose(0, 1).unsqueeze(0)


def _pages_of(cache: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    """A copy of some pages. Not every device can index FP8."""
    return cache.view(torch.uint8)[pages].view(FLOAT8) if cache.dtype == FLOAT8 else cache[pages]


class GroupTable(Sequence[int]):
    """A group's pages in a block table that has a page of each group for every block. Equal to another of the same
    group if both are of the same list, which only grows.
    """

    __slots__ = ("_count", "_group", "_pages")

    def __init__(self, pages: Sequence[int], group: int, count: int) -> None:
        self._pages, self._group, self._count = pages, group, count

    def __len__(self) -> int:
        return len(self._pages) // self._count

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[int]: ...
    def __getitem__(self, at: int | slice) -> int | Sequence[int]:
        if isinstance(at, slice):
            return [self._pages[place * self._count + self._group] for place in range(*at.indices(len(self)))]
        return self._pages[range(len(self))[at] * self._count + self._group]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GroupTable) and self._pages is other._pages and self._group == other._group

    __hash__ = None  # type: ignore[assignment]


class GroupedAttention:
    """Attention of a model whose layers have several page groups: each group has attention of its own."""

    __slots__ = ("_block_tokens", "_chunked", "_groups")

    def __init__(
        self, groups: Sequence[tuple[Attention, int | None]], block_tokens: int, *, chunked: bool = False
    ) -> None:
        """groups: attention and window of each. chunked: windows begin at multiples of their lengths, which are
        multiples of `block_tokens`.
        """
        self._groups, self._block_tokens, self._chunked = groups, block_tokens, chunked

    def plan(
        self,
        qo_indptr: Sequence[int],
        page_table: torch.Tensor,
        kv_lens: Sequence[int],
        tables: Sequence[Sequence[int]] | None = None,
        blocks: BlockSpans | None = None,
    ) -> None:
        """See `Attention.plan`. page_table: `[rows, max_pages]`, a page of each group for every block.

        A group with a window is given only the blocks that its rows see: pages before it may have left their place. A
        row of several chunks becomes one of each.
        """
        count = len(self._groups)
        if count == 1 and self._groups[0][1] is None:
            self._groups[0][0].plan(qo_indptr, page_table, kv_lens, tables, blocks=blocks)
            return
        for index, (attention, window) in enumerate(self._groups):
            own = None if tables is None or window is not None else [GroupTable(each, index, count) for each in tables]
            rows = PlannedRows(qo_indptr, page_table[:, index::count], kv_lens, own, blocks=blocks)
            if window is not None:
                rows = (rows.in_chunks if self._chunked else rows.seen)(window, self._block_tokens)
            attention.plan(*rows)

    def of(self, group: int) -> Attention:
        """The attention of a group."""
        return self._groups[group][0]


class Prefill:
    """A row with more than one token. tokens: its last tokens of `kv_len`, among the step's; pages: that hold them.
    blocks: of the step's tokens.
    """

    __slots__ = ("_blocks", "_device", "_masks", "kv_len", "pages", "tokens")

    def __init__(
        self,
        tokens: slice,
        pages: torch.Tensor,
        kv_len: int,
        device: torch.device,
        blocks: BlockSpans | None = None,
    ) -> None:
        self.tokens, self.pages, self.kv_len, self._device = tokens, pages, kv_len, device
        own = None if blocks is None else BlockSpans(*(each[tokens] for each in blocks))
        self._blocks = own if own is not None and (own.before.any() or own.behind.any()) else None
        self._masks: dict[tuple[int | None, bool] | Scores, torch.Tensor | None] = {}

    def mask(self, scores: Scores) -> torch.Tensor | None:
        """What its tokens see of their keys, made once a plan for each window; None: plain causal attention of a whole
        sequence.
        """
        if self.has_blocks(scores):
            return self.seen_with_blocks(scores)
        window = scores.window
        explicit = scores.softcap is not None or scores.has_sinks or scores.needs_places
        if window is not None and window >= self.kv_len:
            window = None
        if (key := (window, explicit)) not in self._masks:
            self._masks[key] = self._make(window, explicit)
        return self._masks[key]

    @property
    def own(self) -> torch.Tensor:
        """The place of each of its tokens among the row's, `[1, length]`."""
        length = self.tokens.stop - self.tokens.start
        return torch.arange(self.kv_len - length, self.kv_len, device=self._device)[None]

    def has_blocks(self, scores: Scores) -> bool:
        """True if some of its tokens see others behind them, in layers with these scores."""
        return self._blocks is not None and scores.blocks is not BlockMask.NONE

    def seen_with_blocks(self, scores: Scores) -> torch.Tensor:
        """True where one of its tokens `[length, kv_len]` sees a token, with blocks; made once a plan for each kind of
        scores.
        """
        if (found := self._masks.get(scores)) is not None:
            return found
        assert self._blocks is not None
        before, behind = (torch.from_numpy(each).long()[:, None] for each in self._blocks)
        own = torch.arange(self.kv_len - len(before), self.kv_len)[:, None]
        first = torch.zeros_like(own) if scores.window is None else own - scores.window + 1
        if scores.blocks is BlockMask.WHOLE:
            first = torch.minimum(first, own - before)
        place = torch.arange(self.kv_len)
        found = on_device((place >= first) & (place <= own + behind), self._device)
        self._masks[scores] = found
        return found

    @property
    def visible(self) -> torch.Tensor:
        """True where one of its tokens `[length, kv_len]` sees a token."""
        return self.seen(None)

    def seen(self, window: int | None) -> torch.Tensor:
        """`visible`, of the last `window` tokens alone; made once a plan."""
        window = None if window is None or window >= self.kv_len else window
        if (found := self._masks.get((window, True))) is None:
            length = self.tokens.stop - self.tokens.start
            found = self._masks[window, True] = _visible(length, self.kv_len, window, self._device)
        return found

    def _make(self, window: int | None, explicit: bool) -> torch.Tensor | None:
        length = self.tokens.stop - self.tokens.start
        if window is None and not explicit:
            if length == self.kv_len:
                return None
            if self._device.type != "cpu":
                return _bias()(length, self.kv_len)
        return _visible(length, self.kv_len, window, self._device)


def _visible(length: int, kv_len: int, window: int | None, device: torch.device) -> torch.Tensor:
    """True where one of a row's last tokens `[length, kv_len]` sees a token."""
    seen = torch.ones(length, kv_len, dtype=torch.bool, device=device).tril(kv_len - length)
    return seen if window is None else seen.triu(kv_len - length - window + 1)


def _bias() -> Callable[[int, int], torch.Tensor]:
    """Masks for a GPU, by which torch takes kernels that make no scores."""
    from torch.nn.attention.bias import causal_lower_right  # takes a second, which nothing else needs

    return causal_lower_right


def attend_by_scores(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scores: Scores,
    terms: HeadTerms,
    own: torch.Tensor | None,
) -> torch.Tensor:
    """q: `[rows, heads, tokens, head_dim]`; k, v: `[rows, kv_heads, keys, head_dim]`. mask: None: plain causal. own:
    each token's place among the keys, `[rows, tokens]`, where scores need them.
    """
    group, (sinks, slopes, relative) = q.shape[1] // k.shape[1], terms
    if scores.softcap is None and all(each is None for each in terms):
        return scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scores.scale, enable_gqa=group > 1
        )
    assert mask is not None
    if group > 1:
        k, v = (each.repeat_interleave(group, dim=1) for each in (k, v))
    most = max(1, MOST_SCORES // (q.shape[0] * q.shape[1] * k.shape[2]))
    if q.shape[2] > most:
        parts = q.split(most, dim=2), mask.split(most, dim=-2)
        places = [None] * len(parts[0]) if own is None else own.split(most, dim=1)
        each = zip(*parts, terms.split(most, len(places)), places, strict=True)
        return torch.cat([attend_by_scores(rows, k, v, seen, scores, of, at) for rows, seen, of, at in each], dim=2)
    weights = (q @ k.transpose(2, 3)) * (q.shape[-1] ** -0.5 if scores.scale is None else scores.scale)
    if scores.softcap is not None:
        weights = scores.softcap * torch.tanh(weights / scores.softcap)
    if slopes is not None and own is not None:
        ages = own[:, None, :, None] - torch.arange(k.shape[2], device=q.device)
        weights = weights.float() - slopes.float()[:, None, None] * ages
    if relative is not None and own is not None:
        weights = weights.float() + relative.biases(own, k.shape[2])
    return weights_of(weights.masked_fill(~mask, -torch.inf), sinks).to(q.dtype) @ v


def weights_of(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """The softmax of scores `[rows, heads, tokens, keys]`, which sinks `[heads]` join where there are any, float32."""
    if sinks is None:
        return scores.softmax(-1, dtype=torch.float32)
    own = sinks.view(1, -1, 1, 1).expand(len(scores), -1, scores.shape[2], 1)
    return torch.cat((scores, own), dim=-1).softmax(-1, dtype=torch.float32)[..., :-1]


def count_prefills(qo_indptr: Sequence[int], num_rows: int) -> int:
    """Rows with more than one token; they come first. ValueError where they don't."""
    row = 0
    while row < num_rows and qo_indptr[row + 1] - qo_indptr[row] > 1:
        row += 1
    if qo_indptr[-1] - qo_indptr[row] != num_rows - row:
        raise ValueError("rows with more than one token must come before rows with one")
    return row
