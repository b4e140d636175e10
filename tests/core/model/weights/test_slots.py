"""The slots of layers: what is read is what they say, and ranks have all of every tensor."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from chorus.core.model.read_config import read_model_config
from chorus.core.model.specs.config import ModelConfig
from chorus.core.model.weights.dummy_weights import DummyWeights
from chorus.core.model.weights.narrow_bytes import kept_bytes
from chorus.core.model.weights.shard import WHOLE, Shard
from chorus.core.model.weights.slot import Keep
from chorus.core.model.weights.tensor_parts import parts_of
from chorus.core.model.weights.weight_loader import WeightLoader

from ...tiny_families import EVERY, make_tiny

pytestmark = pytest.mark.wide

every_family = pytest.mark.parametrize("family", EVERY)


@cache
def config_of(family: str) -> ModelConfig:
    return read_model_config(make_tiny(family).model)


@every_family
def test_a_layer_that_is_read_has_its_slots(family):
    """Those of parts are in one object; the second rank has no biases of what ranks add up."""
    config = config_of(family)
    for shard in (WHOLE, Shard(1, 2)):
        read = WeightLoader(make_tiny(family).model, config, torch.float32, shard=shard).layers()
        for layer, spec in zip(read, config.layers, strict=True):
            own = [slot for slot in config.composed(spec).slots if slot.keep is not Keep.UNUSED]
            own = [slot for slot in own if not (slot.first_rank and shard.rank)]
            assert set(layer) == {slot.name.partition(".")[0] for slot in own}


@every_family
def test_ranks_have_all_of_every_tensor(family):
    """Each element is on one of two ranks, or on both: of heads and groups that are fewer."""
    for name, part in parts_of(config_of(family)).items():
        counts = torch.zeros(part.shape, dtype=torch.int)
        for rank in range(2):
            for share in part.share(rank, 2):
                counts[share] += 1
        assert set(counts.unique().tolist()) <= {1, 2}, name
        assert int(counts.min()) == 1 or not (part.columns or any(units > 1 for _, units in part.rows)), name


@pytest.mark.parametrize("family", ["gpt-oss", "llama-biased", "qwen3.5"])
def test_random_weights_of_ranks_are_of_one_model(family):
    """Also behind a bias that only the first rank has."""
    config = config_of(family)
    every = [DummyWeights(config, torch.float32, shard=shard) for shard in (WHOLE, Shard(0, 2), Shard(1, 2))]
    assert every[2].num_bytes_kept == kept_bytes(config, 4, shard=Shard(1, 2))
    for layer, *own in zip(*(weights.layers() for weights in every), strict=True):
        assert torch.equal(torch.cat([each["o"] for each in own], 1), layer["o"])
        assert all(torch.equal(each["attention_norm"], layer["attention_norm"]) for each in own)
