"""Random weights in place of a checkpoint: the same parts in the same shapes."""

from __future__ import annotations

import pytest
import torch

from chorus.core.config import EngineConfig
from chorus.core.engine import Engine
from chorus.core.model.read_config import read_model_config
from chorus.core.model.weights.dummy_weights import DummyWeights
from chorus.core.model.weights.open_weights import open_weights
from chorus.core.model.weights.weight_loader import WeightLoader
from chorus.core.requests.request import Request
from chorus.core.requests.request_params import RequestParams


@pytest.mark.parametrize("name", ["gqa", "tied", "wide_heads"])
def test_parts_have_the_shapes_of_a_checkpoints(subject, name):
    path = subject(name).model
    config = read_model_config(path)
    dummy = DummyWeights(config, torch.float32)
    loader = WeightLoader(path, config, torch.float32)
    embed, read = dummy.embed(), loader.embed()
    assert embed.shape == read.shape
    assert dummy.norm().shape == loader.norm().shape
    assert (dummy.lm_head(embed) is embed) == (loader.lm_head(read) is read)
    assert dummy.lm_head(embed).shape == loader.lm_head(read).shape
    assert dummy.num_bytes_kept == loader.num_bytes_kept
    for made, found in zip(dummy.layers(), loader.layers(), strict=True):
        shapes = [{name: part.shape for name, part in layer.items()} for layer in (made, found)]
        assert shapes[0] == shapes[1]


def test_seeded_and_finite(subject):
    config = read_model_config(subject("gqa").model)
    one, same, other = (DummyWeights(config, torch.bfloat16, seed=seed).embed() for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert one.dtype is torch.bfloat16
    assert one.isfinite().all()


def test_projections_are_packed(subject):
    config = read_model_config(subject("gqa").model)
    for layer in DummyWeights(config, torch.float32).layers(lambda weight: weight.T):
        assert layer["qkv"].shape == (config.hidden_size, config.q_size + 2 * config.kv_size)
        assert layer["attention_norm"].shape == (config.hidden_size,)


def test_no_checkpoint_is_looked_for(subject, tmp_path):
    """config.json alone makes an engine; the same tokens every time, and not one over and over."""
    (tmp_path / "config.json").write_bytes((subject("gqa").model / "config.json").read_bytes())
    with open_weights(tmp_path, read_model_config(tmp_path), torch.float32, load_format="dummy") as weights:
        assert isinstance(weights, DummyWeights)
    runs = []
    for _ in range(2):
        config = EngineConfig(model=tmp_path, load_format="dummy", device="cpu", num_pages=32, threads=1)
        engine = Engine.from_config(config)
        request = Request("r", [5, 6, 7], RequestParams(max_tokens=12, temperature=0.0, ignore_eos=True))
        engine.add_request(request)
        while engine.has_work():
            engine.step()
        runs.append(request.token_ids)
        engine.close()
    assert runs[0] == runs[1]
    assert len(set(runs[0][3:])) > 1
