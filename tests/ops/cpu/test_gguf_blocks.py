"""Blocks of GGUF files have the numbers that the package gguf gives them, bit by bit, at every level."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

from chorus.ops.cpu.gguf_blocks import dequantised

pytestmark = pytest.mark.native

NATIVE = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS")


def both(name: str, stored: np.ndarray) -> tuple[torch.Tensor, tuple[torch.Tensor, bool] | None]:
    kind = GGMLQuantizationType[name]
    with np.errstate(all="ignore"):
        known = torch.from_numpy(dequantize(stored, kind))
    return known, dequantised(stored, int(kind), *GGML_QUANT_SIZES[kind])


def blocks(name: str, *counts: int) -> np.ndarray:
    """Random bytes: any bits are some block."""
    _, size = GGML_QUANT_SIZES[GGMLQuantizationType[name]]
    *rows, columns = counts
    return np.random.default_rng(0).integers(0, 256, (*rows, columns * size), dtype=np.uint8)


@pytest.mark.parametrize("name", NATIVE)
def test_numbers_are_those_of_the_package(name):
    for counts in ((3000, 1), (7, 5), (2, 3, 4)):
        known, found = both(name, blocks(name, *counts))
        assert found is not None
        numbers, finite = found
        torch.testing.assert_close(numbers, known, rtol=0, atol=0, equal_nan=True)
        assert finite == bool(known.isfinite().all())


@pytest.mark.parametrize("name", NATIVE)
def test_finite_numbers_are_told_from_others(name):
    zeros = np.zeros_like(blocks(name, 600, 2))
    known, found = both(name, zeros)
    assert found is not None and found[1] and torch.equal(found[0], known)
    at = {"Q3_K": 108, "Q6_K": 208, "Q2_K": 80}.get(name, 0)
    zeros[517, at : at + 2] = 0, 0x7C  # a factor that is infinite
    _, found = both(name, zeros)
    assert found is not None and not found[1]


def test_rows_that_do_not_follow_one_another():
    stored = blocks("Q4_K", 40, 3)
    known, found = both("Q4_K", stored[::3])
    assert found is not None and torch.equal(found[0].nan_to_num(), known.nan_to_num())


def test_other_formats_are_left_to_the_package():
    assert both("TQ1_0", blocks("TQ1_0", 3, 1))[1] is None
    assert dequantised(np.zeros((2, 4), np.float32), 0, 1, 4) is None
