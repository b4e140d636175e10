"""Uploads one adapter's files to a disk that may hang: nothing here blocks the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from concurrent.futures import Future
from contextlib import suppress
from io import FileIO
from typing import TYPE_CHECKING, Any, TypeVar

from ....memory.files.uploads.content_store import StagedUpload
from ...engine.adapter_loader import LoadTimedOut
from ...engine.load_source import LoadSource
from ...errors import ApiError

if TYPE_CHECKING:
    from ...engine.adapter_loader import AdapterLoader

T = TypeVar("T")


class AdapterUpload:
    """A staged upload of one request, on its event loop. Each disk access has a load's deadline, and raises
    LoadTimedOut after it; an operation that hangs is cleaned up once the disk responds.
    """

    def __init__(self, loads: AdapterLoader) -> None:
        self._loads = loads
        self._beginning: Future[StagedUpload] | None = None
        self._latest: Future[Any] | None = None
        self.load: Future[Any] | None = None
        """The load that needs the files until it is done."""

    @property
    def has_begun(self) -> bool:
        return self._beginning is not None

    @property
    def names(self) -> Collection[str]:
        """Names of the files."""
        return self._draft.names

    async def begin(self, expected: int = 0) -> None:
        """Begin the staged upload, unless it has begun. expected: bytes of the body, which the files may need.

        Raises StoreFull, or an ApiError if the server accepts no uploads.
        """
        if self._loads.loaded is None:
            message = "this server accepts no uploaded adapters; start it with --adapter-uploads DIR, or give a path"
            raise ApiError(403, message, code="adapter_uploads_disabled")
        if self._beginning is None:
            room = min(expected, self._loads.loaded.max_bytes)
            self._beginning = self._loads.on_uploads(self._loads.loaded.draft, room)
            await self._wait_for(self._beginning)

    async def write(self, name: str, data: bytes | Callable[[], bytes]) -> None:
        """Append to a file; `data` may produce the bytes on a thread. Raises TooLarge, StoreFull."""
        draft = self._draft

        def write() -> None:
            draft.write(name, data() if callable(data) else data)

        await self._wait_for(self._loads.on_uploads(write))

    async def copy_beside(self, name: str, source: FileIO) -> None:
        """Have a file be a copy of another one: see `StagedUpload.copy_beside`. Raises PoolFull."""
        copy = await self._wait_for(self._loads.on_uploads(self._draft.copy_beside, name, source))
        self._loads.beside_load(copy)

    @property
    def source(self) -> LoadSource:
        """The files for a load; not to be used on the event loop."""
        return LoadSource.upload(self._draft)

    async def end(self, *, failed: bool) -> None:
        """End the staged upload, once nothing uses it any more. failed: nothing may need its files."""
        ended = None
        if self._latest is not None and not self._latest.done():
            self._latest.add_done_callback(lambda _: self._end(failed=True))
        elif self.load is not None and not self.load.done():
            self.load.add_done_callback(lambda load: self._end(failed=load.cancelled() or load.exception() is not None))
        else:
            ended = self._end(failed=failed)
        if ended is not None:
            with suppress(TimeoutError, asyncio.CancelledError):
                async with asyncio.timeout(self._loads.seconds):
                    await asyncio.shield(asyncio.wrap_future(ended))

    @property
    def _draft(self) -> StagedUpload:
        assert self._beginning is not None
        return self._beginning.result(0)

    def _end(self, *, failed: bool) -> Future[None] | None:
        begun = self._beginning
        if begun is None or begun.cancelled() or begun.exception() is not None:
            return None
        return self._loads.end_draft(begun.result(), failed=failed)

    async def _wait_for(self, future: Future[T]) -> T:
        self._latest = future
        done, _ = await asyncio.wait([asyncio.wrap_future(future)], timeout=self._loads.seconds)
        if not done:
            future.cancel()
            raise LoadTimedOut(f"the disk did not answer within {self._loads.seconds:g} seconds (adapter_load_seconds)")
        return done.pop().result()
