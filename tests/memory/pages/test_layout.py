"""The arithmetic of pages and slabs."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from chorus.memory.pages.adapter_layout import AdapterLayout, AdapterPart
from chorus.memory.pages.arena import Arena
from chorus.memory.pages.layer_projections import dense_projections
from chorus.memory.pages.layout import ROW_ALIGNMENT_BYTES, KvShape, PageLayout, SlabLayout, page_groups
from chorus.memory.pages.states import StateShape

from ...tables import LLAMA, llama_table

widths = st.integers(1, 300)
dims_of_a_model = st.fixed_dictionaries({name: st.tuples(widths, widths) for name in LLAMA})
targets_of_an_adapter = st.sets(st.sampled_from(LLAMA), min_size=1)
itemsizes = st.sampled_from([1, 2, 4])

PRODUCTS = ("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",)


def test_values_that_are_parts_of_keys_take_no_room():
    layout = PageLayout(3, 1, 40, 8, 4, value_dim=32)
    assert layout.page_bytes == 8 * 3 * 40 * 4
    arena = Arena(layout, 2, torch.float32, "cpu")
    for layer, (k, v) in enumerate(arena.kv_layers):
        assert (k.shape, v.shape) == ((2, 8, 1, 40), (2, 8, 1, 32))
        k.fill_(layer + 1)
        assert torch.equal(v, k[..., :32])
    assert arena.pages.sum() == 2 * 8 * 40 * (1 + 2 + 3)


@given(dims_of_a_model, targets_of_an_adapter, itemsizes)
def test_slab_rows_are_aligned_disjoint_and_inside(dims, targets, itemsize):
    slab = SlabLayout.build(llama_table(1, dims), sorted(targets), itemsize)
    spans = []
    for product in PRODUCTS:
        for offsets, side in ((slab.a_offset, 0), (slab.b_offset, 1)):
            starts = {name: offsets[LLAMA.index(name)] for name in product}
            assert all((start >= 0) == (name in targets) for name, start in starts.items())
            spans += [(start, start + dims[name][side]) for name, start in starts.items() if start >= 0]
    assert len(spans) == 2 * len(targets)
    assert all(start * itemsize % ROW_ALIGNMENT_BYTES == 0 for start, _ in spans)
    assert spans == sorted(spans), "product after product, its rows of A before those of Bᵀ"
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
        targets=targets_of_an_adapter.map(lambda names: tuple(sorted(names, key=LLAMA.index))),
    ),
    min_size=1,
    max_size=4,
)


@given(dims_of_a_model, parts_of_an_adapter, itemsizes, st.integers(1, 5_000))
def test_slabs_lie_end_to_end_and_only_the_last_page_has_room(dims, parts, itemsize, page_elems):
    layout = AdapterLayout.build(parts, llama_table(4, dims), page_elems, itemsize)
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
    layout = AdapterLayout.build(parts, llama_table(4, dims), page_elems, itemsize)
    runs = sorted(run for layer in range(4) for run in layout.layer_ranges(layer))
    assert [begin for begin, _ in runs] == [0, *(end for _, end in runs[:-1])]
    assert runs[-1][1] == layout.num_elems


def test_numbers_of_a_known_model():
    """Llama-3.1-8B in bf16: a page of 16 tokens is exactly 2 MiB."""
    hidden, kv, ffn = 4096, 1024, 14336
    table = dense_projections(32, hidden, ffn, heads=32, kv_heads=8, head_dim=128)
    layout = PageLayout(32, 8, 128, 16, 2)
    assert layout.page_bytes == 2 << 20
    assert layout.block_tokens == 16
    assert [layout.pages_for_tokens(n) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]
    slab = SlabLayout.build(table, ["q_proj", "v_proj"], 2)
    assert slab.slab_elems == hidden + hidden + hidden + kv
    part = AdapterPart(16, 1.0, tuple(range(32)), LLAMA)
    adapter = AdapterLayout.build([part], table, layout.page_elems, layout.itemsize)
    assert adapter.num_pages * layout.page_bytes == adapter.num_elems * 2 == 80 << 20, "not a byte is left over"


def test_the_rows_that_a_product_needs_are_one_run():
    """Llama-3.1-8B: a product's rows of A, or of Bᵀ, begin where its last one ended."""
    table = dense_projections(32, 4096, 14336, heads=32, kv_heads=8, head_dim=128)
    slab = SlabLayout.build(table, LLAMA, 2)
    for product in PRODUCTS:
        for offsets, side in ((slab.a_offset, 0), (slab.b_offset, 1)):
            ends = [offsets[table.id(name)] + table[name].dims[side] for name in product]
            assert [offsets[table.id(name)] for name in product[1:]] == ends[:-1]


layers_of_shapes = st.lists(
    st.sampled_from([(None, KvShape(2, 16)), (7, KvShape(4, 8)), (7, KvShape(3, 8)), (None, KvShape(1, 8))]),
    min_size=1,
    max_size=30,
)
windows_of_layers = st.lists(st.sampled_from([None, None, 7, 100]), min_size=1, max_size=62)


class TestPageGroups:
    @given(windows_of_layers)
    def test_every_layer_is_in_one_group_with_its_window(self, windows):
        groups = page_groups(windows)
        assert sorted(layer for group in groups for layer in group.layers) == list(range(len(windows)))
        assert all(windows[layer] == group.window for group in groups for layer in group.layers)

    @given(windows_of_layers)
    def test_layers_without_a_window_fill_their_pages(self, windows):
        groups, size = page_groups(windows), len(page_groups(windows)[0].layers)
        assert all(len(group.layers) == size for group in groups if group.window is None)
        assert max(len(group.layers) for group in groups) == size
        assert 8 * size * len(groups) <= 9 * len(windows)

    def test_known_models(self):
        """Gemma 3 of 1B, 4B and 27B, OLMo 3 of 7B, and a model without windows."""
        for interval, layers, size, count in (
            (6, 26, 4, 7),
            (6, 34, 5, 7),
            (6, 62, 5, 13),
            (4, 32, 8, 4),
            (1, 32, 32, 1),
        ):
            groups = page_groups([None if layer % interval == interval - 1 else 1024 for layer in range(layers)])
            assert (len(groups[0].layers), len(groups)) == (size, count)

    @given(layers_of_shapes)
    def test_layers_of_several_shapes_fit_in_equal_pages(self, layers):
        windows, shapes = [window for window, _ in layers], [shape for _, shape in layers]
        layout = PageLayout(len(layers), shapes[0].heads, shapes[0].head_dim, 4, 2, tuple(windows), tuple(shapes))
        assert sorted(layer for group in layout.groups for layer in group.layers) == list(range(len(layers)))
        room = layout.page_bytes // (2 * 2 * 4)
        used = [sum(shapes[layer].elems for layer in group.layers) for group in layout.groups]
        assert max(used) == room
        for group in layout.groups:
            kinds = {(windows[layer], shapes[layer]) for layer in group.layers}
            assert kinds == {(group.window, shapes[group.layers[0]])}
        arena = Arena(layout, 1 + len(layout.groups), torch.float16, "cpu")
        for layer, (k, v) in enumerate(arena.kv_layers):
            assert k.shape == v.shape == (arena.num_pages, 4, shapes[layer].heads, shapes[layer].head_dim)
            page = 1 + layout.group_of_layer[layer]
            k[page] += 1
            v[page] += 1
        assert arena.pages.max() == 1, "an element of two layers"
        assert arena.pages.sum(1).tolist() == [0, *(2 * 4 * each for each in used)], "a page's KV reaches beyond it"

    def test_known_models_of_several_shapes(self):
        """Gemma 4 of 31B, 26B, and the layers with KV of their own of E2B."""
        for interval, layers, local, whole, window, sizes in (
            (6, 60, KvShape(16, 256), KvShape(4, 512), 1024, [10] + [5] * 10),
            (6, 30, KvShape(8, 256), KvShape(2, 512), 1024, [5] + [2] * 12 + [1]),
            (5, 15, KvShape(1, 256), KvShape(1, 512), 512, [3, 6, 6]),
        ):
            is_whole = [layer % interval == interval - 1 for layer in range(layers)]
            shapes = tuple(whole if each else local for each in is_whole)
            windows = tuple(None if each else window for each in is_whole)
            layout = PageLayout(layers, local.heads, local.head_dim, 16, 2, windows, shapes)
            assert [len(group.layers) for group in layout.groups] == sizes
            assert layout.num_growing == 1
            assert layout.page_bytes == 16 * 2 * 2 * sizes[0] * whole.elems
            assert layout.of_ranks(2).page_bytes == 2 * layout.page_bytes

    @given(windows_of_layers, st.integers(1, 16), st.integers(0, 400), st.integers(1, 40))
    def test_pages_hold_what_a_request_sees(self, windows, block, tokens, chunk):
        """A request with so many tokens, of which it computes the last ones, never has more pages than are said."""
        layout = PageLayout(len(windows), 1, 8, block, 4, tuple(windows))
        chunk = min(chunk, tokens)
        seen = 0
        for window in layout.group_windows:
            first = 0 if window is None else max(0, tokens - chunk - window + 1)
            seen += len({position // block for position in range(first, tokens)})
        assert seen <= layout.pages_for_tokens(tokens, chunk)
        assert layout.pages_for_each([tokens, 1]) == [layout.pages_for_tokens(tokens), layout.pages_for_tokens(1)]

    @given(windows_of_layers, st.integers(1, 16), st.integers(0, 300), st.integers(1, 9))
    def test_the_most_tokens_in_so_many_pages(self, windows, block, pages, chunk):
        layout = PageLayout(len(windows), 1, 8, block, 4, tuple(windows))
        fit = layout.tokens_in_pages(pages, chunk, most=500)
        assert layout.pages_for_tokens(fit, chunk) <= pages or not fit
        assert fit >= 500 or layout.pages_for_tokens(fit + 1, chunk) > pages

    @given(st.integers(1, 60), st.integers(1, 16), st.integers(0, 200))
    def test_a_page_leaves_when_its_last_token_is_behind_the_window(self, window, block, computed):
        layout = PageLayout(1, 1, 8, block, 4, (window,))

        def left(position):
            return sum(last < position - window + 1 for last in range(block - 1, 600, block))

        leaving = layout.first_leaving(computed)
        assert left(leaving) > left(computed)
        assert all(left(position) == left(computed) for position in range(computed, leaving))

    def test_gemma_3_serves_four_times_the_requests(self):
        """64 requests of 8k tokens, one of them with a chunk of its prompt, to the 1B model take fewer bytes than 16
        with full attention.
        """
        windows = tuple(None if layer % 6 == 5 else 512 for layer in range(26))
        layout, full = PageLayout(26, 1, 256, 16, 2, windows), PageLayout(26, 1, 256, 16, 2)
        pages = 63 * layout.pages_for_tokens(8192) + layout.pages_for_tokens(8192, chunk=1024)
        assert pages * layout.page_bytes <= 16 * full.pages_for_tokens(8192) * full.page_bytes

    @given(st.integers(1, 9), st.integers(1, 40), st.integers(1, 9), st.integers(1, 40), st.integers(2, 8))
    def test_a_state_takes_as_many_pages_on_all_ranks_together(self, layers, conv, heads, head, size):
        one = PageLayout(1, 1, 8, 16, 2, state=StateShape(layers, conv, heads, head))
        together = one.of_ranks(size)
        assert (together.page_bytes, together.kv_heads) == (size * one.page_bytes, size)
        assert together.state_pages == one.state_pages
        assert together.pages_for_tokens(100, 7) == one.pages_for_tokens(100, 7)

    def test_no_request_may_have_a_state_in_pages_that_are_too_small(self):
        shape = StateShape(num_layers=2, conv_elems=10, num_heads=3, head_elems=300)
        with pytest.raises(ValueError, match="a page has 1024 bytes, and a part of a layer's state takes 1200"):
            PageLayout(1, 1, 8, 16, 4, state=shape)


class TestStatesAlone:
    """No layer has KV: tokens take no page."""

    state = StateShape(num_layers=6, conv_elems=90, num_heads=8, head_elems=64, draft_elems=98, most_drafts=4)

    def layout(self, **more):
        return PageLayout(0, 0, 0, 16, 2, state=self.state, state_page_bytes=self.state.page_bytes, **more)

    def test_a_page_has_room_for_a_layers_heads(self):
        layout = self.layout()
        assert (layout.groups, layout.page_bytes, layout.page_elems) == ((), 4 * 8 * 64, 8 * 64 * 2)
        assert layout.states is not None
        assert (layout.states.heads_per_page, layout.states.convs_per_page) == (8, 5)
        assert layout.state_pages == 2 + 6 + 5
        assert Arena(layout, 3, torch.bfloat16, "cpu").kv_layers == []

    def test_requests_have_pages_for_their_states_alone(self):
        layout = self.layout()
        assert [layout.pages_for_tokens(count) for count in (1, 16, 17, 1 << 20)] == [2 * 13] * 4
        assert layout.pages_for_each([1, 5000]) == [26, 26]
        assert (layout.table_width(5000), layout.pages_per_block, layout.has_windows) == (0, 0, False)
        assert layout.tokens_in_pages(26, most=1000) == 1008
        assert layout.tokens_in_pages(25, most=1000) == 0

    def test_a_page_stands_for_the_tokens_between_checkpoints(self):
        assert self.layout().pages_per_token(1024) == 13 / 1024
        assert self.layout().pages_per_token(0) == 13 / 16
        assert PageLayout(2, 1, 8, 16, 2).pages_per_token(1024) == 1 / 16

    def test_ranks_have_shares_of_it(self):
        whole = self.layout().of_ranks(2)
        assert whole.page_bytes == 2 * self.layout().page_bytes
        assert whole.state_pages == self.layout().state_pages
