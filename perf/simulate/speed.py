"""Speed of the simulator: engine steps per second of processor time, and a cluster's time and memory.

    python -m chorus.perf.simulate.speed [--seconds N] [--json]

Needs no tensor library.
"""

from __future__ import annotations

import json
import math
import random
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from ...core.config import EngineConfig
from ...core.costs.profile import load_profile
from ..report.command import parser
from ..workload.request import TraceRequest
from .adapters import SimAdapters
from .cluster import least_loaded, simulate
from .engine import MODEL
from .replica import Replica

ROOMY, TIGHT = "a100-llama2-7b", "a10-llama2-7b-bgmv"  # 63 GB and 8 GB of arena
RUNNING = (1, 8, 32)
SHORT, LONG = 75, 500  # tokens of an answer: Alpaca's, and a chat's
REPLICAS, RATE = 60, 340.0  # CaraServe §7.5
_RANKS = (8, 16, 32, 64)
_TARGETS = ("q_proj", "k_proj", "v_proj")
_ADAPTERS = 2000
_SECONDS_PER_TOKEN = 0.020  # of ROOMY with 8 running


def trace(requests: int, rate: float, answer: int = SHORT, seed: int = 0) -> Iterator[TraceRequest]:
    """Poisson arrivals of `rate` requests per second; prompts of about 37 tokens, adapters by a power law.

    answer: mean tokens of an answer, lognormal.
    """
    source = random.Random(seed)
    mu = math.log(answer) - 0.32
    now = 0.0
    for index in range(requests):
        now += source.expovariate(rate)
        adapter = min(_ADAPTERS, int(source.paretovariate(0.8))) - 1
        prompt = int(source.lognormvariate(3.3, 0.8))
        output = int(source.lognormvariate(mu, 0.8))
        yield TraceRequest(index, now, f"a{adapter}", min(1000, max(4, prompt)), min(3000, max(1, output)))


def replicas(profile_name: str, count: int, max_num_seqs: int) -> list[Replica]:
    profile = load_profile(profile_name)
    config = EngineConfig(model=MODEL, prefix_cache=False, max_num_seqs=max_num_seqs, host_cache_bytes=1 << 50)
    adapters = SimAdapters(profile.geometry.page_layout(config.block_tokens))
    for index in range(_ADAPTERS):
        rank = _RANKS[index % len(_RANKS)]
        adapters.add(f"a{index}", rank, profile.geometry.adapter_bytes(rank, _TARGETS))
    return [Replica(profile, adapters, config, index=index) for index in range(count)]


def steps_per_second(running: int, answer: int, requests: int) -> float:
    """Of one replica on which about `running` requests run at a time, with answers of `answer` tokens."""
    replica = replicas(ROOMY, 1, 2 * running)
    began = time.process_time()
    records = simulate(trace(requests, running / (answer * _SECONDS_PER_TOKEN), answer), replica)
    seconds = time.process_time() - began
    if len(records) != requests:
        raise RuntimeError(f"{requests - len(records)} of {requests} requests were not served")
    return replica[0].engine.stats().num_steps / seconds


def cluster(seconds: float) -> dict[str, float]:
    """REPLICAS replicas at RATE for `seconds` of virtual time: processor seconds, steps and peak memory."""
    group = replicas(TIGHT, REPLICAS, 32)
    requests = int(seconds * RATE)
    half: list[int] = []

    def watched() -> Iterator[TraceRequest]:
        for request in trace(requests, RATE):
            if request.id == requests // 2:
                half.append(_peak_bytes())
            yield request

    began = time.process_time()
    records = simulate(watched(), group, least_loaded)
    spent = time.process_time() - began
    steps = sum(replica.engine.stats().num_steps for replica in group)
    return {
        "virtual_seconds": seconds,
        "requests": len(records),
        "processor_seconds": spent,
        "processor_seconds_per_hour": spent * 3600 / seconds,
        "steps_per_second": steps / spent,
        "peak_bytes_at_half": half[0],
        "peak_bytes": _peak_bytes(),
    }


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def measure(seconds: float, requests: int) -> dict[str, Any]:
    """requests: of each seat, for the rates of one replica."""
    rates = {
        f"{running} running, answers of {answer}": steps_per_second(running, answer, running * requests)
        for answer in (SHORT, LONG)
        for running in RUNNING
    }
    return {"steps_per_second": rates, "cluster": cluster(seconds)}


def main(argv: Sequence[str] | None = None) -> int:
    command = parser(__spec__, __doc__)
    command.add_argument("--seconds", type=float, default=120.0, help="virtual time of the cluster")
    command.add_argument("--requests", type=int, default=200, help="of each seat of one replica")
    command.add_argument("--json", action="store_true")
    arguments = command.parse_args(argv)
    found = measure(arguments.seconds, arguments.requests)
    if arguments.json:
        print(json.dumps(found))
        return 0
    for case, rate in found["steps_per_second"].items():
        print(f"one replica, {case:27s} {rate:10,.0f} steps/s")
    each = found["cluster"]
    hour, rate = each["processor_seconds_per_hour"], each["steps_per_second"]
    half, end = (each[name] / 2**20 for name in ("peak_bytes_at_half", "peak_bytes"))
    print(f"{REPLICAS} replicas at {RATE:.0f} requests/s: {hour:.0f} s of one processor an hour, {rate:,.0f} steps/s")
    print(f"peak memory {half:.0f} MiB at half of the trace, {end:.0f} MiB at its end")
    return 0


if __name__ == "__main__":
    sys.exit(main())
