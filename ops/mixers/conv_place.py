"""Where a layer has short convolutions of its streams.

Tests: tests/core/layers/test_stream_convs.py
"""

from __future__ import annotations

from enum import StrEnum


class ConvPlace(StrEnum):
    """The stream that a convolution is of; the order is that of their channels."""

    KEYS_AND_VALUES = "keys and values"
    ATTENTION = "attention's output"
    FEED_FORWARD = "the feed-forward part's output"
