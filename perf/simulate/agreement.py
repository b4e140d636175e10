"""Agreement of the simulator with reality: one trace, served by the real executor in real time and simulated.

    python -m chorus.perf.simulate.agreement [--workload SPEC] [--model DIR --adapters DIR] [--profile FILE]

The profile is fitted on this machine before and after each repeat, unless one is given, and the repeat simulated with
both: a machine that drifts in speed drifts for both. A repeat in which the machine was not quiet says nothing and is
made again: the rounds of a fit differ, the same steps take longer after it than before, the system held the process
up, or others took processor time. The requests are the first ones of a workload, squeezed or stretched in time to the
load that is asked for, with lengths cut to what the model takes; the profile was fitted to none of them.

What a client sees of a server, `perf.simulate.fleet_agreement` compares.

Exits with 1 when the median over the requests of |simulated / real - 1| is above 0.15 of TTFT or 0.07 of the latency.
Exits with 2, and draws no conclusion, when twice as many repeats as were asked for have not brought enough quiet ones.
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from ...core.config import EngineConfig
from ...core.costs.machine import Measured, measure_machine
from ...core.costs.measure import forget_file
from ...core.costs.profile import Profile, load_profile
from ...core.engine import Engine
from ...core.requests.request import Request
from ...core.requests.sampling_params import SamplingParams
from ...memory.adapters.adapter import Tier
from ...memory.files.format import WEIGHTS_FILE
from ..bench import random_model
from ..bench.machine import FOREIGN_LIMIT, CpuSample
from ..bench.sizes import Geometry
from ..report.command import conclude, parser
from ..report.table import Table
from ..workload.errors import WorkloadError
from ..workload.request import TraceRequest
from ..workload.spec import WorkloadSpec
from .adapters import SimAdapters
from .cluster import simulate
from .loads import FIRST_TOKEN_ID, at_load, prompt_of
from .records import Records, Served
from .replica import Replica

HELD_UP_SECONDS = 0.5
MOST_NOISE = 0.1
"""Noise of a fit (`Measured.noise`), and drift from the fit before (`Measured.drift`)."""

MOST_ERROR = {"ttft": 0.15, "e2e": 0.07}
"""Of the medians over a workload's requests."""

READ_THREADS = 2

MADE_UP = {
    "requests": 10_000, "arrivals": {"process": "poisson", "rate": 1.0},
    "popularity": {"kind": "uniform"}, "adapters": {"count": 8, "base_share": 0.1},
    "lengths": {"kind": "laws", "prompt": {"law": "uniform", "low": 16, "high": 160},
                "output": {"law": "uniform", "low": 12, "high": 64}},
}  # fmt: skip
"""A workload, at the load that is asked for."""


@dataclass(frozen=True, slots=True)
class Repeat:
    """A load that was served and simulated. unrest: reasons why it says nothing."""

    real: Records
    simulated: Records
    unrest: list[str]


class HeldUp(UserWarning):
    """The system gave the process no processor for long during a step."""


def serve_both(
    config: EngineConfig,
    profile: Profile,
    workload: Sequence[TraceRequest],
    load: float,
    refit: Callable[[], Profile] | None = None,
) -> tuple[Records, Records]:
    """A workload in real time, on an engine that has read none of its adapters yet, and simulated with `profile`.

    load: share of the time in which it keeps the machine busy. refit: gives another profile once the trace has been
    served, with which it is simulated, too.
    """
    gc.collect()  # what an engine before this one held goes back now
    engine = Engine.from_config(config)
    try:
        trace = at_load(workload, load, profile, min(4, config.max_num_seqs), engine.store.names())
        warm_up(engine)
        for name in engine.store.names():
            forget_file(engine.store.get(name).manifest.path / WEIGHTS_FILE)  # as when the disk was measured
        real, virtual = serve(engine, trace), simulated(engine, profile, trace)
        if refit is not None:
            virtual.extend(simulated(engine, refit(), trace))
        return real, virtual
    finally:
        engine.close()


def serve(engine: Engine, trace: Sequence[TraceRequest]) -> Records:
    """Serve `trace` in real time on an engine that does nothing else: requests come when their time has come.

    Warns with HeldUp of steps in which the system gave the process no processor for long: such a run says nothing.
    """
    prompts = {request.id: prompt_of(request, engine.model.vocab_size) for request in trace}
    records = Records()
    open_: dict[str, tuple[Request, TraceRequest]] = {}
    first_tokens: dict[str, float] = {}
    coming = deque(trace)
    start = time.perf_counter()
    begin = time.monotonic()  # the engine's clock
    while coming or open_:
        before = time.perf_counter() - start
        while coming and coming[0].arrival <= before:
            asked = coming.popleft()
            params = SamplingParams(max_tokens=asked.output_tokens, temperature=0.0, seed=0, ignore_eos=True)
            request = Request(str(asked.id), prompts[asked.id], params, asked.adapter)
            engine.add_request(request)
            open_[request.id] = request, asked
        if not open_:
            time.sleep(max(0.0, coming[0].arrival - before))
            continue
        spent = time.process_time()
        outputs = engine.step()
        spent, now = time.process_time() - spent, time.perf_counter() - start
        if now - before - spent > HELD_UP_SECONDS:
            warnings.warn(f"the system held the process up for {now - before - spent:.1f} s", HeldUp, stacklevel=2)
        for output in outputs:
            first = first_tokens.setdefault(output.request_id, now)
            if output.error is None and output.finish_reason is None:
                continue
            request, asked = open_.pop(output.request_id)
            if output.error is not None:
                records.failures.append((asked.arrival, asked.slo))
                continue
            arrival = asked.arrival
            queue, tokens = max(0.0, request.start_time - begin - arrival), request.num_output_tokens
            records.add(Served(arrival, first - arrival, now - arrival, queue, 0.0, tokens))
    return records


def warm_up(engine: Engine) -> None:
    """Prefills and decode steps of every batch size, so that the trace captures and touches nothing for the first time.

    No adapter is loaded by it, but two are read under other names, each on a thread that the trace's will be read on.
    """
    for count in range(1, engine.config.max_num_seqs + 1):
        params = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
        for index in range(count):
            prompt = [FIRST_TOKEN_ID + count, FIRST_TOKEN_ID + index] * 80
            engine.add_request(Request(f"warm-{count}-{index}", prompt, params))
        while engine.has_work():
            engine.step()
    engine.reclaim_idle()
    store = engine.store
    largest = sorted(map(store.get, store.names()), key=lambda adapter: adapter.num_pages)[-READ_THREADS:]
    copies = [store.register(f"warm-{adapter.name}", adapter.manifest.path) for adapter in largest]
    store.loads.ahead(copies)
    while any(store.tier(adapter) is not Tier.HOST for adapter in copies):
        store.images.wait(1.0)


def simulated(engine: Engine, profile: Profile, trace: Sequence[TraceRequest]) -> Records:
    """Serve `trace` in virtual time with the sizes, adapters and configuration of `engine`."""
    page = engine.executor.layout
    config = engine.config.model_copy(
        update={"block_tokens": page.block_tokens, "num_pages": engine.executor.num_pages}
    )
    adapters = SimAdapters(page)
    for name in engine.store.names():
        adapter = engine.store.get(name)
        adapters.add(name, adapter.rank, adapter.num_pages * page.page_bytes)
    vocab = profile.geometry.vocab_size
    return simulate(trace, [Replica(profile, adapters, config)], prompt=lambda request: prompt_of(request, vocab))


def summary(repeats: Sequence[Repeat]) -> dict[str, Any]:
    """Both sides' distributions over all requests of several repeats, and the medians of their errors."""
    real, virtual, off = Records(), Records(), {name: [] for name in MOST_ERROR}
    for repeat in repeats:
        for name, found in errors(repeat.real, repeat.simulated).items():
            off[name] += found
        real.extend(repeat.real)
        virtual.extend(repeat.simulated)
    medians = {name: float(np.median(each)) for name, each in off.items()}
    return {"real": real.summary(), "simulated": virtual.summary(), "median_error": medians}


def errors(real: Records, simulated: Records) -> dict[str, list[float]]:
    """|simulated / real - 1| of each request's TTFT and latency, for each time that it was simulated."""
    place = {arrival: index for index, arrival in enumerate(real.column("arrival"))}
    order = [place[arrival] for arrival in simulated.column("arrival")]
    return {name: np.abs(simulated.column(name) / real.column(name)[order] - 1).tolist() for name in MOST_ERROR}


def unrest(fits: Sequence[Measured], num_held_up: int, others: float) -> list[str]:
    """Reasons why the machine was not quiet; none if it was.

    fits: before and after, none where a profile was given. others: share of the processors' time that they took.
    """
    found = []
    if (noise := max((each.noise for each in fits), default=0.0)) > MOST_NOISE:
        found.append(f"rounds of a fit differ by {noise:.0%} (at most {MOST_NOISE:.0%})")
    if (drift := max((now.drift(then) for then, now in pairwise(fits)), default=0.0)) > MOST_NOISE:
        found.append(f"the same steps take {drift:.0%} more or less afterwards (at most {MOST_NOISE:.0%})")
    if num_held_up:
        found.append(f"the system held the process up {num_held_up} times")
    if others > FOREIGN_LIMIT:
        found.append(f"others took {others:.0%} of the processors' time (at most {FOREIGN_LIMIT:.0%})")
    return found


def table(found: dict[str, Any]) -> Table:
    columns = ["ms", *(f"{side} {name}" for side in ("real", "simulated") for name in ("mean", "p50", "p90"))]
    made = Table("real and simulated", [*columns, "median error, %"])
    for name in ("ttft", "tpot", "e2e"):
        sides, off = (found["real"][name], found["simulated"][name]), found["median_error"].get(name)
        made.add(name, *(1e3 * side[key] for side in sides for key in ("mean", "p50", "p90")), off and 100 * off)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    command = parser(__spec__, __doc__)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "chorus" / "agreement"
    add = command.add_argument
    add("--workload", type=Path, metavar="SPEC", help="a workload's specification; default: one that is made up")
    add("--set", action="append", default=[], metavar="FIELD=VALUE", help="another value of the specification")
    add("--model", type=Path, metavar="DIR", help="default: a random Llama of 125 M parameters")
    add("--adapters", type=Path, metavar="DIR", help="its adapters; needed with --model")
    add("--profile", type=Path, metavar="FILE", help="default: fitted on this machine now")
    add("--repeats", type=int, default=3, help="times to fit and to serve, by turns")
    add("--requests", type=int, default=60, help="of each repeat")
    add("--load", type=float, default=0.5, help="share of time to keep busy")
    add("--threads", type=int, help="CPU threads; default: all")
    add("--rounds", type=int, default=3, help="of the fit")
    add("--work-dir", type=Path, default=cache, help="for the random model")
    arguments = command.parse_args(argv)
    if (arguments.model is None) != (arguments.adapters is None):
        command.error("--model and --adapters go together; give both or neither")
    try:
        workload = _workload(arguments)
    except (WorkloadError, OSError) as error:
        command.error(f"argument --workload: {error}")
    if arguments.model is not None:
        model, adapters = arguments.model, arguments.adapters
    else:
        model, adapters = _random(arguments.work_dir)
    config = EngineConfig(
        model=model, adapters=adapters, threads=arguments.threads, max_num_seqs=16, max_num_batched_tokens=256,
        memory_bytes=512 << 20,
    )  # fmt: skip

    def fit() -> Profile:
        print("fitting a profile", file=sys.stderr)
        fits.append(measure_machine(config, rounds=arguments.rounds, batches=208))
        return fits[-1].profile

    def serve_once() -> Repeat:
        profile = given or fits[-1].profile
        own = (os.getpid(),)
        before = CpuSample.take(own)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", HeldUp)
            real, virtual = serve_both(config, profile, workload, arguments.load, fit if given is None else None)
        num_held_up = sum(issubclass(each.category, HeldUp) for each in caught)
        return Repeat(real, virtual, unrest(fits[-2:], num_held_up, CpuSample.take(own).foreign_share(before)))

    given = load_profile(arguments.profile) if arguments.profile else None
    fits: list[Measured] = []
    if given is None:
        fit()
    made: list[Repeat] = []
    quiet: list[Repeat] = []
    while len(quiet) < arguments.repeats and len(made) < 2 * arguments.repeats:
        print(f"repeat {len(quiet) + 1} of {arguments.repeats}", file=sys.stderr)
        made.append(repeat := serve_once())
        table(summary([repeat])).show(Console(stderr=True, width=120))
        if repeat.unrest:
            print("; ".join(["this repeat says nothing", *repeat.unrest]), file=sys.stderr)
        else:
            quiet.append(repeat)
    is_quiet = len(quiet) == arguments.repeats
    found = summary(quiet if is_quiet else made)
    found["decode_r2"] = [each.profile.step.fit.decode_r2 for each in fits if each.profile.step.fit is not None]
    found["noise"] = [each.noise for each in fits]
    found["unrest"] = [each.unrest for each in made if each.unrest]
    agrees = all(found["median_error"][name] <= most for name, most in MOST_ERROR.items())
    found["verdict"] = "inconclusive" if not is_quiet else "agrees" if agrees else "differs"
    table(found).show()
    conclude(found, agrees)
    return {"agrees": 0, "differs": 1, "inconclusive": 2}[found["verdict"]]


def _workload(arguments: argparse.Namespace) -> list[TraceRequest]:
    """Raises WorkloadError."""
    spec = WorkloadSpec.parse(MADE_UP)
    if arguments.workload is not None:
        spec = WorkloadSpec.load(arguments.workload, arguments.set)
    found = list(itertools.islice(spec, arguments.requests))
    if len(found) < 2:
        raise WorkloadError(f"{arguments.workload} has {len(found)} requests; at least 2 are needed")
    return found


def _random(work_dir: Path) -> tuple[Path, Path]:
    """A random model and the directory of its adapters; made on first use."""
    workload = random_model.RandomModel(Geometry())
    made = random_model.adapters(workload, work_dir)
    directory = work_dir / "adapters"
    directory.mkdir(parents=True, exist_ok=True)
    for name, path in made.items():
        link = directory / name
        if not link.exists():
            link.symlink_to(path.resolve(), target_is_directory=True)
    return random_model.checkpoint(workload, work_dir), directory


if __name__ == "__main__":
    sys.exit(main())
