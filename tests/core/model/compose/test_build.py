"""One writing of a layer gives its program, its slots and its projections."""

from __future__ import annotations

import pickle

import pytest

from chorus.core.model.compose.build import Build, Proj, Value, width_of
from chorus.core.model.compose.composed import composed
from chorus.core.model.compose.decoder_layer import DecoderLayer
from chorus.core.model.program.layer_program import Kept
from chorus.core.model.program.op import View
from chorus.core.model.program.ops.attend import Attend
from chorus.core.model.program.ops.linear import Gemm
from chorus.core.model.specs.attention import AttentionSpec
from chorus.core.model.specs.feed_forward import GatedSpec
from chorus.core.model.specs.norms import NormKind, NormSpec
from chorus.core.model.specs.rope_config import RopeConfig
from chorus.core.model.weights.slot import Keep

NORM = NormSpec(1e-6)
ATTENTION = AttentionSpec(4, 2, 16, 0.25, RopeConfig(16))


def test_a_product_is_an_op_a_slot_and_projections():
    b = Build(32, NORM)
    y = b.linear("qkv", b.norm("attention_norm", b.x), "in", Proj("a", 8, 4), Proj("b", 6, 2, bias=True))
    assert (y, y.width, b.program.ops[-1]) == ("in", 14, Gemm("n", "in", "qkv"))
    assert [(each.path, each.dims, each.units) for each in b.projections] == [("a", (32, 8), 4), ("b", (32, 6), 2)]
    assert [slot.name for slot in b.slots] == ["attention_norm", "qkv", "qkv_bias"]
    assert [each.made for each in b.slots[-1].tensors] == [(0.0,), ()]
    assert b.biased == {"b"}


def test_what_ranks_sum_and_what_is_never_merged_is_said_where_it_is_multiplied():
    b = Build(32, NORM)
    y = b.linear("mine", b.x, "y", Proj("mixer.mine", 32, 4), rows=True)
    b.linear("small", y, "z", Proj("mixer.small", 8), merges=False)
    mine, small = b.projections
    assert (mine.product, mine.is_row_parallel, mine.merges, mine.is_replicated) == ("mine", True, True, False)
    assert (small.product, small.is_row_parallel, small.merges, small.is_replicated) == ("small", False, False, True)


@pytest.mark.parametrize("name", ["mine", "other", "head", "per_layer_projection", "experts.router", "kv_up"])
def test_a_product_has_a_name_of_its_own(name):
    b = Build(32, NORM)
    b.linear("mine", b.x, "y", Proj("mixer.mine", 32))
    b.vector("other_bias", "other.bias", 32)
    with pytest.raises(ValueError, match=f"a layer can't write a product {name!r}"):
        b.linear(name, b.x, "y", Proj("mixer.other", 32))


def test_norms_have_the_tensors_that_their_kind_has():
    def ends(norm: NormSpec) -> list[tuple[str, tuple[float, ...]]]:
        b = Build(8, norm)
        b.norm("mlp_norm", b.x)
        (slot,) = b.slots
        assert slot.keep is Keep.NORM
        return [(each.path, each.made) for each in slot.tensors]

    assert ends(NORM) == [("mlp_norm.weight", ())]
    assert ends(NormSpec(1e-6, NormKind.BIASED_LAYER)) == [("mlp_norm.weight", ()), ("mlp_norm.bias", ())]
    assert ends(NormSpec(1e-6, weightless=True)) == [("mlp_norm.weight", (1.0,))]


def test_a_slot_is_declared_once_and_may_be_another_layers():
    b = Build(8, NORM)
    with b.shared_with(3):
        b.norm("mlp_norm", b.x)
    b.norm("mlp_norm", b.x)
    b.norm("second_norm", b.x)
    assert [(slot.name, slot.shared) for slot in b.slots] == [("mlp_norm", 3), ("second_norm", None)]


def test_buffers_live_across_a_cut_if_they_are_read_before_they_are_written():
    b = Build(8, NORM)
    for name in ("q", "kept", "written", "unread"):
        b.norm("mlp_norm", b.x, name)
    found = b.put(Attend("q", "a", ATTENTION), 4, 16)
    b.norm("mlp_norm", b.x, "written")
    b.concat("both", Value("kept", 8), Value("written", 8), found)
    assert b.program.reads == (Kept("q", (8,)), Kept("kept", (8,)))
    assert b.program.mixed == (Kept("a", (4, 16)),)
    assert len(b.program.segments) == 1


def test_each_cut_behind_other_ops_begins_a_segment():
    b = Build(8, NORM)
    for name in ("q", "p"):
        b.put(Attend(b.norm("mlp_norm", b.x, name), "a", ATTENTION), 4, 16)
    assert [len(each.before) for each in b.program.segments] == [1, 1]
    assert [each.reads for each in b.program.segments] == [(Kept("q", (8,)),), (Kept("p", (8,)),)]


def test_widths_are_those_of_what_is_read():
    x = Value("x", 4, 6)
    assert [width_of(each) for each in (x, View(x, 0, 5), View(x, -7), View(x, 2, -2))] == [24, 5, 7, 20]
    with pytest.raises(AssertionError, match="x is a name without a shape"):
        width_of("x")


def test_a_layer_is_written_once_for_equal_specifications_and_goes_to_other_processes():
    layer = DecoderLayer(ATTENTION, GatedSpec(40))
    assert composed(layer, NORM, 32) is composed(DecoderLayer(ATTENTION, GatedSpec(40)), NORM, 32)
    program = composed(layer, NORM, 32).program
    assert pickle.loads(pickle.dumps(program)) == program
