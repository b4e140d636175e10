"""The arithmetic of pages and slabs."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from chorus.memory.pages.adapter_layout import AdapterLayout, AdapterPart
from chorus.memory.pages.layout import MODULES, ROW_ALIGNMENT_BYTES, PageLayout, SlabLayout

widths = st.integers(1, 300)
dims_of_a_model = st.fixed_dictionaries({name: st.tuples(widths, widths) for name in MODULES})
targets_of_an_adapter = st.sets(st.sampled_from(MODULES), min_size=1)
itemsizes = st.sampled_from([1, 2, 4])


@given(dims_of_a_model, targets_of_an_adapter, itemsizes)
def test_slab_rows_are_aligned_disjoint_and_inside(dims, targets, itemsize):
    slab = SlabLayout.build(dims, sorted(targets), itemsize)
    spans = []
    for index, name in enumerate(MODULES):
        starts = (slab.a_offset[index], slab.b_offset[index])
        if name not in targets:
            assert starts == (-1, -1)
            continue
        spans += [(start, start + width) for start, width in zip(starts, dims[name], strict=True)]
    assert len(spans) == 2 * len(targets)
    assert all(start * itemsize % ROW_ALIGNMENT_BYTES == 0 for start, _ in spans)
    assert spans == sorted(spans), "modules lie in module order, A before B"
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    assert spans[-1][1] <= slab.slab_elems
    assert slab.slab_elems * itemsize % ROW_ALIGNMENT_BYTES == 0, "the next slab would not be aligned"
    assert slab.slab_elems - sum(end - start for start, end in spans) < len(spans) * ROW_ALIGNMENT_BYTES


parts_of_an_adapter = st.lists(
    st.builds(
        AdapterPart,
        rank=st.integers(1, 70),
        scale=st.just(1.0),
        layers=st.sets(st.integers(0, 3), min_size=1).map(lambda layers: tuple(sorted(layers))),
        targets=targets_of_an_adapter.map(lambda names: tuple(sorted(names, key=MODULES.index))),
    ),
    min_size=1,
    max_size=4,
)


@given(dims_of_a_model, parts_of_an_adapter, itemsizes, st.integers(1, 5_000))
def test_slabs_lie_end_to_end_and_only_the_last_page_has_room(dims, parts, itemsize, page_elems):
    layout = AdapterLayout.build(parts, dims, 4, page_elems, itemsize)
    spans = []
    for part, place in zip(parts, layout.parts, strict=True):
        assert [layer for layer in range(4) if place.first_elem[layer] >= 0] == list(part.layers)
        for layer in part.layers:
            first = place.first_elem[layer]
            assert first * itemsize % ROW_ALIGNMENT_BYTES == 0
            spans.append((first, first + part.rank * place.slabs.slab_elems))
    spans.sort()
    assert spans[0][0] == 0
    assert all(end == start for (_, end), (start, _) in itertools.pairwise(spans))
    assert spans[-1][1] == layout.num_elems
    assert (layout.num_pages - 1) * page_elems < layout.num_elems <= layout.num_pages * page_elems


@given(dims_of_a_model, parts_of_an_adapter, itemsizes, st.integers(1, 5_000))
def test_the_layers_runs_cover_the_adapter_once(dims, parts, itemsize, page_elems):
    layout = AdapterLayout.build(parts, dims, 4, page_elems, itemsize)
    runs = sorted(run for layer in range(4) for run in layout.layer_ranges(layer))
    assert [begin for begin, _ in runs] == [0, *(end for _, end in runs[:-1])]
    assert runs[-1][1] == layout.num_elems


def test_numbers_of_a_known_model():
    """Llama-3.1-8B in bf16: a page of 16 tokens is exactly 2 MiB."""
    hidden, kv, ffn = 4096, 1024, 14336
    dims = {
        "q_proj": (hidden, hidden),
        "k_proj": (hidden, kv),
        "v_proj": (hidden, kv),
        "o_proj": (hidden, hidden),
        "gate_proj": (hidden, ffn),
        "up_proj": (hidden, ffn),
        "down_proj": (ffn, hidden),
    }
    layout = PageLayout(32, 8, 128, 16, 2)
    assert layout.page_bytes == 2 << 20
    assert layout.block_tokens == 16
    assert [layout.pages_for_tokens(n) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]
    slab = SlabLayout.build(dims, ["q_proj", "v_proj"], 2)
    assert slab.slab_elems == hidden + hidden + hidden + kv
    part = AdapterPart(16, 1.0, tuple(range(32)), MODULES)
    adapter = AdapterLayout.build([part], dims, 32, layout.page_elems, layout.itemsize)
    assert adapter.num_pages * layout.page_bytes == adapter.num_elems * 2 == 80 << 20, "not a byte is left over"
