"""A progress bar for long loads, on a terminal only."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress(label: str, total: int, *, in_bytes: bool = False) -> Iterator[Callable[[int], None]]:
    """Show a progress bar, of bytes or of items, if standard error is a terminal; it is removed when the context ends.

    Yields a function that takes the amount done since its last call.
    """
    if not sys.stderr.isatty():  # no bar in pipes and log files
        yield lambda amount: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TransferSpeedColumn

    amounts = (DownloadColumn(), TransferSpeedColumn()) if in_bytes else (MofNCompleteColumn(),)
    columns = (TextColumn("{task.description}"), BarColumn(), *amounts)
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=total)
        yield lambda amount: bar.advance(task, amount)
