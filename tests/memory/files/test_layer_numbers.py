"""Numbers of layers of which several stand under one."""

from __future__ import annotations

import pytest

from chorus.memory.files.layer_numbers import LayerNumbers

NUMBERS = LayerNumbers(2, (("mlp.up_proj", "mlps.{}.up_proj"), ("self_attn", "self_attn.{}")))
PAIRS = [
    ("model.layers.6.self_attn.o_proj.weight", "model.layers.3.self_attn.0.o_proj.weight"),
    ("model.layers.7.self_attn.o_proj.weight", "model.layers.3.self_attn.1.o_proj.weight"),
    ("layers.25.mlp.up_proj", "layers.12.mlps.1.up_proj"),
    ("a.model.layers.2.mlp.experts.0.up_proj", "a.model.layers.1.mlp.experts.0.up_proj"),
    ("model.norm.weight", "model.norm.weight"),
]


@pytest.mark.parametrize(("own", "given"), PAIRS)
def test_names_are_turned_both_ways(own, given):
    assert NUMBERS.given(own) == given
    assert NUMBERS.own(given) == own


def test_a_path_that_only_begins_alike_has_no_further_number():
    assert NUMBERS.given("layers.2.self_attn_gate.weight") == "layers.1.self_attn_gate.weight"
    assert NUMBERS.own("layers.1.self_attn.2.o_proj") == "layers.2.self_attn.2.o_proj"


def test_names_are_found_by_what_they_are_there():
    found = NUMBERS.named({given for _, given in PAIRS})
    assert all(own in found for own, _ in PAIRS)
    assert "model.layers.8.self_attn.o_proj.weight" not in found
