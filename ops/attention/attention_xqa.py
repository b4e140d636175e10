"""Decode attention by XQA, TensorRT-LLM's kernel in FlashInfer, for compute capability 9 and later.

These facts from the source of FlashInfer 0.6.4 (`decode.py`, `xqa.py`, `jit/xqa.py`, `csrc/xqa/mha.cu`,
`csrc/xqa/xqa_wrapper.cu`) explain the code below:

- It takes a table of pages `[rows, pages]` int32 and lengths `[rows]` uint32, both on the device, and no plan. The grid
  depends on the number of rows and the table's width alone, so a captured launch is correct for any later step.

- Strides of pages, tokens and heads are K's, counted in whole heads: they must be multiples of a head, and V's must be
  the same. q and the output are read as if contiguous.

- Several programs share a row if rows and KV heads are fewer than the multiprocessors. The last one that ends adds up
  their parts, and sets the row's semaphore to 0 again. So the workspace must be zeros at first, and launches that share
  it must run one after the other.

- Its module has one number of heads per KV head, page size and head size. Those of 1, 2, 4 and 8 heads are built
  ahead; we ask for no others.

- It has windows, which count a query's own key, and scales; no soft caps.

- Over a cache in FP8 it multiplies in FP8: queries would be rounded, too, which other attention does not do.

FlashInfer itself is imported when the first backend is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np
import torch

from ..upload import on_device
from .attention import Attention, AttentionSetup, HeadTerms, KvCache, PlannedRows, Scores

#: Sizes that the kernel serves, and is built ahead for.
BLOCK_TOKENS, HEAD_DIMS, GROUPS = (16, 32, 64, 128), (64, 128, 256), (1, 2, 4, 8)

#: Major compute capabilities that `flashinfer.xqa` accepts.
CAPABILITIES = (9, 10, 12)

#: Tokens that a warp multiplies at once. On compute capability 12.x a tile of V of heads of 256 elements has only half
#: as many, and both halves were read from the page of the first (FlashInfer's #3022, in 0.6.4).
_TILE_TOKENS = 64

#: Bytes of the workspace that `xqa_batch_decode_with_kv_cache` takes for semaphores.
_SEMAPHORE_BYTES = 8 << 20

#: Bytes of partial results per multiprocessor: a program's are at most 16 heads of 256 float32 elements, and row sums.
_PART_BYTES = 32 << 10


class XqaBackend:
    """Makes the decode attention of one page group; steps with prompts have another backend's."""

    captures = True

    def __init__(
        self, setup: AttentionSetup, num_sms: int, eager: Any, *, module: ModuleType | Any | None = None
    ) -> None:
        """num_sms: multiprocessors of the device. eager: the `AttentionBackend` of other steps. module: for tests."""
        self.module = import_module("flashinfer") if module is None else module
        self.name = f"xqa of flashinfer {self.module.__version__}"
        self.reason, self.fix = "the device, dtype and heads suit it", ""
        self.heads, self._eager = setup.heads, eager
        self.table = PageTable(setup.max_rows, setup.max_pages_per_row, setup.heads.block_tokens, setup.device)
        size = _SEMAPHORE_BYTES + num_sms * _PART_BYTES
        self.workspace = setup.scratch.zeros("xqa", size, torch.uint8, setup.device)

    def ragged(self) -> Attention:
        """Attention for steps of any sequences: the other backend's."""
        return self._eager.ragged()

    def decode(self, bucket: int) -> XqaDecodeAttention:
        """Attention for `bucket` sequences of one token; `run` may be captured."""
        return XqaDecodeAttention(self, bucket)


class XqaDecodeAttention(Attention):
    """Attention for a bucket of sequences with one token each, over static buffers.

    Call `plan` before every replay; `run` is captured in the graph.
    """

    def __init__(self, backend: XqaBackend, bucket: int) -> None:
        self._backend, self._bucket = backend, bucket
        table = backend.table
        self._pages, self._lens = table.pages[:bucket], table.lens[:bucket].view(torch.uint32)
        self._max_tokens = table.pages.shape[1] * backend.heads.block_tokens

    def _plan(self, rows: PlannedRows) -> None:
        rows.check_bucket(self._bucket)
        self._backend.table.write(rows.page_table, rows.kv_lens, rows.tables)

    def _attend(self, q: torch.Tensor, cache: KvCache, out: torch.Tensor, scores: Scores, terms: HeadTerms) -> None:
        k_cache, v_cache, _ = cache
        head_dim = self._backend.heads.head_dim
        if k_cache.stride() != v_cache.stride() or k_cache.stride(3) != 1:
            raise ValueError("K and V must have the same strides, and contiguous heads")
        if any(stride % head_dim for stride in k_cache.stride()[:3]):
            raise ValueError(f"strides {k_cache.stride()[:3]} of the cache must be multiples of {head_dim}, a head")
        if not (q.is_contiguous() and out.is_contiguous()):
            raise ValueError("q and out must be contiguous")
        self._backend.module.decode.xqa_batch_decode_with_kv_cache(
            query=q,
            kv_cache=(k_cache, v_cache),
            workspace_buffer=self._backend.workspace,
            block_tables=self._pages,
            seq_lens=self._lens,
            max_seq_len=self._max_tokens,
            bmm1_scale=head_dim**-0.5 if scores.scale is None else scores.scale,
            bmm2_scale=1.0,
            window_left=-1 if scores.window is None else scores.window - 1,
            out=out,
            kv_layout="NHD",
        )


class PageTable:
    """Static block tables on the device: only entries that a step changes are sent.

    pages: int32 `[max_rows, max_pages_per_row]`; entries past a row's pages are pages of earlier steps, or page 0.
    lens: int32 `[max_rows]`.
    """

    def __init__(self, max_rows: int, max_pages_per_row: int, block_tokens: int, device: torch.device) -> None:
        self._block_tokens, self._device = block_tokens, device
        self.pages = torch.zeros(max_rows, max_pages_per_row, dtype=torch.int32, device=device)
        self.lens = torch.ones(max_rows, dtype=torch.int32, device=device)
        self._host = np.zeros((max_rows, max_pages_per_row), np.int64)  # the contents of `pages`
        self._tables: list[Sequence[int] | None] = [None] * max_rows
        self._counts = np.zeros(max_rows, np.int64)  # pages that each row of `_tables` had

    def write(
        self, page_table: torch.Tensor, kv_lens: Sequence[int], tables: Sequence[Sequence[int]] | None = None
    ) -> None:
        """Write a step's rows in stream order; see `Attention.plan`. Raises ValueError if a row does not fit."""
        rows, lens = len(kv_lens), np.array(kv_lens, np.int32)
        counts = (lens.astype(np.int64) - 1) // self._block_tokens + 1
        most = min(self.pages.shape[1], page_table.shape[1])
        if rows > len(self._host) or lens.min(initial=1) < 1 or counts.max(initial=1) > most:
            raise ValueError(
                f"a step of {rows} rows of {lens.min(initial=1)} to {lens.max(initial=1)} tokens does not fit in "
                f"{len(self._host)} rows of {most} pages"
            )
        is_new = np.ones(rows, bool)
        if tables is not None:  # lists that only grow
            is_same = [mine is table for mine, table in zip(self._tables, tables, strict=False)]
            is_new = ~(np.array(is_same, bool) & (counts == self._counts[:rows]))
        self._tables[:rows] = [None] * rows if tables is None else tables
        self._counts[:rows] = counts
        self.lens[:rows].copy_(on_device(torch.from_numpy(lens), self._device))
        (changed,) = is_new.nonzero()
        if not len(changed):
            return
        width = int(counts[changed].max())
        wanted = page_table.numpy()[changed, :width]
        is_other = (wanted != self._host[changed, :width]) & (np.arange(width) < counts[changed, None])
        row, column = is_other.nonzero()
        if len(row):
            found = wanted[row, column]
            self._host[changed[row], column] = found
            places = np.stack((changed[row] * self.pages.shape[1] + column, found))
            sent = on_device(torch.from_numpy(places), self._device)
            self.pages.view(-1).index_copy_(0, sent[0], sent[1].int())


def xqa_obstacle(setup: AttentionSetup, capability: tuple[int, int]) -> str | None:
    """Return why XQA can't serve a page group's decode steps where FlashInfer serves; None if it can."""
    heads = setup.heads
    if setup.float8_kv:
        return "XQA rounds queries to FP8 where the KV cache is in FP8"
    if any(each.softcap is not None for each in setup.scores):
        return "XQA has no soft caps, and the model has one"
    if capability[0] not in CAPABILITIES:
        wanted = ", ".join(f"{major}.x" for major in CAPABILITIES)
        return f"XQA needs compute capability {wanted}; {setup.device} has {capability[0]}.{capability[1]}"
    for name, value, known in (
        ("heads of {} elements", heads.head_dim, HEAD_DIMS),
        ("{} heads per KV head", heads.group, GROUPS),
        ("pages of {} tokens (block_tokens)", heads.block_tokens, BLOCK_TOKENS),
    ):
        if value not in known:
            return f"XQA supports {name.format(', '.join(map(str, known)))}; here it is {value}"
    if capability[0] == 12 and heads.head_dim == 256 and heads.block_tokens < _TILE_TOKENS:
        return (
            f"XQA reads wrong values of heads of 256 elements from pages of {heads.block_tokens} tokens on compute "
            f"capability {capability[0]}.{capability[1]}; set block_tokens to {_TILE_TOKENS} or 128"
        )
    return None


def missing_modules(setup: AttentionSetup) -> list[str]:
    """Return the compiled modules that FlashInfer's packages don't have, so that a compiler has to build them."""
    make, heads = import_module("flashinfer.jit.xqa").gen_xqa_module, setup.heads
    modules = [
        make(
            input_dtype=setup.dtype,
            kv_cache_dtype=setup.dtype,
            page_size=heads.block_tokens,
            head_dim=heads.head_dim,
            head_group_ratio=heads.group,
            use_sliding_window=window,
            output_dtype=setup.dtype,
        )
        for window in dict.fromkeys(each.window is not None for each in setup.scores)
    ]
    return [module.name for module in modules if not module.is_aot]
