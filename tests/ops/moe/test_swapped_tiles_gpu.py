"""Products of experts with narrow weights as the first operand, on a GPU: values, and bits of rows in steps of all
sizes.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from .expert_cases import NARROW, WIDE
from .swapped_cases import check_bits, check_values, check_wide

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("form", "inputs", "group"), [*NARROW, ("int4", 2048, 128), ("mxfp4", 2880, 32)])
def test_values(form, inputs, group, dtype):
    check_values(form, inputs, group, dtype, "cuda")


@pytest.mark.parametrize(("form", "group"), [("int4 zeros", 128), ("int8", 256), ("fp8", 64), ("mxfp4", 32)])
def test_a_rows_bits_are_the_same_in_steps_of_all_sizes(form, group):
    check_bits(form, group, "cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("form", "inputs", "group"), [*WIDE, ("plain", 2048, 0), ("int4", 2048, 128)])
def test_wide_tiles_give_the_same_bits(form, inputs, group, dtype):
    check_wide(form, inputs, group, dtype, "cuda")
