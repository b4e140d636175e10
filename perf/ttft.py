"""Time to first token of a request that joins running ones: its adapter resident (warm), or on disk only (cold)."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from ..core.engine import Engine
from ..core.request import Request
from ..core.sampling_params import SamplingParams
from ..memory.adapter_format import WEIGHTS_FILE
from ..memory.adapter_store import Adapter, Tier
from .cpu_workload import Job

#: Decode steps that the running requests take before one joins.
LEAD_STEPS = 4
_RUNNING_TOKENS = 64
_DROP_TRIES = 10


class JoinProbe:
    """Joins one request to `requests - 1` running ones, over and over. The engine must be idle.

    The joining request uses the last adapter, the running ones all the others in turn.
    """

    def __init__(self, engine: Engine, job: Job) -> None:
        self._engine = engine
        self._job = job
        *self._others, self._joiner = job.adapters
        self._serial = 0
        self._uncached = True
        self._path = Path(job.adapters[self._joiner])

    def measure(self, samples: int) -> dict[str, Any]:
        """Medians over `samples` warm and as many cold joins, in turn, in seconds.

        stall: the longest step that the running requests saw meanwhile. uncached: whether the system's page cache was
        seen to hold nothing of the adapter's file before each cold join.
        """
        found: dict[str, list[tuple[float, float]]] = {"warm": [], "cold": []}
        with TemporaryDirectory(dir=self._path.parents[1]) as copy:  # others may have the original mapped, so cached
            path = Path(shutil.copytree(self._path, Path(copy) / self._joiner))
            self._register(path)
            self._join()
            for _ in range(samples):
                found["warm"].append(self._join())
                self._put_on_disk(path)
                found["cold"].append(self._join())
            self._register(self._path)
        result: dict[str, Any] = {"uncached": self._uncached}
        for name, pairs in found.items():
            result[name] = median(first for first, _ in pairs)
            result[f"{name}_stall"] = median(stall for _, stall in pairs)
        return result

    def _join(self) -> tuple[float, float]:
        """(time to first token, longest step meanwhile) of one join."""
        engine, workload = self._engine, self._job.workload
        prompts = workload.prompts()
        others = [
            self._request(prompts[index], LEAD_STEPS + _RUNNING_TOKENS, self._others[index % len(self._others)])
            for index in range(workload.requests - 1)
        ]
        for request in others:
            engine.add_request(request)
        while any(request.num_output_tokens < LEAD_STEPS for request in others):
            engine.step()
        joining = self._request(prompts[-1], 1, self._joiner)
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

    def _register(self, path: Path) -> Adapter:
        """Forget the joining adapter and register it anew, so that neither a page nor the host has anything of it."""
        self._engine.store.unregister(self._joiner)
        return self._engine.store.register(self._joiner, path)

    def _put_on_disk(self, path: Path) -> None:
        adapter = self._register(path)
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
    if not hasattr(os, "posix_fadvise") or not hasattr(os, "RWF_NOWAIT"):
        return False
    with path.open("rb") as file:
        middle = path.stat().st_size // 2
        for _ in range(_DROP_TRIES):
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            try:
                os.preadv(file.fileno(), [bytearray(1)], middle, os.RWF_NOWAIT)
            except BlockingIOError:
                return True
            except OSError:
                return False
            time.sleep(0.01)
    return False
