"""Ops as the library reads them: numbers, addresses of tensors, structures within structures."""

from __future__ import annotations

import ctypes

import pytest
import torch

from chorus.ops.library import native_library, native_model
from chorus.ops.library.described_ops import DescribedOps, described_registers
from chorus.ops.library.native_layout import layout_of
from chorus.ops.library.native_program import NativeOp, Register

from ..gemm.whole_numbers import WholeNumbers

pytestmark = pytest.mark.skipif(not native_library.levels(), reason="needs the native library")


@pytest.fixture
def layout():
    library = native_library.library()
    assert library is not None
    return layout_of(library)


def first(described: DescribedOps, layout, structure: str):
    op = layout.structure("OpDesc").from_address(described.address)
    return op.kind, layout.structure(structure).from_address(op.arguments)


def test_an_op_has_its_kind_and_its_arguments(layout):
    weight = torch.ones(8)
    described = DescribedOps([NativeOp("Norm", {"x": 3, "width": 8, "eps": 0.5, "weight": weight})], layout)
    kind, norm = first(described, layout, "NormOp")
    assert kind == layout.number("OpKind.kNorm")
    assert (norm.x, norm.column, norm.width, norm.eps, norm.weight) == (3, 0, 8, 0.5, weight.data_ptr())


def test_whole_numbers_say_how_they_are_packed(layout):
    panels = WholeNumbers.of(torch.randn(40, 64), 4, 32, True).packed()
    described = DescribedOps([NativeOp("GateUp", {"gemm": {"w": panels, "layer": 2}, "size": 20})], layout)
    _, op = first(described, layout, "GateUpOp")
    assert (op.gemm.w, op.gemm.layer, op.size) == (panels.data.data_ptr(), 2, 20)
    assert (op.gemm.integers.bits, op.gemm.integers.group) == (4, 32)
    assert op.gemm.integers.scales == panels.scales.data_ptr()


def test_an_argument_that_the_library_lacks_is_refused(layout):
    with pytest.raises(AttributeError, match="NormOp has no field 'height'"):
        DescribedOps([NativeOp("Norm", {"height": 3})], layout)


def test_tensors_must_be_contiguous(layout):
    with pytest.raises(ValueError, match="contiguous"):
        DescribedOps([NativeOp("Norm", {"weight": torch.ones(4, 4).T[1]})], layout)


def test_registers(layout):
    found = described_registers([Register("Float", 8), Register("Rounded", 16)], layout)
    assert [(each.memory, each.width) for each in found] == [(0, 8), (1, 16)]
    assert ctypes.sizeof(found) == 16


def test_a_packed_matrix_is_an_address(layout):
    packed = native_model.pack(torch.ones(32, 8))
    described = DescribedOps([NativeOp("Gemm", {"w": packed, "bias": None})], layout)
    _, op = first(described, layout, "GemmOp")
    assert (op.w, op.bias, op.integers.bits) == (packed.data_ptr(), None, 0)
