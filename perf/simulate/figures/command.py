"""`chorus simulate figures`: the papers' numbers, ours, ratios, and in which share of seeds orders hold."""

from __future__ import annotations

import argparse
import json
import sys

from ....server.start.flags import UsageError

SEEDS, QUICK_SEEDS = 10, 3


def add_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("figures", "flags of `simulate figures`, the table of all published numbers")
    group.add_argument("--figure", action="append", metavar="NAME", help="this figure only; may be given several times")


def run(arguments: argparse.Namespace) -> int:
    from ....core.costs.profile import ProfileError
    from ..document import show
    from ..study import StudyError
    from .figure import load_figures
    from .results import compute
    from .table import document

    seeds, first = arguments.seeds or (QUICK_SEEDS if arguments.quick else SEEDS), arguments.seed or 0
    try:
        figures = load_figures()
        if arguments.list:
            for figure in figures:
                print(f"{figure.name:20} {figure.paper}, {figure.title}")
            return 0
        if arguments.figure:
            known = {figure.name: figure for figure in figures}
            if unknown := [name for name in arguments.figure if name not in known]:
                raise UsageError(
                    f"chorus simulate: error: --figure {unknown[0]} is none; use one of {', '.join(known)}"
                )
            figures = [known[name] for name in arguments.figure]
        results = compute(
            figures, seeds=seeds, first=first, quick=arguments.quick, jobs=arguments.jobs,
            told=lambda what: print(what, file=sys.stderr),
        )  # fmt: skip
    except (StudyError, ProfileError) as error:
        print(f"chorus simulate: error: {error}", file=sys.stderr)
        return 2
    flags = "".join(f" --figure {name}" for name in arguments.figure or ()) + " --quick" * arguments.quick
    flags += "" if arguments.seed is None else f" --seed {first}"
    flags += f" --seeds {seeds}" + ("" if arguments.markdown is None else f" --markdown {arguments.markdown}")
    text = document(results, f"chorus simulate figures{flags}", seeds)
    if arguments.json:
        for result in results:
            print(json.dumps(result.to_json()))
    else:
        show(text)
    if arguments.markdown is not None:
        arguments.markdown.write_text(text, encoding="utf-8")
    return 0
