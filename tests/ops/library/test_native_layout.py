"""Structures that the native library takes lie in memory as Python writes them."""

from __future__ import annotations

import ctypes
import re
from ctypes import c_int32, c_void_p
from pathlib import Path

import pytest
import torch

from chorus.ops.library import native_descriptors, native_library
from chorus.ops.library.native_layout import layout_of

NATIVE = Path(native_library.__file__).parents[1] / "native"

built = pytest.mark.skipif(not native_library.levels(), reason="needs the native library")


@built
def test_every_field_lies_where_the_library_reads_it():
    for level in native_library.levels():
        library = native_library.built(level)
        assert library is not None
        assert native_library.differing_fields(library) == []


class SwappedSegments(ctypes.Structure):
    """Of the same size: only its fields' names say that begin and end have changed places."""

    _fields_ = [
        ("count", c_int32),
        *((name, c_void_p) for name in ("end", "begin", "adapters", "level")),
        *((name, c_int32) for name in ("vectors", "undoes")),
    ]


@built
def test_a_library_with_fields_in_another_order_is_not_used(monkeypatch, caplog):
    monkeypatch.setitem(native_descriptors._STRUCTURES, "Segments", SwappedSegments)  # noqa: SLF001
    level = native_library.levels()[0]
    assert native_library.built.__wrapped__(level) is None
    assert "it was built from other sources, with another Segments.begin, Segments.end" in caplog.text


def test_every_structure_of_python_is_compared():
    listed = set(re.findall(r"ALL\((\w{2,})\)", (NATIVE / "layout.h").read_text()))
    assert listed >= native_descriptors._STRUCTURES.keys()  # noqa: SLF001


@built
def test_structures_are_made_as_the_library_has_them():
    library = native_library.library()
    assert library is not None
    layout = layout_of(library)
    listed = re.findall(r"ALL\((\w{2,})\)", (NATIVE / "layout.h").read_text())
    assert listed
    for name in listed:
        assert ctypes.sizeof(layout.structure(name)) == layout._sizes[name], name  # noqa: SLF001
    gemm = layout.filled("GateUpOp", {"gemm": {"product": 3, "w": 8}, "factor": 0.5})
    assert (gemm.gemm.product, gemm.gemm.w, gemm.factor, gemm.size) == (3, 8, 0.5, 0)


def test_constants_of_the_library_and_of_python_are_the_same():
    source = (NATIVE / "offload.h").read_text() + (NATIVE / "slab_rows.h").read_text()
    constants = dict(re.findall(r"constexpr int (k\w+) =\s*([\d <]+);", source))
    assert eval(constants["kMaxOffloaded"]) == native_descriptors.MAX_OFFLOADED
    assert eval(constants["kMaxExchanges"]) == native_descriptors.MAX_EXCHANGES
    elements = next(line for line in source.splitlines() if line.startswith("enum Element"))
    names = {name.upper(): int(number) for name, number in re.findall(r"k(\w+) = (\d)", elements)}
    assert names == native_descriptors.Element.__members__
    assert {native_descriptors.ELEMENT_OF[dtype] for dtype in (torch.float32, torch.bfloat16)} == {0, 2}
