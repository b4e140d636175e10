"""A page's KV is exactly the page's bytes, page outermost; a layer's cache is a strided view of it."""

from __future__ import annotations

import pytest
import torch

from chorus.memory.pages.arena import Arena
from chorus.memory.pages.layout import PageLayout

LAYOUT = PageLayout(num_layers=3, kv_heads=2, head_dim=8, block_tokens=4, itemsize=4)


@pytest.fixture
def arena():
    return Arena(LAYOUT, 5, torch.float32, "cpu")


def test_starts_empty(arena):
    assert arena.pages.shape == (5, LAYOUT.page_elems)
    assert not arena.pages.any()


def test_layer_views_are_strided_page_outermost(arena):
    for layer in range(LAYOUT.num_layers):
        for side, cache in enumerate(arena.kv_layers[layer]):
            assert cache.shape == (5, 4, 2, 8)
            assert cache.stride() == (LAYOUT.page_elems, 16, 8, 1)
            assert cache.untyped_storage().data_ptr() == arena.pages.untyped_storage().data_ptr()
            assert cache.storage_offset() == (2 * layer + side) * 4 * 2 * 8


def test_kv_of_a_page_covers_exactly_its_bytes(arena):
    for layer in range(LAYOUT.num_layers):
        for cache in arena.kv_layers[layer]:
            cache[2] += 1
    assert torch.equal(arena.pages[2], torch.ones(LAYOUT.page_elems)), "an element written twice or never"
    arena.pages[2] = 0
    assert not arena.pages.any(), "a page's KV reaches into its neighbours"


def test_large_arena_has_the_same_shape_and_is_zero():
    """Beyond the size from which host memory is mapped otherwise."""
    arena = Arena(LAYOUT, (6 << 20) // LAYOUT.page_bytes, torch.float32, "cpu")
    assert arena.pages.is_contiguous()
    assert not arena.pages.any()
    arena.kv_layers[2][1][-1] = 1
    assert arena.pages.sum() == arena.pages[-1].sum() == 4 * 2 * 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kv_in_float8_has_a_byte_an_element_in_the_same_pages(dtype):
    layout = PageLayout(3, kv_heads=2, head_dim=8, block_tokens=4, itemsize=dtype.itemsize, float8_kv=True)
    assert (layout.kv_itemsize, layout.page_bytes) == (1, 3 * 2 * 4 * 2 * 8)
    assert layout.page_elems == layout.page_bytes // dtype.itemsize
    arena = Arena(layout, 5, dtype, "cpu")
    assert (arena.pages.dtype, arena.pages.shape) == (dtype, (5, layout.page_elems))
    for layer in range(3):
        for side, cache in enumerate(arena.kv_layers[layer]):
            assert (cache.dtype, cache.shape) == (torch.float8_e4m3fn, (5, 4, 2, 8))
            assert cache.storage_offset() == (2 * layer + side) * 4 * 2 * 8
            cache.view(torch.uint8)[2] += 1
    assert (arena.pages.view(torch.uint8)[2] == 1).all() and int(
        arena.pages.view(torch.uint8).sum()
    ) == layout.page_bytes


def test_a_page_has_whole_elements_of_adapters():
    with pytest.raises(ValueError, match="a page has 6 bytes, no multiple of the 4 of an element"):
        PageLayout(1, kv_heads=1, head_dim=3, block_tokens=1, itemsize=4, float8_kv=True)


def test_ranks_together_have_the_same_form():
    layout = PageLayout(3, kv_heads=2, head_dim=8, block_tokens=4, itemsize=2, float8_kv=True)
    assert layout.of_ranks(2).page_bytes == 2 * layout.page_bytes


def test_dtype_must_be_the_layouts():
    with pytest.raises(ValueError, match="layout counts 4 bytes per element"):
        Arena(LAYOUT, 5, torch.bfloat16, "cpu")
