"""`chorus simulate`: studies of policies in virtual time, next to published numbers.

Tests: tests/perf/simulate/test_studies.py, tests/perf/simulate/test_results.py
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...server.start.flags import UsageError

if TYPE_CHECKING:
    from .study import Study

SHARE = 0.8
"""An order of rows is reproduced if it holds in this share of the seeds, unless `--check` gives another share."""

SEEDS, QUICK_SEEDS = 10, 3
"""Default seeds of figures; a study has its own number."""

HELP = "compare policies in virtual time, next to published numbers"


def number(
    kind: type[int] | type[float], least: float, *, above: bool = False, most: float = math.inf
) -> Callable[[str], float]:
    """A flag's type: finite numbers from `least` on, or `above` it, up to `most`."""

    def parse(text: str) -> float:
        bounds = f"above {least:g}" if above else f"{least:g} or more"
        bounds += f", at most {most:g}" if most < math.inf else ""
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not (least < value if above else least <= value) or not value <= most or value == math.inf:
            raise argparse.ArgumentTypeError(f"is {text}; give {'a number ' if above else ''}{bounds}")
        return value

    return parse


def add_flags(parser: argparse.ArgumentParser) -> None:
    add, count = parser.add_argument, number(int, 1)
    what = "a study's name (see --list), a TOML file of your own, `all`, or `figures`: the papers' numbers and ours"
    add("studies", nargs="*", metavar="STUDY", help=what)
    add("--list", action="store_true", help="print the studies that come with Chorus")
    add("--json", action="store_true", help="print one JSON object per study and line, and no table")
    add("--out", type=Path, metavar="DIR", help="write the same JSON there, as STUDY.json")
    add("--markdown", type=Path, metavar="FILE", help="write the tables there, as perf/results has them")
    first = "the first seed for requests and random policies (default: 0)"
    add("--seed", type=number(int, 0), metavar="N", help=first)
    add("--seeds", type=count, metavar="N", help="how many seeds each row has (default: the study's own number, 10)")
    add("--jobs", type=count, default=1, metavar="N", help="processes; results don't depend on them (default: 1)")
    add("--rows", metavar="PATTERN", help="only rows with a name in which this regular expression is found")
    add(
        "--region",
        action="store_true",
        help="also simulate other loads, replicas and so on, to see where each order holds",
    )
    times = number(float, 0, above=True)
    add("--scale", type=times, default=1.0, metavar="X", help="multiply each row's duration (default: 1)")
    add("--traces", type=Path, metavar="DIR", help="of the traces that some studies need; `all` leaves these out")
    add("--quick", action="store_true", help="the study's own small version with fewer seeds, for a first look")
    check = f"fail (exit code 1) unless every order holds in this share of seeds and no request failed ({SHARE:g})"
    share = number(float, 0, above=True, most=1)
    add("--check", type=share, nargs="?", const=SHARE, metavar="SHARE", help=check)
    add("--time", action="store_true", help="print the simulation's own time and memory, to standard error")
    add("--figure", action="append", metavar="NAME", help="of `figures`, this one; may be given several times")


def run(arguments: argparse.Namespace) -> int:
    from ...core.costs.profile import ProfileError
    from ..workload.fields import WorkloadError

    if not arguments.studies and not arguments.list:
        raise UsageError("chorus simulate: error: name a study (--list shows them)")
    try:
        return _run_figures(arguments) if arguments.studies == ["figures"] else _run_studies(arguments)
    except (WorkloadError, ProfileError) as error:
        print(f"chorus simulate: error: {error}", file=sys.stderr)
        return 2


def _run_studies(arguments: argparse.Namespace) -> int:
    from .document import document
    from .results import run_study
    from .study import load_study, shipped_studies

    if arguments.list:
        for name in shipped_studies():
            print(f"{name:20} {load_study(name).title}")
        return 0
    names = shipped_studies() if arguments.studies == ["all"] else arguments.studies
    studies = _there([load_study(name, arguments.traces) for name in names], skip=arguments.studies == ["all"])
    share, flags, all_results = arguments.check or SHARE, _flags(arguments), []
    for study in studies:
        with _timed(study.name, arguments) as progress:
            results = run_study(
                study,
                quick=arguments.quick,
                scale=arguments.scale,
                seed=arguments.seed,
                seeds=arguments.seeds,
                jobs=arguments.jobs,
                region=arguments.region,
                only=arguments.rows,
                progress=progress,
            )
        all_results.append(results)
        found = results.to_json()
        _print([found], document([results], flags, share), arguments)
        if arguments.out is not None:
            arguments.out.mkdir(parents=True, exist_ok=True)
            (arguments.out / f"{study.name}.json").write_text(f"{json.dumps(found)}\n", encoding="utf-8")
    if arguments.markdown is not None:
        arguments.markdown.write_text(document(all_results, flags, share), encoding="utf-8")
    return 1 if arguments.check and not all(each.holds_in(share) for each in all_results) else 0


def _run_figures(arguments: argparse.Namespace) -> int:
    from .figures.figure import load_figures
    from .figures.results import compute, document

    known = {figure.name: figure for figure in load_figures()}
    if arguments.list:
        for name, figure in known.items():
            print(f"{name:20} {figure.paper}, {figure.title}")
        return 0
    names = arguments.figure or list(known)
    if unknown := [name for name in names if name not in known]:
        raise UsageError(f"chorus simulate: error: --figure {unknown[0]} is unknown; use one of {', '.join(known)}")
    arguments.seeds = seeds = arguments.seeds or (QUICK_SEEDS if arguments.quick else SEEDS)
    with _timed("figures", arguments) as progress:
        results = compute(
            [known[name] for name in names],
            seeds=seeds,
            first=arguments.seed or 0,
            quick=arguments.quick,
            jobs=arguments.jobs,
            progress=progress,
        )
    flags = "".join(f" --figure {name}" for name in arguments.figure or ()) + _flags(arguments)
    flags += "" if arguments.markdown is None else f" --markdown {arguments.markdown}"
    text = document(results, f"chorus simulate figures{flags}", seeds)
    _print([result.to_json() for result in results], text, arguments)
    if arguments.markdown is not None:
        arguments.markdown.write_text(text, encoding="utf-8")
    return 0


def _print(found: list[Any], text: str, arguments: argparse.Namespace) -> None:
    """Return the results as JSON, or as Markdown: rendered on a terminal, plain elsewhere."""
    from rich.console import Console
    from rich.markdown import Markdown

    console = Console()
    if arguments.json:
        print("\n".join(map(json.dumps, found)))
    elif console.is_terminal:
        console.print(Markdown(text))
    else:
        print(text, end="")


def _flags(arguments: argparse.Namespace) -> str:
    """Return the flags that affect results."""
    flags = "".join(f" --{name}" for name in ("quick", "region") if getattr(arguments, name))
    given = {name: getattr(arguments, name) for name in ("seed", "seeds")}
    flags += "".join(f" --{name} {value}" for name, value in given.items() if value is not None)
    flags += "" if arguments.rows is None else f" --rows {shlex.quote(arguments.rows)}"
    return flags + (f" --scale {arguments.scale:g}" if arguments.scale != 1 else "")


def _there(studies: list[Study], *, skip: bool) -> list[Study]:
    """Return the studies whose files are all there. Raises StudyError for the first other one, unless `skip`."""
    from .setup import StudyError

    for study in studies:
        if study.missing is not None:
            if not skip:
                raise StudyError(study.missing)
            print(f"chorus simulate: left out: {study.missing}", file=sys.stderr)
    return [study for study in studies if study.missing is None]


@contextmanager
def _timed(name: str, arguments: argparse.Namespace) -> Iterator[Callable[[str], None]]:
    """Show finished simulations, and with --time at the end their time and memory, including child processes."""
    import resource

    from rich.console import Console

    wall, cpu = time.perf_counter(), sum(os.times()[:4])
    with Console(stderr=True).status(name) as status:
        yield status.update
    if arguments.time:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20 if sys.platform == "darwin" else 1 << 10)
        wall, cpu = time.perf_counter() - wall, sum(os.times()[:4]) - cpu
        print(f"{name}: {wall:.1f} s ({cpu:.1f} s of CPU), {peak:.0f} MiB at most", file=sys.stderr)
