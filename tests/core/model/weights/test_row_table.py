"""Rows of a table in the host's memory, whole and in parts."""

from __future__ import annotations

import pytest
import torch

from chorus.core.model.weights.row_table import RowTable


@pytest.mark.parametrize("cuts", [[20], [7, 13], [1, 0, 9, 10]], ids=str)
def test_rows_are_found_in_any_part(cuts):
    table = torch.randn(20, 3)
    numbers = torch.tensor([[0, 19], [7, 6], [1, 1], [12, 10]])
    found = RowTable(table.split(cuts)).rows(numbers, torch.float32)
    assert torch.equal(found, table[numbers].flatten(1))


def test_rows_are_of_the_dtype_that_is_asked_for():
    table = RowTable((torch.randn(4, 2),))
    assert table.rows(torch.tensor([[3]], dtype=torch.int32), torch.bfloat16).dtype == torch.bfloat16
