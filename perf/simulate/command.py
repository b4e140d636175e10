"""`chorus simulate`: studies of policies in virtual time, beside the numbers that were published."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ...server.flags import UsageError

if TYPE_CHECKING:
    from .study import Study

HELP = "compare policies in virtual time, beside published numbers"


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "studies", nargs="*", metavar="STUDY", help="a study's name (see --list), a TOML file of your own, or `all`"
    )
    parser.add_argument("--list", action="store_true", help="print the studies that come with Chorus")
    parser.add_argument("--json", action="store_true", help="print one JSON object per study and line, and no table")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write the same JSON there, as STUDY.json")
    parser.add_argument("--plots", type=Path, metavar="DIR", help="write pictures there (needs chorus[plots])")
    parser.add_argument("--seed", type=int, metavar="N", help="another seed for requests and random policies")
    parser.add_argument(
        "--scale", type=float, default=1.0, metavar="X", help="multiply each row's duration (default: 1)"
    )
    parser.add_argument("--quick", action="store_true", help="the study's own small version, for a first look")
    parser.add_argument(
        "--check", action="store_true", help="fail (exit code 1) unless every published order of rows is reproduced"
    )

    parser.add_argument("--time", action="store_true", help="print what the simulation itself took, to standard error")


def run(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from ...core.costs.profile import ProfileError
    from .study import StudyError, load_study, shipped_studies
    from .table import print_list

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


def _took(name: str, wall: float, cpu: float) -> str:
    """Return the time since `wall` and `cpu`, and the peak memory of the process, as text."""
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20 if sys.platform == "darwin" else 1 << 10)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return f"{name}: {wall:.1f} s ({cpu:.1f} s of CPU), {peak:.0f} MiB at most"


def _run_one(study: Study, arguments: argparse.Namespace) -> bool:
    from rich.console import Console
    from rich.progress import Progress

    from .plots import write_plots
    from .results import run_study
    from .table import print_results

    start = time.perf_counter(), time.process_time()
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(study.name, total=len(study.rows) + 1)

        def tell(row: str) -> None:
            progress.update(task, advance=1, description=f"{study.name}: {row}")

        results = run_study(
            study, quick=arguments.quick, scale=arguments.scale, seed=arguments.seed, told=tell
        )  # fmt: skip
    if arguments.time:
        print(_took(study.name, *start), file=sys.stderr)
    if arguments.json:
        print(json.dumps(results.to_json()))
    else:
        console = Console()
        print_results(results, console if console.is_terminal else Console(width=160))
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        path = arguments.out / f"{study.name}.json"
        path.write_text(json.dumps(results.to_json()) + "\n", encoding="utf-8")
    if arguments.plots is not None:
        for path in write_plots(results, arguments.plots):
            print(f"wrote {path}", file=sys.stderr)
    return all(order.holds for order in results.orders)
