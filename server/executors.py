"""Thread pools for work that may never end: each kind has its own, and none keeps the process alive.

The standard library's pool joins its threads when the interpreter exits, so one thread that waits for a dead disk would
keep a server from ending; and a pool that everything shares is lost for everything once one kind of work fills it.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

T = TypeVar("T")


class PoolFull(Exception):
    """All threads of a pool are busy and its queue is full; the same work may be taken later."""


class DaemonPool(Executor):
    """An executor of at most `threads` daemon threads, which are started as they are needed.

    At most `max_waiting` calls wait for a thread; more raise PoolFull.
    """

    def __init__(self, name: str, threads: int, max_waiting: int = 1024) -> None:
        self._name = name
        self._threads = threads
        self._max_waiting = max_waiting
        self._numbers = itertools.count(1)
        self._changed = threading.Condition()
        self._calls: deque[tuple[Future, Callable[[], Any]]] = deque()
        self._num_threads = 0
        self._num_idle = 0
        self._closed = False

    def submit(self, function: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Run `function` on one of the threads. Raises PoolFull."""
        future: Future[T] = Future()
        with self._changed:
            if self._closed:
                raise RuntimeError(f"the pool {self._name} is closed")
            if self._num_idle <= len(self._calls) and self._num_threads == self._threads:
                self._drop_cancelled()
                if len(self._calls) >= self._max_waiting:
                    raise PoolFull(f"all {self._threads} threads for {self._name} are busy")
            self._calls.append((future, lambda: function(*args, **kwargs)))
            if self._num_idle >= len(self._calls):
                self._changed.notify()
            elif self._num_threads < self._threads:
                self._num_threads += 1
                name = f"chorus-{self._name}-{next(self._numbers)}"
                try:
                    threading.Thread(target=self._run, name=name, daemon=True).start()
                except RuntimeError:
                    self._num_threads -= 1
                    if not self._num_threads:  # no thread is left to run it
                        self._calls.pop()
                        raise
        return future

    async def run(self, function: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
        """The result of a call, awaited on the running loop. Raises PoolFull."""
        return await asyncio.wrap_future(self.submit(function, *args, **kwargs))

    def shutdown(self, wait: bool = False, *, cancel_futures: bool = True) -> None:
        """Take no more calls; never waits, whatever `wait` says: a thread may be stuck for ever."""
        with self._changed:
            self._closed = True
            while cancel_futures and self._calls:
                self._calls.popleft()[0].cancel()
            self._changed.notify_all()

    def _drop_cancelled(self) -> None:
        self._calls = deque(call for call in self._calls if not call[0].cancelled())

    def _run(self) -> None:
        while True:
            with self._changed:
                self._num_idle += 1
                while not self._calls and not self._closed:
                    self._changed.wait()
                self._num_idle -= 1
                if not self._calls:
                    self._num_threads -= 1
                    return
                future, call = self._calls.popleft()
            if future.set_running_or_notify_cancel():
                try:
                    result = call()
                except BaseException as error:
                    future.set_exception(error)
                else:
                    future.set_result(result)
                    del result
            del future, call  # an idle thread keeps nothing alive


class Executors:
    """The pools of one server.

    text: reading long bodies, and writing long answers and lists. stop: the engine's end. scrapes: writing the metrics.
    page: encoding the operator's page.
    """

    def __init__(self) -> None:
        self.text = DaemonPool("text", threads=2)
        self.stop = DaemonPool("stop", threads=1, max_waiting=1)
        self.scrapes = DaemonPool("scrapes", threads=1, max_waiting=1)
        self.page = DaemonPool("page", threads=1, max_waiting=1)

    def shutdown(self) -> None:
        for pool in (self.text, self.stop, self.scrapes, self.page):
            pool.shutdown()
