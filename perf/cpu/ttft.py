"""Time to first token of a request that joins running ones: its adapter resident (warm), or on disk only (cold)."""

from __future__ import annotations

import itertools
import os
import shutil
import time
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory
from typing import Any

from ...core.costs.measure import forget_file
from ...core.engine import Engine
from ...core.requests.request import Request
from ...core.requests.sampling_params import SamplingParams
from ...memory.adapters.adapter import Adapter, Tier
from ...memory.files.format import WEIGHTS_FILE
from .workload import Job

#: Decode steps that the running requests take before one joins.
LEAD_STEPS = 4
_RUNNING_TOKENS = 64
_DROP_TRIES = 10


class JoinProbe:
    """Joins one request to `requests - 1` running ones, over and over. The engine must be idle.

    The joining request uses one adapter of each rank in turn, the running ones all the others.
    """

    def __init__(self, engine: Engine, job: Job) -> None:
        self._engine = engine
        self._job = job
        self._joiners = dict(zip(job.workload.ranks, job.adapters, strict=True))  # the last of each rank
        self._serial = 0
        self._uncached = True

    def measure(self, samples: int) -> dict[str, Any]:
        """Medians over `samples` warm and as many cold joins of each rank, in turn, in seconds; then their means.

        stall: the longest step that the running requests saw meanwhile. r8 …: cold over warm of each rank.
        uncached: whether the system's page cache was seen to hold nothing of the adapter's file before each cold join.
        """
        found = {rank: self._measure(name, samples) for rank, name in self._joiners.items()}
        names = ("warm", "cold", "warm_stall", "cold_stall")
        means = {name: mean(medians[name] for medians in found.values()) for name in names}
        ratios = {f"r{rank}": medians["cold"] / medians["warm"] for rank, medians in found.items()}
        return {**means, **ratios, "uncached": self._uncached}

    def _measure(self, joiner: str, samples: int) -> dict[str, float]:
        found: dict[str, list[tuple[float, float]]] = {"warm": [], "cold": []}
        original = Path(self._job.adapters[joiner])
        with TemporaryDirectory(dir=original.parents[1]) as copy:  # others may have the original mapped, so cached
            path = Path(shutil.copytree(original, Path(copy) / joiner))
            self._register(joiner, path)
            self._join(joiner)
            for _ in range(samples):
                found["warm"].append(self._join(joiner))
                self._put_on_disk(joiner, path)
                found["cold"].append(self._join(joiner))
            self._register(joiner, original)
        result = {}
        for name, pairs in found.items():
            result[name] = median(first for first, _ in pairs)
            result[f"{name}_stall"] = median(stall for _, stall in pairs)
        return result

    def _join(self, joiner: str) -> tuple[float, float]:
        """(time to first token, longest step meanwhile) of one join."""
        engine, workload = self._engine, self._job.workload
        prompts = workload.prompts()
        names = itertools.cycle(name for name in self._job.adapters if name != joiner)
        others = [
            self._request(prompts[index], LEAD_STEPS + _RUNNING_TOKENS, next(names))
            for index in range(workload.requests - 1)
        ]
        for request in others:
            engine.add_request(request)
        while any(request.num_output_tokens < LEAD_STEPS for request in others):
            if failed := [output.error for output in engine.step() if output.error]:
                raise RuntimeError(f"a running request failed: {failed[0]}")
        joining = self._request(prompts[-1], 1, joiner)
        longest = 0.0
        began = last = time.perf_counter()
        engine.add_request(joining)
        while not joining.finished:
            engine.step()
            now = time.perf_counter()
            longest, last = max(longest, now - last), now
        for request in others:
            engine.abort(request.id)
        return last - began, longest

    def _register(self, name: str, path: Path) -> Adapter:
        """Forget an adapter and register it anew, so that neither a page nor the host has anything of it."""
        self._engine.store.unregister(name)
        return self._engine.store.register(name, path)

    def _put_on_disk(self, name: str, path: Path) -> None:
        adapter = self._register(name, path)
        self._uncached &= drop_file_cache(path / WEIGHTS_FILE)
        tier = self._engine.store.tier(adapter)
        if tier is not Tier.DISK:
            raise RuntimeError(f"{adapter} should be on disk but is in tier {tier}")

    def _request(self, prompt: list[int], count: int, adapter: str) -> Request:
        self._serial += 1
        return Request(
            f"join{self._serial}", prompt, SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True), adapter
        )


def drop_file_cache(path: Path) -> bool:
    """Ask the system to forget a file's cached pages; whether its middle was seen to be gone."""
    with path.open("rb") as file:
        for _ in range(_DROP_TRIES):
            os.fsync(file.fileno())
            forget_file(path)
            try:
                os.preadv(file.fileno(), [bytearray(1)], path.stat().st_size // 2, os.RWF_NOWAIT)
            except BlockingIOError:
                return True
            except (OSError, AttributeError):  # AttributeError: this system has no such flag
                return False
            time.sleep(0.01)
    return False
