"""One image on its way between the host and the arena, layer by layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..host.image import HostImage
from ..host.layer_stream import LayerStream
from .copy_plan import CopyGroup, CopyPlan

if TYPE_CHECKING:
    from .copy_engine import CopyEngine

#: A prefill that waits for a layer has copies issued this many layers beyond it: enough that the link is never idle
#: while the host launches a layer, few enough that the first layers of adapters in one batch come first.
LAYERS_AHEAD = 4


class Transfer:
    """Made by a CopyEngine. Any thread may call it; only `wait_layer` and `wait` touch the compute stream.

    The pages and the image are the transfer's until `is_quiet()`: whoever owns them must not give them to anybody else
    before, even after `cancel()`, because a copy that was issued can't be called back. The transfer keeps the image
    alive until then by itself; the pages are the owner's to keep.
    """

    def __init__(self, engine: CopyEngine, image: HostImage, plan: CopyPlan, num_pages: int, to_device: bool) -> None:
        self._engine = engine
        self._image: HostImage | None = image
        self._stream = image.stream
        self._plan = plan
        self._num_pages = num_pages
        self._to_device = to_device
        self._data: Any = None  # what copies read from, kept until none runs, even should the image fail
        self._events: list[Any] = []  # of the groups issued so far, in the order in which they fire
        self._num_fired = 0
        self._is_stopped = False

    # -- progress

    def advance(self, last_layer: int | None = None) -> None:
        """Issue the copies of what has been read from the disk, in layer order, at most to `last_layer`'s group.

        Never waits. Raises what the driver raises, and ValueError for an image of the wrong shape or dtype; no more is
        issued then.
        """
        with self._engine.lock:
            while (group := self.next_group()) and (last_layer is None or group.first_layer <= last_layer):
                self.issue_next()
            if self._has_ended():
                self._unfollow()

    def next_group(self) -> CopyGroup | None:
        """The group that may be issued now; None when all are, the disk is behind, or there is no going on."""
        if self._has_ended():
            return None
        group = self._plan.groups[len(self._events)]
        return group if self._stream.num_ready > group.last_layer else None

    def issue_next(self) -> None:
        """Issue the group that `next_group` names. The caller holds the engine's lock."""
        try:
            if not self._events:
                self._data = self._image.data  # there since the first layer was published
                if self._image.error is not None:  # it fails this very moment
                    self._is_stopped = True
                    return
                self._engine.check_image(self._data, self._num_pages)
            data = self._data
            self._events.append(self._engine.issue(data, self._plan.groups[len(self._events)], self._to_device))
        except BaseException:
            self._is_stopped = True
            raise

    # -- waiting

    def wait_layer(self, layer: int, timeout: float = 0.0) -> bool:
        """Make whatever the current compute stream is given from now on see the bytes of `layer`.

        The host waits for the disk only, at most `timeout` seconds, and never for a copy. False when the layer did
        not come in time, when its read failed or the transfer was cancelled; nothing is known of its pages then.
        """
        index = self._plan.group_of[layer]
        if index >= len(self._events) and not self._is_stopped:
            self._stream.wait(self._plan.groups[index].last_layer, timeout)
        with self._engine.lock:
            self.advance(layer + LAYERS_AHEAD)
            if self._has_stopped() or index >= len(self._events):
                return False
            if index >= self._count_fired():
                self._engine.join(self._events[index])
            return True

    def wait(self, timeout: float = 0.0) -> bool:
        """`wait_layer` for the last layer, and so for all: copies complete in order."""
        groups = self._plan.groups
        return self.wait_layer(groups[-1].last_layer, timeout) if groups else not self.has_failed()

    def synchronize(self) -> None:
        """Issue what can be issued, then let the host wait until every issued copy is complete."""
        with self._engine.lock:
            self.advance()
            events = self._events[-1:]
        for event in events:  # outside the lock: others may go on meanwhile
            self._engine.synchronize(event)

    # -- state

    def is_done(self) -> bool:
        """True if all bytes are in place; issues what can be issued and asks the device, but does not wait."""
        with self._engine.lock:
            self.advance()
            return not self._has_stopped() and self._count_fired() == len(self._plan.groups)

    def has_failed(self) -> bool:
        """True if the rest will never come: the read failed, the driver refused a copy, or it was cancelled."""
        with self._engine.lock:
            return self._has_stopped()

    def cancel(self) -> None:
        """Issue no further copy. Safe at any time and from any thread; see `is_quiet` for what was issued before."""
        with self._engine.lock:
            self._is_stopped = True
            self._unfollow()

    def is_quiet(self) -> bool:
        """True if no copy is running and none will be issued: pages and image are their owners' again."""
        with self._engine.lock:
            if not self._has_ended() or self._count_fired() < len(self._events):
                return False
            self._image = self._data = None
            return True

    def event(self, layer: int) -> Any:
        """Event that the engine's `issue` gave for the group of `layer`; None if not issued yet, or without bytes."""
        index = self._plan.group_of[layer]
        return self._events[index] if 0 <= index < len(self._events) else None

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
        while self._num_fired < len(self._events) and self._engine.is_fired(self._events[self._num_fired]):
            self._num_fired += 1
        return self._num_fired
