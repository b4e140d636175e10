"""A transfer of one image between the host and a GPU's arena: the progress of its copies.

Tests: tests/memory/transfers/test_dma.py, tests/memory/transfers/test_staging.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from ..host.image import HostImage, LayerStream
from .copy_plan import CopyGroup, CopyPlan

#: A prefill that waits for a layer has copies issued this many layers further: enough to keep the link busy while the
#: host launches a layer, and few enough to copy the first layers of all adapters in a batch first.
LAYERS_AHEAD = 4


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
    def is_staged(self, image: torch.Tensor) -> bool: ...
    def wake_staging(self) -> None: ...
    def wait_for_staging(self, is_true: Callable[[], bool], timeout: float | None = None) -> bool: ...


class CudaTransfer:
    """A transfer made by CudaCopies. Any thread may call it; only `wait_layer` and `wait` touch the compute stream.

    The pages and the image are in use until `is_quiet()`. Until then, even after `cancel()`, their owner must not reuse
    them, because an issued copy can't be recalled. The transfer itself keeps the image alive; the owner keeps the
    pages.
    """

    def __init__(
        self,
        engine: CudaCopyEngine,
        image: HostImage,
        plan: CopyPlan,
        num_pages: int,
        to_device: bool,
        *,
        is_ahead: bool = False,
    ) -> None:
        self._engine = engine
        self._image: HostImage | None = image
        self._stream = image.stream
        self._plan = plan
        self._num_pages = num_pages
        self.to_device = to_device
        self.is_ahead = is_ahead
        """Nobody waits for it: `Staging` copies all others first."""
        self._data: Any = None  # the source of copies, kept until none runs, even if the image fails
        self.is_staged = False
        """The image lies in ordinary memory, so that `Staging` issues its copies."""
        self._is_staging = False  # a group is being copied through pinned memory
        self._partial: Any = None  # event of copies of a group that did not become whole
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
                if self.is_staged:
                    self._engine.wake_staging()
                    break
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
        if self._stream.num_ready <= group.last_layer:
            return None
        if self._data is None and not self._find_data():
            return None
        return group

    def _find_data(self) -> bool:
        """Choose the memory that copies use, once its first layer has been published; False if the image has failed."""
        image = self._image
        self._data = None if image is None else image.data
        if image is None or image.error is not None:  # it failed just now
            self._is_stopped = True
            return False
        self.is_staged = self._engine.is_staged(self._data)
        return True

    def has_room(self, group: CopyGroup) -> bool:
        """True if the stream has room for a group's copies. The caller holds the engine's lock."""
        return self._engine.has_room(group, self.to_device)

    def issue_next(self) -> None:
        """Issue the group that `next_group` returns. The caller holds the engine's lock."""
        try:
            if not self._events:
                self.check_image(self._data)
            self._events.append(self._engine.issue(self._data, self._plan.groups[len(self._events)], self.to_device))
        except BaseException:
            self._is_stopped = True
            raise

    def begin_staging(self) -> tuple[CopyGroup, torch.Tensor]:
        """Return the group that `next_group` returns, and the image. The caller holds the engine's lock, copies the
        group without it, and calls `end_staging`. The image and the pages are in use until then.
        """
        self._is_staging = True
        return self._plan.groups[len(self._events)], self._data

    def end_staging(self, event: Any, is_whole: bool) -> None:
        """event: fires after the group's copies; None if none was issued. is_whole: all of them were."""
        self._is_staging = False
        if is_whole:
            self._events.append(event)
        else:
            self._is_stopped, self._partial = True, event
        if self._has_ended():
            self._unfollow()

    def check_image(self, image: torch.Tensor) -> None:
        """Raise ValueError for an image of the wrong shape or dtype."""
        self._engine.check_image(image, self._num_pages)

    # -- waiting

    def wait_layer(self, layer: int, timeout: float = 0.0) -> bool:
        """Make work launched from now on on the current compute stream see the bytes of `layer`.

        The host waits only for the disk, and for an image in ordinary memory to be staged, at most `timeout` seconds in
        all, and never for a copy. Returns False if the layer did not come in time, its read failed, or the transfer was
        cancelled; then the contents of its pages are undefined.
        """
        index, deadline = self._plan.group_of[layer], time.monotonic() + timeout
        if index >= len(self._events) and not self._is_stopped:
            self._stream.wait(self._plan.groups[index].last_layer, timeout)
        with self._engine.lock:
            self.advance(layer + LAYERS_AHEAD, needed=layer)
            if self.is_staged and index >= len(self._events):
                left = max(0.0, deadline - time.monotonic())
                self._engine.wait_for_staging(lambda: index < len(self._events) or self._has_stopped(), left)
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
                if self.is_staged:
                    self._engine.wait_for_staging(lambda: not self._is_staging and self.next_group() is None)
                lacks_room, events = self.next_group() is not None, self._events[-1:]
                events += [] if self._partial is None else [self._partial]
            if not lacks_room:
                break
            self._engine.wait_for_room(self.to_device)
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
            if not self._has_ended() or self._is_staging or self._count_fired() < len(self._events):
                return False
            if self._partial is not None and not self._engine.is_fired(self._partial):
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
