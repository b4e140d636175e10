"""Packing of weights for the native decoder, and the check of its steps; the engine's tests check its results."""

from __future__ import annotations

import pytest
import torch

from chorus.ops.cpu import native
from chorus.ops.library import native_model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("n", "k"), [(1, 2), (31, 8), (32, 8), (33, 64), (96, 10), (131, 48)])
def test_packed_weight_holds_every_element_where_the_panels_say(dtype, n, k):
    weight = torch.arange(1, n * k + 1).view(n, k).to(dtype)
    packed = native_model.pack(weight)
    pair = 4 // dtype.itemsize
    assert packed.shape == native_model.packed_shape(n, k, dtype) == (-(-n // 32), k // pair, 32, pair)
    for row in range(n):
        assert torch.equal(packed[row // 32, :, row % 32].flatten(), weight[row])
    assert not packed[-1, :, n - 32 * (len(packed) - 1) :].any(), "columns beyond the weight must be zero"


def test_packing_into_given_memory():
    weight = torch.randn(40, 6)
    out = torch.full(native_model.packed_shape(40, 6, torch.float32), float("nan"))
    assert native_model.pack(weight, out) is out
    assert torch.equal(out, native_model.pack(weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", [(1, 8, 2, 4), (3, 40, 6, 33), (4, 32, 16, 24)], ids=str)
def test_keys_and_values_of_latents_are_packed_by_head(dtype, sizes):
    heads, kv_rank, key, value = sizes
    shape = native_model.LatentShape(heads, kv_rank, key, value)
    kv_up = torch.randn(heads * (key + value), kv_rank).to(dtype)
    packed = shape.pack(kv_up)
    keys, values = shape.packed_elems
    for head, own in enumerate(kv_up.view(heads, key + value, kv_rank)):
        its_keys, its_values = packed[keys * head :][:keys], packed[heads * keys + values * head :][:values]
        assert torch.equal(its_keys, native_model.pack(own[:key].T).flatten())
        assert torch.equal(its_values, native_model.pack(own[key:]).flatten())
    assert torch.equal(shape.unpack(packed), kv_up)
    out = torch.full_like(packed, torch.nan)
    assert shape.pack(kv_up, out) is out
    assert torch.equal(out, packed)


def test_odd_reduction_dimension_is_refused_in_bfloat16():
    with pytest.raises(ValueError, match="must be a multiple of 2"):
        native_model.packed_shape(8, 7, torch.bfloat16)


class TestChecks:
    """Two prefill rows of 3 and 2 tokens, over 6 positions and 5 pages of 4 tokens."""

    MODEL = native_model.NativeModel(
        hidden=2,
        vocab=9,
        block_tokens=4,
        eps=1e-6,
        embed=torch.zeros(9, 2),
        lm_head=torch.zeros(1),
        norm=torch.zeros(2),
        num_layers=0,
        ops=[],
        registers=[],
        gemm_shapes=[],
        gemm_shape_of=[],
        positions=6,
        arena=torch.zeros(5, 64),
    )
    STEP = {
        "token_ids": [8, 0, 1, 2, 3],
        "positions": [3, 4, 5, 0, 1],
        "page": [2, 4, 4, 3, 3],
        "offset": [3, 0, 1, 0, 1],
        "kv_lens": [6, 2],
        "page_table": [[2, 4], [3, 99]],  # entries after a row's pages are not read
        "logit_tokens": [2, 4],
    }

    def check(self, **changed):
        step = {**self.STEP, **changed}
        rows = native.NativeRows()
        rows.plan([0, 3, 5], torch.tensor(step.pop("page_table")), step.pop("kv_lens"))
        native.check_step(self.MODEL, rows=rows, **{name: torch.tensor(values) for name, values in step.items()})

    def test_a_step_within_bounds_passes(self):
        assert native.CHECKS_STEPS, "tests run with checks"
        self.check()

    @pytest.mark.parametrize(
        ("changed", "message"),
        [
            ({"token_ids": [9, 0, 1, 2, 3]}, "token id is 9; it must be from 0 to 8"),
            ({"token_ids": [-1, 0, 1, 2, 3]}, "token id is -1"),
            ({"positions": [3, 4, 6, 0, 1]}, "position is 6; it must be from 0 to 5"),
            ({"page": [2, 4, 5, 3, 3]}, "page that is written is 5"),
            ({"offset": [3, 4, 1, 0, 1]}, "offset in a page is 4"),
            ({"kv_lens": [9, 2]}, "last position of a row is 8; it must be from 0 to 7"),
            ({"kv_lens": [6, 0]}, "last position of a row is -1"),
            ({"page_table": [[2, 5], [3, 99]]}, "page that is read is 5"),
            ({"kv_lens": [6, 5]}, "page that is read is 99"),
            ({"logit_tokens": [2, 5]}, "token that has logits is 5; it must be from 0 to 4"),
        ],
    )
    def test_a_step_beyond_a_bound_is_refused(self, changed, message):
        with pytest.raises(IndexError, match=message):
            self.check(**changed)
