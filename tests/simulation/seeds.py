"""Simulation tests of the engine, by seed: `python -m tests.simulation.seeds --seeds 10000`.

The real engine, scheduler, adapter store, page pool and prefix cache run in virtual time over an executor that checks
every step, with reads that are slow, fail, end early or never end, and with aborts, reloads in place, pins, preemption,
KV that is copied out and back, merges, moves of requests, faults and tiny memory, under options drawn from all there
are. After every step the invariants must hold, every answer must be the one that the request gets alone, a token at a
time, and nothing may come from the cache of another tenant. Prints each failing seed with its cause; the same seed
gives the same run.

    python -m tests.simulation.seeds --first 250000 --seeds 750000 --jobs 1 --log seeds.log
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from chorus.perf.report.command import conclude, parser

from .checked_run import CheckedRun, FilesRun
from .engine_run import Campaign, Outcome, run_seed

LOG_EVERY = 1000


def simulate(seed: int) -> Outcome:
    return run_seed(seed, CheckedRun)


def simulate_files(seed: int) -> Outcome:
    """A run in which cached prefixes are kept in files."""
    return run_seed(seed, FilesRun)


def runs_until_one_fails(most: int, simulated: Callable[[int], Outcome] = simulate) -> int | None:
    return next((seed + 1 for seed in range(most) if simulated(seed)[1] is not None), None)


def runs_of_files_until_one_fails(most: int) -> int | None:
    return runs_until_one_fails(most, simulate_files)


def outcomes(seeds: range, jobs: int, simulated: Callable[[int], Outcome]) -> Iterator[Outcome]:
    if jobs == 1:
        yield from map(simulated, seeds)
        return
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(simulated, seeds, chunksize=50)


def main(argv: list[str] | None = None) -> int:
    command = parser(__spec__, __doc__)
    command.add_argument("--seeds", type=int, default=10_000, help="number of runs")
    command.add_argument("--first", type=int, default=0, help="the first seed; with --seeds 1 to see one again")
    command.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes")
    command.add_argument("--log", type=Path, help="file to which progress is appended, to go on from with --first")
    command.add_argument("--files", action="store_true", help="keep cached prefixes in files in each run")
    args = command.parse_args(argv)
    campaign = Campaign(args.log, LOG_EVERY)
    simulated = simulate_files if args.files else simulate
    for outcome in outcomes(range(args.first, args.first + args.seeds), args.jobs, simulated):
        campaign.add(outcome)
    return conclude(campaign.result(), not campaign.failed)


if __name__ == "__main__":
    sys.exit(main())
