"""A layer's program becomes the native decoder's ops: what one kernel does together is one of them."""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum

import pytest

from chorus.core.model.compose.attention import attend, gated, heads, project
from chorus.core.model.compose.build import Build, Value
from chorus.core.model.compose.composed import composed
from chorus.core.model.compose.decoder_layer import DecoderLayer
from chorus.core.model.compose.parts import activated, down, gate_up
from chorus.core.model.families.bitnet.layer import BitNetLayer
from chorus.core.model.families.cohere_2_moe.layer import CohereMoeLayer
from chorus.core.model.families.diffllama.layer import DiffLlamaLayer
from chorus.core.model.families.diffllama.ops import DifferenceSpec
from chorus.core.model.families.falcon_h1.layer import FactoredLayer
from chorus.core.model.families.mimo.layer import MiMoLayer
from chorus.core.model.program.layer_program import LayerProgram
from chorus.core.model.program.native_program import NativeProgram
from chorus.core.model.program.op import NoNativeOp, Op
from chorus.core.model.program.ops.gates import SparseGates
from chorus.core.model.specs.attention import AttentionSpec, OutputGate
from chorus.core.model.specs.feed_forward import Activation, Experts, GatedSpec, Routing, UngatedSpec
from chorus.core.model.specs.layers import LayerSpec
from chorus.core.model.specs.norms import Norms, NormSpec
from chorus.core.model.specs.rope_config import RopeConfig
from chorus.memory.pages.projections import Projections
from chorus.ops.library import native_library
from chorus.ops.library.native_program import NativeOp

HIDDEN = 32
NORM = NormSpec(1e-6)
MIXER = AttentionSpec(4, 2, 16, 0.25, RopeConfig(16))
LAYER = DecoderLayer(MIXER, GatedSpec(80))
EXPERTS = Experts(8, 40, Routing(2))


def native(*layers: LayerSpec, norm: NormSpec = NORM, has_ranks: bool = False) -> NativeProgram:
    written = [composed(layer, norm, HIDDEN) for layer in layers]
    table = Projections(tuple(each.projections for each in written))
    return NativeProgram([each.program for each in written], HIDDEN, table, has_ranks=has_ranks)


def lowered(*layers: LayerSpec, has_ranks: bool = False) -> list[NativeOp]:
    program = native(*layers, has_ranks=has_ranks)
    return [op for ops in program._ops for op in ops]  # noqa: SLF001


def kinds(*layers: LayerSpec, has_ranks: bool = False) -> str:
    return " ".join(op.kind for op in lowered(*layers, has_ranks=has_ranks))


def test_a_layer_as_llama_has_it():
    assert kinds(LAYER) == "Norm Gemm Attend Gemm Norm GateUp Gemm"
    norm, inputs, attend, output, _, up, down = lowered(LAYER)
    assert output.arguments["accumulate"] == down.arguments["accumulate"] == 1
    assert output.arguments["out"] == down.arguments["out"] == 0, "the residual stream"
    assert norm.arguments["out"] == inputs.arguments["x"]
    assert attend.arguments["out"] == output.arguments["x"] != attend.arguments["q"]
    assert up.arguments["act"] == down.arguments["x"] != up.arguments["gemm"]["x"]
    numbers = [inputs.arguments, output.arguments, up.arguments["gemm"], down.arguments]
    assert [each["number"] for each in numbers] == [0, 1, 2, 3]


class OtherNorm(StrEnum):
    MAXIMUM = "norm by the maximum"


@pytest.mark.skipif(not native_library.levels(), reason="needs the native library")
def test_a_kind_of_norm_that_the_library_lacks_is_refused_by_name():
    with pytest.raises(NoNativeOp, match="norm by the maximum"):
        native(LAYER, norm=NormSpec(1e-6, OtherNorm.MAXIMUM))


class OtherActivation(StrEnum):
    SQUARE = "square"


@pytest.mark.parametrize(
    ("feed_forward", "named"),
    [
        (replace(LAYER.feed_forward, activation=OtherActivation.SQUARE), "activation square"),
        (replace(EXPERTS, activation=OtherActivation.SQUARE), "mixture of experts with square"),
    ],
    ids=["dense", "experts"],
)
def test_an_activation_that_the_library_lacks_is_refused_by_name(feed_forward, named):
    layer = replace(LAYER, feed_forward=feed_forward)
    with pytest.raises(NoNativeOp, match=named):
        native(layer)


def test_additions_of_images_are_refused_by_a_library_without_them(monkeypatch):
    monkeypatch.setattr(native_library, "lacks", lambda name: name == "OpKind.kAddMedia")
    with pytest.raises(NoNativeOp, match="addition of images' rows"):
        lowered(replace(LAYER, media_part=1))


def test_each_layer_but_the_first_waits_for_adapters_before_its_first_product():
    assert kinds(LAYER, LAYER).endswith("Norm GateUp Gemm Norm Arrive Gemm Attend Gemm Norm GateUp Gemm")


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        (replace(LAYER, residual_multiplier=0.5), "Norm Gemm Attend Gemm Add Norm GateUp Gemm Add"),
        (replace(LAYER, norms=Norms.AROUND), "Norm Gemm Attend Gemm Norm Add Norm GateUp Gemm Norm Add"),
        (replace(LAYER, norms=Norms.AFTER), "Copy Gemm Attend Gemm Norm Add Copy GateUp Gemm Norm Add"),
        (replace(LAYER, norms=Norms.PARALLEL), "Norm Gemm GateUp Gemm Attend Gemm"),
        (replace(LAYER, norms=Norms.PARALLEL_TWO_NORMS), "Norm Gemm Norm GateUp Gemm Attend Gemm"),
        (
            replace(LAYER, mixer=replace(MIXER, output_gate=OutputGate.PER_ELEMENT)),
            "Norm Gemm Attend Gemm Norm GateUp Gemm",
        ),
        (replace(LAYER, feed_forward=EXPERTS), "Norm Gemm Attend Gemm Norm Route Moe Combine Add"),
        (CohereMoeLayer(MIXER, EXPERTS, factor=0.5), "Norm Gemm Attend Gemm Norm Route Moe Combine Add"),
        (replace(LAYER, feed_forward=None), "Norm Gemm Attend Gemm"),
        (replace(LAYER, mixer=None), "Norm GateUp Gemm"),
        (replace(LAYER, media_part=2), "Norm Gemm Attend Gemm Norm GateUp Gemm AddMedia"),
        (replace(LAYER, norms=Norms.BEHIND), "Copy Gemm Attend Gemm Norm Copy Copy GateUp Gemm Norm Copy"),
        (
            BitNetLayer(MIXER, GatedSpec(80)),
            "Norm Gemm Attend Widen Norm Gemm Norm GateUp Widen Norm Gemm",
        ),
        (
            MiMoLayer(replace(MIXER, value_dim=8), GatedSpec(80), value_factor=0.7),
            "Norm Gemm Scale Copy Resize Attend Widen Resize Gemm Norm GateUp Gemm",
        ),
        (
            DiffLlamaLayer(replace(MIXER, value_dim=8), GatedSpec(80), difference=DifferenceSpec(0.2, 8)),
            "Norm Gemm Resize Resize Copy Copy Attend Widen Subtract Gemm Norm GateUp Gemm",
        ),
    ],
)
def test_layers_of_other_forms(layer, expected):
    assert kinds(layer) == expected


class HalvedGates(DecoderLayer):
    """Attention whose gates something changes before, or behind, what is attended."""

    def attention_out(self, b: Build, a: AttentionSpec, x: Value, n: Value) -> Value:
        q, gates = heads(b, a, x)
        assert gates is not None
        if self.residual_multiplier == 1.0:
            gates = b.scale(gates, 0.5, "half")
            found = attend(b, a, q)
        else:
            found = attend(b, a, q)
            gates = b.scale(gates, 0.5, "half")
        return project(b, a, gated(b, a, found, gates))


@pytest.mark.parametrize(
    ("factor", "expected"),
    [(1.0, "Norm Gemm Copy Scale Attend Widen Gate"), (2.0, "Norm Gemm Copy Attend Scale Widen Gate")],
)
def test_gates_that_a_layer_changes_are_no_part_of_attention(factor, expected):
    mixer = replace(MIXER, output_gate=OutputGate.PER_ELEMENT)
    layer = HalvedGates(mixer, None, residual_multiplier=factor)
    assert kinds(layer).startswith(expected)
    (attend,) = (op for op in lowered(layer) if op.kind == "Attend")
    assert attend.arguments["output_gate"] == "kNoGate"


def test_a_router_reads_its_input_in_the_pass_that_makes_it():
    ops = lowered(replace(LAYER, feed_forward=EXPERTS, norms=Norms.PARALLEL))
    assert [op.kind for op in ops[:3]] == ["Norm", "Route", "Gemm"]


def test_ranks_meet_before_their_parts_are_added_up():
    whole = "Norm Gemm Attend Gemm Meet Reduce Norm GateUp Gemm Meet Reduce"
    assert kinds(LAYER, has_ranks=True) == whole
    *_, output, _, reduced = lowered(replace(LAYER, feed_forward=None), has_ranks=True)
    assert reduced.arguments["accumulate"] == 1
    assert reduced.arguments["out"] == 0
    assert output.arguments["out"] != 0
    around = kinds(replace(LAYER, norms=Norms.AROUND, feed_forward=None), has_ranks=True)
    assert around == "Norm Gemm Attend Gemm Meet Reduce Norm Add"


def test_factors_of_one_value_are_one():
    layer = FactoredLayer(MIXER, GatedSpec(80), residual_multiplier=0.25, part_factor=0.5)
    (add,) = (op for op in lowered(layer) if op.kind == "Add" and op.arguments["factor"] != 0.25)
    assert add.arguments["factor"] == 0.125


def test_a_gate_that_only_some_activations_read_is_computed_with_its_product():
    for activation in Activation:
        layer = FactoredLayer(MIXER, GatedSpec(80, activation), gate_factor=0.5)
        (up,) = (op for op in lowered(layer) if op.kind == "GateUp")
        assert up.arguments["factor"] == 0.5


class SparseLayer(DecoderLayer):
    """Gates as Gemma 3n has them, in a layer with a residual of one stream."""

    def dense_part(self, b: Build, spec: GatedSpec | UngatedSpec, rows: Value) -> Value:
        gu = gate_up(b, spec, rows)
        b.put(SparseGates(gu, gu, 0.5), gu.width)
        return down(b, spec, activated(b, spec, gu))


def test_sparse_gates_are_of_one_rank():
    sparse = SparseLayer(MIXER, GatedSpec(80))
    assert kinds(sparse) == "Norm Gemm Attend Gemm Norm Gemm SparseGates Activate Gemm"
    with pytest.raises(NoNativeOp, match="sparse gate of which ranks have shares"):
        lowered(sparse, has_ranks=True)


class Unknown(Op):
    """An op of no layer."""

    LACKS = "parts of another kind"


def test_an_op_that_the_library_lacks_is_named():
    table = Projections((composed(LAYER, NORM, HIDDEN).projections,))
    with pytest.raises(NoNativeOp, match="parts of another kind"):
        NativeProgram([LayerProgram((Unknown(),), (), ())], HIDDEN, table)
