"""Which part of a step's budget a kernel belongs to, and what a part takes at the least."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from chorus.perf.bench.environment import describe
from chorus.perf.bench.options import Options
from chorus.perf.profile.parts import Part, assign, floors, part_of
from chorus.perf.profile.trace import Kernel, Step, read_chrome

from . import recorded

OPS = Path(__file__).parents[3] / "ops"


def our_kernels() -> list[str]:
    """Names of the Triton kernels of steps. Those that others call begin with an underscore or return a value;
    `wait_alone` only tests the compiler.
    """
    found = []
    for path in sorted(OPS.rglob("*_triton.py")):
        for node in ast.parse(path.read_text("utf-8")).body:
            if isinstance(node, ast.FunctionDef) and any("jit" in ast.dump(each) for each in node.decorator_list):
                returns = any(isinstance(each, ast.Return) and each.value is not None for each in ast.walk(node))
                found += [node.name] * (not node.name.startswith("_") and not returns)
    return [name for name in found if name != "wait_alone"]


def test_every_kernel_of_ours_has_a_part():
    kernels = our_kernels()
    assert len(kernels) >= 13
    assert [name for name in kernels if part_of(Kernel(name, 0, 1)) is Part.OTHER] == []


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("void flashinfer::BatchPrefillWithPagedKVCacheKernel<KTraits>(Params)", Part.ATTENTION),
        ("void flashinfer::PersistentVariableLengthMergeStatesKernel<8, 16>(T*)", Part.ATTENTION),
        ("void flashinfer::PrefillWithKVCacheKernel<CollectiveMainloop>", Part.ATTENTION),
        ("nvjet_tst_64x16_64x13_4x1_v_bz_splitK_TNT", Part.PRODUCTS),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16>(Params)", Part.PRODUCTS),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float>(Params)", Part.PRODUCTS),
        ("Memcpy HtoD (Pinned -> Device)", Part.COPIES),
        ("[CUDA memcpy Host-to-Device]", Part.COPIES),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgs)", Part.COLLECTIVES),
        ("void at::native::vectorized_elementwise_kernel<4, FillFunctor<int>>", Part.OTHER),
    ],
)
def test_kernels_of_libraries(name, part):
    assert part_of(Kernel(name, 0, 1)) is part


def test_the_last_product_of_a_step_is_that_of_the_head(tmp_path):
    step, _ = read_chrome(recorded.write(tmp_path / "trace.json"))
    assert [part for _, part in assign(step)] == [
        Part.ELEMENTWISE,
        Part.PRODUCTS,
        Part.LORA,
        Part.LORA,
        Part.ATTENTION,
        Part.LOGITS,
        Part.SAMPLING,
    ]
    assert assign(Step(1.0)) == []


@pytest.fixture
def context(tmp_path):
    context = Options.parse(["--quick", "--device", "cpu", "--out", str(tmp_path)]).context()
    rates = {"read": {"bytes_per_s": 1e9}, "matmul": {"flops_per_s": 1e12}}
    context.store.write("limits", 0.0, describe("cpu"), values=rates)
    return context


def test_floors_add_up_to_the_benchmarks_floor_of_a_step(context):
    ranks = (8, 16)
    found = floors(context, 2, 1, 30, ranks)
    of_bytes = sum(us for part, us in found.items() if part is not Part.ELEMENTWISE)
    assert of_bytes == pytest.approx(context.floors(2, 30, ranks).decode * 1e6)
    geometry = context.size.geometry
    assert found[Part.LORA] == pytest.approx(24 * geometry.rank_params * 4 / 1e9 * 1e6)
    assert Part.LORA not in floors(context, 2, 1, 30)


def test_products_of_long_prompts_take_what_they_multiply(context):
    geometry = context.size.geometry
    found = floors(context, 1, 100_000, 0)
    assert found[Part.PRODUCTS] == pytest.approx(2 * 100_000 * geometry.layer_params / 1e12 * 1e6)
    assert found[Part.LOGITS] == pytest.approx(geometry.head_params * 4 / 1e9 * 1e6)
