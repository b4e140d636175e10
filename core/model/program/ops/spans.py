"""Spans in profiles.

Tests: tests/core/model/test_nvtx_spans.py
"""

from __future__ import annotations

from dataclasses import dataclass

from ..op import Op


@dataclass(frozen=True, slots=True)
class Begin(Op):
    """Ops up to the next `End` are a span of this name in profiles."""

    name: str


@dataclass(frozen=True, slots=True)
class End(Op):
    """See `Begin`."""
