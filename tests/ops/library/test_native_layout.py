"""Structures that the native library takes lie in memory as Python writes them."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from chorus.ops.cpu.lora_offload import most_offloaded
from chorus.ops.library import native_descriptors, native_library
from chorus.ops.library.native_layout import layout_of
from chorus.ops.library.native_model import PANEL
from chorus.ops.moe.routing import Scoring

NATIVE = Path(native_library.__file__).parents[1] / "native"

built = pytest.mark.skipif(not native_library.levels(), reason="needs the native library")


@built
def test_a_library_with_columns_in_another_order_is_not_used(monkeypatch, caplog):
    monkeypatch.setitem(native_library._TABLES, "Span", ("end", "start"))  # noqa: SLF001
    level = native_library.levels()[0]
    assert native_library.built.__wrapped__(level) is None
    assert "it was built from other sources, with another Span" in caplog.text


@built
def test_fields_must_say_which_structures_they_are(monkeypatch):
    layout = native_library.native_layout()
    assert layout.lacking({"Span": ("start", "end")}) == []
    fields = layout._fields["StepDesc"]
    monkeypatch.setitem(fields, "segments", (*fields["segments"][:3], ""))
    assert layout.lacking({"Span": ("start", "end")}) == ["StepDesc.segments"]


@built
def test_all_levels_have_the_same_structures():
    first, *others = (layout_of(native_library.built(level)) for level in native_library.levels())
    for other in others:
        assert (other._fields, other._numbers) == (first._fields, first._numbers)  # noqa: SLF001


@built
def test_an_unknown_name_is_an_error():
    layout = native_library.native_layout()
    step = layout.filled("StepDesc", tokens=3)
    with pytest.raises(AttributeError, match="token"):
        step.token = 3
    with pytest.raises(AttributeError, match="StepDesc has no field 'token'; reinstall"):
        layout.filled("StepDesc", token=3)
    with pytest.raises(AttributeError, match="Segments has no field 'rows'; reinstall"):
        layout.filled("StepDesc", segments={"rows": 3})
    with pytest.raises(AttributeError, match=r"has no Activation\.kTanh; reinstall"):
        layout.filled("MixtureDesc", activation="kTanh")
    with pytest.raises(AttributeError, match="the native library has no Steps; reinstall"):
        layout.filled("Steps")


@built
@pytest.mark.parametrize(
    ("enumeration", "own"),
    [
        ("Activation", native_descriptors.NativeActivation),
        ("HeadNorm", native_descriptors.NativeHeadNorm),
        ("OutputGate", native_descriptors.NativeOutputGate),
        ("Scoring", ["k" + each.name.title().replace("_", "") for each in Scoring]),
        ("Element", [f"k{name}" for name in native_descriptors.Element.__members__]),
    ],
)
def test_enumerators_have_the_librarys_names(enumeration, own):
    numbers = native_library.native_layout()._numbers  # noqa: SLF001
    assert {name for name in numbers if name.startswith(f"{enumeration}.")} == {f"{enumeration}.{each}" for each in own}


@built
def test_structures_are_made_as_the_library_has_them():
    library = native_library.library()
    assert library is not None
    layout = layout_of(library)
    listed = re.findall(r"ALL\((\w{2,})\)", (NATIVE / "program" / "layout.h").read_text())
    assert listed
    for name in listed:
        assert ctypes.sizeof(layout.structure(name)) == layout._sizes[name], name  # noqa: SLF001
    gemm = layout.filled("GateUpOp", gemm={"shape": 3, "w": 8}, factor=0.5, activation="kXielu")
    assert (gemm.gemm.shape, gemm.gemm.w, gemm.factor, gemm.size) == (3, 8, 0.5, 0)
    assert gemm.activation == layout.number("Activation.kXielu")


@built
def test_records_are_made_as_the_library_has_them():
    layout = native_library.native_layout()
    for name in ("SampleRow", "LogprobRow", "Exchange", "ReadJob", "ReadGroup", "Span"):
        record, structure = layout.record(name), layout.structure(name)
        assert record.itemsize == ctypes.sizeof(structure)
        places = {
            field: (getattr(structure, field).offset, getattr(structure, field).size) for field in record.names or ()
        }
        assert {field: (at, dtype.itemsize) for field, (dtype, at, *_) in (record.fields or {}).items()} == places
    assert layout.record("SampleRow")["top_p"] == np.float64
    assert layout.record("ReadJob").names == native_descriptors.ReadJob._fields
    assert layout.record("Exchange")["active"].shape == (most_offloaded(),)


@built
def test_constants_of_the_library_and_of_python_are_the_same():
    layout = native_library.native_layout()
    assert layout.number("kPanel") == PANEL
    elements = {name: layout.number(f"Element.k{name}") for name in native_descriptors.Element.__members__}
    assert elements == native_descriptors.Element.__members__
    assert {native_descriptors.ELEMENT_OF[dtype] for dtype in (torch.float32, torch.bfloat16)} == {0, 2}
