"""Programs of layers: every buffer is written before it is read, and pieces hand over what is read behind them."""

from __future__ import annotations

from functools import cache

import pytest

from chorus.core.model.families.longcat.layer import SHORTCUT
from chorus.core.model.program.layer_program import LayerProgram
from chorus.core.model.program.op import CHOSEN, EMBEDDED, PER_LAYER, ROUTER_STATE, STREAM, STREAMS, Op, name_of
from chorus.core.model.program.ops.attend import Attend
from chorus.core.model.program.ops.heads import Heads
from chorus.core.model.program.ops.linear import Gemm
from chorus.core.model.read_config import read_model_config
from chorus.core.model.specs.config import ModelConfig
from chorus.core.model.weights.shard import Shard
from chorus.core.model.weights.slot import Keep
from chorus.memory.pages.projections import Role

from ...tiny_families import EVERY, make_tiny

#: Those which a layer leaves to later ones.
LEFT = {CHOSEN, SHORTCUT, ROUTER_STATE}
LASTING = {STREAM, STREAMS, PER_LAYER, EMBEDDED, *LEFT}


@cache
def config_of(family: str) -> ModelConfig:
    return read_model_config(make_tiny(family).model)


def programs_of(family: str) -> list[LayerProgram]:
    config = config_of(family)
    return [config.composed(layer).program for layer in config.layers]


def writes_of(ops: tuple[Op, ...]) -> set[str]:
    return {name for op in ops for name in op.writes} - LASTING


every_family = pytest.mark.parametrize("family", EVERY)
pytestmark = [pytest.mark.native(needed=False), pytest.mark.wide]


@every_family
def test_buffers_are_written_before_they_are_read(family):
    lasting = LASTING - LEFT
    for program in programs_of(family):
        written = set(lasting)
        for op in program.ops:
            assert {name_of(read) for read in op.reads} <= written, op
            written |= set(op.writes)
        lasting |= written & LEFT


@every_family
def test_what_lives_across_the_mixers_is_kept(family):
    """A buffer of the first part that is read behind it, before another op writes that name, and no other."""
    pairs = [
        (each, whole.segments[at + 1 :]) for whole in programs_of(family) for at, each in enumerate(whole.segments)
    ]
    for program, later in pairs:
        behind, rewritten = set[str](), set[str]()
        for op in (*program.mixers, *program.after, *(op for each in later for op in each.before)):
            behind |= {name_of(read) for read in op.reads} - rewritten - LASTING
            rewritten |= set(op.writes)
        assert {kept.name for kept in program.reads} == behind & writes_of(program.before)
        assert {kept.name for kept in program.mixed} == writes_of(program.mixers)
        assert all(op.IS_CUT for op in program.mixers)
        assert not any(op.IS_CUT for op in (*program.before, *program.after))


@every_family
def test_ops_name_the_weights_of_the_layer(family):
    """Every slot is one of the layer's, and every matrix of the layer is in an op."""
    config = config_of(family)
    for layer in config.layers:
        program, known = (
            config.composed(layer).program,
            {slot.name.partition(".")[0] for slot in config.composed(layer).slots if slot.keep is not Keep.UNUSED},
        )
        named = {slot for op in program.ops for slot in op.slots}
        absent = {slot for op in program.ops if isinstance(op, Heads | Attend) for slot in op.slots}
        assert named - absent <= known <= named | {slot for slot in known if slot.endswith("_bias")}
        matrices = {each.product for each in config.composed(layer).projections if not each.is_of_mixture}
        assert matrices - {Role.KV_UP} == {op.weight for op in program.ops if isinstance(op, Gemm)}


def test_ranks_have_programs_of_their_share():
    whole = config_of("qwen3-moe")
    share = Shard(1, 2).config(whole)
    first, second = (each.composed(each.layers[0]).program for each in (whole, share))
    assert [type(op) for op in first.ops] == [type(op) for op in second.ops]
    assert first.reads[0].shape == (2 * second.reads[0].shape[0], second.reads[0].shape[1])
