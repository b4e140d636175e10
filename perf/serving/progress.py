"""Progress of a load, on a terminal."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from .record import Record


class LoadProgress:
    """A progress bar; elsewhere than on a terminal, nothing. Drawn seldom: drawing takes the client's time."""

    def __init__(self, console: Console, total: int) -> None:
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        self._bar = Progress(*columns, console=console, refresh_per_second=2, disable=not console.is_terminal)
        self._task = self._bar.add_task("", total=total)
        self._sent = self._done = self._errors = self._tokens = 0

    def __enter__(self) -> LoadProgress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def changed(self, record: Record) -> None:
        """A record was sent, or has ended."""
        if not record.ended:
            self._sent += 1
        else:
            self._done += 1
            self._errors += not record.ok
            self._tokens += record.output_tokens
        text = f"{self._sent - self._done} in flight, {self._tokens} tokens"
        if self._errors:
            text += f", [red]{self._errors} failed[/red]"
        self._bar.update(self._task, completed=self._done, description=text)
