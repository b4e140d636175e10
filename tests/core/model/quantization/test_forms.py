"""Quantised checkpoints have the weights of a plain checkpoint that holds the dequantised values, bit by bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from chorus.core.model import weights as loading
from chorus.core.model.read_config import read_model_config
from chorus.core.model.shard import Shard
from chorus.core.model.weights import WeightLoader

from .forms import FORMS
from .twins import weights, write_twins


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Phi3ForCausalLM"])
@pytest.mark.parametrize("form", FORMS)
def test_weights_have_the_bits_of_the_dequantised_twin(tmp_path, architecture, form):
    quantised, twin = write_twins(tmp_path, FORMS[form], architecture)
    for options in ({}, {"shard": Shard(0, 2)}, {"shard": Shard(1, 2)}, {"dtype": torch.float32}):
        for found, want in zip(weights(quantised, **options), weights(twin, **options), strict=True):
            assert (found is None and want is None) or torch.equal(found, want)


@pytest.mark.parametrize("form", FORMS)
def test_parts_of_any_number_of_rows_make_the_same_weights(tmp_path, monkeypatch, form):
    monkeypatch.setattr(loading, "_CHUNK", 50)
    monkeypatch.setattr(loading, "_ROWS", 1)
    quantised, twin = write_twins(tmp_path, FORMS[form])
    for found, want in zip(weights(quantised), weights(twin), strict=True):
        assert (found is None and want is None) or torch.equal(found, want)


#: AWQ packs eight outputs into a word, so 30 of them are no shape of it.
SHAPES = [(form, hidden) for form in FORMS for hidden in (30, 40) if hidden == 40 or not form.startswith("awq")]


@pytest.mark.parametrize(("form", "hidden"), SHAPES)
def test_shapes_that_groups_and_words_do_not_divide(tmp_path, form, hidden):
    sizes = {"hidden_size": hidden, "intermediate_size": hidden * 7 // 5, "head_dim": hidden // 5}
    sizes |= {"num_attention_heads": 5, "num_key_value_heads": 1}
    config = replace(FORMS[form], config=sizes)
    quantised, twin = write_twins(tmp_path, config)
    for found, want in zip(weights(quantised), weights(twin), strict=True):
        assert (found is None and want is None) or torch.equal(found, want)


class Largest(TorchDispatchMode):
    """Notes the bytes of the largest tensor that an operation returns."""

    num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):
            self.num_bytes = max(self.num_bytes, made.untyped_storage().nbytes())
        return made


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_nothing_is_as_large_as_a_projection_while_it_is_read(tmp_path, monkeypatch, form):
    monkeypatch.setattr(loading, "_CHUNK", 4096)
    monkeypatch.setattr(loading, "_ROWS", 8)
    sizes = {"hidden_size": 64, "intermediate_size": 768, "vocab_size": 56}
    path, _ = write_twins(tmp_path, replace(FORMS[form], config=sizes))
    loader = WeightLoader(path, read_model_config(path), torch.bfloat16)
    with Largest() as largest:
        kept = [layer.gate_up.nbytes for layer in loader.layers()]
    assert largest.num_bytes == kept[0] == 2 * 768 * 64 * 2
