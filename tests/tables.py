"""Tables of projections: those of models shaped like Llama, and of one with layers of two kinds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from chorus.core.model.compose.composed import composed
from chorus.core.model.compose.decoder_layer import DecoderLayer
from chorus.core.model.specs.norms import NormSpec
from chorus.core.model.specs.recurrent import GatedDeltaSpec, RecurrentSpec
from chorus.memory.files.module_paths import ModulePaths
from chorus.memory.pages.layer_projections import attention_projections, dense_projections, gated_projections
from chorus.memory.pages.projections import Projection, Projections

#: Of tests/memory/conftest.py's model.
TINY = dense_projections(3, hidden=16, ffn=24, heads=2, kv_heads=1, head_dim=8)
TINY_PATHS = ModulePaths(TINY)

#: Linear attention of 2 heads of keys and 4 of values.
DELTA = GatedDeltaSpec(2, 4, 4, 4, 1e-6)

#: The projections of a Llama model, by id.
LLAMA = TINY.names

#: The products of such a layer.
LAYER_MATRICES = ("qkv", "o", "gate_up", "down")


def llama_table(num_layers: int, dims: Mapping[str, tuple[int, int]]) -> Projections:
    """A table of Llama's projections with inputs and outputs of any size, by name; some may be missing."""
    layer = (
        replace(TINY[name], inputs=dims[name][0], outputs=dims[name][1], units=1) for name in LLAMA if name in dims
    )
    return Projections((tuple(layer),) * num_layers)


def mixer_projections(mixer: RecurrentSpec, hidden: int) -> tuple[Projection, ...]:
    """The projections of a layer that is a recurrent mixer alone."""
    return composed(DecoderLayer(mixer, None), NormSpec(1e-6), hidden).projections


def hybrid_table(pattern: str = "LLAL", hidden: int = 16, ffn: int = 24) -> Projections:
    """A: a layer with full attention, L: one with linear attention."""
    mixers = {"A": attention_projections(hidden, 2, 1, 8), "L": mixer_projections(DELTA, hidden)}
    return Projections(tuple(mixers[kind] + gated_projections(hidden, ffn) for kind in pattern))
