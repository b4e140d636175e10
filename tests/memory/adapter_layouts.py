"""Adapters of any make, small."""

from __future__ import annotations

from hypothesis import strategies as st

from chorus.memory.pages.adapter_layout import AdapterLayout, AdapterPart
from chorus.memory.pages.layer_projections import dense_projections

from ..tables import LLAMA

NUM_LAYERS = 5

_TABLE = dense_projections(NUM_LAYERS, hidden=12, ffn=20, heads=2, kv_heads=1, head_dim=4)

_parts = st.lists(
    st.builds(
        AdapterPart,
        rank=st.integers(1, 4),
        scale=st.just(1.0),
        layers=st.sets(st.integers(0, NUM_LAYERS - 1), min_size=1).map(lambda layers: tuple(sorted(layers))),
        targets=st.sets(st.sampled_from(LLAMA), min_size=1, max_size=3).map(
            lambda names: tuple(sorted(names, key=LLAMA.index))
        ),
    ),
    min_size=1,
    max_size=3,
)


def adapter_layouts(page_elems: int, itemsize: int = 4) -> st.SearchStrategy[AdapterLayout]:
    """Several parts, layer patterns, and rows that go on in the next page."""
    return _parts.map(lambda parts: AdapterLayout.build(parts, _TABLE, page_elems, itemsize))
