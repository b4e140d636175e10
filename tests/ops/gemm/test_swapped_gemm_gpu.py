"""The GEMM whose narrow weights are the first operand, on a GPU: values, and bits of rows in steps of all sizes."""

from __future__ import annotations

import itertools

import pytest
import torch

pytest.importorskip("triton")

from .test_small_gemm_triton import Case, Inputs, narrow
from .test_swapped_gemm import FORMS, ROWS, SHAPES, check_values, has_form

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

#: Of Llama-3.1-8B.
LARGE = (4096, 6144), (14336, 4096)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_values(form, dtype):
    for seed, (shape, rows) in enumerate(itertools.product((*SHAPES, *LARGE), ROWS)):
        if has_form(form, shape[0]):
            case = Case(seed, rows, shape, bias=bool(seed & 1), silu=False)
            problem = check_values(case, form, dtype, "cuda")
            assert not problem, (case, problem)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_bits_of_a_row_do_not_depend_on_the_rows_of_the_step(form):
    from chorus.ops.gemm.swapped_gemm_triton import multiply

    case = Case(1, 256, (4096, 6144), bias=False, silu=False)
    x, weight = Inputs(case, torch.bfloat16, "cuda").x, narrow(case, form, torch.bfloat16, "cuda")
    whole = multiply(x, weight)
    for rows in range(1, 257):
        assert torch.equal(multiply(x[:rows], weight), whole[:rows]), rows
