"""Neighbours that one kernel computes become one op, over layers as well."""

from __future__ import annotations

from chorus.core.model.program.ops.linear import Gemm
from chorus.core.model.program.ops.norm import Norm
from chorus.core.model.program.ops.residual import Add
from chorus.core.model.program.ops.rows import Activate, Scale
from chorus.core.model.program.ops.spans import Begin
from chorus.core.model.program.peepholes import fused, fused_layers
from chorus.core.model.specs.feed_forward import Activation
from chorus.core.model.specs.norms import NormSpec

NORM = NormSpec(1e-6)
GATE_UP = Gemm("n", "gu", "gate_up")


def norm(added: str | None = None) -> Norm:
    return Norm("x", "n", "mlp_norm", NORM, added)


def test_a_norm_adds_what_is_added_before_it():
    assert fused([Add("x", "y"), norm()]) == [norm("y")]
    assert fused([Add("x", "y"), Begin("mlp"), norm()]) == [Begin("mlp"), norm("y")]
    other = [Add("o", "y"), norm()]
    assert fused(other) == other
    apart = [Add("x", "y"), Scale("x", "x", 2.0), norm()]
    assert fused(apart) == apart


def test_silu_is_computed_with_the_product_that_nothing_else_reads():
    silu, gelu = (Activate("gu", "f", each) for each in (Activation.SILU, Activation.GELU_TANH))
    assert fused([GATE_UP, silu]) == [Gemm("n", "f", "gate_up", silu=True)]
    assert fused([GATE_UP, gelu]) == [GATE_UP, gelu]
    scaled = [GATE_UP, Scale("gu", "gu", 0.5), silu]
    assert fused(scaled) == scaled
    read_again = [GATE_UP, silu, Add("x", "gu")]
    assert fused(read_again) == read_again
    assert fused(again := [GATE_UP, silu], {"gu"}) == again
    both = [GATE_UP, silu, GATE_UP, silu]
    assert fused(both) == [Gemm("n", "f", "gate_up", silu=True)] * 2


def test_what_a_layer_adds_last_is_added_by_the_next_ones_norm():
    layer = [norm(), GATE_UP, Add("x", "y")]
    layers, pending = fused_layers([layer, layer, [Scale("x", "x", 2.0)]])
    assert layers == [[norm(), GATE_UP], [norm("y"), GATE_UP], [Add("x", "y"), Scale("x", "x", 2.0)]]
    assert pending is None
    assert fused_layers([layer]) == ([[norm(), GATE_UP]], Add("x", "y"))
