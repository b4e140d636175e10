"""Tables of projections: those of models shaped like Llama, and of one with layers of two kinds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from chorus.memory.files.module_paths import ModulePaths
from chorus.memory.pages.layer_projections import (
    attention_projections,
    dense_projections,
    gated_projections,
    linear_projections,
)
from chorus.memory.pages.projections import Projections

#: Of tests/memory/conftest.py's model.
TINY = dense_projections(3, hidden=16, ffn=24, heads=2, kv_heads=1, head_dim=8)
TINY_PATHS = ModulePaths(TINY)

#: The projections of a Llama model, by id.
LLAMA = TINY.names

#: The slots of the matrices of such a layer, by group.
LAYER_MATRICES = ("qkv", "o", "gate_up", "down")


def llama_table(num_layers: int, dims: Mapping[str, tuple[int, int]]) -> Projections:
    """A table of Llama's projections with inputs and outputs of any size, by name; some may be missing."""
    layer = (
        replace(TINY[name], inputs=dims[name][0], outputs=dims[name][1], units=1) for name in LLAMA if name in dims
    )
    return Projections((tuple(layer),) * num_layers)


def hybrid_table(pattern: str = "LLAL", hidden: int = 16, ffn: int = 24) -> Projections:
    """A: a layer with full attention, L: one with linear attention."""
    mixers = {"A": attention_projections(hidden, 2, 1, 8), "L": linear_projections(hidden, 8, 16, 2, 4)}
    return Projections(tuple(mixers[kind] + gated_projections(hidden, ffn) for kind in pattern))
