"""The kernel of vectors without a GPU: values in Triton's interpreter against torch's path, and an offline compile."""

from __future__ import annotations

import json

import pytest
import torch

from chorus.ops.lora.sgmv_tables import TablesFull
from chorus.ops.lora.vectors_tables import VectorTables

from ...processes import run_python
from .vector_cases import LAYERS, MODULES, Case, cases

pytestmark = pytest.mark.triton

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


def tables_of(case: Case, table_rows: int = 16, tokens: int = 32) -> VectorTables:
    most = max((len(rows.pages) for rows in case.segments.rows), default=1)
    return VectorTables(table_rows, LAYERS, most, tokens, modules=len(MODULES), itemsize=case.arena.itemsize)


def check(case: Case, dtype: torch.dtype) -> None:
    from chorus.ops.lora.vectors_triton import ScaleRows

    tables = tables_of(case)
    tables.plan(case.segments)
    for undo in (False, True):
        launch = ScaleRows(case.arena, tables, MODULES, undo=undo)
        for layer in range(LAYERS):
            wide = torch.full((len(case.y), case.y.shape[1] + 5), 7.0, dtype=dtype)  # rows may be apart
            y = wide[:, : case.y.shape[1]]
            y.copy_(case.y)
            launch(y, layer)
            want = case.want(layer, undo=undo)
            error = float((y.float() - want).abs().max() / want.abs().max().clamp_min(1e-6))
            assert error <= TOLERANCE[dtype], (undo, layer, error)
            assert (wide[:, case.y.shape[1] :] == 7.0).all()


def main() -> None:
    for dtype in TOLERANCE:
        for case in cases(5, 12, dtype):
            if case.segments.vectors:
                check(case, dtype)


@pytest.mark.slow
def test_values_equal_the_torch_path():
    result = run_python("-m", "tests.ops.lora.test_vectors_triton", TRITON_INTERPRET="1")
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.slow
def test_compiles_for_a_gpu_that_is_not_there():
    result = run_python("-m", "chorus.perf.kernels", "--compile", "sm_90", "--only", "scale_rows", "--workers", "1")
    assert result.returncode == 0, result.stdout + result.stderr
    lines = json.loads(result.stdout.splitlines()[-1])["compile"]
    assert lines
    for line in lines:
        assert not line["spill_bytes"]
        assert line["registers"] <= 80


def test_table_rows_are_kept_and_taken_from_those_unused():
    steps = [case for case in cases(6, 60, torch.float32) if len(case.segments.vectors) in (2, 3)][:6]
    tables = VectorTables(4, LAYERS, 64, 32, modules=len(MODULES), itemsize=4)
    for case in steps:
        tables.plan(case.segments)
        for index in case.segments.vectors:
            rows, token = case.segments.rows[index], case.segments.begin[index]
            row = int((tables.undone if rows.scale < 0 else tables.applied)[token])
            assert tables.first[row, :, : len(MODULES)].tolist() == [list(each) for each in rows.vectors or ()]
            assert tables.pages[row, : len(rows.pages)].tolist() == list(rows.pages)
    covered = sum(end - begin for begin, end, _ in steps[-1].segments)
    assert int((tables.applied >= 0).sum() + (tables.undone >= 0).sum()) == covered


def test_more_adapters_than_the_tables_hold():
    case = next(case for case in cases(7, 60, torch.float32) if len(case.segments.vectors) > 2)
    with pytest.raises(TablesFull, match="adapters with vectors, but the tables have 2 rows"):
        tables_of(case, table_rows=2).plan(case.segments)


if __name__ == "__main__":
    main()
