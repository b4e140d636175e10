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


class KvShape(NamedTuple):
    """The keys of a token in a layer; its values have the same shape, or are parts of them."""

    heads: int
    head_dim: int

    queries: int = 0
    """Heads of queries, where layers with these keys have different numbers of them: attention is planned for one."""

    @property
    def elems(self) -> int:
        return self.heads * self.head_dim


class PageGroup(NamedTuple):
    """Layers whose KV shares a page."""

    layers: tuple[int, ...]
    window: int | None = None
    """Tokens that they see; pages of earlier tokens are freed. None: all."""


@dataclass(frozen=True, slots=True)
class PageLayout:
    """Pages as KV cache: `block_tokens` tokens of the layers of a page group, page-outermost (Punica §5.4).

    A page is `[layers of a group, 2, block_tokens, kv_heads, head_dim]`, keys and then values, or `[…, 1, …]` where
    values are parts of keys. A block of tokens has one page of each group. Layers of a group have the same shape. Pages
    are equally large, whatever the shape of a group's layers, so any page may serve any group: see `page_groups`.

    Without layers with KV there is no group: tokens take no page, and pages hold states and adapters.
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
    shapes: tuple[KvShape, ...] = ()
    """The shape of each layer's KV, where layers differ; empty: all have `kv_heads` and `head_dim`."""
    state: StateShape | None = None
    """The past of a request in other layers."""
    state_slots: int = 2
    """States that a request has pages for; see `StateSlots`."""
    float8_kv: bool = False
    """KV is in FP8 (E4M3), one byte an element."""
    value_dim: int | None = None
    """A value is the first elements of its key, as many as this (latent attention); None: values are kept, too."""
    chunked: bool = False
    """Windows begin at multiples of their lengths. Pages leave as those of other windows do, which see no less."""
    state_page_bytes: int = 0
    """Bytes of a page where no layer has KV; see `StateShape.page_bytes`."""
    groups: tuple[PageGroup, ...] = field(init=False)
    layer_shapes: tuple[KvShape, ...] = field(init=False, compare=False)
    """The shape of each layer's KV."""
    states: StateLayout | None = field(init=False, compare=False)
    group_windows: tuple[int | None, ...] = field(init=False, compare=False)
    """The window of each group."""
    num_growing: int = field(init=False, compare=False)
    """Pages that a request beyond all windows grows by with each block: those of groups without a window."""
    state_pages: int = field(init=False, compare=False)
    """Pages of a state."""
    _token_elems: int = field(init=False, compare=False, repr=False)
    """Elements of a token's keys in a page."""
    _windows: tuple[int, ...] = field(init=False, compare=False, repr=False)
    _pages_of_states: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Raises ValueError if a page is too small for a part of a state, or has no whole number of elements."""
        shapes = self.shapes or (KvShape(self.kv_heads, self.head_dim),) * self.num_layers
        groups = page_groups(self.windows or (None,) * self.num_layers, shapes)
        object.__setattr__(self, "groups", groups)
        object.__setattr__(self, "layer_shapes", shapes)
        elems = (sum(shapes[layer].elems for layer in group.layers) for group in groups)
        object.__setattr__(self, "_token_elems", max(elems, default=0))
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
        if not self.groups:
            return self.state_page_bytes
        return self.block_tokens * self.kv_parts * self._token_elems * self.kv_itemsize

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
        shapes = tuple(shape._replace(heads=size * shape.heads) for shape in self.shapes)
        page = size * self.state_page_bytes
        return replace(self, kv_heads=size * self.kv_heads, shapes=shapes, state=state, state_page_bytes=page)

    def pages_per_token(self, checkpoint_tokens: int) -> float:
        """Pages that a token takes in a long request. Where tokens take none, a state's pages stand for the tokens from
        one checkpoint to the next, which have to be computed again without it.
        """
        if self.groups:
            return self.pages_per_block / self.block_tokens
        return self.state_pages / max(self.block_tokens, checkpoint_tokens)

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


def page_groups(windows: Sequence[int | None], shapes: Sequence[KvShape] = ()) -> tuple[PageGroup, ...]:
    """Divide layers into groups for equally large pages, each with as many layers as fit; layers of a group have the
    same window and shape. shapes: empty: all layers' are equal.

    Layers without a window fill their pages if any size of pages does that, so that the KV that stays with a request
    has no padding. Of the sizes with at most an eighth more room than KV the largest is taken: then a block has the
    fewest pages. If all have more, the one with the least is taken. The last group of a kind of layers may leave room.
    """
    alike: dict[tuple[int | None, KvShape], list[int]] = {}
    for layer, (window, shape) in enumerate(zip(windows, shapes or (KvShape(1, 1),) * len(windows), strict=True)):
        alike.setdefault((window, shape), []).append(layer)
    if not alike:
        return ()
    room = _room([_Kind(window is None, shape.elems, len(layers)) for (window, shape), layers in alike.items()])
    ordered = sorted(alike.items(), key=lambda each: each[0][0] is not None)  # groups without a window come first
    return tuple(
        PageGroup(tuple(layers[first : first + room // shape.elems]), window)
        for (window, shape), layers in ordered
        for first in range(0, len(layers), room // shape.elems)
    )


class _Kind(NamedTuple):
    """Layers of one window and shape."""

    is_free: bool
    """They have no window."""
    elems: int
    layers: int

    def padding(self, room: int) -> int:
        """Elements of pages of so much room that none of them fills."""
        return -(-self.layers // (room // self.elems)) * room - self.layers * self.elems


def _room(kinds: Sequence[_Kind]) -> int:
    """Elements of a token's keys in a page: see `page_groups`."""
    free, least = [kind for kind in kinds if kind.is_free], max(kind.elems for kind in kinds)
    rooms: set[int] = set()
    for kind in free or kinds:
        first = -(-least // kind.elems)
        rooms.update(count * kind.elems for count in range(first, max(kind.layers, first) + 1))
    rooms = {room for room in rooms if not any(kind.padding(room) for kind in free)} or rooms
    padding = {room: sum(kind.padding(room) for kind in kinds) for room in rooms}
    total = sum(kind.layers * kind.elems for kind in kinds)
    near = [room for room in rooms if 8 * padding[room] <= total]
    return max(near) if near else min(rooms, key=lambda room: (padding[room], -room))


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
        own = [(projections.id(each.name), each) for each in projections if each.name in targets]
        for _, product in groupby(own, key=lambda target: target[1].product):
            modules = list(product)
            for offsets, side in ((a_offset, 0), (b_offset, 1)):
                for module, projection in modules:
                    offsets[module] = offset
                    offset += -(-projection.dims[side] // step) * step
        return cls(tuple(a_offset), tuple(b_offset), offset)
