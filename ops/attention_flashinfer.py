"""Paged attention by FlashInfer, eager for ragged steps and captured for decode buckets.

What was read in FlashInfer 0.6.4 (`csrc/batch_prefill*.cu`, `csrc/batch_decode.cu`, `page.cuh`, `scheduler.cuh`) and
what follows from it here:

- K and V may have any strides over pages, tokens and heads, as long as they are the same for both and a head's elements
  lie side by side; offsets are 64 bits wide. A layer of the page-outermost arena is taken as it is.
- A plan reads `indptr` and `last_page_len` on the host, and only passes `indices` on. So page ids go to the device in
  one copy of our own, and nothing is ever read back.
- A plan writes page-locked memory of the wrapper's and starts a copy from it, just as we do with our staging buffer:
  neither may be written again before that copy is done. An event after every plan guards both.
- The integer workspace holds what the last plan said until `run` is over: a wrapper has its own. The float workspace is
  scratch of a single `run`: all wrappers share one.
- `max_token_per_sequence` and `max_sequence_kv` of a prefill plan are not for us: with them, the plan of 0.6.4 makes no
  host copies of the lengths, and then reads them. `fast_decode_plan` outside graph mode would have the kernel read the
  host's `indptr`.
- In graph mode the launch grid depends on the number of rows alone, so a replay after any other plan is right.
- The Hopper prefill kernel (fa3) neither splits a long KV over processors nor packs the heads that share it, and every
  row takes a tile of 128 queries. A decode row would be slow there, so decode rows of a mixed step have a wrapper of
  their own, which splits and packs. fa2 could take both kinds in one launch, but picks its tile from the rows' mean.

FlashInfer itself is imported when the first backend is made.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from .attention import check_bucket, count_prefills
from .attention_plan import PlanBuffers

DTYPES = (torch.bfloat16, torch.float16)
HEAD_DIMS = (64, 128, 256)

#: Decode takes the tensor-core kernel if at least this many heads share a KV head: it multiplies tiles of 16 rows, one
#: row per head. The other kernel is compiled for groups of 1, 2, 3, 4 and 8 alone.
TENSOR_CORE_GROUP = 4

#: Tensor-core kernel of decode, said rather than left to a version's choice: the others neither split a long KV nor
#: pack heads, and `unavailable_modules` asks for this one.
DECODE_KERNEL = "fa2"

#: Least float workspace, what FlashInfer's authors recommend.
FLOAT_WORKSPACE_BYTES = 128 << 20

#: A decode plan needs some tens of bytes per row; FlashInfer's own 8 MiB for each of many buckets would add up.
DECODE_INT_WORKSPACE_BYTES = 1 << 20


class FlashInferBackend:
    """Makes the attention objects of one executor; they share buffers.

    A plan holds until the next plan of any of them, and all run on one stream.
    """

    captures = True

    def __init__(
        self,
        num_heads: int,
        kv_heads: int,
        head_dim: int,
        block_tokens: int,
        dtype: torch.dtype,
        device: torch.device | str,
        *,
        max_rows: int,
        max_pages_per_row: int,
        num_sms: int,
        module: ModuleType | Any | None = None,
        new_event: Callable[[], Any] | None = None,
    ) -> None:
        """max_rows: most rows of a step. num_sms: processors of the device. module, new_event: for tests."""
        self.module = import_module("flashinfer") if module is None else module
        self.name = f"flashinfer {self.module.__version__}"
        self.reason, self.fix = "the device, dtype and head size suit it", ""
        self.device = torch.device(device)
        self.group = num_heads // kv_heads
        self.plan_arguments = {
            "num_qo_heads": num_heads,
            "num_kv_heads": kv_heads,
            "page_size": block_tokens,
            "q_data_type": dtype,
            "kv_data_type": dtype,
        }
        self.head_dim = head_dim
        self.buffers = PlanBuffers(max_rows, max_pages_per_row, block_tokens, self.device)
        self.event = (torch.cuda.Event if new_event is None else new_event)()
        size = max(FLOAT_WORKSPACE_BYTES, float_workspace_bytes(num_heads, kv_heads, head_dim, max_rows, num_sms))
        self.workspace = torch.zeros(size, dtype=torch.uint8, device=self.device)

    def ragged(self) -> FlashInferRaggedAttention:
        """For steps of any rows, run eagerly."""
        return FlashInferRaggedAttention(self)

    def decode(self, bucket: int) -> FlashInferDecodeAttention:
        """For `bucket` rows of one token; `run` may be captured once `plan` has been called."""
        return FlashInferDecodeAttention(self, bucket)

    @property
    def tensor_cores(self) -> bool:
        """True if decode takes the tensor-core kernel."""
        return self.group >= TENSOR_CORE_GROUP


class FlashInferRaggedAttention:
    """Rows of any lengths: prefill chunks first, then decode rows of one token. Eager."""

    def __init__(self, backend: FlashInferBackend) -> None:
        self._backend = backend
        module = backend.module
        self._prefill = module.BatchPrefillWithPagedKVCacheWrapper(
            backend.workspace, "NHD", backend=prefill_kernel(backend.head_dim)
        )
        self._decode = module.BatchDecodeWithPagedKVCacheWrapper(
            backend.workspace, "NHD", use_tensor_cores=backend.tensor_cores, backend=DECODE_KERNEL
        )
        self._prefill_tokens = 0
        self._num_tokens = 0

    def plan(
        self,
        qo_indptr: Sequence[int],
        page_table: torch.Tensor,
        kv_lens: Sequence[int],
        tables: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Prepare a step, as `PagedAttention.plan`; page_table is in host memory."""
        backend, buffers = self._backend, self._backend.buffers
        num_prefills = count_prefills(qo_indptr, len(kv_lens))
        backend.event.synchronize()
        split = buffers.write(page_table, kv_lens, num_prefills, qo_indptr)
        buffers.upload()
        self._prefill_tokens, self._num_tokens = qo_indptr[num_prefills], qo_indptr[-1]
        if num_prefills:
            self._prefill.plan(
                qo_indptr=buffers.qo_indptr[: num_prefills + 1],
                paged_kv_indptr=buffers.prefill_indptr[: num_prefills + 1],
                paged_kv_indices=buffers.indices[:split],
                paged_kv_last_page_len=buffers.host_last_page_len[:num_prefills],
                head_dim_qk=backend.head_dim,
                causal=True,
                **backend.plan_arguments,
            )
        if num_decodes := len(kv_lens) - num_prefills:
            self._decode.plan(
                indptr=buffers.host_indptr[: num_decodes + 1],
                indices=buffers.indices[split : buffers.num_indices],
                last_page_len=buffers.host_last_page_len[num_prefills : len(kv_lens)],
                head_dim=backend.head_dim,
                **backend.plan_arguments,
            )
        backend.event.record()

    def run(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Attend with one layer's cache, as `PagedAttention.run`."""
        out = torch.empty_like(q) if out is None else out
        split = self._prefill_tokens
        if split:
            self._prefill.run(q[:split], (k_cache, v_cache), out=out[:split])
        if split < self._num_tokens:
            self._decode.run(q[split:], (k_cache, v_cache), out=out[split:])
        return out.view(len(q), -1)


class FlashInferDecodeAttention:
    """A bucket's rows of one token each over static buffers: `plan` before every replay, `run` inside the graph."""

    def __init__(self, backend: FlashInferBackend, bucket: int) -> None:
        self._backend = backend
        self._bucket = bucket
        buffers = backend.buffers
        self._wrapper = backend.module.BatchDecodeWithPagedKVCacheWrapper(
            backend.workspace,
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=backend.tensor_cores,
            paged_kv_indptr_buffer=buffers.indptr[: bucket + 1],
            paged_kv_indices_buffer=buffers.indices,
            paged_kv_last_page_len_buffer=buffers.last_page_len[:bucket],
            backend=DECODE_KERNEL,
        )
        self._wrapper.reset_workspace_buffer(
            backend.workspace, torch.empty(DECODE_INT_WORKSPACE_BYTES, dtype=torch.uint8, device=backend.device)
        )
        self._planned = False
        self._arguments = {  # of every plan
            "indptr": buffers.host_indptr[: bucket + 1],
            "last_page_len": buffers.host_last_page_len[:bucket],
            "head_dim": backend.head_dim,
            **backend.plan_arguments,
        }

    def plan(
        self,
        qo_indptr: Sequence[int],
        page_table: torch.Tensor,
        kv_lens: Sequence[int],
        tables: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Prepare a step of exactly the bucket's rows, padding among them; page_table is in host memory."""
        backend, buffers = self._backend, self._backend.buffers
        check_bucket(self._bucket, qo_indptr, kv_lens)
        backend.event.synchronize()
        buffers.write(page_table, kv_lens, tables=tables)
        buffers.upload()
        arguments = {**self._arguments, "indices": buffers.indices[: buffers.num_indices]}
        if self._planned:
            # the same plan without copies, which `upload` has made, and without a Python loop over the rows
            backend.module.decode.fast_decode_plan(self._wrapper, **arguments)
        else:
            self._wrapper.plan(**arguments)
            self._planned = True
        backend.event.record()

    def run(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Attend with one layer's cache: q `[bucket, heads, head_dim]` → `[bucket, heads · head_dim]`."""
        return self._wrapper.run(q, (k_cache, v_cache), out=out).view(len(q), -1)


def prefill_kernel(head_dim: int) -> str:
    """FlashInfer's kernel for prefill chunks: the device's best for heads of 128 elements. For others fa2, since fa3's
    tile of 192 queries at a head size of 64 suits chunks badly, and it is seldom built ahead.
    """
    return "auto" if head_dim == 128 else "fa2"


def unavailable_modules(group: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> tuple[list[str], str]:
    """Compiled modules that serving such heads takes, as far as they are neither built ahead nor can be built here; and
    the reason why they can't be built. RuntimeError or ImportError where FlashInfer itself says that it can't.
    """
    jit = import_module("flashinfer.jit")
    if os.environ.get("FLASHINFER_DISABLE_JIT"):
        cause = "FLASHINFER_DISABLE_JIT is set, so it builds none"
    elif not _has_nvcc():
        cause = "there is no CUDA compiler (nvcc) to build it"
    else:
        return [], ""
    kernel = prefill_kernel(head_dim)
    types = (dtype, dtype, dtype, torch.int32)
    if kernel == "auto":
        kernel = import_module("flashinfer.utils").determine_attention_backend(device, 0, False, False, dtype, dtype)
    shape = (*types, head_dim, head_dim, 0, False, False)
    modules = [jit.gen_batch_prefill_module(kernel, *shape, False)]
    if group >= TENSOR_CORE_GROUP:
        modules.append(jit.gen_batch_prefill_module(DECODE_KERNEL, *shape, False))
    else:
        modules.append(jit.gen_batch_decode_module(*shape))
    return list(dict.fromkeys(module.name for module in modules if not module.is_aot)), cause


def _has_nvcc() -> bool:
    """True if FlashInfer finds the compiler that its modules are built with."""
    try:
        home = import_module("flashinfer.jit.cpp_ext").get_cuda_path()
    except RuntimeError:
        return False
    return Path(home, "bin", "nvcc").is_file()


def float_workspace_bytes(num_heads: int, kv_heads: int, head_dim: int, max_rows: int, num_sms: int) -> int:
    """Most bytes of partial results that `PrefillPlan` and `DecodePlan` of `scheduler.cuh` lay out: an output and a sum
    in float32 per head and row of a tile, for two tiles per processor, or in graph mode for every row of the batch.
    """
    group, split_tiles = num_heads // kv_heads, max(2 * num_sms // kv_heads, 1)
    decode_tile = 16 if group <= 16 else 64 if group <= 64 or head_dim >= 256 else 128
    decode_tiles = max(split_tiles, -(-max_rows * group // decode_tile) + max_rows - 1)
    rows = max(split_tiles * (128 if head_dim < 256 else 64), decode_tiles * decode_tile)
    return num_heads * rows * (head_dim + 1) * 4 + 64
