"""The spread of requests over adapters."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from chorus.perf.bench.sections.mixes import POPULARITIES, segment_lengths


@given(st.sampled_from(POPULARITIES), st.integers(1, 600))
def test_every_request_has_an_adapter_and_every_adapter_a_request(popularity, requests):
    lengths = segment_lengths(popularity, requests)
    assert sum(lengths) == requests
    assert min(lengths) >= 1
    assert lengths == sorted(lengths, reverse=True)


@given(st.integers(1, 600))
def test_uniform_has_root_n_adapters_of_equal_shares(requests):
    lengths = segment_lengths("uniform", requests)
    assert len(lengths) == math.ceil(math.sqrt(requests))
    assert max(lengths) - min(lengths) <= 1


def test_shapes():
    assert segment_lengths("distinct", 3) == [1, 1, 1]
    assert segment_lengths("identical", 3) == [3]
    # 1, 1, 2, 3, 5, 7, 11, 17, then the 17 that are left: each 1.5 times the one before, rounded down
    assert segment_lengths("zipf-1.5", 64) == [17, 17, 11, 7, 5, 3, 2, 1, 1]
