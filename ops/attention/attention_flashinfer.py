"""Paged attention by FlashInfer: eager for ragged steps, captured for decode buckets.

These facts from the source of FlashInfer 0.6.4 (`csrc/batch_prefill*.cu`, `csrc/batch_decode.cu`, `page.cuh`,
`scheduler.cuh`) explain the code below:

- K and V may have any strides over pages, tokens and heads, if both have the same strides and a head's elements are
  contiguous; offsets have 64 bits. So a layer of the page-outermost arena is passed as it is.

- A plan reads `indptr` and `last_page_len` on the host, and only passes `indices` on. So we send page ids to the device
  in one copy of our own, and nothing is ever read back.

- A plan writes the wrapper's page-locked memory and starts a copy from it, as we do with our staging buffer. Neither
  may be written again before that copy is done. An event after every plan guards both.

- The integer workspace holds the last plan until `run` has finished, so each wrapper has its own. The float
  workspace is scratch for a single `run`, so all wrappers share one.

- `max_token_per_sequence` and `max_sequence_kv` of a prefill plan must not be used. With them, the plan of 0.6.4 makes
  no host copies of the lengths, and then reads them. `fast_decode_plan` outside graph mode would make the kernel read
  the host's `indptr`.

- In graph mode the launch grid depends only on the number of sequences, so a replay is correct after any other plan.

- The Hopper prefill kernel (fa3) neither splits a long KV over processors nor packs the heads that share it, and every
  sequence takes a tile of 128 queries. A decoding sequence would be slow there, so decoding sequences of a mixed step
  have their own wrapper, which splits and packs. fa2 could take both kinds in one launch, but chooses its tile from the
  mean length.

- `window_left` counts the keys that a query sees in addition to its own. Windows and causal masks count from the end of
  a sequence, so nothing changes if its first pages are left out and its length is that of the others.

- A cache in FP8 is widened to the query's dtype as it is loaded; only fa2 does so for queries of 16 bits. A plan is
  told the cache's dtype. A run multiplies the scores' scale by `k_scale`, and the output, in place, by `v_scale`. In
  bfloat16, and below compute capability 9.0 in float16, too, NaN in the cache is read as 480.

- A wrapper keeps the window, the soft cap and the scale of its plan, and a window is part of how the plan divides the
  work. So layers that differ in any of them have wrappers of their own.

FlashInfer itself is imported when the first backend is made.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ..elementwise.float8_kv import DTYPE as FLOAT8
from ..elementwise.float8_kv import UNSCALED
from .attention import PLAIN, Attention, AttentionSetup, HeadTerms, KvCache, PlannedRows, Scores
from .attention_plan import PlanBuffers

#: The version that the facts above were read from, and that has run on GPUs.
VERSION = "0.6.4"

#: Versions from the first on and before the second take the same calls (0.7.2 was read, and none has run). They serve
#: if their values are right at the start: see `values_problem`.
OTHERS = (0, 7, 2), (0, 9)

DTYPES = (torch.bfloat16, torch.float16)
HEAD_DIMS = (64, 128, 256)

#: Decode uses the tensor-core kernel if at least this many heads share a KV head: it multiplies tiles of 16 rows, one
#: row per head. The other kernel is compiled only for groups of 1, 2, 3, 4 and 8.
TENSOR_CORE_GROUP = 4

#: The tensor-core kernel of decode, named explicitly because a version's own choice may differ. The others neither
#: split a long KV nor pack heads, and `unavailable_modules` checks for this one.
DECODE_KERNEL = "fa2"

#: The least float workspace, as FlashInfer's authors recommend.
FLOAT_WORKSPACE_BYTES = 128 << 20

#: A decode plan needs tens of bytes per sequence; FlashInfer's own 8 MiB for each of many buckets would add up.
DECODE_INT_WORKSPACE_BYTES = 1 << 20


class FlashInferBackend:
    """Makes the attention objects of one executor, which share buffers.

    A plan is valid until any of them plans again, and all run on one stream.
    """

    captures = True

    def __init__(
        self,
        setup: AttentionSetup,
        num_sms: int,
        *,
        module: ModuleType | Any | None = None,
        new_event: Callable[[], Any] | None = None,
    ) -> None:
        """num_sms: multiprocessors of the device. module, new_event: for tests."""
        heads = setup.heads
        self.module = import_module("flashinfer") if module is None else module
        self.name = f"flashinfer {self.module.__version__}"
        self.reason, self.fix = "the device, dtype and head size suit it", ""
        self.device, self.group, self.scores = setup.device, heads.group, setup.scores
        self.plan_arguments = {
            "num_qo_heads": heads.num_heads,
            "num_kv_heads": heads.kv_heads,
            "page_size": heads.block_tokens,
            "q_data_type": setup.dtype,
            "kv_data_type": setup.kv_dtype,
        }
        self.head_dim, self.kv_dtype = heads.head_dim, setup.kv_dtype
        self.buffers = PlanBuffers(setup.max_rows, setup.max_pages_per_row, heads.block_tokens, self.device)
        self.event = (torch.cuda.Event if new_event is None else new_event)()
        least = float_workspace_bytes(heads.num_heads, heads.kv_heads, heads.head_dim, setup.max_rows, num_sms)
        size = max(FLOAT_WORKSPACE_BYTES, least)
        self.workspace = setup.scratch.zeros("flashinfer", size, torch.uint8, self.device)

    def ragged(self) -> FlashInferRaggedAttention:
        """Attention for steps of any sequences, run eagerly."""
        return FlashInferRaggedAttention(self)

    def decode(self, bucket: int) -> FlashInferDecodeAttention:
        """Attention for `bucket` sequences of one token; `run` may be captured after `plan` has been called."""
        return FlashInferDecodeAttention(self, bucket)

    @property
    def tensor_cores(self) -> bool:
        """True if decode uses the tensor-core kernel."""
        return self.group >= TENSOR_CORE_GROUP


class FlashInferRaggedAttention(Attention):
    """Eager attention for sequences of any length: prefill chunks first, then sequences of one token."""

    def __init__(self, backend: FlashInferBackend) -> None:
        self._backend = backend
        module = backend.module
        self._prefills = {
            scores: module.BatchPrefillWithPagedKVCacheWrapper(
                backend.workspace, "NHD", backend=prefill_kernel(backend.head_dim, backend.kv_dtype)
            )
            for scores in backend.scores
        }
        self._decodes = {
            scores: module.BatchDecodeWithPagedKVCacheWrapper(
                backend.workspace, "NHD", use_tensor_cores=backend.tensor_cores, backend=DECODE_KERNEL
            )
            for scores in backend.scores
        }
        self._prefill_tokens = 0
        self._num_tokens = 0

    def _plan(self, rows: PlannedRows) -> None:
        qo_indptr, page_table, kv_lens, *_ = rows
        backend, buffers = self._backend, self._backend.buffers
        num_prefills = rows.num_prefills
        backend.event.synchronize()
        split = buffers.write(page_table, kv_lens, num_prefills, qo_indptr)
        buffers.upload()
        self._prefill_tokens, self._num_tokens = qo_indptr[num_prefills], qo_indptr[-1]
        if num_prefills:
            for scores, wrapper in self._prefills.items():
                wrapper.plan(
                    qo_indptr=buffers.qo_indptr[: num_prefills + 1],
                    paged_kv_indptr=buffers.prefill_indptr[: num_prefills + 1],
                    paged_kv_indices=buffers.indices[:split],
                    paged_kv_last_page_len=buffers.host_last_page_len[:num_prefills],
                    head_dim_qk=backend.head_dim,
                    causal=True,
                    **backend.plan_arguments,
                    **scores_arguments(scores),
                )
        if num_decodes := len(kv_lens) - num_prefills:
            for scores, wrapper in self._decodes.items():
                wrapper.plan(
                    indptr=buffers.host_indptr[: num_decodes + 1],
                    indices=buffers.indices[split : buffers.num_indices],
                    last_page_len=buffers.host_last_page_len[num_prefills : len(kv_lens)],
                    head_dim=backend.head_dim,
                    **backend.plan_arguments,
                    **scores_arguments(scores),
                )
        backend.event.record()

    def _attend(self, q: torch.Tensor, cache: KvCache, out: torch.Tensor, scores: Scores, terms: HeadTerms) -> None:
        split = self._prefill_tokens
        if split:
            _run(self._prefills[scores], q[:split], cache, out[:split])
        if split < self._num_tokens:
            _run(self._decodes[scores], q[split:], cache, out[split:])


class FlashInferDecodeAttention(Attention):
    """Attention for a bucket of sequences with one token each, over static buffers.

    Call `plan` before every replay; `run` is captured in the graph.
    """

    def __init__(self, backend: FlashInferBackend, bucket: int) -> None:
        self._backend = backend
        self._bucket = bucket
        self._planned = False
        self._wrappers = {scores: self._new_wrapper() for scores in backend.scores}
        buffers = backend.buffers
        self._arguments = {  # of every plan
            scores: {
                "indptr": buffers.host_indptr[: bucket + 1],
                "last_page_len": buffers.host_last_page_len[:bucket],
                "head_dim": backend.head_dim,
                **backend.plan_arguments,
                **scores_arguments(scores),
            }
            for scores in backend.scores
        }

    def _new_wrapper(self) -> Any:
        backend, buffers, bucket = self._backend, self._backend.buffers, self._bucket
        wrapper = backend.module.BatchDecodeWithPagedKVCacheWrapper(
            backend.workspace,
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=backend.tensor_cores,
            paged_kv_indptr_buffer=buffers.indptr[: bucket + 1],
            paged_kv_indices_buffer=buffers.indices,
            paged_kv_last_page_len_buffer=buffers.last_page_len[:bucket],
            backend=DECODE_KERNEL,
        )
        wrapper.reset_workspace_buffer(
            backend.workspace, torch.empty(DECODE_INT_WORKSPACE_BYTES, dtype=torch.uint8, device=backend.device)
        )
        return wrapper

    def _plan(self, rows: PlannedRows) -> None:
        backend, buffers = self._backend, self._backend.buffers
        rows.check_bucket(self._bucket)
        backend.event.synchronize()
        buffers.write(rows.page_table, rows.kv_lens, tables=rows.tables)
        buffers.upload()
        indices = buffers.indices[: buffers.num_indices]
        for scores, wrapper in self._wrappers.items():
            arguments = {**self._arguments[scores], "indices": indices}
            if self._planned:
                # The same plan without copies, which `upload` has made, and without a Python loop over the sequences.
                backend.module.decode.fast_decode_plan(wrapper, **arguments)
            else:
                wrapper.plan(**arguments)
        self._planned = True
        backend.event.record()

    def _attend(self, q: torch.Tensor, cache: KvCache, out: torch.Tensor, scores: Scores, terms: HeadTerms) -> None:
        _run(self._wrappers[scores], q, cache, out)


def _run(wrapper: Any, q: torch.Tensor, cache: KvCache, out: torch.Tensor) -> None:
    k, v, scales = cache
    wrapper.run(q, (k, v), out=out, **({} if scales == UNSCALED else {"k_scale": scales.k, "v_scale": scales.v}))


def scores_arguments(scores: Scores) -> dict[str, float]:
    """Arguments of a plan for layers with such scores."""
    found = {
        "sm_scale": scores.scale,
        "window_left": None if scores.window is None else scores.window - 1,
        "logits_soft_cap": scores.softcap,
    }
    return {name: value for name, value in found.items() if value is not None}


def prefill_kernel(head_dim: int, kv_dtype: torch.dtype) -> str:
    """FlashInfer's kernel for prefill chunks: the device's best for heads of 128 elements, else fa2; for a cache in FP8
    always fa2.

    At a head size of 64, fa3's tile of 192 queries does not suit chunks, and that kernel is seldom built ahead.
    """
    return "auto" if head_dim == 128 and kv_dtype != FLOAT8 else "fa2"


def unavailable_modules(
    group: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    scores: Collection[Scores] = (PLAIN,),
    *,
    kv_dtype: torch.dtype | None = None,
) -> tuple[list[str], str]:
    """Return the compiled modules that are missing and can't be built here, and why they can't be built.

    kv_dtype: of the cache; None: `dtype`.
    Raises RuntimeError or ImportError if FlashInfer itself reports that it can't serve.
    """
    prefill, decode = import_module("flashinfer.prefill"), import_module("flashinfer.decode")
    if not (cause := why_none_is_built()):
        return [], ""
    kv_dtype = dtype if kv_dtype is None else kv_dtype
    kernel = prefill_kernel(head_dim, kv_dtype)
    types = (dtype, kv_dtype, dtype, torch.int32)
    if kernel == "auto":
        kernel = import_module("flashinfer.utils").determine_attention_backend(device, 0, False, False, dtype, dtype)
    modules = []
    for each in scores:
        shape = (*types, head_dim, head_dim, 0, each.window is not None, each.softcap is not None)
        modules.append(_prefill_module(prefill, kernel, *shape, False))
        if group >= TENSOR_CORE_GROUP:
            modules.append(_prefill_module(prefill, DECODE_KERNEL, *shape, False))
        else:
            modules.append(decode.gen_batch_decode_module(*shape))
    return list(dict.fromkeys(module.name for module in modules if not module.is_aot)), cause


def _prefill_module(prefill: ModuleType | Any, kernel: str, *shape: Any) -> Any:
    """The module that a wrapper of FlashInfer loads: from 0.7 on fa2's is one for equal strides of K and V."""
    primary = getattr(prefill, "_gen_batch_prefill_primary_module", None) if kernel == "fa2" else None
    return (prefill.gen_batch_prefill_module if primary is None else primary)(kernel, *shape)


def has_run(version: str) -> bool:
    """True for the version that has run on GPUs."""
    return version == VERSION or version.startswith(f"{VERSION}.")


def is_supported(version: str) -> bool:
    """True for a version that takes our calls."""
    numbers = tuple(int(each) for each in version.split(".")[:3] if each.isdigit())
    return has_run(version) or OTHERS[0] <= numbers < OTHERS[1]


def why_none_is_built() -> str:
    """Return why FlashInfer can't build modules here; empty if it can."""
    if os.environ.get("FLASHINFER_DISABLE_JIT"):
        return "FLASHINFER_DISABLE_JIT is set, so it builds none"
    return "" if _has_nvcc() else "there is no CUDA compiler (nvcc) to build it"


def _has_nvcc() -> bool:
    """True if FlashInfer finds the compiler that builds its modules."""
    try:
        home = import_module("flashinfer.jit.cpp_ext").get_cuda_path()
    except RuntimeError:
        return False
    return Path(home, "bin", "nvcc").is_file()


def float_workspace_bytes(num_heads: int, kv_heads: int, head_dim: int, max_rows: int, num_sms: int) -> int:
    """Upper bound for the partial results of `PrefillPlan` and `DecodePlan` in `scheduler.cuh`, in bytes.

    They have an output and a sum in float32 per head and row of a tile. There are two tiles per processor, or, in graph
    mode, tiles for every sequence of the batch.
    """
    group, split_tiles = num_heads // kv_heads, max(2 * num_sms // kv_heads, 1)
    decode_tile = 16 if group <= 16 else 64 if group <= 64 or head_dim >= 256 else 128
    decode_tiles = max(split_tiles, -(-max_rows * group // decode_tile) + max_rows - 1)
    rows = max(split_tiles * (128 if head_dim < 256 else 64), decode_tiles * decode_tile)
    return num_heads * rows * (head_dim + 1) * 4 + 64
