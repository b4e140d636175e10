"""Keys and values in FP8 (E4M3): `x` is stored as `x / scale`, rounded once, and stands for `scale` times that.

Values beyond ±448 · scale become ±448 · scale. Values that are not finite become NaN.

Tests: tests/ops/elementwise/test_float8_kv.py
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch

DTYPE = torch.float8_e4m3fn

LARGEST = 448.0
"""Of E4M3."""


class KvScales(NamedTuple):
    """Scales of a layer's keys and values in FP8; 1 for all other dtypes."""

    k: float = 1.0
    v: float = 1.0


UNSCALED = KvScales()


@cache
def inverse(scale: float) -> float:
    """Factors of values before they are rounded: 1 / scale in float32."""
    return float(1 / torch.tensor(scale, dtype=torch.float32))


def rounded(values: torch.Tensor, scale: float) -> torch.Tensor:
    """Values of any dtype as they are stored."""
    wide = values.float() * inverse(scale)
    return wide.clamp(-LARGEST, LARGEST).masked_fill(~wide.isfinite(), torch.nan).to(DTYPE)
