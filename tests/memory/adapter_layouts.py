"""Adapters of any make, small."""

from __future__ import annotations

from hypothesis import strategies as st

from chorus.memory.pages.adapter_layout import AdapterLayout, AdapterPart
from chorus.memory.pages.layout import MODULES

NUM_LAYERS = 5

_DIMS = {"q_proj": (12, 8), "k_proj": (12, 4), "v_proj": (12, 4), "o_proj": (8, 12),
         "gate_proj": (12, 20), "up_proj": (12, 20), "down_proj": (20, 12)}  # fmt: skip

_parts = st.lists(
    st.builds(
        AdapterPart,
        rank=st.integers(1, 4),
        scale=st.just(1.0),
        layers=st.sets(st.integers(0, NUM_LAYERS - 1), min_size=1).map(lambda layers: tuple(sorted(layers))),
        targets=st.sets(st.sampled_from(MODULES), min_size=1, max_size=3).map(
            lambda names: tuple(sorted(names, key=MODULES.index))
        ),
    ),
    min_size=1,
    max_size=3,
)


def adapter_layouts(page_elems: int, itemsize: int = 4) -> st.SearchStrategy[AdapterLayout]:
    """Several parts, layer patterns, and rows that go on in the next page."""
    return _parts.map(lambda parts: AdapterLayout.build(parts, _DIMS, NUM_LAYERS, page_elems, itemsize))
