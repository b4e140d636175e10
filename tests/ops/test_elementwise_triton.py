"""The fused elementwise kernels without a GPU: values in Triton's interpreter, and an offline compile; a process for
each.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chorus.perf.kernels.elementwise_values import CHECKS, HEAD_DIMS, HEADS, TOLERANCE, WIDTHS, Case, cases

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")

launches = st.builds(
    Case,
    seed=st.integers(0, 2**31),
    tokens=st.integers(0, 6),
    width=st.integers(1, 70) | st.sampled_from(WIDTHS),
    heads=st.sampled_from(HEADS),
    head_dim=st.integers(1, 20).map(lambda half: 2 * half) | st.sampled_from(HEAD_DIMS),
    spare=st.integers(0, 5),
    scale=st.integers(-3, 2),
)


def interpret() -> None:
    """Run in a process of its own."""
    from chorus.ops.offline_triton import _rounded, mend_bf16

    values = torch.randn(4000) * 10.0 ** torch.randint(-38, 38, (4000,)).float()
    values = torch.cat((values, torch.tensor([0.0, -0.0, np.inf, -np.inf, 1.00390625, 1.01171875, 3.4e38])))
    bits = _rounded(values.numpy()).astype(np.int32)
    assert np.array_equal(bits, values.bfloat16().view(torch.int16).numpy().astype(np.int32) & 0xFFFF)
    assert np.isnan(torch.from_numpy(_rounded(np.float32([np.nan])).view(np.int16)).view(torch.bfloat16).float()).all()
    mend_bf16()

    @settings(max_examples=80, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(case=launches, name=st.sampled_from(list(CHECKS)), dtype=st.sampled_from(list(TOLERANCE)))
    def equals_the_torch_path(case: Case, name: str, dtype: torch.dtype) -> None:
        _, problem = CHECKS[name](case, dtype, "cpu")
        assert not problem, problem

    equals_the_torch_path()


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    plain = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-W", "ignore", *command],
        env={**plain, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_values_equal_the_torch_path():
    result = run(__file__, TRITON_INTERPRET="1")
    assert result.returncode == 0, result.stdout + result.stderr


def test_compiles_for_a_gpu_that_is_not_there():
    only = "rms_norm|silu|rotate"
    result = run("-m", "chorus.perf.kernels", "--compile", "sm_90", "--only", only, "--workers", "1")
    assert result.returncode == 0, result.stdout + result.stderr
    lines = json.loads(result.stdout.splitlines()[-1])["compile"]
    assert {line["group"] for line in lines} == {"norm", "add", "silu", "rotary", "normed"}
    for line in lines:
        assert not line["spill_bytes"]
        assert line["wide_loads"]
        assert line["registers"] <= 80, "programs are small, and many must fit a processor"


def test_the_grid_goes_through_all_shapes():
    drawn = list(cases(0, 8))
    assert {case.width for case in drawn} == set(WIDTHS)
    assert {case.head_dim for case in drawn} == set(HEAD_DIMS)
    assert {case.heads for case in drawn} == set(HEADS)


if __name__ == "__main__":
    interpret()
