"""A progress bar for long loads, on a terminal only."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress(label: str, total: int, *, in_bytes: bool = False) -> Iterator[Callable[[int], None]]:
    """Show progress, of bytes or of items, where standard error is a terminal; gone when the context ends.

    It is told what was done since the last time.
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
