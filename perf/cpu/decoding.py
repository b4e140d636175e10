"""An engine with timed decode steps: the requests, the adapters and the options that its benchmarks share."""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...core.config import EngineConfig
from ...core.engine import Engine
from ...core.requests.request import Request
from ...core.requests.sampling_params import SamplingParams
from . import random_model
from .workload import Geometry, Workload

_PROMPT_TOKENS = 128


def add_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    command.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    command.add_argument("--geometry", type=Geometry.parse, default=Geometry(), help="as of perf.cpu")


def workload_of(args: argparse.Namespace) -> Workload:
    return Workload(args.geometry, dtype=args.dtype, threads=args.threads, ranks=(8, 16, 32, 64))


class Decoding:
    """An engine with the workload's adapters registered."""

    def __init__(
        self, workload: Workload, directory: Path, *, copies: int = 1, more_params: int = 0, **config: Any
    ) -> None:
        """copies: of each adapter. more_params: weights that there is room for beside adapters and KV. config: further
        fields of the engine's.
        """
        adapters = random_model.adapters(workload, directory)
        shape = workload.geometry
        lora = copies * sum(map(workload.adapter_params, range(len(adapters))))
        kv = workload.requests * shape.positions * shape.kv_elems_per_token
        self.engine = Engine.from_config(
            EngineConfig(
                model=random_model.checkpoint(workload, directory), max_num_seqs=workload.requests, prefix_cache=False,
                threads=workload.threads, seed=0, memory_bytes=2 * workload.itemsize * (more_params + lora + kv),
                **config,
            )
        )  # fmt: skip
        self.names = list(adapters)
        self.serial = 0
        self._prompt = workload.prompts()[0][:_PROMPT_TOKENS]
        for name, path in adapters.items():
            self.engine.store.register(name, path)

    def add(self, adapter: str | None, tokens: int) -> None:
        self.serial += 1
        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        self.engine.add_request(Request(f"r{self.serial}", self._prompt, params, adapter))

    def begin(self, adapters: Sequence[str | None], tokens: int) -> None:
        """Add a request for each adapter and have all of them decode."""
        before = self.engine.stats().num_generated_tokens
        for adapter in adapters:
            self.add(adapter, tokens)
        while self.engine.stats().num_generated_tokens < before + 3 * len(adapters):
            self.engine.step()

    def step_seconds(self, steps: int) -> float:
        """Median seconds of a step."""
        times = []
        for _ in range(steps):
            began = time.perf_counter()
            self.engine.step()
            times.append(time.perf_counter() - began)
        return statistics.median(times)

    def finish(self) -> None:
        while self.engine.has_work():
            self.engine.step()
