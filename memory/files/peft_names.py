"""Names that PEFT gives an adapter's tensors, by the projections that they are of, and their shapes.

Tests: tests/memory/files/test_adapter_format.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from ..pages.adapter_layout import VectorTarget
from ..pages.projections import Projection, Projections, Role
from .vectors import vector_names as names_of_vectors

PREFIX = "base_model.model."
IN_LAYERS = "base_model.model.model.layers."
"""Prefixes of names of layers' tensors."""

LAYER = re.compile(r"\.layers\.([0-9]{1,6})\.")
"""Where a name has the number of its layer."""

#: The base model's own name for its layers' parent. A model around it (one that sees, say) may have changed it, and a
#: model without a head (`AutoModel`) has none.
STEM = "model"
HEAD = "lm_head"
EMBEDDINGS = "embed_tokens"
LAYERS = "layers"
#: Other names of the output projection (Tinker's), among the modules of the model's parent and beside it.
UNEMBED = "unembed_tokens"


def tensor_names(layer: int, projection: Projection) -> tuple[str, str]:
    """Of a target's A and B."""
    key = _module_key(layer, projection)
    if projection.product == Role.EMBEDDING:
        return f"{key}.lora_embedding_A", f"{key}.lora_embedding_B"
    return f"{key}.lora_A.weight", f"{key}.lora_B.weight"


def is_of_a(name: str) -> bool:
    """True if a tensor of a target is its A, False if it is its B."""
    return name.endswith((".lora_A.weight", ".lora_embedding_A"))


def tensor_shapes(
    layer: int, projection: Projection, rank: int
) -> tuple[tuple[str, tuple[int, int]], tuple[str, tuple[int, int]]]:
    """Name and shape of a target's A `[rank, in]` and B `[out, rank]`; with all experts' ranks if it is of them all."""
    a, b = tensor_names(layer, projection)
    shape_a, shape_b = matrix_shapes(projection, rank)
    return (a, shape_a), (b, shape_b)


def matrix_shapes(projection: Projection, rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Shape of a target's A and of its B; see `tensor_shapes`."""
    rank *= max(1, projection.experts)
    return (rank, projection.inputs), (projection.outputs, rank)


def vector_names(target: VectorTarget, projections: Projections) -> Iterator[str]:
    """Of a module's magnitudes, bias, bias of B and scales, those that there are."""
    names = filter(None, (target.module, projections.scales(target.module)))
    keys = {(target.layer, name): _module_key(target.layer, projections[name]) for name in names}
    return names_of_vectors(target, keys, projections)


def _module_key(layer: int, projection: Projection) -> str:
    """The prefix of the names of a module's tensors."""
    path = projection.path if projection.is_of_model else f"{STEM}.layers.{layer}.{projection.path}"
    return f"{PREFIX}{path}"


def module_keys(projections: Projections) -> dict[tuple[int, str], str]:
    """`_module_key` of every module of every layer, in the order of layers and projections."""
    return {
        (layer, name): _module_key(layer, projections[name])
        for layer in range(projections.num_layers)
        for name in projections.names_in(layer)
    }
