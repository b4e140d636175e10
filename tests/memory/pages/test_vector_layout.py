"""Places of vectors in an adapter: behind its rank-rows, layer by layer, and no two in one place."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from chorus.memory.pages.adapter_layout import AdapterLayout, AdapterPart, VectorTarget, uniform_parts, vector_elems

from ...tables import TINY, hybrid_table

places = st.sets(st.tuples(st.integers(0, 2), st.sampled_from(TINY.names)))


@given(
    places=places, rank=st.integers(1, 9), page_elems=st.sampled_from([16, 64, 1024]), itemsize=st.sampled_from([2, 4])
)
def test_every_element_has_one_use(places, rank, page_elems, itemsize):
    parts = uniform_parts(TINY, rank, targets=("q_proj", "down_proj"))
    vectors = [VectorTarget(*place) for place in sorted(places, key=lambda it: (it[0], TINY.id(it[1])))]
    layout = AdapterLayout.build(parts, TINY, page_elems, itemsize, vectors=vectors)
    plain = AdapterLayout.build(parts, TINY, page_elems, itemsize)
    assert layout.parts == plain.parts
    more = 2 * sum(vector_elems(TINY[name].outputs, itemsize) for _, name in places)
    assert layout.num_elems == plain.num_elems + more
    assert layout.num_pages == -(-layout.num_elems // page_elems)
    used = sorted(run for layer in range(3) for run in layout.layer_ranges(layer))
    assert [begin for begin, _ in used] == [0, *(end for _, end in used[:-1])], "gaps or overlaps"
    assert used[-1][1] == layout.num_elems
    if not places:
        assert layout == plain and layout.vectors is None
        return
    assert layout.vectors is not None
    starts = [first for own in layout.vectors.first_elem for first in own if first >= 0]
    assert len(starts) == len(places) and starts == sorted(starts)
    assert all(first * itemsize % 16 == 0 for first in starts)
    for layer, (begin, end) in enumerate(layout.vectors.layer_elems):
        own = [first for first in layout.vectors.first_elem[layer] if first >= 0]
        assert all(begin <= first < end for first in own) and bool(own) == (begin < end)


@given(first=st.integers(0, 2), last=st.integers(1, 3))
def test_ranges_of_several_layers_hold_each_of_them(first, last):
    vectors = [VectorTarget(layer, "o_proj") for layer in (0, 2)]
    layout = AdapterLayout.build((AdapterPart(2, 1.0, (1,), ("q_proj",)),), TINY, 64, 4, vectors=vectors)
    runs = layout.ranges(range(first, last))
    for layer in range(first, last):
        for begin, end in layout.layer_ranges(layer):
            assert any(a <= begin and end <= b for a, b in runs)


def test_layers_with_other_projections():
    table = hybrid_table()
    vectors = [VectorTarget(layer, name) for layer in range(table.num_layers) for name in table.names_in(layer)]
    layout = AdapterLayout.build((), table, 1024, 2, vectors=vectors)
    assert layout.vectors is not None
    for layer, own in enumerate(layout.vectors.first_elem):
        assert {table.names[module] for module, at in enumerate(own) if at >= 0} == set(table.names_in(layer))
