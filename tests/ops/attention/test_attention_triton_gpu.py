"""Our decode attention on a GPU: values, batch invariance, and captured steps replayed over other rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from .test_attention_triton import CASES, CHECKS, TOLERANCE, Case, Inputs, check_values, new_backend

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

#: Llama-3.1-8B's heads and others over long rows: of parts of several tiles, shared by many programs.
LONG = [
    Case(32, 8, 128, 16, (1, 4096, 700, 2049, 5000, 64), seed=7),
    Case(28, 4, 128, 16, (3000, 17, 1), seed=8),
    Case(14, 2, 64, 16, (9000, 256, 257), seed=9),
    Case(8, 4, 256, 32, (2500, 31), seed=10),
]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", CHECKS)
def test_values_and_bits(name, dtype):
    for case in [*CASES, *LONG]:
        problem = CHECKS[name](case, dtype, "cuda")
        assert not problem, (case, problem)


def test_many_launches_give_the_same_bits():
    """Whichever program comes last adds a row's parts up, and leaves its counter at 0."""
    case = LONG[0]
    inputs, rows = Inputs(case, torch.bfloat16, "cuda"), list(range(len(case.lens)))
    attention = new_backend(case, torch.bfloat16, "cuda", 1000).decode(len(rows))
    want = inputs.run(attention, rows)
    q = inputs.q.clone()
    got = [attention.run(q, *inputs.caches) for _ in range(200)]
    assert all(torch.equal(each, want) for each in got)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("num_sms", [1, 132, 1000])
def test_replays_with_other_lengths(dtype, num_sms):
    """Captured over short rows, replayed over long ones, shorter ones, and with another bucket planned between."""
    first = Case(32, 8, 128, 16, (3, 1, 17, 1), seed=11)
    cases = [replace(first, lens=lens, seed=12) for lens in ((500, 21, 1, 64), (3,) * 4, (4000, 256, 257, 2048))]
    backend = new_backend(cases[-1], dtype, "cuda", num_sms)
    four, two = backend.decode(4), backend.decode(2)
    steps = [Inputs(case, dtype, "cuda") for case in (first, *cases)]
    q = torch.zeros_like(steps[0].q)
    arena = torch.zeros(max(len(step.arena) for step in steps), *steps[0].arena.shape[1:], dtype=dtype, device="cuda")
    caches = arena[:, 1, 0], arena[:, 1, 1]

    def load(step):
        q.copy_(step.q)
        arena[: len(step.arena)] = step.arena
        four.plan(range(5), step.table, step.case.lens)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        load(steps[0])
        four.run(q, *caches)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            out = four.run(q, *caches)
        for step in steps:
            load(step)
            graph.replay()
            eager = four.run(q, *caches)
            stream.synchronize()
            error = float((out.double().cpu() - step.want).abs().max()) / step.largest
            assert error <= TOLERANCE[dtype]
            assert torch.equal(eager, out), "a replay gives the same bits as an eager run"
            two.plan(range(3), step.table[:2], step.case.lens[:2])
            assert torch.equal(two.run(q[:2], *caches), out[:2]), "a smaller bucket gives a row the same bits"


def test_values_where_all_rows_are_padding():
    problem = check_values(Case(32, 8, 128, 16, (1,) * 8), torch.bfloat16, "cuda")
    assert not problem, problem
