"""A progress bar of a list of prompts, on standard error."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ...core.requests.request_params import InvalidRequest


@contextmanager
def progress_bar(total: int, use_tqdm: Any, what: str) -> Iterator[Callable[[], None]]:
    """A bar that the function advances by one; any thread may call it.

    use_tqdm: vLLM's name; None shows the bar for several prompts if standard error is a terminal. Raises InvalidRequest
    for another value.
    """
    if use_tqdm is not None and not isinstance(use_tqdm, bool):
        raise InvalidRequest("use_tqdm", f"use_tqdm is {use_tqdm!r:.80}; it must be True, False or None")
    if not (total > 1 and sys.stderr.isatty() if use_tqdm is None else use_tqdm):
        yield _nothing
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)


def _nothing() -> None:
    pass
