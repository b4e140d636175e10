"""`chorus simulate`: studies of policies in virtual time, beside the numbers that were published."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ...server.flags import UsageError
from .figures import command as figures

if TYPE_CHECKING:
    from .study import Study

HELP = "compare policies in virtual time, beside published numbers"


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "studies",
        nargs="*",
        metavar="STUDY",
        help="a study's name (see --list), a TOML file of your own, `all`, or `figures`: the papers' numbers and ours",
    )
    add("--list", action="store_true", help="print the studies that come with Chorus")
    add("--json", action="store_true", help="print one JSON object per study and line, and no table")
    add("--out", type=Path, metavar="DIR", help="write the same JSON there, as STUDY.json")
    add("--plots", type=Path, metavar="DIR", help="write pictures there (needs chorus[plots])")
    add("--seed", type=int, metavar="N", help="another seed for requests and random policies")
    add("--scale", type=float, default=1.0, metavar="X", help="multiply each row's duration (default: 1)")
    add("--quick", action="store_true", help="the study's own small version, for a first look")
    add("--check", action="store_true", help="fail (exit code 1) unless every published order of rows is reproduced")
    add("--time", action="store_true", help="print what the simulation itself took, to standard error")
    figures.add_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from ...core.costs.profile import ProfileError
    from .study import StudyError, load_study, shipped_studies
    from .table import print_list

    if arguments.studies == ["figures"]:
        return figures.run(arguments)
    if arguments.list:
        print_list([load_study(name) for name in shipped_studies()], Console())
        return 0
    if not arguments.studies:
        raise UsageError("chorus simulate: error: name a study (--list shows them)")
    if not 0 < arguments.scale < float("inf"):
        raise UsageError(f"chorus simulate: error: --scale is {arguments.scale:g}; give a number above 0")
    if arguments.seed is not None and arguments.seed < 0:
        raise UsageError(f"chorus simulate: error: --seed is {arguments.seed}; give 0 or more")
    names = shipped_studies() if arguments.studies == ["all"] else arguments.studies
    try:
        studies = [load_study(name) for name in names]
        holds = [_run_one(study, arguments) for study in studies]
    except (StudyError, ProfileError) as error:
        print(f"chorus simulate: error: {error}", file=sys.stderr)
        return 2
    return 1 if arguments.check and not all(holds) else 0


def _run_one(study: Study, arguments: argparse.Namespace) -> bool:
    """True if every published order holds."""
    import resource

    from rich.console import Console

    from .plots import write_plots
    from .results import run_study
    from .table import print_results

    wall, cpu = time.perf_counter(), time.process_time()
    with Console(stderr=True).status(study.name) as status:
        results = run_study(
            study, quick=arguments.quick, scale=arguments.scale, seed=arguments.seed,
            told=lambda row: status.update(f"{study.name}: {row}"),
        )  # fmt: skip
    if arguments.time:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20 if sys.platform == "darwin" else 1 << 10)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        print(f"{study.name}: {wall:.1f} s ({cpu:.1f} s of CPU), {peak:.0f} MiB at most", file=sys.stderr)
    text = json.dumps(results.to_json())
    if arguments.json:
        print(text)
    else:
        console = Console()
        print_results(results, console if console.is_terminal else Console(width=160))
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / f"{study.name}.json").write_text(f"{text}\n", encoding="utf-8")
    for path in write_plots(results, arguments.plots) if arguments.plots else ():
        print(f"wrote {path}", file=sys.stderr)
    return all(order.holds for order in results.orders)
