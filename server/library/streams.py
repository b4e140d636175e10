"""Streams of `LLM`: one completion's text as it comes, for `for` and `async for`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from concurrent.futures import Future

from ..errors import GenerationFailed
from .completion import Completion
from .loop import LoopThread


class Stream:
    """Pieces of a completion's text. The first read starts the request; leaving the loop ends it."""

    def __init__(self, loop: LoopThread, pieces: AsyncGenerator[str, None], ended: list[Completion]) -> None:
        """pieces: run on `loop`. ended: gets the whole completion at the end."""
        self._loop = loop
        self._pieces = pieces
        self._ended = ended

    @property
    def completion(self) -> Completion:
        """The whole completion, once the stream has been read to its end. Raises GenerationFailed before."""
        if not self._ended:
            raise GenerationFailed("the stream has not been read to its end yet")
        return self._ended[0]

    def __iter__(self) -> Iterator[str]:
        try:
            while (piece := self._loop.run(self._read())) is not None:
                yield piece
        finally:
            self.close()

    async def __aiter__(self) -> AsyncIterator[str]:
        try:
            while (piece := await asyncio.wrap_future(self._loop.submit(self._read()))) is not None:
                yield piece
        finally:
            self.close()

    def close(self) -> Future[None] | None:
        """End the request, if it has not ended. May be called repeatedly."""
        return self._loop.try_submit(self._pieces.aclose)

    async def _read(self) -> str | None:
        return await anext(self._pieces, None)
