"""Numbers of layers of which several stand under one, and a module behind all of them."""

from __future__ import annotations

import pytest

from chorus.memory.files.module_behind import ModuleBehind
from chorus.memory.files.names.layer_numbers import LayerNumbers

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


BEHIND = ModuleBehind(11, "mixer")
BEHIND_PAIRS = [
    ("model.layers.11.mixer.down.weight", "model.mixer.down.weight"),
    ("layers.11.mixer", "mixer"),
    ("a.model.layers.11.mixer.up.lora_A.weight", "a.model.mixer.up.lora_A.weight"),
]


@pytest.mark.parametrize(("own", "given"), BEHIND_PAIRS)
def test_a_module_behind_all_layers_is_in_the_last_one(own, given):
    assert BEHIND.given(own) == given
    assert BEHIND.own(given) == own
    assert own in BEHIND.named({given})


@pytest.mark.parametrize("name", ["model.layers.1.mixer.up", "model.mixer_2.up", "model.layers.11.mixers", "lm_head"])
def test_names_that_only_look_alike_stay(name):
    assert BEHIND.given(name) == name
    assert BEHIND.own(name) == name
