"""The other ways to compute LoRA products compute them, so that their times mean something."""

from __future__ import annotations

import pytest
import torch

from chorus.ops.sgmv_schedule import decode
from chorus.perf.bench.lora_case import ArenaPages, LoraCase, num_pages
from chorus.perf.bench.rivals import GatherBmm, Loop
from chorus.perf.bench.sizes import SIZES

TINY = SIZES["tiny"]
LENGTHS, RANKS, LAYERS = [2, 1, 1], [4, 8, 2], 2


@pytest.fixture
def case() -> LoraCase:
    arena = ArenaPages(TINY, torch.float32, "cpu", num_pages(TINY, RANKS, LAYERS, 4), seed=0)
    return LoraCase(TINY, arena, LENGTHS, RANKS, LAYERS, decode(4, 8), 8)


def outputs(rival_type: type, case: LoraCase) -> list[torch.Tensor]:
    """The product that a way adds to y, with the same weights for every way."""
    torch.manual_seed(0)
    rival = rival_type(case)
    for group in case.groups:
        group.y.zero_()
    rival.run()
    return [group.y.clone() for group in case.groups]


def definition(case: LoraCase) -> list[torch.Tensor]:
    """Both products, token by token, of each adapter's own rank."""
    torch.manual_seed(0)
    weights = Loop(case).weights
    found = [torch.zeros_like(group.y) for group in case.groups]
    owner = [index for index, length in enumerate(LENGTHS) for _ in range(length)]
    for layer in weights:
        for y, group, modules in zip(found, case.groups, layer, strict=True):
            for (_, column, width), (a, b) in zip(group.modules, modules, strict=True):
                for token, adapter in enumerate(owner):
                    rank = RANKS[adapter]
                    h = a[adapter, :rank] @ group.x[token]
                    y[token, column : column + width] += b[adapter, :, :rank] @ h
    return found


@pytest.mark.parametrize("rival_type", [GatherBmm, Loop])
def test_values(case, rival_type):
    for got, want in zip(outputs(rival_type, case), definition(case), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))
