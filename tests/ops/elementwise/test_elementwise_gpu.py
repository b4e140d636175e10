"""The fused elementwise kernels on a GPU against their torch paths on the CPU."""

from __future__ import annotations

import pytest
import torch

from chorus.ops import dependent_launch
from chorus.ops.elementwise.elementwise import (
    RotaryEmbedding,
    add_rms_norm,
    clamped_swiglu,
    gelu_and_mul,
    rms_norm,
    rotate_and_write,
    silu_and_mul,
)
from chorus.ops.elementwise.rotation import KvSlots

from .test_elementwise_triton import CHECKS, TOLERANCE, Case, cases

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

#: Those of Llama-3.1-8B and beyond, and rows too wide for a program of few threads.
LARGE = [
    Case(seed=1, tokens=300, width=4096, heads=(32, 8), head_dim=128, spare=0, scale=0),
    Case(seed=2, tokens=64, width=14336, heads=(28, 4), head_dim=128, spare=64, scale=1),
    Case(seed=3, tokens=17, width=16384, heads=(64, 8), head_dim=256, spare=8, scale=-2),
]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", CHECKS)
def test_values(name, dtype):
    for case in [*cases(0, 24), *LARGE]:
        if "rotary" in name and case.tokens > 20:
            continue  # the arena has no more places
        error, problem = CHECKS[name](case, dtype, "cuda")
        assert not problem, (case, error, problem)


def test_one_name_serves_both_devices():
    """The functions that the model calls pick the kernel by where their tensors are."""
    torch.manual_seed(0)
    x, residual, weight = torch.randn(5, 64), torch.randn(5, 64), torch.randn(64)
    stream = residual.cuda()
    for got, want in (
        (rms_norm(x.cuda(), weight.cuda(), 1e-5), rms_norm(x, weight, 1e-5)),
        (add_rms_norm(x.cuda(), stream, weight.cuda(), 1e-5), add_rms_norm(x, residual, weight, 1e-5)),
        (stream, residual),
        *((f(x.cuda()), f(x)) for f in (silu_and_mul, gelu_and_mul, lambda each: clamped_swiglu(each, 1.702, 7.0))),
    ):
        torch.testing.assert_close(got.cpu(), want, rtol=1e-5, atol=1e-6)


def test_captured_launches_follow_their_inputs():
    """Positions, pages and values are read when the graph is replayed; padding writes the dummy page."""
    heads, kv_heads, head_dim, tokens = 4, 2, 64, 6
    embeddings = [
        RotaryEmbedding(1e4 ** (-torch.arange(0, head_dim, 2) / head_dim), 100, torch.bfloat16, device)
        for device in ("cpu", "cuda")
    ]
    qkv = torch.zeros(tokens, (heads + 2 * kv_heads) * head_dim, dtype=torch.bfloat16, device="cuda")
    positions, page, offset = (torch.zeros(tokens, dtype=torch.long, device="cuda") for _ in range(3))
    arena = torch.zeros(8, 2, 2, 4, kv_heads, head_dim, dtype=torch.bfloat16, device="cuda")

    def step():
        slots = KvSlots(arena[:, 1, 0], arena[:, 1, 1], page, offset)
        return rotate_and_write(qkv, embeddings[1].at(positions), None, slots)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        q = step()
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        values = torch.randn(qkv.shape, generator=generator).bfloat16()
        at = torch.randint(0, 100, (tokens,), generator=generator)
        place = torch.randperm(28, generator=generator)[:tokens] + 4
        place[-2:] = 0  # two rows of padding
        for target, source in ((qkv, values), (positions, at), (page, place // 4), (offset, place % 4)):
            target.copy_(source)
        want = arena.cpu()
        graph.replay()
        torch.cuda.synchronize()
        rotation = embeddings[0].at(at)
        slots = KvSlots(want[:, 1, 0], want[:, 1, 1], place // 4, place % 4)
        want_q = rotate_and_write(values, rotation, None, slots)
        assert torch.equal(q.cpu(), want_q)
        assert torch.equal(arena[1:].cpu(), want[1:])


def test_an_early_launch_waits_for_what_its_stream_waits_for():
    """A kernel that begins before the previous launch has ended follows `cudaStreamWaitEvent` here, as steps follow
    copies of adapters. It must see everything that the other stream has written.
    """
    if not dependent_launch.begins_early(torch.device("cuda", 0)):
        pytest.skip("launches begin early on compute capability 9 and later")
    generator = torch.Generator("cuda").manual_seed(0)
    weight = torch.ones(4096, device="cuda", dtype=torch.bfloat16)
    rows = torch.randn(64, 4096, generator=generator, device="cuda", dtype=torch.bfloat16)
    large = torch.randn(4096, 4096, generator=generator, device="cuda", dtype=torch.bfloat16)
    want = rms_norm(rows, weight, 1e-5)
    x = torch.empty_like(rows)
    main, side, ready = torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.Event()
    torch.cuda.synchronize()
    got = []
    for _ in range(50):
        with torch.cuda.stream(side):
            side.wait_stream(main)
            x.fill_(torch.nan)
            for _ in range(4):
                torch.mm(large, large)  # so that the write comes late
            x.copy_(rows)
            ready.record()
        with torch.cuda.stream(main):
            rms_norm(want, weight, 1e-5)  # a launch that the next may begin before
            main.wait_event(ready)
            got.append(rms_norm(x, weight, 1e-5))
    torch.cuda.synchronize()
    assert all(torch.equal(each, want) for each in got)
