"""The size of a GPU's arena, and the error when that is too little."""

from __future__ import annotations

import pytest

from chorus.core.executors.cuda_memory import (
    MAX_PAGES,
    MemoryUse,
    OutOfDeviceMemory,
    check_pages,
    check_weights,
    num_pages,
)

GIB = 1 << 30
PAGE = 2 << 20
USE = MemoryUse(free=60 * GIB, total=80 * GIB, weights=16 * GIB, activations=3 * GIB, graphs=1 * GIB)


def test_the_arena_takes_what_its_share_leaves():
    # 72 GiB may be used, 20 are, by this process and others; a step and graphs take 4 more
    assert USE.arena_bytes(0.9) == 48 * GIB
    assert num_pages(USE, PAGE, 100, 0.9) == 48 * GIB // PAGE
    assert num_pages(USE, PAGE, 100, 1.0) == 56 * GIB // PAGE


def test_small_pages_are_not_counted_by_the_million():
    assert num_pages(USE, 1 << 10, 100, 0.9) == MAX_PAGES


def test_refusal_has_the_numbers():
    needed = 30 * GIB // PAGE
    with pytest.raises(OutOfDeviceMemory) as refused:
        num_pages(USE, PAGE, needed, 0.5)
    for part in (
        "the page pool may take 16.00 GiB (8192 pages)",
        "max_model_len needs 30.00 GiB (15360 pages)",
        "of 80.00 GiB",
        "take 16.00 GiB",
        "a step 3.00 GiB",
        "graphs 1.00 GiB",
        "60.00 GiB are free",
        "lower max_model_len",
        "(0.5)",
    ):
        assert part in str(refused.value)


def test_nothing_left_is_not_a_negative_arena():
    with pytest.raises(OutOfDeviceMemory, match=r"may take 0.00 GiB \(0 pages\)"):
        num_pages(USE, PAGE, 1, 0.1)


def test_a_configured_arena_must_fit_what_is_free():
    check_pages(USE, PAGE, 56 * GIB // PAGE)
    with pytest.raises(OutOfDeviceMemory, match=r"set a page pool of 57.00 GiB, but there is room for 56.00 GiB"):
        check_pages(USE, PAGE, 57 * GIB // PAGE)


def test_weights_are_refused_before_they_are_read():
    check_weights(16 * GIB, 16 * GIB, 24 * GIB)
    with pytest.raises(OutOfDeviceMemory, match=r"weights take 17.00 GiB, but 16.00 GiB of the device's 24.00 GiB are"):
        check_weights(17 * GIB, 16 * GIB, 24 * GIB)
