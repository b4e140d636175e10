"""Batch sizes that are captured, and the one that a step takes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chorus.graphs.runner import DecodeBuckets, padded


@given(st.integers(1, 600))
def test_sizes_end_exactly_at_the_limit(limit):
    sizes = DecodeBuckets(limit).sizes
    assert sizes[0] == 1
    assert sizes[-1] == limit
    assert list(sizes) == sorted(set(sizes))
    assert all(size in (1, 2, 4) or size % 8 == 0 for size in sizes[:-1])


@given(st.integers(1, 5000), st.data())
def test_pick_is_the_smallest_that_holds_the_rows(limit, data):
    buckets = DecodeBuckets(limit)
    rows = data.draw(st.integers(1, limit))
    assert buckets.pick(rows) == min(size for size in buckets.sizes if size >= rows)
    assert buckets.pick(rows) - rows < max(8, rows / 8), "more padding than a step of the ladder"


def test_known_ladders():
    assert DecodeBuckets(1).sizes == (1,)
    assert DecodeBuckets(3).sizes == (1, 2, 3)
    assert DecodeBuckets(8).sizes == (1, 2, 4, 8)
    assert DecodeBuckets(31).sizes == (1, 2, 4, 8, 16, 24, 31)
    assert DecodeBuckets(32).sizes == (1, 2, 4, 8, 16, 24, 32)
    assert DecodeBuckets(128).sizes[-3:] == (112, 120, 128)
    assert DecodeBuckets(300).sizes[-5:] == (224, 240, 256, 288, 300)


def test_sizes_for_drafts_go_on_to_the_most_tokens():
    assert DecodeBuckets(6, 54).sizes == (1, 2, 4, 6, 8, 16, 24, 32, 40, 48, 54)
    assert DecodeBuckets(1, 9).sizes == (1, 2, 4, 8, 9)
    assert DecodeBuckets(200, 128).sizes == DecodeBuckets(200).sizes


def test_graphs_of_many_rows_are_few():
    """Two of each are captured before the first request."""
    assert len(DecodeBuckets(256).sizes) == 27
    assert len(DecodeBuckets(4096).sizes) == 59


@pytest.mark.parametrize("rows", [-1, 0, 33, 1000])
def test_no_bucket_for_other_row_counts(rows):
    with pytest.raises(ValueError, match=f"no bucket holds {rows} sequences; the largest holds 32"):
        DecodeBuckets(32).pick(rows)


@pytest.mark.parametrize("limit", [0, -3])
def test_limit_must_be_positive(limit):
    with pytest.raises(ValueError, match="at least 1"):
        DecodeBuckets(limit)


def test_more_than_64_rows_are_padded_as_without_a_limit():
    buckets = DecodeBuckets(4096)
    assert [padded(rows) for rows in range(65, 4097)] == [buckets.pick(rows) for rows in range(65, 4097)]
