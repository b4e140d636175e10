"""FlashInfer's own Python over stand-ins for its compiled modules: the kernels' arguments, without a GPU."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from chorus.ops.attention import attention_flashinfer
from chorus.ops.attention.attention import PLAIN, AttentionSetup, HeadShape, Scores
from chorus.ops.attention.attention_flashinfer import FlashInferBackend

from .attention_ref import paged_attention_ref
from .test_attention import DUMMY, SCALES, Step

flashinfer = pytest.importorskip("flashinfer")
from flashinfer import decode, prefill  # noqa: E402  only where it is installed

pytestmark = pytest.mark.integration

CAUSAL, NON_CAUSAL, NHD = 1, 0, 0


class Kernels:
    """A compiled module: plans are counted, `run` and `paged_run` compute from the buffers that they are given."""

    def __init__(self):
        self.plans, self.mask_modes, self.scores = 0, set(), set()

    def plan(self, float_workspace, int_workspace, pinned, *args):
        assert int_workspace.numel() == pinned.numel()
        lists = [arg for arg in args if isinstance(arg, torch.Tensor) and arg.numel()]
        assert all(arg.device.type == "cpu" and arg.dtype is torch.int32 for arg in lists)
        self.plans += 1
        return [self.plans]

    def run(self, _float, _int, plan_info, q, k, v, indptr, indices, last, out, lse, layout, window, pdl, *rest):
        assert plan_info and layout == NHD and lse is None
        _, softcap, scale, *_ = rest
        self._attend(q, k, v, torch.arange(len(q) + 1), indptr, indices, last, out, (scale, window, softcap))

    def paged_run(self, _float, _int, plan_info, q, k, v, qo_indptr, indptr, indices, last, out, lse, mask, *rest):
        layout, window, _, _, _, _, _, _, _, softcap, scale, *_ = rest
        assert plan_info and layout == NHD and lse is None
        self.mask_modes.add(mask)
        self._attend(q, k, v, qo_indptr, indptr, indices, last, out, (scale, window, softcap))

    def _attend(self, q, k, v, qo_indptr, indptr, indices, last, out, given):
        scale, window, softcap = given
        how = Scores(scale, None if window == -1 else window + 1, softcap or None)
        self.scores.add(how)
        assert {t.dtype for t in (qo_indptr.int(), indptr, indices, last)} == {torch.int32}
        assert k.stride() == v.stride()
        indptr = indptr.tolist()
        tables = [indices[a:b].tolist() for a, b in itertools.pairwise(indptr)]
        lens = [(len(table) - 1) * k.shape[1] + end for table, end in zip(tables, last.tolist(), strict=True)]
        out.copy_(paged_attention_ref(q, k, v, qo_indptr.tolist(), tables, lens, how))


@pytest.fixture
def kernels(monkeypatch):
    """The stand-ins: `prefill` for both tensor-core paths, `decode` for the other."""
    made = SimpleNamespace(prefill=Kernels(), decode=Kernels(), prefill_backends=[], variants=set())
    empty = torch.empty

    def prefill_module(backend, *args):
        made.prefill_backends.append(backend)
        made.variants.add(args[7:9])
        return made.prefill

    def decode_module(*args):
        made.variants.add(args[7:9])
        return made.decode

    monkeypatch.setattr(torch, "empty", lambda *args, pin_memory=False, **kwargs: empty(*args, **kwargs))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(prefill, "get_batch_prefill_module", prefill_module)
    monkeypatch.setattr(decode, "get_batch_prefill_module", prefill_module)
    monkeypatch.setattr(decode, "get_batch_decode_module", decode_module)
    monkeypatch.setattr(prefill, "determine_attention_backend", lambda *args, **kwargs: "fa3")
    for module in (prefill, decode):
        monkeypatch.setattr(module, "device_support_pdl", lambda device: False)
    monkeypatch.setattr(attention_flashinfer, "FLOAT_WORKSPACE_BYTES", 1)
    return made


def backend(heads, kv_heads, head_dim=8, scores=PLAIN, float8_kv=False):
    shape = HeadShape(heads, kv_heads, head_dim, 4)
    sizes = {"max_rows": 8, "max_pages_per_row": 16, "scores": (scores,), "float8_kv": float8_kv}
    setup = AttentionSetup(shape, torch.float16, torch.device("cpu"), **sizes)
    event = SimpleNamespace(record=lambda: None, synchronize=lambda: None)
    return FlashInferBackend(setup, num_sms=2, new_event=lambda: event)


def half(step):
    step.q, step.k, step.v = step.q.half(), step.k.half(), step.v.half()
    return step


def check(step, attention, scores=PLAIN):
    want = paged_attention_ref(step.q, step.k, step.v, step.qo_indptr, step.tables, step.kv_lens, scores)
    torch.testing.assert_close(step.run(attention, scores)[: len(want)], want.flatten(1))


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


@pytest.mark.parametrize("heads", [(4, 4), (8, 2)])
@pytest.mark.parametrize("scores", [Scores(window=3), Scores(0.25, 6, 20.0), Scores(softcap=2.0)], ids=str)
def test_windows_and_soft_caps_reach_the_kernels(kernels, heads, scores):
    """By the first plan of a bucket and by the fast ones, in prompts and decode rows of other steps."""
    made = backend(*heads, scores=scores)
    ragged, bucket = made.ragged(), made.decode(2)
    for seed in range(3):
        check(half(Step(seed, [(1, 3 + seed), (1, 12)], heads=heads[0], kv_heads=heads[1])), bucket, scores)
        check(half(Step(seed, [(5, 6), (1, 9)], heads=heads[0], kv_heads=heads[1])), ragged, scores)
    assert kernels.variants == {(scores.window is not None, scores.softcap is not None)}
    seen = kernels.prefill.scores | kernels.decode.scores
    assert {(how.window, how.softcap) for how in seen} == {(scores.window, scores.softcap)}


@pytest.mark.parametrize("heads", [(4, 4), (8, 2)])
@pytest.mark.parametrize("scales", SCALES, ids=str)
def test_scales_of_a_cache_in_float8_reach_the_kernels(kernels, heads, scales):
    """Those of keys with the scores' scale; the output is multiplied by those of values where it is."""
    made = backend(*heads, head_dim=128, float8_kv=True)
    ragged, bucket = made.ragged(), made.decode(2)
    for seed in range(2):
        for rows, attention in (([(1, 3 + seed), (1, 12)], bucket), ([(5, 6), (1, 9)], ragged)):
            step = Step(seed, rows, heads=heads[0], kv_heads=heads[1], head_dim=128).in_float8(scales)
            step.q = step.q.half()
            want = paged_attention_ref(step.q, *step.caches, step.qo_indptr, step.tables, step.kv_lens)
            torch.testing.assert_close(step.run(attention), want.flatten(1), rtol=4e-3, atol=2e-3)
    assert set(kernels.prefill_backends) == {"fa2"}


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
