"""Rows for the next use of an image: how many are kept, and what leaves for them."""

from __future__ import annotations

from collections.abc import Hashable

import torch

from chorus.core.media.row_cache import RowCache, Rows, RowsKey
from chorus.memory.host.budget import HostBudget


def key(name: str) -> RowsKey:
    return "", "", name, ""


def rows(num_bytes: int = 32, seconds: float = 1.0) -> Rows:
    return Rows(torch.zeros(num_bytes // 4), seconds)


class Others:
    """Items of some bytes each that may all be dropped."""

    def __init__(self, budget: HostBudget, count: int, num_bytes: int, cost: float) -> None:
        self.left = {f"other {number}": num_bytes for number in range(count)}
        budget.join(self)
        for name in self.left:
            budget.offer(self, name, num_bytes, cost, 1)

    @property
    def num_bytes(self) -> int:
        return sum(self.left.values())

    def is_loose(self, item: Hashable) -> bool:
        return True

    def drop(self, item: Hashable) -> None:
        del self.left[str(item)]


def test_the_least_recently_used_rows_leave_for_others() -> None:
    budget = HostBudget(1 << 20)
    kept = RowCache(64, budget)
    first = rows()
    kept.note_use(key("a"), first)
    kept.note_use(key("b"), rows(seconds=9.0))
    kept.note_use(key("a"), first)
    kept.note_use(key("c"), rows(seconds=1.0))
    assert kept.find(key("a")) is first and kept.find(key("b")) is None and kept.find(key("c")) is not None
    assert kept.num_bytes == budget.num_bytes == 64
    kept.note_use(key("large"), rows(68, seconds=1.0))
    assert kept.find(key("large")) is None and kept.num_bytes == 64


def test_a_cleared_cache_holds_nothing_and_takes_new_rows() -> None:
    budget = HostBudget(1 << 20)
    kept = RowCache(64, budget)
    for name in "ab":
        kept.note_use(key(name), rows())
    assert kept.clear() == 2 and kept.num_bytes == budget.num_bytes == 0
    assert kept.find(key("a")) is None and kept.clear() == 0
    kept.note_use(key("a"), again := rows())
    assert kept.find(key("a")) is again and budget.num_bytes == 32


def test_rows_compete_with_other_items_by_seconds_for_a_byte() -> None:
    budget = HostBudget(128)
    cheap = Others(budget, 4, 32, cost=0.001)
    kept = RowCache(1 << 20, budget)
    kept.note_use(key("a"), rows(seconds=1.0))
    assert kept.num_bytes == 32 and cheap.num_bytes == 96
    budget.make_room(96)
    assert kept.num_bytes == 32 and cheap.num_bytes == 0
    budget = HostBudget(128)
    dear = Others(budget, 4, 32, cost=9.0)
    kept = RowCache(1 << 20, budget)
    kept.note_use(key("a"), rows(seconds=1.0))
    assert kept.num_bytes == 0 and dear.num_bytes == 128


def test_a_flood_of_rows_leaves_others_most_of_the_memory() -> None:
    budget = HostBudget(1024)
    adapters = Others(budget, 16, 64, cost=0.001)
    kept = RowCache(128, budget)
    for number in range(100):
        kept.note_use(key(f"{number}"), rows(seconds=1.0))
    assert kept.num_bytes == 128 and adapters.num_bytes == 1024 - 128


def test_used_rows_outlive_others() -> None:
    budget = HostBudget(64)
    kept = RowCache(1 << 20, budget)
    used = rows()
    kept.note_use(key("used"), used)
    kept.note_use(key("once"), rows(seconds=1.0))
    for _ in range(3):
        kept.note_use(key("used"), used)
    budget.make_room(32)
    assert kept.find(key("used")) is used and kept.find(key("once")) is None


def test_rows_that_were_not_kept_are_kept_once_there_is_room() -> None:
    budget = HostBudget(64)
    kept, full = RowCache(64, budget), Others(budget, 1, 64, cost=99.0)
    kept.note_use(key("a"), rows())
    assert kept.num_bytes == 0 and kept.find(key("a")) is None
    budget.make_room(64)
    kept.note_use(key("a"), rows())
    assert kept.num_bytes == 32 and full.num_bytes == 0
