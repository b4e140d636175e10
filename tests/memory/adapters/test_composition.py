"""Names of several adapters with scales."""

from __future__ import annotations

import math

import pytest

from chorus.memory.adapters.adapter import check_name
from chorus.memory.adapters.composition import (
    MAX_TERMS,
    Composition,
    InvalidComposition,
    is_composition,
    read_composition,
)
from chorus.memory.files.error import AdapterFormatError

READ = {
    "A*0.7+B*0.5": [("A", 0.7), ("B", 0.5)],
    "B*0.5+A*0.7": [("A", 0.7), ("B", 0.5)],
    "A * 0.7 + B * 0.5": [("A", 0.7), ("B", 0.5)],
    "A*.5": [("A", 0.5)],
    "A*-1": [("A", -1.0)],
    "A*1e-3+B*2E+1": [("A", 0.001), ("B", 20.0)],
    "A*0.5+B": [("A", 0.5), ("B", 1.0)],
    "A+B*0.5": [("A", 1.0), ("B", 0.5)],
    "A*0.5+A*0.25": [("A", 0.75)],
    "A*0+B*2": [("B", 2.0)],
    "org/A@3*0.5+b_c-d.e*1": [("b_c-d.e", 1.0), ("org/A@3", 0.5)],
    "A@step%2B1*0.5": [("A@step+1", 0.5)],
    "100%*0.5": [("100%", 0.5)],
}


@pytest.mark.parametrize("text", READ)
def test_read(text):
    found = read_composition(text)
    assert found is not None
    assert list(found.terms) == READ[text]
    assert read_composition(found.model or "") in (None, found._replace(named=tuple(name for name, _ in found.terms)))
    assert is_composition(text)


@pytest.mark.parametrize(
    "text", ["A", "A+B", "A@1+2", "A*", "*0.5", "A*x", "A*0.5*2", "A*0.5+", "+A*0.5", "A*1.2.3", ""]
)
def test_other_names(text):
    assert read_composition(text) is None
    assert not is_composition(text)


def test_one_name_for_equal_compositions():
    assert Composition.of([("B", 0.5), ("A", 0.7)]).model == "A*0.7+B*0.5"
    assert Composition.of([("A", 1.0)]).model == "A"
    assert Composition.of([("A", 0.0), ("B", 1.0)]).model == "B"
    assert Composition.of([("A", 0.0)]).model is None
    assert Composition.of([("A", 0.0), ("B", 1.0)]).named == ("A", "B")
    for name in ("a+b", "100%", "a*b", "%2B", "a%2Ab"):
        given = Composition.of([(name, 0.5), ("x", 1 / 3)])
        assert read_composition(given.model or "") == given


@pytest.mark.parametrize("scale", [math.inf, math.nan, 1e5, -1e5])
def test_scales_out_of_range(scale):
    with pytest.raises(InvalidComposition, match=r"scale of 'A' is .*-10000 to 10000"):
        Composition.of([("A", scale)])
    assert is_composition("A*1e99")


def test_too_many():
    names = "+".join(f"a{index}*0.5" for index in range(MAX_TERMS + 1))
    with pytest.raises(InvalidComposition, match="17 adapters are named, at most 16"):
        read_composition(names)


def test_no_adapter_can_have_such_a_name():
    with pytest.raises(AdapterFormatError, match="reads as adapters with scales"):
        check_name("A*0.7+B*0.5")
    assert check_name("A+B") == "A+B"
