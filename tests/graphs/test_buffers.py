"""The static decode buffers hold this step and padding, and nothing of the steps before."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from chorus.graphs.buffers import DecodeBuffers

DUMMY = 99
SIZES = (1, 2, 4, 8)
BLOCK = 4
MAX_PAGES = 5
TENSORS = ("token_ids", "positions", "page", "offset", "page_table")


def make_buffers():
    return DecodeBuffers(SIZES, MAX_PAGES, BLOCK, DUMMY)


@st.composite
def steps(draw):
    """A bucket and its rows of (token, position, block table); tables may be longer than the position needs."""
    bucket = draw(st.sampled_from(SIZES))
    rows = []
    for _ in range(draw(st.integers(1, bucket))):
        position = draw(st.integers(0, BLOCK * MAX_PAGES - 1))
        count = draw(st.integers(position // BLOCK + 1, MAX_PAGES))
        pages = random.Random(draw(st.integers(0, 2**32 - 1))).sample(range(50), count)  # one draw, not one a page
        rows.append((draw(st.integers(1, 500)), position, pages))
    return bucket, rows


def fill(buffers, bucket, rows):
    return buffers.fill(bucket, [row[0] for row in rows], [row[1] for row in rows], [list(row[2]) for row in rows])


@given(st.lists(steps(), min_size=1, max_size=6))
def test_views_show_the_last_step_and_padding_only(sequence):
    buffers = make_buffers()
    for bucket, rows in sequence:
        views = fill(buffers, bucket, rows)
        padding = bucket - len(rows)
        assert views is buffers.views[bucket]
        assert views.token_ids.tolist() == [row[0] for row in rows] + [0] * padding
        assert views.positions.tolist() == [row[1] for row in rows] + [0] * padding
        assert views.page.tolist() == [[row[2][row[1] // BLOCK] for row in rows] + [DUMMY] * padding]
        assert views.offset.tolist() == [row[1] % BLOCK for row in rows] + [0] * padding
        assert views.kv_lens == [row[1] + 1 for row in rows] + [1] * padding
        want = [list(row[2]) + [DUMMY] * (MAX_PAGES - len(row[2])) for row in rows]
        assert views.page_table.tolist() == want + [[DUMMY] * MAX_PAGES] * padding


def test_sequences_of_several_tokens_have_a_row_of_the_table_each():
    """After a step of five sequences, nothing of it is left; another step in the same bucket is as it was."""
    buffers, first, second = make_buffers(), [7, 8], [3]
    five = [(5, 3, [11]), (6, 4, [12, 13]), (7, 0, [14]), (8, 1, [15]), (9, 2, [16])]
    fill(buffers, 8, five)
    views = buffers.fill(4, [31, 32, 33, 41], [3, 4, 5, 2], [first, second], [3, 1])
    assert views.token_ids.tolist() == [31, 32, 33, 41] and views.positions.tolist() == [3, 4, 5, 2]
    assert views.page.tolist() == [[7, 8, 8, 3]] and views.offset.tolist() == [3, 0, 1, 2]
    assert views.kv_lens == [6, 3] and views.tables == [first, second]
    assert views.page_table[:2].tolist() == [[7, 8, DUMMY, DUMMY, DUMMY], [3, DUMMY, DUMMY, DUMMY, DUMMY]]
    padded = buffers.fill(8, [31, 32], [3, 4], [first], [2])
    assert padded.kv_lens == [5, *[1] * 6] and padded.page.tolist() == [[7, 8, *[DUMMY] * 6]]
    assert padded.page_table[:7].tolist() == [[7, 8, DUMMY, DUMMY, DUMMY], *[[DUMMY] * 5] * 6]
    again = fill(buffers, 8, five)
    assert again.page_table[:5, 0].tolist() == [11, 12, 14, 15, 16] and again.kv_lens == [4, 5, 1, 2, 3, 1, 1, 1]


def test_any_number_of_entries_up_to_the_largest_bucket_has_views():
    buffers = make_buffers()
    assert buffers.view(5) is buffers.view(5) is buffers.fill(5, [1], [0], [[2]])
    assert buffers.view(5).token_ids.data_ptr() == buffers.view(8).token_ids.data_ptr()


def addresses(buffers):
    """Addresses of everything that a captured step reads."""
    return {
        size: (id(view.kv_lens), *(getattr(view, name).data_ptr() for name in TENSORS))
        for size, view in buffers.views.items()
    }


def test_views_never_move():
    buffers = make_buffers()
    before = addresses(buffers)
    for bucket in (8, 1, 4):
        fill(buffers, bucket, [(7, 3, [1, 2])])
    assert addresses(buffers) == before


def test_small_buckets_share_the_largest_ones_memory():
    buffers = make_buffers()
    fill(buffers, 8, [(token, 0, [token]) for token in range(1, 9)])
    assert buffers.views[2].token_ids.tolist() == [1, 2]
    assert buffers.views[4].page_table[:, 0].tolist() == [1, 2, 3, 4]


def test_dtypes_are_those_that_operators_index_with():
    views = make_buffers().views[4]
    for name in TENSORS:
        assert getattr(views, name).dtype is torch.long


def test_position_must_lie_in_its_block_table():
    with pytest.raises(IndexError):
        fill(make_buffers(), 2, [(5, BLOCK, [1])])


def test_a_table_that_grows_is_read_on_from_its_end():
    """A request's block table is one list, to which pages are added; only those are copied."""
    buffers, table = make_buffers(), [11]
    for position, page in ((3, 12), (7, 13), (11, 14)):
        views = buffers.fill(1, [5], [position], [table])
        assert views.page_table[0].tolist() == table + [DUMMY] * (MAX_PAGES - len(table))
        table.append(page)
