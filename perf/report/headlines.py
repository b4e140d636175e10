"""The measurements on README's first screen, from the files in perf/results: `python -m chorus.perf.report.headlines`.

The newest result of each command becomes a line of README's table, between two marks, and a part of its picture in
`docs/pictures`, for light and for dark pages. The picture needs matplotlib (`pip install 'chorus-lora[plan]'`).
`--check` fails if the table or what the pictures tell is stale.

Tests: tests/perf/report/test_headlines.py
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from .command import parser
from .headline_picture import Bars, draw
from .history import COMMANDS, RESULTS, Measured, Values, folders

ROOT = RESULTS.parent.parent
README, PICTURES = ROOT / "README.md", ROOT / "docs" / "pictures"
BEGIN = "<!-- measured: python -m chorus.perf.report.headlines -->"
END = "<!-- end of measured -->"

HEADLINES = {name: each for name, each in COMMANDS.items() if each.question}
"""By the name of the file."""


class Found(NamedTuple):
    """The newest result of a command."""

    headline: Measured
    values: Values
    folder: str

    def text(self, name: str) -> str:
        return self.headline.text(name, self.values)

    @property
    def bars(self) -> Bars | None:
        """Its part of the picture, if it has one."""
        pairs = [each.split("=") for each in self.text("bars").split(";") if each]
        named = [(name, float(value)) for name, value in pairs]
        return Bars(self.text("title"), self.headline.unit, named, self.headline.goal) if named else None


def newest(results: Path) -> list[Found]:
    """The newest result of each command that has one, in the order of `HEADLINES`."""
    found = []
    for name, headline in HEADLINES.items():
        path = next((each / f"{name}.json" for each in folders(results) if (each / f"{name}.json").exists()), None)
        if path is not None:
            found.append(Found(headline, json.loads(path.read_text("utf-8")), path.parent.name))
    return found


def table(found: Sequence[Found]) -> str:
    """The lines of README's table, marks included."""
    lines = [BEGIN, "| question | measured | rerun it |", "|---|---|---|"]
    for each in found:
        again = f"`python -m {each.headline.command}{each.text('options')}`"
        lines.append(f"| {each.text('question')} | {each.text('answer')} | {again} |")
    return "\n".join([*lines, END])


def with_table(text: str, lines: str) -> str:
    """A text with its table replaced. Raises ValueError for a text without marks."""
    before, is_there, rest = text.partition(BEGIN)
    _, has_end, after = rest.partition(END)
    if not (is_there and has_end):
        raise ValueError(f"the text has no {BEGIN!r} and {END!r} after it")
    return f"{before}{lines}{after}"


def told(found: Sequence[Found]) -> str:
    """What a picture tells, as text that is kept in it."""
    parts = [each.bars for each in found if each.bars is not None]
    texts = [f"{bars.title}: {', '.join(f'{name} {value:.4g}' for name, value in bars.bars)}" for bars in parts]
    return "; ".join(texts).replace("\n", " ")


def is_stale(results: Path, readme: Path, pictures: Path) -> list[Path]:
    """The files that are not what the results say."""
    found = newest(results)
    text = readme.read_text("utf-8")
    stale = [] if with_table(text, table(found)) == text else [readme]
    paths = [pictures / f"measured-{mode}.svg" for mode in ("light", "dark")]
    return stale + [path for path in paths if not path.exists() or told(found) not in path.read_text("utf-8")]


def main(argv: Sequence[str] | None = None) -> int:
    command = parser(__spec__, __doc__)
    command.add_argument("--check", action="store_true", help="fail if something is stale")
    command.add_argument("--results", type=Path, default=RESULTS)
    command.add_argument("--readme", type=Path, default=README)
    command.add_argument("--pictures", type=Path, default=PICTURES)
    args = command.parse_args(argv)
    if args.check:
        stale = is_stale(args.results, args.readme, args.pictures)
        for path in stale:
            print(f"{path} is stale: run python -m chorus.perf.report.headlines", file=sys.stderr)
        return bool(stale)
    found = newest(args.results)
    args.readme.write_text(with_table(args.readme.read_text("utf-8"), table(found)), "utf-8")
    draw([each.bars for each in found if each.bars is not None], told(found), args.pictures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
