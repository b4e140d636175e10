"""Chorus itself, driven step by step without HTTP."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from ... import __file__ as package
from ... import __version__
from ...core.config import EngineConfig
from ...core.engine import Engine
from ...core.requests.request import Request
from ...core.requests.sampling_params import SamplingParams
from ..cpu.workload import Job


class Contender:
    """One engine for all cases: adapters are registered and made resident, or unregistered, between them."""

    def __init__(self) -> None:
        self._serial = 0

    def open(self, job: dict[str, Any]) -> dict[str, Any]:
        self._job = Job.from_json(job)
        workload = self._job.workload
        self._engine = Engine.from_config(
            EngineConfig(
                model=Path(self._job.model),
                max_num_seqs=workload.requests,
                max_num_batched_tokens=workload.max_batched_tokens,
                memory_bytes=_arena_bytes(workload),
                prefix_cache=False,
                threads=workload.threads,
                seed=workload.seed,
                **self._job.options,
            )
        )
        model = type(self._engine.executor.decoder).__name__
        return {"version": __version__, "engine": f"{model} from {Path(package).parent}"}

    @property
    def engine(self) -> Engine:
        return self._engine

    def run(self, case: str) -> dict[str, Any]:
        self._prepare(case)
        workload, names = self._job.workload, list(self._job.adapters)
        requests = [
            self._request(prompt, workload.output_tokens, None if adapter is None else names[adapter])
            for prompt, adapter in zip(workload.prompts(), workload.assignment(case), strict=True)
        ]
        tokens: dict[str, list[int]] = {request.id: [] for request in requests}
        began = time.perf_counter()
        for request in requests:
            self._engine.add_request(request)
        first = 0.0
        while self._engine.has_work():
            for output in self._engine.step():
                tokens[output.request_id] += output.token_ids
            if not first and all(tokens.values()):
                first = time.perf_counter()
        ended = time.perf_counter()
        return {"seconds": ended - began, "prefill_seconds": first - began, "tokens": list(tokens.values())}

    def close(self) -> None:
        self._engine.close()

    def _prepare(self, case: str) -> None:
        """Have no adapter registered for `base_plain`, else all of them registered and resident."""
        store = self._engine.store
        if case == "base_plain":
            for name in store.names():
                store.unregister(name)
            return
        missing = [name for name in self._job.adapters if name not in store or not store.get(name).pages]
        for name in missing:
            if name not in store:
                store.register(name, Path(self._job.adapters[name]))
            self._engine.add_request(self._request(self._job.workload.prompts()[0], 1, name))
        while self._engine.has_work():
            self._engine.step()

    def _request(self, prompt: list[int], count: int, adapter: str | None) -> Request:
        self._serial += 1
        params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
        return Request(f"r{self._serial}", prompt, params, adapter)


def _arena_bytes(workload: Any) -> int:
    """Twice the adapters and the longest sequences, so that nothing is evicted while something is measured."""
    shape = workload.geometry
    adapters = sum(map(workload.adapter_params, range(len(workload.ranks))))
    kv = workload.requests * shape.positions * shape.kv_elems_per_token
    return 2 * workload.itemsize * (adapters + kv) + (16 << 20)
