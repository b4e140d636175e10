"""A progress bar for long loads, on a terminal only."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class LoadProgress:
    """Progress that shows nothing, for pipes and log files."""

    def start(self, total: int) -> None:
        """Set the total."""

    def advance(self, amount: int) -> None:
        """Add `amount` to what is done."""


class TerminalProgress(LoadProgress):
    """A transient bar on standard error; gone when the load is done."""

    def __init__(self, label: str, *, counts_bytes: bool = True) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TransferSpeedColumn,
        )

        amounts = (DownloadColumn(), TransferSpeedColumn()) if counts_bytes else (MofNCompleteColumn(),)
        columns = (TextColumn("{task.description}"), BarColumn(), *amounts)
        self.bar = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task = self.bar.add_task(label, total=None)

    def start(self, total: int) -> None:
        self.bar.update(self._task, total=total)

    def advance(self, amount: int) -> None:
        self.bar.update(self._task, advance=amount)


@contextmanager
def load_progress(label: str) -> Iterator[LoadProgress]:
    """Progress in bytes of loading `label`: a bar where standard error is a terminal, silence elsewhere."""
    with _shown(lambda: TerminalProgress(f"loading {label}")) as progress:
        yield progress


@contextmanager
def count_progress(label: str, total: int) -> Iterator[LoadProgress]:
    """Progress in `total` items, shown as `load_progress` is."""
    with _shown(lambda: TerminalProgress(label, counts_bytes=False)) as progress:
        progress.start(total)
        yield progress


@contextmanager
def _shown(make: Callable[[], TerminalProgress]) -> Iterator[LoadProgress]:
    if not sys.stderr.isatty():
        yield LoadProgress()
        return
    progress = make()
    with progress.bar:
        yield progress
