"""Layers with a dynamic tanh in place of each norm."""

from __future__ import annotations

from dataclasses import dataclass

from chorus.core.model.compose.build import Build, Proj, Value
from chorus.core.model.compose.decoder_layer import DecoderLayer
from chorus.core.model.program.ops.residual import Replace
from chorus.core.model.weights.slot import SlotTensor

from .op import DynamicTanh

#: Where a checkpoint's layers have them.
_PATHS = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}


@dataclass(frozen=True, kw_only=True)
class TanhLayer(DecoderLayer):
    """Llama's layer, with a dynamic tanh of what attention and the feed-forward part read.

    What attention reads has gates, too: `n · sigmoid(up(down(n)))`.
    """

    gate_rank: int
    """Width between the two matrices of gates; 0: there are none."""

    def normed(self, b: Build, name: str, x: Value) -> Value:
        """See `DecoderLayer.normed`."""
        n = _tanh(b, name, _PATHS[name], x)
        if not self.gate_rank or name != "attention_norm":
            return n
        # products of names of our own, which adapters may change
        low = b.linear("tanh_gates_down", n, "l", Proj("input_layernorm.gates_down", self.gate_rank))
        return b.gate(n, b.linear("tanh_gates_up", low, "g", Proj("input_layernorm.gates_up", b.hidden)))

    def finish(self, b: Build) -> None:
        """See `LayerSpec.finish`: in place of the last norm."""
        b.put(Replace(b.x, _tanh(b, "last", "norm", b.x)), b.hidden)


def _tanh(b: Build, name: str, path: str, x: Value) -> Value:
    """A dynamic tanh of x, with weights of its own. path: of its module."""
    shapes = {"alpha": (1,), "weight": (b.hidden,), "bias": (b.hidden,)}
    slots = (b.weight(f"{name}_{end}", SlotTensor(f"{path}.{end}", shape)) for end, shape in shapes.items())
    return b.put(DynamicTanh(x, "n", *slots), b.hidden)
