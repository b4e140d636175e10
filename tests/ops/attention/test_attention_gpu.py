"""Paged attention on a GPU against its definition: FlashInfer eager and captured; ours and torch's for the rest."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from chorus.ops.attention.attention import PLAIN, AttentionSetup, HeadShape, PagedAttention, Scores
from chorus.ops.attention.attention_backend import choose_attention

from .attention_ref import paged_attention_ref
from .test_attention import Step

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
SHAPES = [(8, 8, 64), (8, 2, 64), (8, 1, 64), (8, 8, 128), (8, 2, 128), (8, 1, 128), (14, 2, 64)]
LATER_ROWS = [[(1, 500), (1, 20), (1, 0), (1, 63)], [(1, 2)] * 4, [(1, 255)] * 4]


class DeviceStep(Step):
    """A step whose q and caches are on the GPU, in a page-outermost arena, with the float32 reference."""

    def __init__(self, seed, rows, shape, dtype, scores=PLAIN):
        heads, kv_heads, head_dim = shape
        super().__init__(seed, rows, heads=heads, kv_heads=kv_heads, head_dim=head_dim, block_tokens=16)
        self.q, arena = self.q.to(dtype), torch.stack((self.k, self.v), dim=1).to(dtype)
        self.k, self.v = arena[:, 0], arena[:, 1]
        want = paged_attention_ref(
            self.q.float(), self.k.float(), self.v.float(), self.qo_indptr, self.tables, self.kv_lens, scores
        )
        self.want = want.flatten(1)
        wide = torch.full((len(arena), 3, 2, *arena.shape[2:]), float("nan"), dtype=dtype, device="cuda")
        wide[:, 1] = arena.cuda()
        self.q, self.k, self.v = self.q.cuda(), wide[:, 1, 0], wide[:, 1, 1]

    def check(self, attention, scores=PLAIN):
        got = self.run(attention, scores).float().cpu()
        torch.testing.assert_close(got, self.want, rtol=2e-2, atol=2e-2)


def setup(shape, dtype):
    return AttentionSetup(HeadShape(*shape, 16), dtype, torch.device("cuda:0"), max_rows=32, max_pages_per_row=64)


def device_backend(shape, dtype, name="flashinfer"):
    """The backend that serves. In float16 ours may, with its reason, where FlashInfer's modules are in bfloat16."""
    backend = choose_attention(setup(shape, dtype))
    fallback = dtype is torch.float16 and "no compiled" in backend.reason
    assert backend.name.startswith("triton" if fallback else name), backend.reason
    return backend


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_ragged(shape, dtype):
    attention = device_backend(shape, dtype).ragged()
    for seed, rows in enumerate(
        [[(40, 0)], [(17, 30), (5, 0), (1, 70), (1, 0)], [(1, 300), (1, 15), (1, 16)], [(130, 64), (2, 500)]]
    ):
        DeviceStep(seed, rows, shape, dtype).check(attention)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_decode_replays_with_other_lengths(shape, dtype):
    """Captured over short rows, replayed over long ones, shorter ones and with another bucket planned between."""
    backend = device_backend(shape, dtype)
    four, two = backend.decode(4), backend.decode(2)
    first = DeviceStep(0, [(1, 3), (1, 0), (1, 17), (1, 1)], shape, dtype)
    pages = 4 * 40
    q = torch.zeros_like(first.q)
    caches = torch.zeros(pages, 3, 2, 16, *first.k.shape[2:], dtype=dtype, device="cuda")

    def load(step):
        q.copy_(step.q)
        caches[: len(step.k), 1, 0], caches[: len(step.v), 1, 1] = step.k, step.v
        four.plan(step.qo_indptr, step.page_table, step.kv_lens)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        load(first)
        four.run(q, caches[:, 1, 0], caches[:, 1, 1])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            out = four.run(q, caches[:, 1, 0], caches[:, 1, 1])
        for seed, rows in enumerate(LATER_ROWS):
            step = DeviceStep(seed, rows, shape, dtype)
            load(step)
            graph.replay()
            stream.synchronize()
            torch.testing.assert_close(out.float().cpu(), step.want, rtol=2e-2, atol=2e-2)
            eager = four.run(q, caches[:, 1, 0], caches[:, 1, 1])
            assert torch.equal(eager, out), "a replay gives the same bits as an eager run"
            DeviceStep(9, [(1, 4), (1, 90)], shape, dtype).check(two)


@pytest.mark.parametrize("shape", [(8, 2, 64), (8, 8, 128), (8, 1, 256)], ids=str)
@pytest.mark.parametrize("wanted", ["auto", "triton"])
def test_scores_far_below_zero_leave_masked_keys_out(shape, wanted):
    """FlashInfer 0.6.4 gives masked keys a score of -5e4 (its #4401): more than that of every key that a query sees
    here, which is -8e4 at most. Values of later tokens, and of pages' ends, must not come in all the same.
    """
    backend = choose_attention(setup(shape, torch.bfloat16), wanted=wanted)
    ragged, bucket = backend.ragged(), backend.decode(4)
    for seed, rows in enumerate([[(40, 0)], [(17, 30), (5, 0), (1, 70), (1, 0)]]):
        far_below(DeviceStep(seed, rows, shape, torch.bfloat16)).check(ragged)
    for seed, rows in enumerate(LATER_ROWS):
        far_below(DeviceStep(seed, rows, shape, torch.bfloat16)).check(bucket)


def far_below(step: DeviceStep) -> DeviceStep:
    """The same values, with queries and keys whose products are alike and far below zero."""
    step.q.fill_(-100.0)
    step.k.fill_(100.0)
    q, k, v = (each.float().cpu() for each in (step.q, step.k, step.v))
    assert float((q[0, 0] @ k[0, 0, 0]) * q.shape[-1] ** -0.5) <= -8e4
    step.want = paged_attention_ref(q, k, v, step.qo_indptr, step.tables, step.kv_lens).flatten(1)
    return step


@pytest.mark.parametrize("shape", [(8, 2, 64), (8, 8, 128), (8, 1, 256)], ids=str)
@pytest.mark.parametrize(
    "scores", [Scores(window=5), Scores(window=100), Scores(softcap=3.0), Scores(0.05, 130, 20.0)], ids=str
)
def test_windows_and_soft_caps(shape, scores):
    """In prompts shorter and longer than the window and in decode rows, by whichever backend serves."""
    backend = choose_attention(replace(setup(shape, torch.bfloat16), scores=(scores,)))
    assert backend.captures
    ragged, bucket = backend.ragged(), backend.decode(4)
    for seed, rows in enumerate([[(40, 0)], [(150, 30), (5, 0), (1, 170), (1, 0)], [(2, 500), (1, 98)]]):
        DeviceStep(seed, rows, shape, torch.bfloat16, scores).check(ragged, scores)
    for seed, rows in enumerate(LATER_ROWS):
        DeviceStep(seed, rows, shape, torch.bfloat16, scores).check(bucket, scores)


def test_torch_attention():
    """Cases that neither FlashInfer nor our kernel takes: heads of 8 elements."""
    backend = device_backend((4, 2, 8), torch.float32, name="torch")
    for seed, rows in enumerate([[(9, 0)], [(4, 9), (3, 0), (1, 20)], [(1, 0), (1, 33)]]):
        DeviceStep(seed, rows, (4, 2, 8), torch.float32).check(backend.ragged())
    assert isinstance(backend.decode(2), PagedAttention)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_our_attention_of_ragged_steps(dtype):
    """Prompts by torch, decode rows by our kernel, where FlashInfer can't serve or is not asked for."""
    backend = choose_attention(setup((4, 2, 64), dtype), wanted="triton")
    assert backend.name.startswith("triton")
    assert backend.captures
    for seed, rows in enumerate([[(9, 0)], [(4, 9), (3, 0), (1, 20)], [(1, 0), (1, 33)], [(40, 100), (1, 900)]]):
        DeviceStep(seed, rows, (4, 2, 64), dtype).check(backend.ragged())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_late_chunk_of_a_long_prompt_by_torch_makes_no_scores(dtype):
    """They would take 16 GiB of 16-bit values, more than the largest step, by which the arena is sized, has needed."""
    tokens, context, block = 2048, 1 << 17, 16
    arena = torch.zeros(context // block, 2, block, 8, 128, dtype=dtype, device="cuda")
    attention = PagedAttention(HeadShape(32, 8, 128, block), "cuda")
    attention.plan([0, tokens], torch.arange(context // block)[None], [context])
    q = torch.randn(tokens, 32, 128, dtype=dtype, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = attention.run(q, arena[:, 0], arena[:, 1])
    torch.cuda.synchronize()
    assert not out.any()
    assert torch.cuda.max_memory_allocated() - before < 8 << 30
