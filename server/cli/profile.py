"""`chorus profile`: measures the cost of steps and loads on this machine, for the simulator and the policies."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from ...core.costs.profile import Profile
from ..machine_faults import reason_of
from ..settings import Settings

GOOD_R2 = 0.95
QUIET = 0.15
"""Relative difference between rounds above which the machine was too busy for a reliable profile."""


def add_flags(parser: argparse.ArgumentParser, number: Callable[[str], int]) -> None:
    """number: parses a flag's positive number."""
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("profile.json"),
        metavar="FILE",
        help="file to write (default: profile.json)",
    )
    parser.add_argument(
        "--batches", type=number, default=240, metavar="N", help="decode batches to measure (default: 240)"
    )
    parser.add_argument("--rounds", type=number, default=5, metavar="N", help="times to run each (default: 5)")


def run(settings: Settings, output: Path, batches: int, rounds: int, out: TextIO) -> None:
    """Measure, print and write. Raises LaunchError if something can't be measured or written."""
    from ...core.costs.fit import FitError
    from ...core.costs.machine import measure_machine
    from ...core.costs.measure import MeasureError
    from ..start.launch import LaunchError, check_model

    check_model(settings)
    if not output.parent.is_dir():
        raise LaunchError(f"there is no directory {output.parent} to write {output.name} into; make it")
    try:
        with _bar() as progress:
            measured = measure_machine(settings.engine_config(), batches=batches, rounds=rounds, progress=progress)
        measured.profile.save(output)
    except (MeasureError, FitError) as error:
        raise LaunchError(f"can't measure {settings.model}: {error}") from None
    except (OSError, ValueError) as error:
        raise LaunchError(f"can't measure {settings.model}: {reason_of(error, output)}") from error
    print(table(measured.profile), file=out)
    print(f"noise      a median round is {measured.noise:.1%} above the best", file=out)
    if measured.noise > QUIET:
        print("           the machine was busy: stop other programs, or raise --rounds", file=out)
    if not measured.uncached:
        print("           adapter files were read from the system's cache, not from the disk", file=out)
    print(f"written to {output}", file=out)


def table(profile: Profile) -> str:
    """The coefficients of every cost model, and how well each fits the measurements."""
    lines = [f"profile    {profile.model}", f"on         {profile.device}"]
    for name in ("step", "disk", "link", "overhead"):
        part = getattr(profile, name)
        if part is None:
            continue
        report = part.fit
        quality = (
            ""
            if report is None
            else (f"R² {report.r2:.4f}   mean error {report.mean_error:.1%}   {report.samples} samples")
        )
        if report is not None and report.decode_r2 is not None:
            quality += f"   R² of decode steps {report.decode_r2:.4f}"
        weak = name == "step" and report is not None and min(report.r2, report.decode_r2 or report.r2) < GOOD_R2
        lines.append(f"{name:10s} {quality}{'   (weak)' if weak else ''}")
        lines += [f"  {term:18s} {_shown(term, number.value)}" for term, number in part.terms.items()]
    return "\n".join(lines)


def _shown(term: str, value: float) -> str:
    return f"{value:14.6f}" if term == "contention" else f"{value * 1e6:14.6f} µs"


@contextmanager
def _bar() -> Iterator[Callable[[int, int], None]]:
    """A progress bar of the steps on a terminal; nothing elsewhere."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("measuring", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
