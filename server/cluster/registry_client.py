"""An API server's copy of the registry, and its connection for changes.

The copy follows the registry's changes. While the registry is away the copy stays the same, so requests are still
routed, and changes are refused with 503.

Tests: tests/server/cluster/test_registry.py
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from types import MappingProxyType

from ...memory.adapters.registry_store import Entry, check_entry
from ..errors import ApiError
from .address import Address
from .registry import EXISTS, FROM_REGISTRY, INVALID, MAX_COPY_BYTES, UNKNOWN, UNWRITABLE
from .stream import FrameStream, connect, stay_connected
from .wire import Frame, Malformed, WireError

log = logging.getLogger(__name__)

WRITE_SECONDS = 60.0
"""Seconds that a change may take until all API servers have seen it."""

MAX_RETIRED = 10_000
"""Retired entries whose files wait to be removed; beyond this number they are set aside instead of removed."""

Change = tuple[str, Entry | None]
"""A name, and its entry now; None if it has none."""

Adopt = Callable[[str, Entry | None], Awaitable[None]]
"""Applies a change in the API server. Once it returns, no request begins with the name's previous content."""

_STATUS = {INVALID: 400, EXISTS: 409, UNKNOWN: 404}


class RegistryAway(ApiError):
    """The registry does not respond, so nothing can be changed."""

    def __init__(self, message: str) -> None:
        super().__init__(503, message, code="registry_unavailable", retry_after=1)


class RegistryRefusal(ApiError):
    """The registry refuses a change."""

    def __init__(self, reason: str, message: str) -> None:
        code = "storage_unavailable" if reason == UNWRITABLE else f"registry_{reason}"
        super().__init__(_STATUS.get(reason, 503), message, code=code)
        self.reason = reason


class RegistryCopy:
    """The registry's content as of a generation; frames are applied in order of arrival.

    changes: applied ones; the owner pops them.
    """

    def __init__(self) -> None:
        self.changes: deque[Change] = deque()
        self._entries: dict[str, Entry] = {}
        self._coming: dict[str, Entry] | None = {}  # a copy that waits for its last part
        self.identity: str | None = None
        self.generation = 0
        self._retired: deque[Entry] = deque(maxlen=MAX_RETIRED)  # by changes that this API server received

    @property
    def entries(self) -> Mapping[str, Entry]:
        """The entry of each name."""
        return MappingProxyType(self._entries)

    def take_retired(self) -> list[Entry]:
        """Entries that lost their names, once; entries missing from a new copy are not included: they may be those of a
        lost file.
        """
        retired, self._retired = list(self._retired), deque(maxlen=MAX_RETIRED)
        return retired

    def begin(self) -> None:
        """A new connection: its first frames are a copy."""
        self._coming = {}

    def apply(self, frame: Frame) -> bool:
        """Take a frame; True once its generation is this copy's. Raises Malformed for a frame out of order."""
        try:
            if frame.kind == "copy":
                return self._take_part(*frame.fields)
            if self._coming is not None:
                raise Malformed(f"the registry sent {frame.kind} before its copy was complete")
            if frame.kind == "changed":
                (fields,) = frame.fields
                entry = check_entry(fields)
                self._follow(entry.generation, entry.name, entry)
            else:
                generation, name = frame.fields
                if not isinstance(name, str) or name not in self._entries:
                    raise Malformed("the registry removed an unknown name")
                self._follow(generation, name, None)
        except (ValueError, TypeError) as error:
            raise Malformed(f"the registry sent {frame.kind} that can't be read: {error}") from None
        return True

    def _follow(self, generation: int, name: str, now: Entry | None) -> None:
        if generation != self.generation + 1:
            raise Malformed(f"the registry sent generation {generation!r} after {self.generation}")
        self.generation = generation
        if (before := self._entries.get(name)) is not None:
            self._retired.append(before)
        self._set(name, now)

    def _take_part(self, identity: str, generation: int, entries: list[object], is_last: bool) -> bool:
        if self._coming is None:
            raise Malformed("the registry sent a second copy")
        if not isinstance(identity, str) or type(generation) is not int or not isinstance(entries, list):
            raise Malformed("the registry's copy has fields of other types")
        for fields in entries:
            entry = check_entry(fields if isinstance(fields, list) else ())
            if entry.generation > generation or entry.name in self._coming:
                raise Malformed("the registry's copy contradicts itself")
            self._coming[entry.name] = entry
        if not is_last:
            return False
        if self.identity == identity and generation < self.generation:
            log.warning(
                "the registry went back from generation %d to %d; was its file restored from a backup?",
                self.generation,
                generation,
            )
        coming, self._coming = self._coming, None
        self.identity, self.generation = identity, generation
        for name in [*coming, *(self._entries.keys() - coming.keys())]:
            self._set(name, coming.get(name))
        return True

    def _set(self, name: str, now: Entry | None) -> None:
        if self._entries.get(name) == now:
            return
        if now is None:
            del self._entries[name]
        else:
            self._entries[name] = now
        self.changes.append((name, now))


class RegistryClient:
    """Keeps a copy up to date over one connection, which is reopened whenever it breaks; on one event loop.

    The client confirms a change to the registry once `adopt` has returned for it; so `adopt` has `SEEN_SECONDS`. An
    error of `adopt` is logged: the API server must then serve nothing under the name.
    """

    def __init__(self, address: Address, secret: bytes, adopt: Adopt | None = None) -> None:
        self._address = address
        self._secret = secret
        self._adopt = adopt
        self.copy = RegistryCopy()
        self._stream: FrameStream | None = None  # once the copy is complete
        self._calls: dict[int, asyncio.Future[tuple[int, bool, str]]] = {}
        self._numbers = itertools.count(1)
        self._first = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        run = stay_connected("the registry", self._connect, self._follow)
        self._task = asyncio.get_running_loop().create_task(run)

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def wait_for_copy(self) -> None:
        """Return once there is a copy to route from."""
        await self._first.wait()

    async def put(self, entry: Entry, *, replace: bool = True) -> tuple[int, bool]:
        """Register the entry of a name; returns its generation, and whether the name existed before. On return all API
        servers know it.

        Raises RegistryAway, RegistryRefusal.
        """
        return (await self._write("put", list(entry), replace))[:2]

    async def load(
        self, entry: Entry, *, replace: bool, keep: int | None, before: Entry | None = None, last_number: int = 0
    ) -> tuple[str, bool]:
        """Make a version the newest of its name, by `plan_load`; returns its label, and whether the name existed
        before. Raises the errors of `put`.
        """
        fields = list(entry), replace, keep, before and list(before), last_number
        _, existed, label = await self._write("load", *fields)
        return label, existed

    async def remove(self, name: str) -> int:
        """Forget a name; returns the generation of the change. Raises the errors of `put`."""
        return (await self._write("remove", name))[0]

    async def _write(self, kind: str, *fields: object) -> tuple[int, bool, str]:
        stream = self._stream
        if stream is None:
            raise RegistryAway(
                "the cluster's registry does not answer, so adapters can't be changed; known adapters are still served"
            )
        number = next(self._numbers)
        done = self._calls[number] = asyncio.get_running_loop().create_future()
        try:
            stream.send(kind, number, *fields)
            async with asyncio.timeout(WRITE_SECONDS):
                return await done
        except (TimeoutError, WireError, OSError):
            raise RegistryAway(
                "the cluster's registry went away before it answered; check whether the change was made, or try again"
            ) from None
        finally:
            del self._calls[number]

    def _connect(self) -> Awaitable[FrameStream]:
        return connect(self._address, self._secret, FROM_REGISTRY, MAX_COPY_BYTES)

    async def _follow(self, stream: FrameStream) -> None:
        """One connection, until it ends."""
        self.copy.begin()
        try:
            stream.send("subscribe")
            while (frame := await stream.read()) is not None:
                await self._take(stream, frame)
        finally:
            self._stream = None
            for done in self._calls.values():
                if not done.done():
                    done.set_exception(ConnectionResetError("the registry went away"))

    async def _take(self, stream: FrameStream, frame: Frame) -> None:
        if frame.kind not in ("done", "failed"):
            if self.copy.apply(frame):
                await self._adopt_all()
                stream.send("seen", self.copy.generation)
                self._stream = stream
                self._first.set()
            return
        self._end_call(frame)

    async def _adopt_all(self) -> None:
        """Apply received changes in the API server; if this is interrupted, the rest is applied the next time."""
        while self.copy.changes:
            name, now = self.copy.changes[0]
            if self._adopt is not None:
                try:
                    await self._adopt(name, now)
                except Exception:
                    log.exception("the registry's change of adapter %s could not be followed", name)
            self.copy.changes.popleft()

    def _end_call(self, frame: Frame) -> None:
        """Give a write its reply."""
        number, *rest = frame.fields or (None,)
        done = self._calls.get(number) if type(number) is int else None
        if len(rest) != (3 if frame.kind == "done" else 2) or type(number) is not int:
            raise Malformed(f"the registry sent {frame.kind} with {len(frame.fields)} fields")
        if done is None or done.done():
            return  # its caller has timed out
        if frame.kind == "done":
            done.set_result((int(rest[0]), bool(rest[1]), str(rest[2])))
        else:
            done.set_exception(RegistryRefusal(str(rest[0]), str(rest[1])))
