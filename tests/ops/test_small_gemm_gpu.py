"""The product of few rows on a GPU: against its definition, row by row in any company, and captured."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from chorus.core.cpus import available_cpus
from chorus.graphs.device import CudaDevice
from chorus.ops import dependent_launch
from chorus.ops.launch_triton import compiling

from .test_expanded_product import check_companies, check_values
from .test_small_gemm_triton import TOLERANCE, Case, Inputs, cases, check, check_broken_row, check_company, run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

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
    """Compile what the cases launch, with the activation and without; one by one it takes minutes."""
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
    from chorus.ops import small_gemm_triton

    x, weight = torch.randn(rows, 4096, device="cuda").bfloat16(), torch.randn(16384, 4096, device="cuda").bfloat16()
    whole = small_gemm_triton.multiply(x, weight)
    for outputs in (1024, 4096):
        assert torch.equal(small_gemm_triton.multiply(x, weight[:outputs]), whole[:, :outputs]), outputs


def test_captured_launches_follow_their_inputs():
    from chorus.ops import small_gemm_triton

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
