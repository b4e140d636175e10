"""Commands to the engines of all replicas: pause, sleep, and resets of the prefix cache and of images' rows.

Tests: tests/server/cluster/test_control.py
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from typing import Any

from ...memory.pages.block import Medium
from .commands import BUSY, FREEZE, RESET_ROWS, SLEEP, WAKE, error_of, reset_of
from .link import Link

log = logging.getLogger(__name__)


class _Command:
    """A command that some replicas have not carried out yet. Its future has the sum of their numbers."""

    def __init__(self, waiting: set[str]) -> None:
        self.waiting = waiting
        self.sum = 0
        self.error: Exception | None = None
        self.done: Future[int] = Future()

    def end_if_over(self) -> bool:
        if self.waiting or self.done.done():
            return not self.waiting
        if self.error is not None:
            self.done.set_exception(self.error)
        else:
            self.done.set_result(self.sum)
        return True


class Control:
    """Sends commands to all connected replicas, on their loop. A replica that connects later gets the present state.

    A replica that is gone has nothing to carry out: its cache has gone with it, and its successor gets the state.
    """

    def __init__(self, links: Sequence[Link]) -> None:
        self._links = links
        self._numbers = itertools.count()
        self._open: dict[int, _Command] = {}
        self._frozen = self._asleep = False

    def freeze(self, frozen: bool) -> Future[int]:
        self._frozen = frozen
        return self._send(FREEZE, frozen)

    def sleep(self) -> Future[int]:
        """All replicas sleep, or none: where one can't, the others wake."""
        was_frozen, self._frozen, self._asleep = self._frozen, True, True
        command = self._send(SLEEP)

        def end(slept: Future[int]) -> None:
            if slept.exception() is not None:
                self.wake()
                self.freeze(was_frozen)

        command.add_done_callback(end)
        return command

    def wake(self) -> Future[int]:
        self._asleep = False
        return self._send(WAKE)

    def reset(self, resets_running: bool, tiers: Collection[Medium]) -> Future[int]:
        """The sum of the replicas' forgotten blocks."""
        return self._send(reset_of(tiers), resets_running)

    def reset_image_rows(self) -> Future[int]:
        """The sum of the images whose rows the replicas have forgotten."""
        return self._send(RESET_ROWS)

    def _send(self, kind: str, argument: bool = True) -> Future[int]:
        number = next(self._numbers)
        links = [link for link in self._links if link.is_up]
        command = self._open[number] = _Command({link.name for link in links})
        for link in links:
            link.send("control", number, kind, argument)
        self._end_if_over(number)
        return command.done

    def on_up(self, link: Link) -> None:
        """A replica has connected: it runs. Call this before it gets requests."""
        if self._asleep:
            link.send("control", next(self._numbers), SLEEP, True)
        elif self._frozen:
            link.send("control", next(self._numbers), FREEZE, True)

    def on_reply(self, link: Link, number: int, count: int, failure: str | None, text: str) -> None:
        command = self._open.get(number)
        if command is None:
            if failure is not None:
                log.warning("replica %s could not be paused as the others are: %s", link.name, text)
            return
        command.waiting.discard(link.name)
        command.sum += count
        if failure is not None and command.error is None:
            command.error = error_of(failure, f"replica {link.name}: {text}" if failure == BUSY else text)
        self._end_if_over(number)

    def on_down(self, link: Link) -> None:
        for number, command in list(self._open.items()):
            command.waiting.discard(link.name)
            self._end_if_over(number)

    def _end_if_over(self, number: int) -> None:
        if self._open[number].end_if_over():
            del self._open[number]


def chained(call: Callable[[], Future[Any]], into: Future[Any]) -> None:
    """Give `into` the result of a future that `call` begins."""

    def end(done: Future[Any]) -> None:
        if (error := done.exception()) is not None:
            into.set_exception(error)
        else:
            into.set_result(done.result())

    try:
        call().add_done_callback(end)
    except Exception as error:
        into.set_exception(error)
