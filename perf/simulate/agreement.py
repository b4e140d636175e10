"""Agreement of the simulator with reality: one trace, served by the real executor in real time and simulated.

    python -m chorus.perf.simulate.agreement [--workload SPEC] [--http] [--model DIR --adapters DIR] [--profile FILE]

The profile is fitted on this machine before and after each repeat, unless one is given, and the repeat simulated with
both: a machine whose speed drifts drifts for both. Without --workload the requests are made up; with it, they are the
first ones of a workload, as perf.workload reads it, squeezed or stretched in time to the load that is asked for and
with lengths cut to what the model takes: the profile was fitted to none of them.

With --http the built-in model is served by `chorus serve`, and what the client sees is compared: what event loop,
tokenizer, timers and sockets add to the engine's time is fitted to other requests just before.

Exits with 1 when mean TTFT or TPOT differ by more than --limit, with --workload when the median over the requests of
|simulated / real - 1| is above 0.15 of TTFT or 0.07 of the latency. Exits with 2, and draws no conclusion, when the
machine was not quiet: the rounds of a fit differ, the fits do, or the system held the process up.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import random
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
from rich.console import Console

from ...core.config import EngineConfig
from ...core.costs.machine import measure_machine
from ...core.costs.measure import forget_file
from ...core.costs.profile import Profile, load_profile
from ...core.engine import Engine
from ...core.requests.request import Request
from ...core.requests.sampling_params import SamplingParams
from ...memory.adapters.adapter import Tier
from ...memory.files.format import WEIGHTS_FILE
from ...server.demo.builtin import BUILTIN_ADAPTERS, BUILTIN_MODEL
from ..cpu import random_model
from ..cpu.workload import Geometry, Workload
from ..report.command import parser
from ..report.table import Table
from ..workload.errors import WorkloadError
from ..workload.request import TraceRequest
from ..workload.spec import open_workload
from .adapters import SimAdapters
from .cluster import simulate
from .over_http import HostTimes, fit_host, served
from .records import Records, Served
from .replica import Replica

PROMPT_TOKENS = (16, 160)
OUTPUT_TOKENS = (12, 64)
HELD_UP_SECONDS = 0.5
MOST_NOISE = 0.1
"""Noise of a fit (`Measured.noise`), and share by which the prices of a decode step may differ between fits."""

MOST_ERROR = {"ttft": 0.15, "e2e": 0.07}
"""Of the medians over a workload's requests."""

_PROMPT_SHARE = 0.75  # of the model's length, that a workload's prompt may take
READ_THREADS = 2
_FIRST_TOKEN_ID = 16  # ids below are special in most vocabularies


class HeldUp(UserWarning):
    """The system gave the process no processor for long during a step."""


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that keep a machine busy for a share of the time."""

    requests: int
    share: float
    seed: int = 0

    def trace(self, profile: Profile, rows: int, adapters: Sequence[str]) -> list[TraceRequest]:
        """Poisson arrivals; lengths evenly within PROMPT_TOKENS and OUTPUT_TOKENS; a tenth on the base model.

        rows: batch size at which the share holds.
        """
        source = random.Random(self.seed)
        rate = rate_at(profile, self.share, rows)
        now, found = 0.0, []
        for index in range(self.requests):
            now += source.expovariate(rate)
            name = None if source.random() < 0.1 else source.choice(list(adapters))
            found.append(TraceRequest(index, now, name, source.randint(*PROMPT_TOKENS), source.randint(*OUTPUT_TOKENS)))
        return found


@dataclass(frozen=True, slots=True)
class Recorded:
    """The first requests of a workload, at a load of ours.

    The adapters that it names become those that there are, each always the same one.
    """

    workload: Sequence[TraceRequest]
    share: float
    most_tokens: int

    def trace(self, profile: Profile, rows: int, adapters: Sequence[str]) -> list[TraceRequest]:
        """Arrivals keep their pattern. rows: batch size at which the share holds."""
        costs, names = profile.costs(), sorted(adapters)
        most_prompt = int(_PROMPT_SHARE * self.most_tokens)
        first, last = self.workload[0].arrival, self.workload[-1].arrival
        cut, busy = [], 0.0
        for request in self.workload:
            prompt, output = request.prompt_tokens, request.output_tokens
            prompt, output = min(prompt, most_prompt), max(1, min(output, self.most_tokens - most_prompt))
            name = None if request.adapter is None else names[crc32(request.adapter.encode()) % len(names)]
            decode = costs.decode_seconds([16] * rows, rows * (prompt + output // 2)) / rows
            busy += costs.prefill_seconds(prompt, 16) + output * decode
            cut.append(request._replace(prompt_tokens=prompt, output_tokens=output, adapter=name))
        factor = busy / self.share / max(last - first, 1e-9)
        return [each._replace(id=index, arrival=(each.arrival - first) * factor) for index, each in enumerate(cut)]


def prompt_of(request: TraceRequest, vocab_size: int) -> list[int]:
    """Random token ids; no two requests share a beginning worth caching."""
    source = random.Random(request.id)
    return [source.randrange(_FIRST_TOKEN_ID, vocab_size) for _ in range(request.prompt_tokens)]


def serve_both(
    config: EngineConfig, profile: Profile, load: Load | Recorded, refit: Callable[[], Profile] | None = None
) -> tuple[Records, Records]:
    """The same trace in real time, on an engine that has read none of its adapters yet, and simulated with `profile`.

    refit: gives another profile once the trace has been served, with which it is simulated, too.
    """
    gc.collect()  # what an engine before this one held goes back now
    engine = Engine.from_config(config)
    try:
        trace = load.trace(profile, min(4, config.max_num_seqs), engine.store.names())
        warm_up(engine)
        for name in engine.store.names():
            forget_file(engine.store.get(name).manifest.path / WEIGHTS_FILE)  # as when the disk was measured
        real, virtual = serve(engine, trace), simulated(engine, profile, trace)
        if refit is not None:
            virtual.extend(simulated(engine, refit(), trace))
        return real, virtual
    finally:
        engine.close()


def serve_both_over_http(
    config: EngineConfig, profile: Profile, load: Load | Recorded
) -> tuple[Records, Records, HostTimes]:
    """The same trace from a server over HTTP, as its client sees it, and simulated with what the host adds, which is
    fitted to other requests just before. Raises LoadError.
    """
    engine = Engine.from_config(config)  # whose sizes are the server's
    try:
        names = engine.store.names()
        trace = load.trace(profile, min(4, config.max_num_seqs), names)

        def in_virtual_time(profile: Profile, trace: Sequence[TraceRequest]) -> Records:
            return simulated(engine, profile, trace)

        with served(config) as server:
            for name in names:
                forget_file(engine.store.get(name).manifest.path / WEIGHTS_FILE)
            host = fit_host(server, profile, in_virtual_time, config.max_num_seqs)
            real, counted = server.serve(trace)
        return real, host.simulate(in_virtual_time, profile, counted), host
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
                records.num_failed += 1
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
            prompt = [_FIRST_TOKEN_ID + count, _FIRST_TOKEN_ID + index] * (PROMPT_TOKENS[1] // 2)
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


def rate_at(profile: Profile, load: float, rows: int) -> float:
    """Requests per second that keep a machine busy for a share `load` of the time, at batches of `rows`."""
    costs = profile.costs()
    prompt, output = sum(PROMPT_TOKENS) / 2, sum(OUTPUT_TOKENS) / 2
    decode = costs.decode_seconds([16] * rows, int(rows * (prompt + output / 2))) / rows
    return load / (costs.prefill_seconds(int(prompt), 16) + output * decode)


def compare(real: Records, simulated: Records) -> dict[str, Any]:
    """Both summaries, and by how much the simulated means are off, as a share of the real ones."""
    found: dict[str, Any] = {"real": real.summary(), "simulated": simulated.summary()}
    found["deviation"] = {
        name: found["simulated"][name]["mean"] / found["real"][name]["mean"] - 1 for name in ("ttft", "tpot", "e2e")
    }
    return found


def errors(real: Records, simulated: Records) -> dict[str, list[float]]:
    """|simulated / real - 1| of each request's TTFT and latency, for each time that it was simulated."""
    place = {arrival: index for index, arrival in enumerate(real.column("arrival"))}
    order = [place[arrival] for arrival in simulated.column("arrival")]
    return {name: np.abs(simulated.column(name) / real.column(name)[order] - 1).tolist() for name in MOST_ERROR}


def unrest(noises: Sequence[float], profiles: Sequence[Profile], num_held_up: int) -> list[str]:
    """Reasons why the machine was not quiet; none if it was."""
    found = []
    if noises and max(noises) > MOST_NOISE:
        found.append(f"rounds of a fit differ by {max(noises):.0%} (at most {MOST_NOISE:.0%})")
    prices = [profile.costs().decode_seconds([16] * 4, 400) for profile in profiles]
    if (drift := max(prices) / min(prices) - 1) > MOST_NOISE:
        found.append(f"fits differ by {drift:.0%} (at most {MOST_NOISE:.0%})")
    if num_held_up:
        found.append(f"the system held the process up {num_held_up} times")
    return found


def table(found: dict[str, Any]) -> Table:
    columns = ["ms", *(f"{side} {name}" for side in ("real", "simulated") for name in ("mean", "p50", "p90"))]
    made = Table("real and simulated", [*columns, "mean off by, %"])
    for name, off in found["deviation"].items():
        sides = (found["real"][name], found["simulated"][name])
        made.add(name, *(1e3 * side[key] for side in sides for key in ("mean", "p50", "p90")), 100 * off)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    command = parser(__spec__, __doc__)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "chorus" / "agreement"
    add = command.add_argument
    add("--workload", type=Path, metavar="SPEC", help="a workload's specification or requests; default: made up ones")
    add("--set", action="append", default=[], metavar="FIELD=VALUE", help="another value of the specification")
    add("--http", action="store_true", help="serve with `chorus serve`, and see what its client sees")
    add(
        "--model",
        type=Path,
        metavar="DIR",
        help="default: a random Llama of 125 M parameters; the built-in one by HTTP",
    )
    add("--adapters", type=Path, metavar="DIR", help="its adapters; needed with --model")
    add("--profile", type=Path, metavar="FILE", help="default: fitted on this machine now")
    add("--repeats", type=int, default=3, help="times to fit and to serve, by turns")
    add("--requests", type=int, default=60, help="of each repeat")
    add("--load", type=float, default=0.5, help="share of time to keep busy")
    add("--threads", type=int, help="CPU threads; default: all")
    add("--rounds", type=int, default=3, help="of the fit")
    add("--limit", type=float, default=0.15, help="share that means may be off, of requests that are made up")
    add("--seed", type=int, default=0)
    add("--work-dir", type=Path, default=cache, help="for the random model")
    add("--json", action="store_true")
    arguments = command.parse_args(argv)
    if (arguments.model is None) != (arguments.adapters is None):
        command.error("--model and --adapters go together; give both or neither")
    try:
        load = _load(arguments)
    except (WorkloadError, OSError) as error:
        command.error(f"argument --workload: {error}")
    if arguments.model is not None:
        model, adapters = arguments.model, arguments.adapters
    else:
        model, adapters = (BUILTIN_MODEL, BUILTIN_ADAPTERS) if arguments.http else _random(arguments.work_dir)
    config = EngineConfig(
        model=model, adapters=adapters, threads=arguments.threads, max_num_seqs=16, max_num_batched_tokens=256,
        memory_bytes=512 << 20,
    )  # fmt: skip

    def fit() -> Profile:
        print("fitting a profile", file=sys.stderr)
        measured = measure_machine(config, rounds=arguments.rounds, batches=208)
        noises.append(measured.noise)
        profiles.append(measured.profile)
        return profiles[-1]

    noises: list[float] = []
    hosts: list[dict[str, float]] = []
    profiles: list[Profile] = [load_profile(arguments.profile)] if arguments.profile else []
    if not profiles:
        fit()
    real, virtual, off = Records(), Records(), {name: [] for name in MOST_ERROR}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", HeldUp)
        for repeat in range(arguments.repeats):
            print(f"repeat {repeat + 1} of {arguments.repeats}", file=sys.stderr)
            asked = load(repeat, profiles[-1])
            if arguments.http:
                *both, host = serve_both_over_http(config, profiles[-1], asked)
                hosts.append(asdict(host))
                if not arguments.profile:
                    fit()
            else:
                both = serve_both(config, profiles[-1], asked, None if arguments.profile else fit)
            for name, found in errors(*both).items():
                off[name] += found
            real.extend(both[0])
            virtual.extend(both[1])
            table(compare(*both)).show(Console(stderr=True, width=120))
    found = compare(real, virtual)
    found["decode_r2"] = [profile.step.fit.decode_r2 for profile in profiles if profile.step.fit is not None]
    found["median_error"] = {name: float(np.median(each)) for name, each in off.items()}
    found["noise"], found["host"] = noises, hosts
    found["unrest"] = unrest(noises, profiles, sum(issubclass(each.category, HeldUp) for each in caught))
    if arguments.workload is not None:
        agrees = all(found["median_error"][name] <= most for name, most in MOST_ERROR.items())
    else:
        agrees = all(abs(found["deviation"][name]) <= arguments.limit for name in ("ttft", "tpot"))
    found["verdict"] = "inconclusive" if found["unrest"] else "agrees" if agrees else "differs"
    if arguments.json:
        print(json.dumps(found))
    else:
        table(found).show()
        for host in hosts:
            print("host, µs: " + ", ".join(f"{name} {seconds * 1e6:.1f}" for name, seconds in host.items()))
        print("R² of the decode model: " + (", ".join(f"{r2:.4f}" for r2 in found["decode_r2"] if r2) or "not known"))
        print("median error: " + ", ".join(f"{name} {each:.1%}" for name, each in found["median_error"].items()))
        print("; ".join([found["verdict"], *found["unrest"]]))
    return {"agrees": 0, "differs": 1, "inconclusive": 2}[found["verdict"]]


def _load(arguments: argparse.Namespace) -> Callable[[int, Profile], Load | Recorded]:
    """Return what gives the requests of a repeat. Raises WorkloadError."""
    if arguments.workload is None:
        return lambda repeat, profile: Load(arguments.requests, arguments.load, arguments.seed + repeat)
    recorded = list(itertools.islice(open_workload(arguments.workload, arguments.set), arguments.requests))
    if len(recorded) < 2:
        raise WorkloadError(f"{arguments.workload} has {len(recorded)} requests; at least 2 are needed")
    return lambda repeat, profile: Recorded(recorded, arguments.load, profile.geometry.max_model_len)


def _random(work_dir: Path) -> tuple[Path, Path]:
    """A random model and the directory of its adapters; made on first use."""
    workload = Workload(Geometry())
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
