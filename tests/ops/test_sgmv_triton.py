"""The Triton SGMV kernels without a GPU: values in Triton's interpreter, and an offline compile; a process for each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chorus.perf.kernels.sgmv_values import GROUPS, LAYERS, RANKS, TOLERANCE, Case, check, make_tables, schedules

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


@st.composite
def steps(draw: st.DrawFn) -> Case:
    """Any ranks, targets, layers and segments; a page holds from one row's first 16 bytes up to many rows."""
    group = draw(st.integers(0, len(GROUPS) - 1))
    modules = range(len(GROUPS[group][1]))
    targets = st.sets(st.sampled_from(modules), min_size=1).map(lambda chosen: tuple(sorted(chosen)))
    layers = st.sets(st.sampled_from(range(LAYERS)), min_size=1).map(lambda chosen: tuple(sorted(chosen)))
    small = [rank for rank in RANKS if rank <= 33]
    count = 3

    def each(strategy: st.SearchStrategy) -> tuple:
        return tuple(draw(strategy) for _ in range(count))

    return Case(
        seed=draw(st.integers(0, 2**32 - 1)),
        ranks=each(st.sampled_from(small)),
        targets=each(targets),
        layers=each(layers),
        skipped=each(st.integers(0, 6)),
        segments=tuple(draw(st.lists(st.tuples(st.integers(0, 5), st.integers(-1, count - 1)), max_size=5))),
        page_vectors=draw(st.integers(1, 40)),
        group=group,
        minus=draw(st.integers(-1, count - 1)),
    )


def interpret() -> None:
    """Run in a process of its own. Tables are kept from step to step, as replays of a captured launch keep them."""
    from chorus.ops.offline_triton import mend_bf16

    mend_bf16()
    kept = {(name, dtype): make_tables() for name in schedules() for dtype in TOLERANCE}

    @settings(max_examples=40, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(case=steps(), which=st.sampled_from(list(kept)))
    def equals_its_definition(case: Case, which: tuple) -> None:
        name, dtype = which
        _, problem = check(case, schedules()[name], dtype, kept[which])
        assert not problem, problem

    equals_its_definition()


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    plain = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-W", "ignore", *command],
        env={**plain, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@needs_triton
def test_values_equal_the_reference():
    result = run(__file__, TRITON_INTERPRET="1")
    assert result.returncode == 0, result.stdout + result.stderr


@needs_triton
def test_compiles_for_a_gpu_that_is_not_there():
    result = run("-m", "chorus.perf.kernels", "--compile", "sm_90", "--only", " o$", "--workers", "1")
    assert result.returncode == 0, result.stdout + result.stderr
    lines = json.loads(result.stdout.splitlines()[-1])["compile"]
    assert {line["kernel"] for line in lines} == {
        "shrink_decode", "shrink_prefill", "expand_decode", "expand_prefill"
    }  # fmt: skip
    for line in lines:
        assert not line["spill_bytes"]
        assert line["wide_loads"], "rank-rows start on 16 bytes; a load that doesn't use it reads them slowly"
        assert line["matrix"].startswith("wgmma") == line["kernel"].endswith("prefill")


if __name__ == "__main__":
    interpret()
