"""Sums over ranks, which are threads here: in the order of the ranks, in pieces, and aborted."""

from __future__ import annotations

import mmap
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from chorus.ops.library import native_library
from chorus.ops.ranks.ranks import Ranks, RanksLost, StepGivenUp

pytestmark = pytest.mark.skipif(
    not native_library.available(torch.float32), reason="ranks add up by the native library"
)


def group(size, floats=64, seconds=60.0):
    memory = mmap.mmap(-1, Ranks.num_bytes(size, floats))
    return [Ranks(memory, rank, size, floats, seconds) for rank in range(size)]


def on_all(ranks, work):
    """Results of `work(rank)` on a thread for each rank."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(work, ranks))


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("count", [1, 64, 1000])
def test_sums_have_the_bits_of_the_ranks_order(size, count):
    """Whichever rank comes first, also in pieces: 1000 values go through buffers of 64."""
    ranks = group(size)
    parts = torch.randn(size, 20, count) * 10 ** torch.randint(-4, 5, (size, 20, count))

    def run(rank):
        rank.begin(1)
        return torch.stack([rank.add_up(part.clone()) for part in parts[rank.rank]])

    want = parts[0].clone()
    for part in parts[1:]:
        want += part
    for found in on_all(ranks, run):
        assert torch.equal(found, want)


def test_sums_of_16_bits_are_rounded_once():
    ranks = group(3)
    parts = [torch.randn(8).bfloat16() for _ in ranks]
    for rank in ranks:
        rank.begin(1)
    want = (parts[0].float() + parts[1].float() + parts[2].float()).bfloat16()
    assert all(torch.equal(found, want) for found in on_all(ranks, lambda rank: rank.add_up(parts[rank.rank])))


@pytest.mark.parametrize("width", [7, 131])
def test_columns_are_gathered_on_the_first_rank(width):
    """Ranks have different numbers of columns, and rows come in pieces."""
    ranks = group(3)
    rows = torch.randn(9, width)
    bounds = [width * rank // 3 for rank in range(4)]
    for rank in ranks:
        rank.begin(1)
    found = on_all(ranks, lambda rank: rank.gather(rows[:, bounds[rank.rank] : bounds[rank.rank + 1]], width))
    assert torch.equal(found[0], rows)
    assert [len(each) for each in found[1:]] == [0, 0]


def test_a_step_that_one_rank_gives_up_is_left_by_all_and_the_next_goes_on():
    ranks = group(3)
    for rank in ranks:
        rank.begin(1)

    def give_up(rank):
        if rank.rank == 1:
            rank.fail(1)
            return
        with pytest.raises(StepGivenUp):
            rank.add_up(torch.ones(3))

    on_all(ranks, give_up)
    for rank in ranks:
        rank.begin(2)
    assert [found.tolist() for found in on_all(ranks, lambda rank: rank.add_up(torch.ones(2)))] == [[3.0, 3.0]] * 3


def test_no_rank_waits_longer_than_it_is_to_nor_for_ranks_that_are_lost():
    first, second = group(2, seconds=0.01)
    first.begin(1)
    with pytest.raises(RanksLost):
        first.add_up(torch.ones(1))
    second.begin(1)
    with pytest.raises(RanksLost):
        second.check()
    first, second = group(2)
    first.begin(1)
    threading.Timer(0.05, second.lose).start()
    with pytest.raises(RanksLost):
        first.add_up(torch.ones(1))
