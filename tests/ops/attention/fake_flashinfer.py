"""FlashInfer's interface without a GPU: checks a plan's arguments, and computes from these alone.

Copies from page-locked memory are late, as they may be on a GPU: host tensors are kept as they are and only read when
the stream is waited for or `run` is called.
"""

from __future__ import annotations

import functools
import itertools
from types import SimpleNamespace

import torch

from chorus.ops.attention.attention import Scores

from .attention_ref import paged_attention_ref


class Stream:
    """Copies in flight, done when an event recorded after them is waited for."""

    def __init__(self):
        self.pending = []
        self.waits = 0

    def copy(self, target, source):
        self.pending.append((target, source))

    def finish(self):
        for target, source in self.pending:
            target.copy_(source)
        self.pending.clear()

    def new_event(self):
        return SimpleNamespace(record=lambda: None, synchronize=self._synchronize)

    def _synchronize(self):
        self.waits += 1
        self.finish()


def ints(tensor, size):
    assert tensor.dtype is torch.int32
    assert tensor.shape == (size,)
    assert tensor.device.type == "cpu"
    return tensor


def recorded(method):
    """Note the call in `fake.calls`, for comparison with the real signature."""

    @functools.wraps(method)
    def call(self, *args, **kwargs):
        fake = args[0] if method.__name__ == "__init__" else self.fake
        given = args[1:] if method.__name__ == "__init__" else args
        fake.calls.append((type(self).real_name, method.__name__, given, kwargs))
        return method(self, *args, **kwargs)

    return call


class Wrapper:
    def __init__(self, fake, workspace, layout):
        assert layout == "NHD"
        assert workspace.dtype is torch.uint8
        self.fake, self.workspace = fake, workspace
        self.int_workspace = torch.empty(8 << 20, dtype=torch.uint8, device="meta")
        self.plans = 0
        fake.wrappers.append(self)

    def _keep(self, name, tensor):
        target = torch.full_like(tensor, -(10**6))
        setattr(self, name, target)
        self.fake.stream.copy(target, tensor)

    def take(
        self,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        q_data_type,
        kv_data_type,
        sm_scale=None,
        window_left=-1,
        logits_soft_cap=None,
    ):
        assert q_data_type is not None
        assert kv_data_type in (q_data_type, torch.float8_e4m3fn)
        self.shape = (num_qo_heads, num_kv_heads, head_dim, page_size)
        self.dtype, self.kv_dtype = q_data_type, kv_data_type
        window = None if window_left == -1 else window_left + 1  # FlashInfer leaves out a query's own key
        self.scores = Scores(sm_scale, window, logits_soft_cap)
        self.plans += 1

    def _attend(self, q, caches, qo_indptr, indptr, indices, last, out, k_scale=None, v_scale=None):
        self.fake.stream.finish()
        heads, kv_heads, head_dim, page_size = self.shape
        k, v = caches
        assert (q.dtype, k.dtype, v.dtype) == (self.dtype, self.kv_dtype, self.kv_dtype)
        assert q.shape[1:] == (heads, head_dim)
        assert k.shape[1:] == v.shape[1:] == (page_size, kv_heads, head_dim)
        assert k.stride() == v.stride(), "the kernels assume it"
        assert k.stride(-1) == q.stride(-1) == 1
        qo_indptr, indptr, last = qo_indptr.tolist(), indptr.tolist(), last.tolist()
        assert indptr[0] == qo_indptr[0] == 0
        assert qo_indptr[-1] == len(q)
        assert all(1 <= length <= page_size for length in last)
        tables = [indices[a:b].tolist() for a, b in itertools.pairwise(indptr)]
        lens = [(len(table) - 1) * page_size + length for table, length in zip(tables, last, strict=True)]
        if k_scale is not None:
            k, v = k.float() * k_scale, v.float() * v_scale
        result = paged_attention_ref(q, k, v, qo_indptr, tables, lens, self.scores)
        if out is None:
            return result
        assert out.shape == q.shape
        return out.copy_(result)


class Prefill(Wrapper):
    real_name = "BatchPrefillWithPagedKVCacheWrapper"

    @recorded
    def __init__(self, fake, float_workspace_buffer, kv_layout="NHD", *, backend="auto"):
        super().__init__(fake, float_workspace_buffer, kv_layout)
        self.backend = backend

    @recorded
    def plan(
        self,
        qo_indptr,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim_qk,
        page_size,
        *,
        causal,
        **rest,
    ):
        assert causal
        rows = len(qo_indptr) - 1
        self.take(num_qo_heads, num_kv_heads, head_dim_qk, page_size, **rest)
        assert len(paged_kv_indices) == paged_kv_indptr[-1]
        self._keep("qo_indptr", ints(qo_indptr, rows + 1))
        self._keep("indptr", ints(paged_kv_indptr, rows + 1))
        self._keep("last", ints(paged_kv_last_page_len, rows))
        self.indices = paged_kv_indices  # lies on the device: FlashInfer keeps it as it is

    @recorded
    def run(self, q, paged_kv_cache, *, out=None, k_scale=None, v_scale=None):
        lists = self.qo_indptr, self.indptr, self.indices, self.last
        return self._attend(q, paged_kv_cache, *lists, out, k_scale, v_scale)


class Decode(Wrapper):
    real_name = "BatchDecodeWithPagedKVCacheWrapper"

    @recorded
    def __init__(
        self,
        fake,
        float_workspace_buffer,
        kv_layout="NHD",
        *,
        use_cuda_graph=False,
        use_tensor_cores=False,
        paged_kv_indptr_buffer=None,
        paged_kv_indices_buffer=None,
        paged_kv_last_page_len_buffer=None,
        backend="auto",
    ):
        assert backend == "fa2", "a version may choose one that serves decode rows badly"
        super().__init__(fake, float_workspace_buffer, kv_layout)
        self.graph, self.tensor_cores = use_cuda_graph, use_tensor_cores
        if use_cuda_graph:
            rows = len(paged_kv_last_page_len_buffer)
            self.indptr = ints(paged_kv_indptr_buffer, rows + 1)
            self.last = ints(paged_kv_last_page_len_buffer, rows)
            self.indices = paged_kv_indices_buffer

    @recorded
    def reset_workspace_buffer(self, float_workspace_buffer, int_workspace_buffer):
        assert float_workspace_buffer is self.workspace
        self.int_workspace = int_workspace_buffer

    @recorded
    def plan(
        self,
        indptr,
        indices,
        last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        **rest,
    ):
        rows = len(last_page_len)
        self.take(num_qo_heads, num_kv_heads, head_dim, page_size, **rest)
        ints(indptr, rows + 1)
        ints(last_page_len, rows)
        assert len(indices) == indptr[-1]
        if not self.graph:
            self._keep("indptr", indptr)
            self._keep("last", last_page_len)
            self.indices = indices
            return
        assert rows == len(self.last), "a wrapper in graph mode has one batch size"
        assert indices.data_ptr() == self.indices.data_ptr(), "another buffer would be copied, blocking"
        self.fake.stream.copy(self.indptr, indptr)
        self.fake.stream.copy(self.last, last_page_len)

    @recorded
    def run(self, q, paged_kv_cache, *, out=None, k_scale=None, v_scale=None):
        lists = torch.arange(len(self.last) + 1), self.indptr, self.indices, self.last
        return self._attend(q, paged_kv_cache, *lists, out, k_scale, v_scale)


class FakeFlashInfer:
    """Stands for the package `flashinfer`."""

    __version__ = "0.0.fake"

    def __init__(self, stream):
        self.stream = stream
        self.wrappers, self.calls = [], []
        self.fast_plans = 0
        self.decode = SimpleNamespace(
            fast_decode_plan=self._fast_decode_plan, xqa_batch_decode_with_kv_cache=self._xqa_decode
        )

    def BatchPrefillWithPagedKVCacheWrapper(self, *args, **kwargs):
        return Prefill(self, *args, **kwargs)

    def BatchDecodeWithPagedKVCacheWrapper(self, *args, **kwargs):
        return Decode(self, *args, **kwargs)

    def _fast_decode_plan(self, wrapper, indptr, indices, last_page_len, **kwargs):
        """Copies nothing into the wrapper's buffers; needs a plan before it."""
        self.calls.append(("fast_decode_plan", None, (wrapper, indptr, indices, last_page_len), kwargs))
        assert wrapper.graph
        assert wrapper.plans
        assert len(indices) == indptr[-1]
        wrapper.take(**kwargs)
        self.fast_plans += 1

    def _xqa_decode(self, **given):
        """The kernel reads tables and lengths on the device, and strides in heads."""
        self.calls.append(("xqa_batch_decode_with_kv_cache", None, (), given))
        query, out, (k, v) = given["query"], given["out"], given["kv_cache"]
        tables, lens, window = given["block_tables"], given["seq_lens"], given["window_left"]
        rows, _, head_dim = query.shape
        assert given["kv_layout"] == "NHD"
        assert given["bmm2_scale"] == 1.0, "it scales the output"
        assert given["workspace_buffer"].dtype is torch.uint8
        assert (tables.dtype, lens.dtype, lens.shape) == (torch.int32, torch.uint32, (rows,))
        assert all(each.is_contiguous() for each in (tables, query, out))
        assert given["max_seq_len"] == tables.shape[1] * k.shape[1]
        assert k.stride() == v.stride(), "it reads K's alone"
        assert not any(stride % head_dim for stride in k.stride()[:3])
        lens = lens.view(torch.int32).tolist()
        assert all(1 <= length <= given["max_seq_len"] for length in lens)
        pages = [table[: -(-length // k.shape[1])] for table, length in zip(tables.tolist(), lens, strict=True)]
        scores = Scores(given["bmm1_scale"], None if window < 0 else window + 1)
        return out.copy_(paged_attention_ref(query, k, v, list(range(rows + 1)), pages, lens, scores))
