"""Page lists that are kept from step to step are those that are written anew."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from chorus.ops.attention.attention_plan import PlanBuffers

MAX_ROWS, MAX_PAGES, BLOCK = 5, 6, 4
CPU = torch.device("cpu")


def make() -> PlanBuffers:
    return PlanBuffers(MAX_ROWS, MAX_PAGES, BLOCK, CPU)


def table_of(tables: list[list[int]], kv_lens: list[int]) -> torch.Tensor:
    """`[rows, MAX_PAGES]`; entries after a row's pages are any page."""
    return torch.tensor([table[:MAX_PAGES] + [0] * (MAX_PAGES - len(table)) for table in tables])


def lists(buffers: PlanBuffers, rows: int) -> tuple[list[int], ...]:
    """Return the lists that the device has."""
    indptr = buffers.indptr[: rows + 1].tolist()
    return indptr, buffers.last_page_len[:rows].tolist(), buffers.indices[: indptr[-1]].tolist()


@st.composite
def lives(draw):
    """Steps of rows, which grow, end, begin, change places, or go back; some are not told of block tables."""
    serial = iter(range(1, 1000))
    rows: list[tuple[list[int], int]] = []
    steps = []
    for _ in range(draw(st.integers(1, 12))):
        what = draw(st.sampled_from(["grow", "grow", "grow", "end", "begin", "swap", "back", "unknown"]))
        if what == "begin" or not rows:
            if len(rows) < MAX_ROWS:
                rows.insert(draw(st.integers(0, len(rows))), ([next(serial)], 1))
        elif what == "end":
            rows.pop(draw(st.integers(0, len(rows) - 1)))
        elif what == "swap":
            rows.reverse()
        elif what == "back":
            rows = [(table, draw(st.integers(1, length))) for table, length in rows]
        else:
            rows = [(table, min(MAX_PAGES * BLOCK, length + draw(st.integers(0, 9)))) for table, length in rows]
        for table, length in rows:
            table += [next(serial) for _ in range(-(-length // BLOCK) - len(table))]
        if rows:
            steps.append(([table for table, _ in rows], [length for _, length in rows], what != "unknown"))
            # a table that grows later must not change this step's view
            steps[-1] = (*steps[-1], table_of(*steps[-1][:2]))
    return steps


@given(lives())
def test_lists_that_grow_are_those_written_anew(steps):
    kept = make()
    for tables, kv_lens, known, page_table in steps:
        fresh = make()
        fresh.write(page_table, kv_lens)
        kept.write(page_table, kv_lens, tables=tables if known else None)
        for buffers in (fresh, kept):
            buffers.upload()
        assert lists(kept, len(kv_lens)) == lists(fresh, len(kv_lens))
        assert kept.num_indices == fresh.num_indices


def test_only_new_pages_are_written_and_sent(monkeypatch):
    """A step in which no row has a new page sends no page list; one that has reads nothing but the new pages."""
    buffers, tables = make(), [[1, 2], [3], [4, 5]]
    buffers.write(table_of(tables, []), [8, 3, 5], tables=tables)
    buffers.upload()
    sent = []
    copy = torch.Tensor.copy_
    monkeypatch.setattr(torch.Tensor, "copy_", lambda self, *args, **more: sent.append(len(self)) or copy(self, *args))
    elsewhere = torch.full((3, MAX_PAGES), 99)  # not read
    buffers.write(elsewhere, [8, 4, 6], tables=tables)
    buffers.upload()
    tables[1].append(6)
    buffers.write(elsewhere, [8, 5, 7], tables=tables)
    buffers.upload()
    assert lists(buffers, 3) == ([0, 2, 4, 6], [4, 1, 3], [1, 2, 3, 6, 4, 5])
    assert sent[0] < sent[1] == sent[0] + 6


def test_a_step_that_is_refused_leaves_the_lists_as_they_are():
    buffers, tables = make(), [[1, 2], [3]]
    buffers.write(table_of(tables, []), [8, 3], tables=tables)
    with pytest.raises(ValueError, match="sequences have 0 to 8 tokens"):
        buffers.write(table_of(tables, []), [8, 0], tables=tables)
    tables[0].append(4)
    buffers.write(table_of(tables, []), [9, 3], tables=tables)
    buffers.upload()
    assert lists(buffers, 2) == ([0, 3, 4], [1, 3], [1, 2, 4, 3])
