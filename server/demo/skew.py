"""`chorus demo --skew`: one adapter's share of the requests grows and shrinks again, and steps merge its weights."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Callable

from rich.console import Console

from ..start.launch import LaunchError
from .client import Answer, DemoClient
from .questions import Question

SHARES = (0.0, 0.5, 1.0, 0.5, 0.0)
"""Shares of the requests for the one adapter, one after another."""

SHARE_LINES = 6
"""Lines printed for each share. They are counted, not timed, so a busy machine still shows every share."""

LINE_SECONDS = 1.0
CLIENTS = 8


class Skew:
    """Clients that always have a request in progress, and a periodic line with the mode of the steps."""

    def __init__(
        self,
        client: DemoClient,
        questions: dict[str, list[Question]],
        console: Console,
        answered: Callable[[Question, Answer], object],
        seed: int,
    ) -> None:
        """questions: by adapter; the last adapter's share grows. answered: called with every answer."""
        self._client = client
        self._console = console
        self._answered = answered
        self._source = random.Random(seed)
        self._questions = {name: itertools.cycle(asked) for name, asked in questions.items()}
        *self._others, self._one = questions
        self._share = 0.0
        self._tokens = 0

    async def run(self) -> None:
        """Go through `SHARES`. Raises the errors of asking, or LaunchError without an adapter."""
        if not self._others:
            raise LaunchError("chorus demo --skew needs an adapter; give some with --adapters")
        self._print(("seconds", self._one, "merged", "merges", "switches", "tokens/s"))
        asking = asyncio.gather(*(self._ask() for _ in range(CLIENTS)))
        watching = asyncio.create_task(self._watch())
        try:
            await asyncio.wait((asking, watching), return_when=asyncio.FIRST_COMPLETED)
            if asking.done():
                await asking
            await watching
        finally:
            asking.cancel()
            watching.cancel()
            await asyncio.gather(asking, watching, return_exceptions=True)

    async def _ask(self) -> None:
        while True:
            name = self._one if self._source.random() < self._share else self._source.choice(self._others)
            question = next(self._questions[name])
            answer = await self._client.ask(question)
            self._tokens += answer.tokens
            self._answered(question, answer)

    async def _watch(self) -> None:
        began = time.perf_counter()
        for share in SHARES:
            self._share = share
            for _ in range(SHARE_LINES):
                await self._watch_line(began)

    async def _watch_line(self, began: float) -> None:
        tokens, since = self._tokens, time.perf_counter()
        await asyncio.sleep(LINE_SECONDS)
        now = time.perf_counter()
        weights = await self._client.weights()
        merged = weights["merged_adapter"]
        rate, style = (self._tokens - tokens) / (now - since), None if merged is None else "green"
        share, counts = f"{self._share:.0%}", (weights["merges"], weights["switches"])
        self._print((f"{now - began:.0f}", share, merged or "-", *counts, f"{rate:.0f}"), style=style)

    def _print(self, cells: tuple[object, ...], style: str | None = None) -> None:
        seconds, share, merged, *numbers = cells
        line = f"{seconds:>7}{share:>12}  {merged:<16}" + "".join(f"{number:>10}" for number in numbers)
        self._console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)
