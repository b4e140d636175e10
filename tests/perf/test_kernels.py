"""What the command that checks kernels refuses; the kernels themselves: `tests/ops/test_sgmv_triton.py`."""

from __future__ import annotations

from dataclasses import replace

import pytest

from chorus.ops.sgmv_cost import Cost
from chorus.perf import kernels
from chorus.perf.kernel_values import RANKS, cases
from chorus.perf.kernel_variants import SHARED_LIMIT, Line, Variant, variants

GOOD = Line(Variant("expand_prefill", "o", "bf16", 256, 64), "sm_90", 128, 0, 4096, "wgmma.m64n64k16", 8, Cost(1, 1))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"spill_bytes": 8}, "spills 8 bytes"),
        ({"shared_bytes": SHARED_LIMIT + 1}, "shared memory"),
        ({"wide_loads": 0}, "16 bytes"),
        ({"matrix": ""}, "matrix instruction"),
    ],
)
def test_what_a_kernel_must_not_do(change, problem):
    assert not list(GOOD.problems())
    (found,) = replace(GOOD, **change).problems()
    assert problem in found


def test_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(kernels, "find_spec", lambda name: None)
    assert kernels.main(["--interpret"]) == 2
    assert "chorus[kernels]" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [[], ["--interpret", "--compile", "sm_90"], ["--compile", "hopper"]])
def test_bad_arguments(argv, capsys):
    with pytest.raises(SystemExit):
        kernels.main(argv)
    assert "usage" in capsys.readouterr().err


def test_the_grid_goes_through_all_ranks():
    assert {rank for case in cases(0, 8) for rank in case.ranks} == set(RANKS)
    assert {1, 256} <= set(RANKS)


def test_variants_differ():
    listed = list(variants())
    assert len(set(listed)) == len(listed)
