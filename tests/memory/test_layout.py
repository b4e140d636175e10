"""The arithmetic of pages and slabs."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from chorus.memory.layout import MODULES, ROW_ALIGNMENT_BYTES, PageLayout, SlabLayout

widths = st.integers(1, 300)
dims_of_a_model = st.fixed_dictionaries({name: st.tuples(widths, widths) for name in MODULES})
targets_of_an_adapter = st.sets(st.sampled_from(MODULES), min_size=1)
itemsizes = st.sampled_from([1, 2, 4])


@given(dims_of_a_model, targets_of_an_adapter, itemsizes, st.integers(1, 20_000))
def test_slab_rows_are_aligned_disjoint_and_inside(dims, targets, itemsize, page_elems):
    slab = SlabLayout.build(dims, sorted(targets), page_elems, itemsize, check=False)
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


@given(dims_of_a_model, targets_of_an_adapter, itemsizes, st.integers(1, 20_000), st.integers(0, 500))
def test_no_slab_straddles_a_page(dims, targets, itemsize, page_elems, num_slabs):
    slab = SlabLayout.build(dims, sorted(targets), page_elems, itemsize, check=False)
    assume(slab.slab_elems <= page_elems)
    assert slab.slabs_per_page >= 1
    assert slab.slabs_per_page * slab.slab_elems <= page_elems
    assert (slab.slabs_per_page + 1) * slab.slab_elems > page_elems
    pages = slab.pages_for(num_slabs)
    assert (pages - 1) * slab.slabs_per_page < max(num_slabs, 1) <= max(pages, 1) * slab.slabs_per_page


@given(dims_of_a_model, itemsizes)
def test_slab_that_no_page_holds_is_refused(dims, itemsize):
    elems = SlabLayout.build(dims, MODULES, 1, itemsize, check=False).slab_elems
    assert SlabLayout.build(dims, MODULES, elems, itemsize).slabs_per_page == 1
    with pytest.raises(ValueError, match=f"one rank-row takes {elems * itemsize} bytes.*raise block_tokens"):
        SlabLayout.build(dims, MODULES, elems - 1, itemsize)


@given(
    dims_of_a_model,
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 16),
    st.integers(1, 32),
    itemsizes,
)
def test_fitting_page_is_the_smallest_doubling_that_holds_a_slab(dims, layers, kv_heads, half_dim, block, itemsize):
    layout = PageLayout.fitting(layers, kv_heads, 2 * half_dim, block, itemsize, dims)
    slab_elems = SlabLayout.build(dims, MODULES, 1, itemsize, check=False).slab_elems

    def holds(candidate: PageLayout) -> bool:
        return candidate.page_elems >= slab_elems and candidate.page_bytes % ROW_ALIGNMENT_BYTES == 0

    assert holds(layout)
    doublings = layout.block_tokens // block
    assert layout.block_tokens == block * doublings
    assert doublings & (doublings - 1) == 0
    if doublings > 1:
        assert not holds(PageLayout(layers, kv_heads, 2 * half_dim, layout.block_tokens // 2, itemsize))


def test_shallow_model_gets_longer_pages():
    """One layer of 8 KV elements a token against a slab of thousands."""
    dims = dict.fromkeys(MODULES, (256, 256))
    layout = PageLayout.fitting(1, 1, 8, 16, 4, dims)
    assert layout.block_tokens == 256
    assert SlabLayout.build(dims, MODULES, layout.page_elems, 4).slabs_per_page == 1


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
    layout = PageLayout.fitting(32, 8, 128, 16, 2, dims)
    assert layout.page_bytes == 2 << 20
    assert layout.block_tokens == 16
    assert [layout.pages_for_tokens(n) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]
    slab = SlabLayout.build(dims, ["q_proj", "v_proj"], layout.page_elems, 2)
    assert slab.slab_elems == hidden + hidden + hidden + kv
    assert slab.slabs_per_page == 78
    assert slab.pages_for(16 * 32) == 7
