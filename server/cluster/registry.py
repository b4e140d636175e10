"""The adapter registry of a cluster: a process that owns the adapters' names and tells every API server each change.

An API server sends `subscribe` once and gets a copy of the table, in parts, and then each change. It answers each
change with `seen`. A write completes when all API servers have seen it, so none starts a request with the old content
afterwards. A peer that breaks the protocol loses its connection; nothing else is affected.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from ...memory.adapters.publishing import LabelTaken, plan_load, plan_removal
from ...memory.adapters.registry_store import Done, RegistryError, RegistryFull, RegistryStore, check_entry
from ..rare_log import RareLog
from . import listener
from .address import Listening
from .listener import Listener
from .stream import FrameStream, accept
from .wire import Frame, Malformed, WireError

log = logging.getLogger(__name__)

T = TypeVar("T")

TO_REGISTRY = ("subscribe", "seen", "put", "load", "remove")
FROM_REGISTRY = ("copy", "changed", "removed", "done", "failed")

MAX_REQUEST_BYTES = 64 << 10
"""Largest payload of an API server's frame: a name, a path and little more."""

MAX_COPY_BYTES = 16 << 20
"""Largest payload of the registry's frame."""

COPY_PART = 1000
"""Entries in one part of the copy. An entry has at most 5 KB, most of it its path."""

MAX_WRITES = 1024
"""Most writes in progress; further ones are refused."""

SEEN_SECONDS = 45.0
"""Seconds that an API server has to act on a change, which may mean reading an adapter from a disk. After that it loses
its connection, and the write does not wait for it.
"""

FIRST_WRITE_SECONDS = 2.0
"""Seconds after the start during which nothing is written, so that API servers of the previous run can reconnect: one
that has not would miss the change and go on with the old content. They try again within `LAST_RETRY_SECONDS`.
"""

INVALID, EXISTS, UNKNOWN, FULL, UNWRITABLE, BUSY = "invalid", "exists", "unknown", "full", "unwritable", "busy"
TAKEN = "taken"
"""Reasons why a write fails."""


class Registry:
    """Serves one store to API servers on one event loop, which never waits for the disk."""

    def __init__(self, store: RegistryStore, secret: bytes, first_write_seconds: float = FIRST_WRITE_SECONDS) -> None:
        self._store = store
        self._secret = secret
        self._refusals = RareLog(log)
        self._disk = ThreadPoolExecutor(1, "chorus-registry")
        self._api_servers: dict[FrameStream, int] = {}  # subscribed ones, and the last generation that each has seen
        self._news = asyncio.Condition()
        self._writing = asyncio.Lock()  # one change at a time, so all API servers see the changes in one order
        self._open_at = asyncio.get_running_loop().time() + first_write_seconds
        self._tasks: set[asyncio.Task[None]] = set()

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection; the handler for an address's `listen`."""
        try:
            stream = await accept(reader, writer, self._secret, TO_REGISTRY, MAX_REQUEST_BYTES)
        except (WireError, OSError) as error:
            self._refusals.warning("refused a connection to the registry: %s", error)
            return
        reason = None
        try:
            while (frame := await stream.read()) is not None:
                await self._take(stream, frame)
        except WireError as error:
            reason = str(error)
            log.warning("closing an API server's connection to the registry: %s", error)
        except OSError as error:
            log.info("an API server's connection to the registry broke: %s", error)
        finally:
            await self._forget(stream, reason)

    async def close(self) -> None:
        """Close all connections and the file; changes in progress are completed."""
        async with self._writing:
            for stream in list(self._api_servers):
                await self._forget(stream, "the registry ends")
            for task in self._tasks:
                task.cancel()
            await self._on_disk(self._store.close)
            self._disk.shutdown(wait=False)

    async def _take(self, stream: FrameStream, frame: Frame) -> None:
        kind, fields = frame
        if kind == "subscribe" and not fields and stream not in self._api_servers:
            await self._subscribe(stream)
        elif kind == "seen" and len(fields) == 1 and type(fields[0]) is int and stream in self._api_servers:
            if not self._api_servers[stream] <= fields[0] <= self._store.generation:
                raise Malformed(f"an API server has seen generation {fields[0]}, which was not its next")
            self._api_servers[stream] = fields[0]
            async with self._news:
                self._news.notify_all()
        elif kind in ("put", "load", "remove") and fields and type(fields[0]) is int:
            if len(self._tasks) >= MAX_WRITES:
                self._send(stream, "failed", fields[0], BUSY, f"{MAX_WRITES} writes wait already; try again")
                return
            # not awaited: the writer is an API server too, and its frames must be read for it to report that it has
            # seen the change
            task = asyncio.get_running_loop().create_task(self._write(stream, kind, fields[0], fields[1:]))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        else:
            raise Malformed(f"an API server sent {kind} with {len(fields)} fields, or not in its place")

    async def _subscribe(self, stream: FrameStream) -> None:
        async with self._writing:  # between two changes
            entries, generation = self._store.entries(), self._store.generation
            for first in range(0, max(1, len(entries)), COPY_PART):
                part = [list(entry) for entry in entries[first : first + COPY_PART]]
                stream.send("copy", self._store.identity, generation, part, first + COPY_PART >= len(entries))
            self._api_servers[stream] = generation

    async def _write(self, stream: FrameStream, kind: str, call: int, fields: list[Any]) -> None:
        """Make a change, wait until all API servers have seen it, and reply."""
        loop = asyncio.get_running_loop()
        await asyncio.sleep(max(0.0, self._open_at - loop.time()))
        try:
            answer = await getattr(self, f"_{kind}")(fields)
        except (ValueError, KeyError, FileExistsError, RegistryError) as error:
            failure, text = _reason(error)
            self._send(stream, "failed", call, failure, text)
            return
        await self._wait_until_seen(answer[0])
        self._send(stream, "done", call, *answer)

    async def _put(self, fields: list[Any]) -> tuple[int, bool, str]:
        """Change a version's properties, such as whether it is paused."""
        if len(fields) != 2 or not isinstance(fields[0], list) or type(fields[1]) is not bool:
            raise ValueError("put must have an adapter's fields, and whether it may replace another")
        entry, replace = check_entry(fields[0])._replace(generation=0), fields[1]

        def put() -> tuple[Done, bool, str]:
            existed = self._store.get(entry.name) is not None
            if existed and not replace:
                raise FileExistsError(entry.name)
            return self._store.change([(entry.name, entry)]), existed, entry.label

        return await self._change(put)

    async def _load(self, fields: list[Any]) -> tuple[int, bool, str]:
        """Make a new version, by `plan_load`."""
        if len(fields) != 5 or type(fields[1]) is not bool or not _is_count(fields[2]):
            raise ValueError(
                "load must have an adapter's fields, whether it may replace, and how many versions are kept"
            )
        entry, replace, keep = check_entry(_fields(fields[0]))._replace(generation=0), fields[1], fields[2]
        before = None if fields[3] is None else check_entry(_fields(fields[3]))
        last_number = fields[4]
        if type(last_number) is not int or last_number < 0:
            raise ValueError("the last version must be an integer")

        def load() -> tuple[Done, bool, str]:
            plan = plan_load(self._store, entry, replace=replace, keep=keep, before=before, last_number=last_number)
            return self._store.change(plan.changes), plan.existed, plan.entry.label

        return await self._change(load)

    async def _remove(self, fields: list[Any]) -> tuple[int, bool, str]:
        if len(fields) != 1 or not isinstance(fields[0], str):
            raise ValueError("remove must have a name")
        return await self._change(lambda: (self._store.change(plan_removal(self._store, fields[0])), True, ""))

    async def _change(self, change: Callable[[], tuple[Done, bool, str]]) -> tuple[int, bool, str]:
        """Write a change, and send it to all API servers."""
        async with self._writing:
            done, existed, label = await self._on_disk(change)
            for count, (name, entry) in enumerate(done.told, self._store.generation + 1 - len(done.told)):
                if entry is not None:
                    self._tell("changed", list(entry))
                    log.info("adapter %s is %s since generation %d", name, entry.content_hash, count)
                else:
                    self._tell("removed", count, name)
                    log.info("adapter %s was removed with generation %d", name, count)
            return self._store.generation, existed, label

    async def _wait_until_seen(self, generation: int) -> None:
        """Return once every connected API server has seen the generation; slow ones lose their connection."""
        async with self._news:
            try:
                async with asyncio.timeout(SEEN_SECONDS):
                    await self._news.wait_for(lambda: all(seen >= generation for seen in self._api_servers.values()))
                    return
            except TimeoutError:
                slow = [stream for stream, seen in self._api_servers.items() if seen < generation]
        for stream in slow:
            log.warning("an API server has not seen generation %d and loses its connection", generation)
            await self._forget(stream, f"this API server has not seen generation {generation} in time")

    def _tell(self, kind: str, *fields: Any) -> None:
        for stream in list(self._api_servers):
            self._send(stream, kind, *fields)

    def _send(self, stream: FrameStream, kind: str, *fields: Any) -> None:
        try:
            stream.send(kind, *fields)
        except (WireError, OSError) as error:
            log.warning("closing an API server's connection to the registry: %s", error)
            stream.close()  # its reader notices, and forgets it

    async def _forget(self, stream: FrameStream, reason: str | None) -> None:
        self._api_servers.pop(stream, None)
        stream.close(reason)
        async with self._news:
            self._news.notify_all()

    async def _on_disk(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._disk, function)


def _is_count(value: Any) -> bool:
    """True for how many versions are kept; None: all."""
    return value is None or (type(value) is int and value >= 1)


def _fields(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _reason(error: Exception) -> tuple[str, str]:
    name = str(error.args[0]) if error.args else ""
    if isinstance(error, KeyError):
        return UNKNOWN, f"adapter {name!r} is not registered"
    if isinstance(error, LabelTaken):
        return TAKEN, name
    if isinstance(error, FileExistsError):
        return EXISTS, f"adapter {name!r} is registered already"
    return FULL if isinstance(error, RegistryFull) else UNWRITABLE if isinstance(
        error, RegistryError
    ) else INVALID, name


async def serve(
    file: Path,
    address: Listening,
    secret: bytes,
    ready: Callable[[Listening], None] = lambda address: None,
    first_write_seconds: float = FIRST_WRITE_SECONDS,
) -> None:
    """Serve a store's file at an address until the task is cancelled.

    Raises RegistryError if the file can't be used, OSError for the address. `ready` is called once API servers may
    connect.
    """
    store = await asyncio.to_thread(RegistryStore, file)
    registry, server = Registry(store, secret, first_write_seconds), None
    try:
        server, told = await address.listen(registry.handle)  # the file's lock: no other registry listens there
        ready(told)
        await asyncio.get_running_loop().create_future()
    finally:
        if server is not None:
            server.close()
        await registry.close()


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--file", type=Path, required=True, help="SQLite file, created if it is missing")
    parser.add_argument("--first-write-seconds", type=float, default=FIRST_WRITE_SECONDS, help=argparse.SUPPRESS)
    parser.add_argument("--log-format", choices=("text", "json"), default="text", help="format of log lines")
    listener.add_flags(parser)


def run(given: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT; return the exit code."""
    where = Listener.of(given)

    def ready(address: Listening) -> None:
        where.tell(address)
        print("ready", flush=True)

    async def serve_until_told() -> None:
        task = asyncio.current_task()
        assert task is not None
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        await serve(given.file, where.address, where.secret, ready, given.first_write_seconds)

    try:
        asyncio.run(serve_until_told())
    except asyncio.CancelledError:
        return 0
    except (RegistryError, OSError, ValueError) as error:
        print(f"chorus registry: error: {error}", file=sys.stderr)
        return 1
    return 0
