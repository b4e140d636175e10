"""Layouts of pages: KV of a few tokens for all layers, or a run of rank-rows ("slabs") of one adapter.

Pure arithmetic, no tensors, so that the simulator and the allocator studies use the very numbers that serving uses.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from typing import NamedTuple

from .projections import Projections
from .states import StateLayout, StateShape

ROW_ALIGNMENT_BYTES = 16

NEVER = 1 << 62
"""A number of tokens that no request reaches."""


class PageGroup(NamedTuple):
    """Layers whose KV shares a page."""

    layers: tuple[int, ...]
    window: int | None = None
    """Tokens that they see; pages of earlier tokens are freed. None: all."""


@dataclass(frozen=True, slots=True)
class PageLayout:
    """Pages as KV cache: `block_tokens` tokens of the layers of a page group, page-outermost (Punica §5.4).

    A page is `[layers of a group, 2, block_tokens, kv_heads, head_dim]`, keys and then values, or `[…, 1, …]` where
    values are parts of keys. A block of tokens has one page of each group. Groups are equally large, so any page may
    serve any group: see `page_groups`.
    """

    num_layers: int
    """Layers with KV."""
    kv_heads: int
    head_dim: int
    block_tokens: int
    itemsize: int
    """Bytes of an element of adapters, and of KV unless it is in FP8."""
    windows: tuple[int | None, ...] = ()
    """The attention window of each layer; empty: none has one."""
    state: StateShape | None = None
    """The past of a request in other layers."""
    state_slots: int = 2
    """States that a request has pages for; see `StateSlots`."""
    float8_kv: bool = False
    """KV is in FP8 (E4M3), one byte an element."""
    value_dim: int | None = None
    """A value is the first elements of its key, as many as this (latent attention); None: values are kept, too."""
    groups: tuple[PageGroup, ...] = field(init=False)
    states: StateLayout | None = field(init=False, compare=False)
    group_windows: tuple[int | None, ...] = field(init=False, compare=False)
    """The window of each group."""
    num_growing: int = field(init=False, compare=False)
    """Pages that a request beyond all windows grows by with each block: those of groups without a window."""
    state_pages: int = field(init=False, compare=False)
    """Pages of a state."""
    _windows: tuple[int, ...] = field(init=False, compare=False, repr=False)
    _pages_of_states: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Raises ValueError if a page is too small for a part of a state, or has no whole number of elements."""
        groups = page_groups(self.windows or (None,) * self.num_layers)
        object.__setattr__(self, "groups", groups)
        if self.page_bytes % self.itemsize:
            raise ValueError(f"a page has {self.page_bytes} bytes, no multiple of the {self.itemsize} of an element")
        states = None if self.state is None else StateLayout(self.state, self.page_bytes)
        object.__setattr__(self, "states", states)
        # schedulers ask for what follows once per request and step
        object.__setattr__(self, "group_windows", tuple(group.window for group in groups))
        object.__setattr__(self, "num_growing", self.group_windows.count(None))
        object.__setattr__(self, "state_pages", 0 if states is None else states.num_pages)
        object.__setattr__(self, "_pages_of_states", self.state_pages * self.state_slots)
        object.__setattr__(self, "_windows", tuple(window for window in self.group_windows if window is not None))

    @property
    def kv_itemsize(self) -> int:
        """Bytes of an element of KV."""
        return 1 if self.float8_kv else self.itemsize

    @property
    def page_bytes(self) -> int:
        elems = self.block_tokens * len(self.groups[0].layers) * self.kv_parts * self.kv_heads * self.head_dim
        return elems * self.kv_itemsize

    @property
    def kv_parts(self) -> int:
        """Parts of a layer's KV: keys and values, or keys alone."""
        return 2 if self.value_dim is None else 1

    @property
    def page_elems(self) -> int:
        """Elements of `itemsize` bytes that fit in a page, such as an adapter's."""
        return self.page_bytes // self.itemsize

    @property
    def pages_per_block(self) -> int:
        """Pages that the tokens of a block fill."""
        return len(self.groups)

    @property
    def group_of_layer(self) -> list[int]:
        """The index of each layer's group."""
        found = {layer: index for index, group in enumerate(self.groups) for layer in group.layers}
        return [found[layer] for layer in range(self.num_layers)]

    @property
    def has_windows(self) -> bool:
        return bool(self._windows)

    def of_ranks(self, size: int) -> PageLayout:
        """The layout of the pages of `size` TP ranks together, each with its share of every page in this layout."""
        state = None if self.state is None else self.state.of_ranks(size)
        return replace(self, kv_heads=size * self.kv_heads, state=state)

    def first_leaving(self, computed: int) -> int:
        """The number of computed tokens at which, after `computed` of them, another page leaves a window."""
        block = self.block_tokens
        return min(
            ((max(0, computed - window + 1) // block + 1) * block + window - 1 for window in self._windows),
            default=NEVER,
        )

    def blocks_for_tokens(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_tokens)

    def table_width(self, num_tokens: int) -> int:
        """Entries of the block table of so many tokens."""
        return self.blocks_for_tokens(num_tokens) * self.pages_per_block

    def pages_for_tokens(self, num_tokens: int, chunk: int = 1) -> int:
        """Pages of a request with so many tokens while it computes the last `chunk` of them."""
        return -(-num_tokens // self.block_tokens) * self.num_growing + self.fixed_pages(num_tokens, chunk)

    def pages_for_each(self, counts: Iterable[int]) -> list[int]:
        """`pages_for_tokens` of each number of tokens."""
        if self._windows:
            return list(map(self.pages_for_tokens, counts))
        block, growing, fixed = self.block_tokens, self.num_growing, self._pages_of_states
        return [-(-count // block) * growing + fixed for count in counts]

    def fixed_pages(self, num_tokens: int, chunk: int = 1) -> int:
        """As `pages_for_tokens`, those alone that do not grow without end: of states, and in windows, wherever in a
        block the window begins.
        """
        if not self._windows:
            return self._pages_of_states
        blocks, block = self.blocks_for_tokens(num_tokens), self.block_tokens
        in_windows = sum(min(blocks, (window + chunk + block - 3) // block + 1) for window in self._windows)
        return self._pages_of_states + in_windows

    def tokens_in_pages(self, num_pages: int, chunk: int = 1, most: int = 1 << 30) -> int:
        """The most tokens, up to `most`, that a request may have within so many pages; see `pages_for_tokens`."""
        blocks = range(self.blocks_for_tokens(most) + 1)
        pages = partial(self.pages_for_tokens, chunk=chunk)
        fit = bisect_right(blocks, num_pages, key=lambda count: pages(count * self.block_tokens)) - 1
        return max(0, fit) * self.block_tokens


def page_groups(windows: Sequence[int | None]) -> tuple[PageGroup, ...]:
    """Divide layers into groups of as many places for layers each; layers of a group have the same window.

    Layers without a window fill their groups, so that the KV that stays with a request has no padding. Of the sizes
    with at most an eighth more places than layers the largest is taken: then a block has the fewest pages. The last
    group of a window may have places that no layer uses.
    """
    alike: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        alike.setdefault(window, []).append(layer)
    free = len(alike.get(None, ()))
    sizes = [size for size in range(1, (free or max(map(len, alike.values()), default=1)) + 1) if not free % size]

    def places(size: int) -> int:
        return sum(-(-len(layers) // size) * size for layers in alike.values())

    size = max(size for size in sizes if 8 * places(size) <= 9 * max(1, len(windows)))
    ordered = sorted(alike.items(), key=lambda each: each[0] is not None)  # groups without a window come first
    groups = [
        PageGroup(tuple(layers[first : first + size]), window)
        for window, layers in ordered
        for first in range(0, len(layers), size)
    ]
    return tuple(groups) or (PageGroup(()),)


@dataclass(frozen=True, slots=True)
class SlabLayout:
    """One slab: product after product, row i of A (`in` elems) of its targeted projections, then row i of Bᵀ (`out`
    elems) of each. So what a product reads of a rank-row is one run.

    a_offset, b_offset: elements from the slab's start to the row, per module id; -1 where the module is not targeted.
    Rows start on 16-byte boundaries.
    """

    a_offset: tuple[int, ...]
    b_offset: tuple[int, ...]
    slab_elems: int

    @classmethod
    def build(cls, projections: Projections, targets: Sequence[str], itemsize: int) -> SlabLayout:
        """Lay out `targets` (names of projections) in the table's order, which is that of products."""
        step = max(1, ROW_ALIGNMENT_BYTES // itemsize)
        offset = 0
        a_offset, b_offset = [-1] * len(projections), [-1] * len(projections)
        own = [(module, each) for module, each in enumerate(projections) if each.name in targets]
        for _, product in groupby(own, key=lambda target: target[1].group):
            modules = list(product)
            for offsets, side in ((a_offset, 0), (b_offset, 1)):
                for module, projection in modules:
                    offsets[module] = offset
                    offset += -(-projection.dims[side] // step) * step
        return cls(tuple(a_offset), tuple(b_offset), offset)
