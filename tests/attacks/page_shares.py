"""Shares of pages: how soon a small tenant begins while another's large requests fill the arena.

The large tenant keeps nine requests of 3,000 + 1,000 tokens in progress, five of which wait, in an arena of 1,000 pages
and 16 slots; the small tenant's requests come at random. Its TTFT is compared with its TTFT while the large tenant
keeps to half of the arena, and the throughput with the same run of one tenant, in which pages have no shares.

Run `python -m tests.attacks.page_shares --seeds 10`.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence

import numpy as np

from chorus.core.config import EngineConfig
from chorus.core.costs.profile import load_profile
from chorus.core.requests.request_params import RequestParams
from chorus.perf.report.command import judge, parser
from chorus.perf.report.table import Goal
from chorus.perf.simulate.adapters import SimAdapters
from chorus.perf.simulate.engine import MODEL, simulated_engine
from chorus.perf.simulate.link import VirtualClock
from chorus.perf.simulate.scheduler import SimRequest

SECONDS = 60.0
LARGE = 3000, 1000
"""Tokens of a prompt and of its answer: four such requests fill the arena."""

NUM_AT_SHARE, NUM_FLOOD = 2, 9
"""Requests of the large tenant in progress: within half of the arena, or five that wait for four."""

SIZES = {"tiny": ((30, 10), 1.0), "medium": ((400, 200), 0.5), "long": ((2000, 500), 0.1)}
"""Requests of the small tenant: tokens of a prompt and of its answer, and requests a second."""

DECODE_STEP = 0.025
"""Seconds of a decode step of four large requests, at most: a request that arrives in one waits for its end."""


class Run:
    """One tenant keeps `num_large` requests in progress; another's come at random, `rate` a second."""

    def __init__(
        self, seed: int, num_large: int, size: tuple[int, int], rate: float, tells_tenants: bool = True
    ) -> None:
        profile = load_profile("a100-llama2-7b").model_copy(update={"overhead": None})
        config = EngineConfig(model=MODEL, prefix_cache=False, max_num_seqs=16, num_pages=1000)
        self.clock = VirtualClock()
        catalogue = SimAdapters(profile.geometry, 16)
        self.engine, executor = simulated_engine(profile, catalogue, config, self.clock)
        self.tells_tenants = tells_tenants
        self.sent: dict[str, float] = {}
        first: dict[str, float] = {}
        rng, due = random.Random(seed), [1.0]
        while due[-1] < SECONDS - 3:
            due.append(due[-1] + rng.expovariate(rate))
        for _ in range(num_large):
            self.add("large", *LARGE)
        while self.clock.now < SECONDS:
            while due and due[0] <= self.clock.now:
                due.pop(0)
                self.add("small", *size)
            executor.horizon = due[0] if due else SECONDS
            if not self.engine.has_work():
                self.clock.now = executor.horizon
                continue
            for output in self.engine.step():
                first.setdefault(output.request_id, self.clock.now)
                if output.finish_reason is not None and output.request_id.startswith("large"):
                    self.add("large", *LARGE)
        self.engine.check_integrity()
        self.ttft = sorted(first.get(name, SECONDS) - when for name, when in self.sent.items() if "small" in name)
        self.tokens = self.engine.scheduler.num_generated_tokens

    def add(self, tenant: str, num_prompt: int, num_output: int) -> None:
        params = RequestParams(max_tokens=num_output, temperature=0.0, ignore_eos=True)
        request = SimRequest(f"{tenant} {len(self.sent)}", [1] * num_prompt, params, None, self.clock.now)
        request.tenant = tenant if self.tells_tenants else ""
        self.engine.add_request(request)
        self.sent[request.id] = self.clock.now


def measure(name: str, seeds: Sequence[int]) -> dict[str, float]:
    """The small tenant's p99 and slowest TTFT at its share, under the flood, and under it without shares; and the
    throughput with shares, relative to that without.
    """
    size, rate = SIZES[name]
    runs = {
        label: [Run(seed, count, size, rate, tells) for seed in seeds]
        for label, count, tells in (
            ("at_share", NUM_AT_SHARE, True),
            ("flood", NUM_FLOOD, True),
            ("without_shares", NUM_FLOOD, False),
        )
    }
    found = {"throughput": sum(run.tokens for run in runs["flood"]) / sum(run.tokens for run in runs["without_shares"])}
    for label, each in runs.items():
        ttft = [seconds for run in each for seconds in run.ttft]
        found |= {label: float(np.percentile(ttft, 99)), f"slowest_{label}": max(ttft)}
    return found


def main(argv: list[str] | None = None) -> int:
    command = parser(__spec__, __doc__)
    command.add_argument("--seeds", type=int, default=10)
    args = command.parse_args(argv)
    found = {name: measure(name, range(args.seeds)) for name in SIZES}
    goals = []
    for name, of in found.items():
        bar = 2 * of["at_share"] + DECODE_STEP
        goals.append(Goal(f"p99 TTFT beside the flood, of twice its own: {name}", of["flood"] / bar, 1.0, at_most=True))
        goals.append(Goal(f"throughput of the run without shares: {name}", of["throughput"], 0.95))
    return judge({"seeds": args.seeds, "page_shares": found}, goals)


if __name__ == "__main__":
    sys.exit(main())
