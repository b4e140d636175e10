"""A product of more projections than a launch takes is several launches, each over its own columns."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from chorus.ops import dependent_launch
from chorus.ops.lora.in_parts import InParts, launch_for


class Launch:
    """Adds a number to the columns of each of its projections."""

    def __init__(self, modules):
        self.modules, self.arenas = modules, []

    def use_arena(self, arena):
        self.arenas.append(arena)

    def __call__(self, y, number, *, times):
        assert len(self.modules) <= 4
        for module, column, width in self.modules:
            y[:, column : column + width] += number + times * module


MODULES = [(3, 0, 2), (1, 2, 1), (0, 3, 4), (7, 7, 1), (5, 8, 3), (2, 11, 1)]


def test_each_part_has_its_own_columns(monkeypatch):
    made, wanted = [], []
    monkeypatch.setattr(dependent_launch, "only", lambda early: wanted.append(early) or nullcontext())
    product = launch_for(MODULES, lambda modules: made.append(Launch(modules)) or made[-1])
    assert isinstance(product, InParts)
    assert [each.modules for each in made] == [MODULES[:4], [(5, 0, 3), (2, 3, 1)]]
    assert wanted == [False], "they share scratch memory"
    y = torch.zeros(2, 14)
    product(y, 1, times=10)
    want = [31, 31, 11, 1, 1, 1, 1, 71, 51, 51, 51, 21, 0, 0]
    assert y.tolist() == [want, want]
    product.use_arena(y)
    assert all(arena is y for each in made for arena in each.arenas)
    assert [len(each.arenas) for each in made] == [1, 1]
    assert product.shrink(y, 0) is None


@pytest.mark.parametrize("count", [1, 4])
def test_few_projections_are_one_launch(count):
    assert isinstance(launch_for(MODULES[:count], Launch), Launch)
