"""Packing of weights for the native decoder; what it computes is tested through the engine."""

from __future__ import annotations

import pytest
import torch

from chorus.ops import native


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("n", "k"), [(1, 2), (31, 8), (32, 8), (33, 64), (96, 10), (131, 48)])
def test_packed_weight_holds_every_element_where_the_panels_say(dtype, n, k):
    weight = torch.arange(1, n * k + 1).view(n, k).to(dtype)
    packed = native.pack(weight)
    pair = 4 // dtype.itemsize
    assert packed.shape == native.packed_shape(n, k, dtype) == (-(-n // 32), k // pair, 32, pair)
    for row in range(n):
        assert torch.equal(packed[row // 32, :, row % 32].flatten(), weight[row])
    assert not packed[-1, :, n - 32 * (len(packed) - 1) :].any(), "columns beyond the weight must be zero"


def test_packing_into_given_memory():
    weight = torch.randn(40, 6)
    out = torch.full(native.packed_shape(40, 6, torch.float32), float("nan"))
    assert native.pack(weight, out) is out
    assert torch.equal(out, native.pack(weight))


def test_odd_reduction_dimension_is_refused_in_bfloat16():
    with pytest.raises(ValueError, match="must be a multiple of 2"):
        native.packed_shape(8, 7, torch.bfloat16)
