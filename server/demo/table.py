"""Display of the demo: a table of running lanes, and the summary."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from .client import Answer
from .questions import Question, Score

MARKS = {True: "✓", False: "✗", None: ""}
STYLES = {True: "green", False: "red", None: ""}


@dataclass(slots=True)
class Lane:
    """Questions of one adapter or the base, asked one after another while other lanes do the same."""

    name: str
    rank: int
    questions: list[Question]
    question: Question | None = None
    answer: Answer = field(default_factory=Answer)
    right: bool | None = None
    score: Score = field(default_factory=Score)


class LaneTable:
    """Shows the lanes: as a live table on a terminal, otherwise as a line per finished answer."""

    def __init__(self, console: Console, lanes: list[Lane], *, judged: bool) -> None:
        self._console = console
        self._lanes = lanes
        self._judged = judged
        self._live = (
            Live(console=console, get_renderable=self._render, refresh_per_second=12) if console.is_terminal else None
        )

    def __enter__(self) -> LaneTable:
        if self._live is not None:
            self._live.start(refresh=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def finished(self, lane: Lane) -> None:
        """Show a complete answer of the lane."""
        if self._live is not None or lane.question is None:
            return
        answer, mark = lane.answer, MARKS[lane.right]
        line = (
            f"{lane.name:<12} r={lane.rank:<3} {lane.question.text!r} -> {answer.text!r} {mark} "
            f"[{answer.tokens_per_second:.0f} tok/s, {answer.adapters} adapters in a step]"
        )
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _render(self) -> Table:
        table = Table(expand=True)
        table.add_column("adapter", no_wrap=True)
        table.add_column("rank", justify="right", no_wrap=True)
        table.add_column("prompt", ratio=2, no_wrap=not self._judged)
        table.add_column("answer", ratio=3 if self._judged else 5, no_wrap=self._judged)
        if self._judged:
            table.add_column("right", justify="right", no_wrap=True)
        table.add_column("tok/s", justify="right", no_wrap=True)
        table.add_column("adapters\nin step", justify="right", no_wrap=True)
        for lane in self._lanes:
            right = [Text(f"{lane.score.exact}/{lane.score.asked} {MARKS[lane.right]}", STYLES[lane.right])]
            cells = (
                lane.name,
                str(lane.rank) if lane.rank else "-",
                Text(printable(lane.question.text) if lane.question else ""),
                Text(printable(lane.answer.text), STYLES[lane.right]),
                *(right if self._judged else ()),
                f"{lane.answer.tokens_per_second:.0f}",
                str(lane.answer.adapters),
            )
            table.add_row(*cells)
        return table


def printable(text: str) -> str:
    """Text in one row, without terminal control characters."""
    return "".join(char if char.isprintable() else " " if char.isspace() else "·" for char in text)


def score_table(scores: dict[str, Score], ranks: dict[str, int]) -> Table:
    """Exact answers per skill."""
    table = Table(title="exact answers to inputs the model has never seen")
    for heading in ("skill", "rank", "asked", "exact", "%", "another skill's"):
        table.add_column(heading, justify="left" if heading == "skill" else "right")
    for name, score in scores.items():
        counts = str(score.asked), str(score.exact), f"{100 * score.accuracy:.1f}", str(len(score.crossed))
        table.add_row(name, str(ranks.get(name, 0) or "-"), *counts)
    return table
