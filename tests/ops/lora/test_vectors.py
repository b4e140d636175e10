"""Vectors by torch's operators against their definition, and beside LoRA."""

from __future__ import annotations

import pytest
import torch

from chorus.ops.lora.merge import merge
from chorus.ops.lora.sgmv import Segments, sgmv
from chorus.ops.lora.vectors import scale_outputs

from .vector_cases import LAYERS, MODULES, WIDTHS, cases

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("undo", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_wherever_pages_end(dtype, undo):
    for case in cases(1, 40, dtype):
        for layer in range(LAYERS):
            y = case.y.clone()
            scale_outputs(y, case.arena, case.segments, layer, MODULES, undo=undo)
            assert torch.equal(y, case.want(layer, undo=undo).to(dtype))


def test_lora_takes_no_notice_of_vectors():
    """They are entries without rank-rows, on no level of their own."""
    for case in cases(2, 20, torch.float32):
        y = case.y.clone()
        sgmv(y, torch.randn(len(y), 12), case.arena, case.segments, 0, MODULES)
        assert torch.equal(y, case.y)
        assert not any(case.segments.level)
        assert case.segments.without(range(len(case.segments.rows))).vectors == []


def test_merged_weights_are_scaled():
    for case in cases(3, 20, torch.float32):
        origin = torch.randn(sum(WIDTHS), 12)
        for rows, vectors in zip(case.segments.rows, case.found, strict=True):
            out = torch.empty_like(origin)
            growth = merge(origin, out, case.arena, 1, [rows], MODULES)
            want = origin.clone()
            for (_, first, width), pair in zip(MODULES, vectors[1], strict=True):
                if pair is not None:
                    want[first : first + width] *= pair[0][:, None]
            assert torch.equal(out, want)
            assert 0.5 <= growth <= 1.5


def test_a_scale_of_0_can_not_be_merged():
    case = next(it for it in cases(4, 20, torch.float32) if it.segments.rows and it.found[0][0][0] is not None)
    rows = case.segments.rows[0]
    assert rows.vectors is not None
    page, at = divmod(rows.vectors[0][0], case.arena.shape[1])
    case.arena[rows.pages[page], at] = 0
    origin = torch.randn(sum(WIDTHS), 12)
    assert merge(origin, torch.empty_like(origin), case.arena, 0, [rows], MODULES) == float("inf")


def test_without_vectors_nothing_is_looked_at():
    scale_outputs(None, None, Segments(), 0, MODULES)
