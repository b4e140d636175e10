"""Keys and values in FP8: every number of E4M3 stays, others become the nearest one, and none is beyond the largest."""

from __future__ import annotations

import math

import pytest
import torch

from chorus.ops.elementwise import write_kv
from chorus.ops.float8_kv import DTYPE, LARGEST, KvScales, inverse, rounded
from chorus.ops.rotation import KvSlots

NUMBERS = torch.arange(256, dtype=torch.uint8).view(DTYPE).float()
FINITE = NUMBERS[NUMBERS.isfinite()].sort().values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1.0, 0.25, 64.0])
def test_numbers_of_the_format_stay(dtype, scale):
    values = (FINITE * scale).to(dtype)
    assert torch.equal(rounded(values, scale).float() * scale, values.float())


@pytest.mark.parametrize("scale", [1.0, 0.003, 7.0])
def test_others_become_the_nearest(scale):
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(4000, generator=generator) * 2.0 ** torch.randint(-12, 9, (4000,), generator=generator)
    wide = values * inverse(scale)
    nearest = (wide.clamp(-LARGEST, LARGEST)[:, None] - FINITE).abs().min(1).values
    assert torch.equal((rounded(values, scale).float() - wide.clamp(-LARGEST, LARGEST)).abs(), nearest)


def test_the_bound_of_the_manual():
    """A sixteenth of a normal number, 2^-10 of others."""
    values = torch.logspace(-6, math.log2(LARGEST), 5000, base=2)
    assert float(((rounded(values, 1.0).float() - values) / values).abs().max()) <= 2**-4
    small = torch.linspace(-(2.0**-6), 2.0**-6, 5000)
    assert float((rounded(small, 1.0).float() - small).abs().max()) <= 2**-10


def test_values_beyond_the_range_become_its_end_and_those_that_are_not_finite_nan():
    values = torch.tensor([449.0, 1e30, -470.0, math.inf, -math.inf, math.nan])
    assert rounded(values, 1.0).float().nan_to_num(7).tolist() == [448, 448, -448, 7, 7, 7]
    assert rounded(values, 2.0).float()[:1].tolist() == [224]


def test_writes_go_where_they_belong_and_nowhere_else():
    caches = torch.full((6, 3, 2, 4, 2, 8), 0x11, dtype=torch.uint8)
    k_cache, v_cache = (caches.view(DTYPE)[:, 1, side] for side in (0, 1))
    page, offset = torch.tensor([3, 0, 5]), torch.tensor([1, 1, 0])
    k, v = torch.randn(2, 3, 2, 8)
    write_kv(KvSlots(k_cache, v_cache, page, offset, KvScales(0.5, 0.1)), k, v)
    for side, (values, scale) in enumerate(((k, 0.5), (v, 0.1))):
        for index in range(3):
            written = caches[page[index], 1, side, offset[index]].view(DTYPE)
            assert torch.equal(written.float(), rounded(values[index], scale).float())
    assert int((caches != 0x11).sum()) <= 2 * 3 * 2 * 8
    assert (caches[:, [0, 2]] == 0x11).all()
