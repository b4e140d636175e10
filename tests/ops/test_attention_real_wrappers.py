"""FlashInfer's own Python over stand-ins for its compiled modules: the kernels' arguments, without a GPU."""

from __future__ import annotations

import itertools
import math
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from chorus.ops import attention_flashinfer
from chorus.ops.attention import AttentionSetup, HeadShape
from chorus.ops.attention_flashinfer import FlashInferBackend

from .attention_ref import paged_attention_ref
from .test_attention import DUMMY, Step

flashinfer = pytest.importorskip("flashinfer")
from flashinfer import decode, prefill  # noqa: E402  only where it is installed

CAUSAL, NON_CAUSAL, NHD = 1, 0, 0


class Kernels:
    """A compiled module: plans are counted, `run` and `paged_run` compute from the buffers that they are given."""

    def __init__(self):
        self.plans, self.mask_modes = 0, set()

    def plan(self, float_workspace, int_workspace, pinned, *args):
        assert int_workspace.numel() == pinned.numel()
        lists = [arg for arg in args if isinstance(arg, torch.Tensor) and arg.numel()]
        assert all(arg.device.type == "cpu" and arg.dtype is torch.int32 for arg in lists)
        self.plans += 1
        return [self.plans]

    def run(self, _float, _int, plan_info, q, k, v, indptr, indices, last, out, lse, layout, window, pdl, *scales):
        assert plan_info and layout == NHD and lse is None and window == -1
        assert scales[2] == pytest.approx(1 / math.sqrt(q.shape[-1]))
        self._attend(q, k, v, torch.arange(len(q) + 1), indptr, indices, last, out)

    def paged_run(self, _float, _int, plan_info, q, k, v, qo_indptr, indptr, indices, last, out, lse, mask, layout, *_):
        assert plan_info and layout == NHD and lse is None
        self.mask_modes.add(mask)
        self._attend(q, k, v, qo_indptr, indptr, indices, last, out)

    def _attend(self, q, k, v, qo_indptr, indptr, indices, last, out):
        assert {t.dtype for t in (qo_indptr.int(), indptr, indices, last)} == {torch.int32}
        assert k.stride() == v.stride()
        indptr = indptr.tolist()
        tables = [indices[a:b].tolist() for a, b in itertools.pairwise(indptr)]
        lens = [(len(table) - 1) * k.shape[1] + end for table, end in zip(tables, last.tolist(), strict=True)]
        out.copy_(paged_attention_ref(q, k, v, qo_indptr.tolist(), tables, lens))


@pytest.fixture
def kernels(monkeypatch):
    """The stand-ins: `prefill` for both tensor-core paths, `decode` for the other."""
    made = SimpleNamespace(prefill=Kernels(), decode=Kernels(), prefill_backends=[])
    empty = torch.empty

    def prefill_module(backend, *args):
        made.prefill_backends.append(backend)
        return made.prefill

    monkeypatch.setattr(torch, "empty", lambda *args, pin_memory=False, **kwargs: empty(*args, **kwargs))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(prefill, "get_batch_prefill_module", prefill_module)
    monkeypatch.setattr(decode, "get_batch_prefill_module", prefill_module)
    monkeypatch.setattr(decode, "get_batch_decode_module", lambda *args: made.decode)
    monkeypatch.setattr(prefill, "determine_attention_backend", lambda *args, **kwargs: "fa3")
    for module in (prefill, decode):
        monkeypatch.setattr(module, "device_support_pdl", lambda device: False)
    monkeypatch.setattr(attention_flashinfer, "FLOAT_WORKSPACE_BYTES", 1)
    return made


def backend(heads, kv_heads, head_dim=8):
    shape = HeadShape(heads, kv_heads, head_dim, 4)
    setup = AttentionSetup(shape, torch.float16, torch.device("cpu"), max_rows=8, max_pages_per_row=16)
    event = SimpleNamespace(record=lambda: None, synchronize=lambda: None)
    return FlashInferBackend(setup, num_sms=2, new_event=lambda: event)


def half(step):
    step.q, step.k, step.v = step.q.half(), step.k.half(), step.v.half()
    return step


def check(step, attention):
    want = paged_attention_ref(step.q, step.k, step.v, step.qo_indptr, step.tables, step.kv_lens)
    torch.testing.assert_close(step.run(attention)[: len(want)], want.flatten(1))


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (8, 2)])
def test_ragged(kernels, heads):
    attention = backend(*heads).ragged()
    for seed, rows in enumerate([[(5, 6), (3, 0), (1, 9)], [(4, 0)], [(1, 3), (1, 12)], [(2, 9), (1, 0), (1, 7)]]):
        check(half(Step(seed, rows, heads=heads[0], kv_heads=heads[1])), attention)
    tensor_cores = heads[0] // heads[1] >= 4
    assert kernels.prefill.mask_modes == ({CAUSAL, NON_CAUSAL} if tensor_cores else {CAUSAL})
    assert bool(kernels.decode.plans) is not tensor_cores
    assert set(kernels.prefill_backends) == {"fa2"}


def test_prefill_of_common_heads_is_the_devices_best(kernels):
    check(half(Step(1, [(5, 6)], head_dim=128)), backend(4, 2, 128).ragged())
    assert kernels.prefill_backends == ["fa3"]


@pytest.mark.parametrize("heads", [(4, 4), (8, 2)])
def test_buckets_in_graph_mode(kernels, heads):
    """Every plan after the first is the fast one; buffers hold the values of `upload` for any planned bucket."""
    made = backend(*heads)
    buckets = {size: made.decode(size) for size in (2, 4)}
    for seed, (size, rows) in enumerate(
        [(4, [(1, 3), (1, 0), (1, 17)]), (2, [(1, 30)]), (4, [(1, 40)] * 4), (2, [(1, 2)] * 2), (4, [(1, 1)])]
    ):
        step = half(Step(seed, rows, heads=heads[0], kv_heads=heads[1]))
        want = paged_attention_ref(step.q, step.k, step.v, step.qo_indptr, step.tables, step.kv_lens)
        padding = size - len(rows)
        step.qo_indptr, step.kv_lens = range(size + 1), step.kv_lens + [1] * padding
        table = torch.full((padding, step.page_table.shape[1]), DUMMY, dtype=torch.long)
        step.page_table = torch.cat((step.page_table, table))
        step.q = torch.cat((step.q, step.q.new_ones(padding, *step.q.shape[1:])))
        torch.testing.assert_close(step.run(buckets[size])[: len(rows)], want.flatten(1))
    assert (kernels.prefill if heads[0] // heads[1] >= 4 else kernels.decode).plans == 5


@pytest.mark.parametrize(("group", "kinds"), [(1, ["batch_prefill", "batch_decode"]), (4, ["batch_prefill"])])
def test_modules_that_are_missing_are_named(monkeypatch, tmp_path, group, kinds):
    """Until FlashInfer finds them where modules built ahead lie."""
    monkeypatch.setattr(flashinfer.jit.env, "FLASHINFER_AOT_DIR", tmp_path)
    monkeypatch.setattr(flashinfer.jit.core.current_compilation_context, "TARGET_CUDA_ARCHS", {(9, "0a")})
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")
    wanted = group, 64, torch.float16, torch.device("cuda:0")
    missing, cause = attention_flashinfer.unavailable_modules(*wanted)
    assert [name[: len(kind)] for name, kind in zip(missing, kinds, strict=True)] == kinds
    assert "FLASHINFER_DISABLE_JIT" in cause
    for name in missing:
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.so").touch()
    assert attention_flashinfer.unavailable_modules(*wanted) == ([], cause)
