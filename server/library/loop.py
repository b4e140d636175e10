"""The event loop of an `LLM`, on its own thread, for programs with and without a loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from ..errors import EngineUnavailable

T = TypeVar("T")


class LoopThread:
    """Runs coroutines from any thread, from its beginning to `stop`."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="chorus-llm", daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine; cancelling the future cancels it. Raises EngineUnavailable after `stop`."""
        if self._loop.is_closed():
            work.close()
            raise EngineUnavailable("this LLM is closed")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def try_submit(self, begin: Callable[[], Coroutine[Any, Any, T]]) -> Future[T] | None:
        """Start a coroutine, unless `stop` has ended everything."""
        return None if self._loop.is_closed() else asyncio.run_coroutine_threadsafe(begin(), self._loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine; if waiting for it is interrupted, the coroutine is cancelled."""
        future = self.submit(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def stop(self) -> None:
        """Cancel running coroutines and end the thread. May be called repeatedly."""
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(_cancel_all(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _cancel_all() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
