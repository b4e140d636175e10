"""The GEMM of few rows on a GPU: against its definition, batch-invariant, and captured."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from chorus.core.cpus import available_cpus
from chorus.graphs.device import CudaDevice
from chorus.ops import dependent_launch
from chorus.ops.elementwise.elementwise import rms_norm
from chorus.ops.gemm.narrow_weights import is_kept
from chorus.ops.launch_triton import compiling
from chorus.ops.lora.sgmv_schedule import decode, prefill

from .test_expanded_product import MAX_RANK, World, check_companies, check_values
from .test_narrow_weights import forms, kept
from .test_small_gemm_triton import (
    FORMS,
    TOLERANCE,
    Case,
    Inputs,
    cases,
    check,
    check_broken_row,
    check_company,
    check_float8_numbers,
    check_form,
    narrow,
    run,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

HALVES = [dtype for dtype in TOLERANCE if dtype.itemsize == 2]

#: Those of Llama-3.1-8B, and some that end within a block.
LARGE = [
    Case(seed=1, rows=16, shape=(4096, 6144), bias=False, silu=False),
    Case(seed=2, rows=7, shape=(4096, 14336), bias=False, silu=True),
    Case(seed=3, rows=16, shape=(4096, 14336), bias=False, silu=True),
    Case(seed=4, rows=9, shape=(14336, 4096), bias=False, silu=False),
    Case(seed=5, rows=16, shape=(4096, 128256), bias=False, silu=False),
    Case(seed=6, rows=3, shape=(3584, 4608), bias=True, silu=False),
    Case(seed=7, rows=5, shape=(896, 1153), bias=True, silu=True, spare=8),
    Case(seed=8, rows=32, shape=(4096, 6144), bias=False, silu=False),
    Case(seed=9, rows=64, shape=(4096, 14336), bias=False, silu=True),
    Case(seed=10, rows=64, shape=(14336, 4096), bias=False, silu=False),
    Case(seed=11, rows=24, shape=(4096, 128256), bias=False, silu=False),
    Case(seed=12, rows=48, shape=(3584, 4608), bias=True, silu=False),
    Case(seed=13, rows=33, shape=(896, 1153), bias=True, silu=True, spare=8),
]


@pytest.fixture(params=[True, False], ids=["early", "in turn"])
def launch(request):
    dependent_launch.allow(request.param)
    yield
    dependent_launch.allow(True)


def compile_ahead(cases: list[Case], dtype: torch.dtype) -> list[Case]:
    """Compile the kernels of the cases, with the activation and without; one by one it takes minutes."""
    with compiling(available_cpus()):
        for case, silu in itertools.product(cases, (False, True)):
            if case.silu or not silu:
                run(replace(case, silu=silu), Inputs(case, dtype, "cuda"), compile_only=True)
    return cases


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_values(dtype, launch):
    for case in compile_ahead([*cases(0, 24), *LARGE], dtype):
        problem = check(case, dtype, "cuda")
        assert not problem, (case, problem)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_bits_of_a_row_do_not_depend_on_its_company(dtype, launch):
    for case in compile_ahead([*cases(3, 24), *LARGE], dtype):
        problem = check_company(case, dtype, "cuda") or check_broken_row(case, "cuda")
        assert not problem, (case, problem)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_product_with_a_narrow_weight_is_that_of_its_stored_numbers(form):
    """Of Llama-3.1-8B's shapes, and of small ones; the kernel that widens them gives the same as torch."""
    chosen = [
        case
        for case in (*cases(4, 14), *LARGE[:4], *LARGE[7:10])
        if is_kept(case.shape[0], form[0], form[1] or case.shape[0])
    ]
    with compiling(available_cpus()):
        for case in chosen:
            inputs = Inputs(case, torch.bfloat16, "cuda")
            run(case, inputs, compile_only=True)
            inputs.weight = narrow(case, form, torch.bfloat16, "cuda")
            run(case, inputs, compile_only=True)
    for case in chosen:
        problem = check_form(case, form, torch.bfloat16, "cuda")
        assert not problem, (case, problem)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_narrow_weights_of_every_float8_number(dtype):
    assert not check_float8_numbers(dtype, "cuda")


def test_narrow_weights_are_widened_to_the_same_bits():
    for seed, (bits, (inputs, group), zeros, dtype) in enumerate(forms()):
        weight, want = kept(300, inputs, bits=bits, group=group, zeros=zeros, dtype=dtype, seed=seed)
        moved = {name: getattr(weight, name) for name in ("data", "scales", "zeros")}
        moved = {name: None if each is None else each.cuda() for name, each in moved.items()}
        assert torch.equal(replace(weight, **moved).dense().cpu(), want), (bits, inputs, group, zeros, dtype)


def test_adapters_expanded_in_the_launch(launch):
    check_values(HALVES, "cuda")
    check_companies("cuda")


def test_bits_do_not_depend_on_when_launches_begin():
    for case in LARGE:
        inputs, found = Inputs(case, torch.bfloat16, "cuda"), []
        for early in (True, False):
            dependent_launch.allow(early)
            found.append(run(case, inputs))
        dependent_launch.allow(True)
        assert torch.equal(*found), case


@pytest.mark.parametrize("rows", [16, 64])
def test_bits_of_a_column_do_not_depend_on_how_many_a_program_has(rows):
    from chorus.ops.gemm import small_gemm_triton

    x, weight = torch.randn(rows, 4096, device="cuda").bfloat16(), torch.randn(16384, 4096, device="cuda").bfloat16()
    whole = small_gemm_triton.multiply(x, weight)
    for outputs in (1024, 4096):
        assert torch.equal(small_gemm_triton.multiply(x, weight[:outputs]), whole[:, :outputs]), outputs


def test_captured_launches_follow_their_inputs():
    from chorus.ops.gemm import small_gemm_triton

    device = CudaDevice()
    with device.scope():
        x, weight = torch.zeros(4, 512, device="cuda").bfloat16(), torch.randn(96, 512, device="cuda").bfloat16()
        y = torch.zeros(4, 96, device="cuda").bfloat16()
        replay = device.capture(lambda: y.copy_(small_gemm_triton.multiply(x, weight)))
        for _ in range(3):
            x.normal_()
            replay()
            assert torch.equal(y, small_gemm_triton.multiply(x, weight))


def test_seconds_are_of_replays():
    device = CudaDevice()
    values = torch.zeros(1 << 20, device="cuda")
    torch.cuda.synchronize()
    assert device.seconds(lambda: values.add_(1), count=3) > 0
    assert float(values[0]) == 5, "once before the capture, a replay to warm up, and three that are timed"


@pytest.mark.parametrize("schedule", [decode(4, MAX_RANK), prefill(4, MAX_RANK)], ids=["decode", "prompts"])
def test_rank_rows_that_are_loaded_early_are_those_behind_an_event(schedule):
    """Shrink and expand load rank-rows before the previous launch has ended. In a step a norm follows
    `cudaStreamWaitEvent` first, and does not begin before the event: no later launch may either.
    """
    if not dependent_launch.begins_early(torch.device("cuda", 0)):
        pytest.skip("launches begin early on compute capability 9 and later")
    from chorus.ops.lora.sgmv_triton import Sgmv

    world, used = World(0, torch.bfloat16, "cuda"), [0, 1, 2, 0]
    d_out, rows = sum(world.widths), len(used)
    arrived, arena = world.arena.cuda(), world.arena.cuda()
    sgmv = Sgmv(arena, world.tables, world.modules, world.d_in, schedule)
    num_tiles = world.tables.plan(world.segments(used), schedule.tile_tokens)
    x, weight = world.x[:rows].cuda().contiguous(), torch.ones(world.d_in, device="cuda").bfloat16()
    large = torch.randn(4096, 4096, device="cuda").bfloat16()
    main, side, ready = torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.Event()

    def launch():
        y = torch.zeros(rows, d_out, device="cuda", dtype=torch.bfloat16)
        sgmv(y, rms_norm(x, weight, 1e-5), 1, world.tables.tiles, num_tiles)
        return y

    want, got = launch(), []
    torch.cuda.synchronize()
    assert want.isfinite().all() and want.any()
    for _ in range(50):
        with torch.cuda.stream(side):
            side.wait_stream(main)
            arena.fill_(torch.nan)
            for _ in range(4):
                torch.mm(large, large)  # so that the copy comes late
            arena.copy_(arrived)
            ready.record()
        with torch.cuda.stream(main):
            rms_norm(x, weight, 1e-5)  # a launch that the next may begin before
            main.wait_event(ready)
            got.append(launch())
    torch.cuda.synchronize()
    assert all(torch.equal(each, want) for each in got)
