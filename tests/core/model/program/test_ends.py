"""Programs of a model's ends. What they compute is tested with whole models: see `tests/core/test_families.py`."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from chorus.core.model.families.longcat.layer import SHORTCUT
from chorus.core.model.program.ends import LOGITS, STATES, end_programs
from chorus.core.model.program.op import CHOSEN, ROUTER_STATE, STREAM, name_of
from chorus.core.model.program.ops.embed import EmbedMedia
from chorus.core.model.program.ops.logits import Rows, Select
from chorus.core.model.program.ops.norm import Norm
from chorus.core.model.program.ops.residual import Add
from chorus.core.model.program.peepholes import fused, fused_layers
from chorus.core.model.read_config import read_model_config
from chorus.core.model.specs.config import ModelConfig
from chorus.core.model.weights.end_weights import end_weights
from chorus.core.model.weights.open_weights import open_weights

from ...tiny_families import EVERY, make_tiny

pytestmark = [pytest.mark.native(needed=False), pytest.mark.wide]
every_family = pytest.mark.parametrize("family", EVERY)


@cache
def config_of(family: str) -> ModelConfig:
    return read_model_config(make_tiny(family).model)


@every_family
def test_buffers_are_written_before_they_are_read(family):
    config = config_of(family)
    ends, written = end_programs(config), set[str]()
    for op in (*ends.before, *ends.behind):
        assert {name_of(read) for read in op.reads} <= written, op
        written |= set(op.writes)
    lasting = {kept.name for kept in ends.lasting} - {CHOSEN, SHORTCUT, ROUTER_STATE}  # which layers write
    assert {STREAM, STATES, LOGITS, *lasting} <= written


@every_family
def test_every_weight_of_the_ends_is_read_by_an_op(family):
    config = config_of(family)
    ends = end_programs(config)
    named = {slot for op in (*ends.before, *ends.behind, *ends.kept) for slot in op.slots}
    with open_weights(make_tiny(family).model, config, torch.float32) as weights:
        found = end_weights(config, weights, weights.embed(), None, torch.float32, torch.device("cpu"), packs=False)
    assert named == set(found)
    assert ("media" in found) == any(isinstance(op, EmbedMedia) for op in ends.embed)


def test_rows_are_chosen_before_what_the_last_layer_adds():
    """So the addition and the final norm stay one kernel, of these rows alone."""
    config = config_of("llama2")
    _, pending = fused_layers([config.composed(layer).program.ops for layer in config.layers])
    assert isinstance(pending, Add)
    select, norm = fused([pending, *end_programs(config).states])
    assert select == Select((STREAM, pending.y), Rows.LOGITS)
    assert isinstance(norm, Norm) and norm.added == pending.y
