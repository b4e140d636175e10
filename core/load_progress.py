"""A progress bar for long loads, on a terminal only."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


class LoadProgress:
    """Shows nothing: what pipes and log files get."""

    def start(self, num_bytes: int) -> None:
        """Say how many bytes there are to read."""

    def advance(self, num_bytes: int) -> None:
        """Say that so many more bytes were read."""


class TerminalProgress(LoadProgress):
    """A transient bar on standard error; gone when the load is done."""

    def __init__(self, label: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

        columns = (TextColumn("loading {task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        self.bar = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task = self.bar.add_task(label, total=None)

    def start(self, num_bytes: int) -> None:
        self.bar.update(self._task, total=num_bytes)

    def advance(self, num_bytes: int) -> None:
        self.bar.update(self._task, advance=num_bytes)


@contextmanager
def load_progress(label: str) -> Iterator[LoadProgress]:
    """Progress of loading `label`: a bar where standard error is a terminal, silence elsewhere."""
    if not sys.stderr.isatty():
        yield LoadProgress()
        return
    progress = TerminalProgress(label)
    with progress.bar:
        yield progress
