"""A layer as it was written.

Tests: tests/core/model/compose/test_build.py, tests/core/model/program/test_golden.py
"""

from __future__ import annotations

from functools import cache

from ..specs.layers import LayerSpec
from ..specs.norms import NormSpec
from .build import Build


@cache
def composed(layer: LayerSpec, norm: NormSpec, hidden: int) -> Build:
    """What a layer writes, with norms of this kind. hidden: width of the residual stream."""
    found = Build(hidden, norm)
    layer.build(found)
    return found
