"""Feed-forward parts with a gate or without: functions with which layers write them.

Tests: tests/core/model/program/test_golden.py, tests/core/model/program/test_builder.py
"""

from __future__ import annotations

from ..program.ops.rows import TakeLayerEmbedding
from ..specs.feed_forward import GatedSpec, UngatedActivation, UngatedSpec
from ..specs.layers import LayerSpec
from ..weights.slot import Keep, SlotTensor
from .build import Build, Proj, Value

#: Parameters of xIELU, each one number.
_XIELU = ("alpha_p", "alpha_n", "beta", "eps")


def dense(b: Build, spec: GatedSpec | UngatedSpec, rows: Value) -> Value:
    """What the part adds."""
    return down(b, spec, activated(b, spec, gate_up(b, spec, rows)))


def gate_up(b: Build, spec: GatedSpec | UngatedSpec, rows: Value, *, is_alone: bool = True) -> Value:
    """Gate and up side by side, or up alone. is_alone: nothing is added to them."""
    size, bias, form = spec.size, spec.bias, spec.form
    gate = (Proj("mlp.gate_proj", size, size, bias, form=form),) * isinstance(spec, GatedSpec)
    up = Proj("mlp.up_proj", size, size, bias, form=form, scales="mlp.down_proj" if gate and is_alone else "")
    return b.linear("gate_up", rows, "gu", *gate, up)


def activated(b: Build, spec: GatedSpec | UngatedSpec, gu: Value) -> Value:
    """What `down` reads, of what `gate_up` gave."""
    parameters = None
    if spec.activation is UngatedActivation.XIELU:
        own = (SlotTensor(f"mlp.act_fn.{each}", (1,)) for each in _XIELU)
        parameters = b.weight("xielu", *own, keep=Keep.FLOAT32)
    return b.activate(gu, spec.activation, "f", parameters)


def down(b: Build, spec: GatedSpec | UngatedSpec, f: Value) -> Value:
    """What the part adds, of what `activated` gave."""
    own = Proj("mlp.down_proj", b.hidden, spec.size, spec.bias, form=spec.form)
    return b.reduce(b.linear("down", f, "y", own, rows=True))


def per_layer_part(b: Build, layer: LayerSpec, size: int, rows: Value) -> Value:
    """What a layer's embedding of this size adds, by gates of these rows: see `PerLayerEmbeddingSpec`."""
    assert layer.dense is not None, "a layer with an embedding has a dense part"
    gate = b.linear("input_gate", rows, "g", Proj("per_layer_input_gate", size), merges=False)
    g = b.concat("g", gate, b.put(TakeLayerEmbedding(), size))
    f = b.activate(g, layer.dense.activation)
    y = b.linear("input_projection", f, "y", Proj("per_layer_projection", b.hidden), merges=False)
    return b.scale(b.norm("input_norm", y, y), layer.residual_multiplier)
