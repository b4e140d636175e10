"""Quantised checkpoints have the weights of a plain checkpoint that holds the dequantised values, bit by bit."""

from __future__ import annotations

import pytest
import torch

from chorus.core.model.shard import Shard

from .forms import FORMS
from .twins import weights, write_twins


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Phi3ForCausalLM"])
@pytest.mark.parametrize("form", FORMS)
def test_weights_have_the_bits_of_the_dequantised_twin(tmp_path, architecture, form):
    quantised, twin = write_twins(tmp_path, FORMS[form], architecture)
    for options in ({}, {"shard": Shard(0, 2)}, {"shard": Shard(1, 2)}, {"dtype": torch.float32}):
        for found, want in zip(weights(quantised, **options), weights(twin, **options), strict=True):
            assert (found is None and want is None) or torch.equal(found, want)
