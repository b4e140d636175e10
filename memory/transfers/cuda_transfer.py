"""A transfer of one image between the host and a GPU's arena: the plan of its copies, and their progress.

Tests: tests/memory/transfers/test_dma.py, tests/memory/transfers/test_dma_plan.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..host.image import HostImage, LayerStream
from ..pages.adapter_layout import AdapterLayout

#: A prefill that waits for a layer has copies issued this many layers further: enough to keep the link busy while the
#: host launches a layer, and few enough to copy the first layers of all adapters in a batch first.
LAYERS_AHEAD = 4


@dataclass(frozen=True, slots=True)
class CopyRun:
    """Elements that are contiguous both in the image, from `image_elem` on, and in the arena, from `arena_elem` on."""

    image_elem: int
    arena_elem: int
    num_elems: int


@dataclass(frozen=True, slots=True)
class CopyGroup:
    """Layers `first_layer … last_layer`, which are copied under one event."""

    first_layer: int
    last_layer: int
    runs: tuple[CopyRun, ...]

    @property
    def num_elems(self) -> int:
        return sum(run.num_elems for run in self.runs)


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """The groups of a transfer."""

    groups: tuple[CopyGroup, ...]
    """In the order in which they are copied."""
    group_of: tuple[int, ...]
    """The group of each layer; -1 for a layer without bytes."""

    @classmethod
    def of_layers(cls, layout: AdapterLayout, pages: Sequence[int], page_elems: int, group_elems: int = 0) -> CopyPlan:
        """Plan the copies of an adapter, layer by layer. pages: its pages in the arena, in the layout's order.

        The first group is the first layer alone, so that a prefill begins as early as possible. A later group ends with
        the layer that reaches `group_elems`.
        """
        ranges = (layout.layer_ranges(layer) for layer in range(layout.num_layers))
        return cls._build(ranges, pages, page_elems, group_elems)

    @classmethod
    def of_pages(cls, pages: Sequence[int], page_elems: int, group_elems: int = 0) -> CopyPlan:
        """Plan the copies of whole pages, each of which counts as a layer."""
        ranges = ([(i * page_elems, (i + 1) * page_elems)] for i in range(len(pages)))
        return cls._build(ranges, pages, page_elems, group_elems)

    @classmethod
    def _build(
        cls, layers: Iterable[list[tuple[int, int]]], pages: Sequence[int], page_elems: int, group_elems: int
    ) -> CopyPlan:
        groups: list[CopyGroup] = []
        group_of: list[int] = []
        ranges: list[tuple[int, int]] = []
        first = last = num_elems = 0
        for layer, found in enumerate(layers):
            if not found:
                group_of.append(-1)
                continue
            group_of.append(len(groups))
            first, last = (first if ranges else layer), layer
            ranges += found
            num_elems += sum(end - begin for begin, end in found)
            if not groups or num_elems >= group_elems:
                groups.append(CopyGroup(first, last, _runs(ranges, pages, page_elems)))
                ranges, num_elems = [], 0
        if ranges:
            groups.append(CopyGroup(first, last, _runs(ranges, pages, page_elems)))
        return cls(tuple(groups), tuple(group_of))


def _runs(ranges: list[tuple[int, int]], pages: Sequence[int], page_elems: int) -> tuple[CopyRun, ...]:
    """Split an image's ranges only where its pages are not contiguous in the arena."""
    runs: list[CopyRun] = []
    for begin, end in sorted(ranges):
        while begin < end:
            page, offset = divmod(begin, page_elems)
            count = min(end - begin, page_elems - offset)
            target = pages[page] * page_elems + offset
            last = runs[-1] if runs else None
            if last and (last.image_elem + last.num_elems, last.arena_elem + last.num_elems) == (begin, target):
                runs[-1] = CopyRun(last.image_elem, last.arena_elem, last.num_elems + count)
            else:
                runs.append(CopyRun(begin, target, count))
            begin += count
    return tuple(runs)


class CudaCopyEngine(Protocol):
    """The methods of `CudaCopies` that a transfer calls, with its lock held unless they wait."""

    @property
    def lock(self) -> AbstractContextManager[Any, Any]: ...

    def check_image(self, image: torch.Tensor, num_pages: int) -> None: ...
    def has_room(self, group: CopyGroup, to_device: bool) -> bool: ...
    def wait_for_room(self, to_device: bool) -> None: ...
    def issue(self, image: torch.Tensor, group: CopyGroup, to_device: bool) -> Any: ...
    def is_fired(self, event: Any) -> bool: ...
    def join(self, event: Any) -> None: ...
    def synchronize(self, event: Any) -> None: ...


class CudaTransfer:
    """A transfer made by CudaCopies. Any thread may call it; only `wait_layer` and `wait` touch the compute stream.

    The pages and the image are in use until `is_quiet()`. Until then, even after `cancel()`, their owner must not reuse
    them, because an issued copy can't be recalled. The transfer itself keeps the image alive; the owner keeps the
    pages.
    """

    def __init__(
        self, engine: CudaCopyEngine, image: HostImage, plan: CopyPlan, num_pages: int, to_device: bool
    ) -> None:
        self._engine = engine
        self._image: HostImage | None = image
        self._stream = image.stream
        self._plan = plan
        self._num_pages = num_pages
        self._to_device = to_device
        self._data: Any = None  # the source of copies, kept until none runs, even if the image fails
        self._events: list[Any] = []  # of the groups issued so far, in the order in which they fire
        self._num_fired = 0
        self.arrived = LayerStream()
        """Layers whose copies the host has seen complete."""
        self._is_stopped = False

    @property
    def address(self) -> int:
        return self.arrived.address

    # -- progress

    def advance(self, last_layer: int | None = None, needed: int = -1) -> None:
        """Issue the copies of the layers that have been read, in layer order, at most up to `last_layer`'s group, and
        only those that the stream has room for. needed: layers up to this one are issued all the same.

        Never waits. Raises the driver's errors, and ValueError for an image of the wrong shape or dtype; then it issues
        no more copies.
        """
        with self._engine.lock:
            while (group := self.next_group()) and (last_layer is None or group.first_layer <= last_layer):
                if group.first_layer > needed and not self.has_room(group):
                    break
                self.issue_next()
            if self._has_ended():
                self._unfollow()

    def next_group(self) -> CopyGroup | None:
        """Return the group that may be issued now; None if none is left or read, or the transfer has ended."""
        if self._has_ended():
            return None
        group = self._plan.groups[len(self._events)]
        return group if self._stream.num_ready > group.last_layer else None

    def has_room(self, group: CopyGroup) -> bool:
        """True if the stream has room for a group's copies. The caller holds the engine's lock."""
        return self._engine.has_room(group, self._to_device)

    def issue_next(self) -> None:
        """Issue the group that `next_group` returns. The caller holds the engine's lock."""
        try:
            if not self._events:
                image = self._image
                self._data = None if image is None else image.data  # set since the first layer was published
                if image is None or image.error is not None:  # the image failed just now
                    self._is_stopped = True
                    return
                self._engine.check_image(self._data, self._num_pages)
            self._events.append(self._engine.issue(self._data, self._plan.groups[len(self._events)], self._to_device))
        except BaseException:
            self._is_stopped = True
            raise

    # -- waiting

    def wait_layer(self, layer: int, timeout: float = 0.0) -> bool:
        """Make work launched from now on on the current compute stream see the bytes of `layer`.

        The host waits only for the disk, at most `timeout` seconds, and never for a copy. Returns False if the layer
        did not come in time, its read failed, or the transfer was cancelled; then the contents of its pages are
        undefined.
        """
        index = self._plan.group_of[layer]
        if index >= len(self._events) and not self._is_stopped:
            self._stream.wait(self._plan.groups[index].last_layer, timeout)
        with self._engine.lock:
            self.advance(layer + LAYERS_AHEAD, needed=layer)
            if self._has_stopped() or index >= len(self._events):
                return False
            if index >= self._count_fired():
                self._engine.join(self._events[index])
            return True

    def wait(self, timeout: float = 0.0) -> bool:
        """`wait_layer` for the last layer, which includes all others because copies complete in order."""
        groups = self._plan.groups
        return self.wait_layer(groups[-1].last_layer, timeout) if groups else not self.has_failed()

    def synchronize(self) -> None:
        """Issue everything that can be issued, then make the host wait until every issued copy is complete.

        It sleeps outside the lock, so that other threads can continue.
        """
        while True:
            with self._engine.lock:
                self.advance()
                lacks_room, events = self.next_group() is not None, self._events[-1:]
            if not lacks_room:
                break
            self._engine.wait_for_room(self._to_device)
        for event in events:
            self._engine.synchronize(event)

    # -- state

    def is_done(self) -> bool:
        """True if all bytes are in place. Issues copies that can be issued and queries the device; never waits."""
        with self._engine.lock:
            self.advance()
            return not self._has_stopped() and self._count_fired() == len(self._plan.groups)

    def has_failed(self) -> bool:
        """True if the rest will never come: the read or a copy failed, or the transfer was cancelled."""
        with self._engine.lock:
            return self._has_stopped()

    def cancel(self) -> None:
        """Issue no further copy. Safe at any time and from any thread; see `is_quiet` for the copies issued before."""
        with self._engine.lock:
            self._is_stopped = True
            self._unfollow()

    def is_quiet(self) -> bool:
        """True if no copy is running and none will be issued: the owners may reuse pages and image."""
        with self._engine.lock:
            if not self._has_ended() or self._count_fired() < len(self._events):
                return False
            self._image = self._data = None
            return True

    def _has_stopped(self) -> bool:
        if self._stream.num_ready == LayerStream.FAILED:
            self._is_stopped = True
        return self._is_stopped

    def _has_ended(self) -> bool:
        return self._has_stopped() or len(self._events) == len(self._plan.groups)

    def _unfollow(self) -> None:
        if self._image is not None:
            self._image.unfollow(self.advance)

    def _count_fired(self) -> int:
        before = self._num_fired
        while self._num_fired < len(self._events) and self._engine.is_fired(self._events[self._num_fired]):
            self._num_fired += 1
        if self._num_fired > before:
            plan, fired = self._plan, self._num_fired
            is_all = fired == len(plan.groups)
            self.arrived.publish(len(plan.group_of) if is_all else plan.groups[fired - 1].last_layer + 1)
        return self._num_fired
