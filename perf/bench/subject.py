"""The engine under measurement: on the device, with random weights, driven step by step without HTTP."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import torch

from ...core.config import EngineConfig
from ...core.engine import Engine
from ...core.model.batch import GemmBackends
from ...core.requests.request import Request
from ...core.requests.request_params import RequestParams
from ...core.requests.types import RequestOutput
from ...graphs.runner import DecodeBuckets, GraphRunner, StepForm, StepMode
from ...memory.adapters.adapter import Tier
from ...memory.transfers.pinned import CHUNK_BYTES
from ..inline_reads import InlineReads
from .context import Context
from .models.random_mixture import MixtureSize
from .models.sizes import ModelSize

#: Largest rank that the engine supports.
MAX_RANK = 64


def host_cache(file_bytes: Collection[int]) -> int:
    """Bytes of host memory in which the images of all files are pinned on a GPU.

    An adapter that is read again has two images for a while. A chunk of pinned memory is a power of two, so an image
    may take up to twice its size.
    """
    return 2 * (sum(file_bytes) + max(file_bytes, default=0) + CHUNK_BYTES)


class Unsettled(RuntimeError):
    """The engine did not reach the state where a measurement begins."""


class Subject:
    """An idle engine with `adapters` registered. Use as a context: leaving it frees the device.

    max_seqs, max_batched, max_len: EngineConfig's max_num_seqs, max_num_batched_tokens, max_model_len; there are pages
    for the KV of `max_seqs` requests of `max_len` tokens, and for all adapters. shadow: with room to merge an adapter.
    inline_reads: read adapters on the engine's thread, so the disk's speed does not change the steps. size: None: the
    context's. fields: of EngineConfig; they override the context's. Without a value, `small_gemm` is measured at the
    start, and may differ the next time.
    """

    def __init__(
        self,
        context: Context,
        adapters: Mapping[str, Path],
        *,
        max_seqs: int,
        max_batched: int,
        max_len: int,
        inline_reads: bool = False,
        shadow: bool = False,
        size: ModelSize | MixtureSize | None = None,
        **fields: Any,
    ) -> None:
        self._context = context
        self._random = Random(context.seed)
        self._serial = 0
        self._buckets = DecodeBuckets(max_seqs)
        size = context.size if size is None else size
        geometry = size.geometry
        self._vocab = geometry.vocab
        page = geometry.page_layout(context.dtype.itemsize)
        kv_pages = max_seqs * page.pages_for_tokens(max_len)
        files = {name: sum(each.stat().st_size for each in path.iterdir()) for name, path in adapters.items()}
        ranks = fields.get("tensor_parallel_size", 1)  # a TP rank's share of an adapter is at most all of it
        adapter_pages = ranks * sum(num_bytes // page.page_bytes + 1 for num_bytes in files.values())
        shadow_bytes = geometry.layer_params * context.dtype.itemsize if shadow else 0
        shadow_pages = shadow_bytes // page.page_bytes + 4 * geometry.layers if shadow else 0
        self.model = size.write_config(
            context.work_dir / size.name / size.family / context.dtype_name, context.dtype_name
        )
        common: dict[str, Any] = {
            "model": self.model,
            "load_format": "dummy",
            "dtype": context.dtype_name,
            "device": context.device,
            "cpu_kernels": "torch" if context.smoke else "auto",
            "max_model_len": max_len,
            "max_num_seqs": max_seqs,
            "max_num_batched_tokens": max(max_batched, max_seqs),
            "block_tokens": page.block_tokens,
            "memory_bytes": max(1 << 16, (2 + kv_pages + adapter_pages + shadow_pages) * page.page_bytes),
            "max_lora_rank": MAX_RANK,
            "graph_capture": "lazy",
            "host_cache_bytes": host_cache(files.values()),
            "prefix_cache": False,
            "speculation": "off",  # steps have a token of each sequence
            "lookahead": max(1, max_seqs),
            "threads": 1 if context.smoke else None,
            "seed": context.seed,
        }
        config = EngineConfig.model_validate({**common, **context.engine, **fields})
        began = time.perf_counter()
        self.engine = Engine.from_config(config, InlineReads() if inline_reads else None)
        context.timer.synchronize()
        self._startup_seconds = time.perf_counter() - began
        for name, path in adapters.items():
            self.engine.store.register(name, path)

    def __enter__(self) -> Subject:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.close()
        del self.engine
        if self._context.device == "cuda":
            gc.collect()
            torch.cuda.empty_cache()

    def startup(self) -> dict[str, Any]:
        """Seconds to build the engine, cost of the captures so far, and each bucket's GEMM backends."""
        report = [*self._graphs.report, *(self._steps.mixed.graphs.report if hasattr(self._steps, "mixed") else ())]
        backends = getattr(self._decoding, "backends", {})
        seconds = [step.seconds for step in report]
        return {
            "seconds": self._startup_seconds,
            "graphs": len(report),
            "capture_seconds": sum(seconds),
            "slowest_capture_seconds": max(seconds, default=0.0),
            "graph_bytes": sum(step.num_bytes for step in report),
            "ways": {str(bucket): _names(chosen) for bucket, chosen in backends.items()},
        }

    # -- requests

    def add(self, prompt_tokens: int, output_tokens: int, adapter: str | None = None, **params: Any) -> Request:
        """Queue a request of random tokens that continues past any end-of-sequence token; greedy except for
        `params`.
        """
        request = self.request(prompt_tokens, output_tokens, adapter, **params)
        self.engine.add_request(request)
        return request

    def request(self, prompt_tokens: int, output_tokens: int, adapter: str | None = None, **params: Any) -> Request:
        """Make a request without queuing it, to keep the time for sampling its prompt out of the measurement."""
        self._serial += 1
        prompt = [self._random.randrange(3, self._vocab) for _ in range(prompt_tokens)]
        wanted = RequestParams(**{"max_tokens": output_tokens, "temperature": 0.0, "ignore_eos": True, **params})
        return Request(f"q{self._serial}", prompt, wanted, adapter)

    def step(self) -> list[RequestOutput]:
        """Run one engine step. Raises RuntimeError if a request ends with an error."""
        outputs = self.engine.step()
        for output in outputs:
            if output.error is not None:
                raise RuntimeError(f"request {output.request_id}: {output.error}")
        return outputs

    def timed_step(self) -> tuple[list[RequestOutput], float]:
        """Outputs of a step, and its seconds."""
        began = time.perf_counter()
        outputs = self.step()
        return outputs, time.perf_counter() - began

    def finish(self) -> float:
        """Run until there is no work left; seconds."""
        began = time.perf_counter()
        while self.engine.has_work():
            self.step()
        self._context.timer.synchronize()
        return time.perf_counter() - began

    def clear(self, requests: Sequence[Request]) -> None:
        """Abort those of `requests` that still run."""
        for request in requests:
            self.engine.abort(request.id)
        self.finish()

    def abort_all(self) -> None:
        """Abort everything that an error has left running."""
        scheduler = self.engine.scheduler
        self.clear([*scheduler.running, *scheduler.waiting])

    # -- measurements

    def decoding(self, adapters: Sequence[str | None], prompt_tokens: int, steps: int, **params: Any) -> list[Request]:
        """Requests of these adapters, past their prefill, with `steps` decode steps left.

        The adapters are loaded first: otherwise a request of a late adapter would still decode when others have ended.
        """
        requests = [self.request(prompt_tokens, steps + len(adapters) + 8, adapter, **params) for adapter in adapters]
        store = self.engine.store
        self.load([name for name in adapters if name is not None and store.tier(store.get(name)) is not Tier.DEVICE])
        for request in requests:
            self.engine.add_request(request)
        for _ in range(4 * len(requests) + 64):
            self.step()
            if all(request.num_output_tokens for request in requests):
                break
        else:
            self.clear(requests)
            raise Unsettled(f"{len(requests)} requests did not all get past their prefill")
        for _ in range(2):  # captures the bucket's graph, if that happens on first use
            self.step()
        self._context.timer.synchronize()
        return requests

    def step_seconds(self, steps: int, rows: int) -> list[float]:
        """Seconds of each of `steps` decode steps; all of them have `rows` sequences."""
        found = []
        for _ in range(steps):
            found.append(self.timed_step()[1])
            info = self.engine.stats().last_step
            if info is None or info.num_tokens != rows:
                raise Unsettled(f"a step had {info and info.num_tokens} tokens where {rows} rows should decode")
        return found

    def decode_seconds(
        self, adapters: Sequence[str | None], prompt_tokens: int, steps: int, **params: Any
    ) -> list[float]:
        """Seconds of each of so many decode steps of new requests, which are then aborted."""
        requests = self.decoding(adapters, prompt_tokens, steps, **params)
        try:
            return self.step_seconds(steps, len(adapters))
        finally:
            self.clear(requests)

    def replay_seconds(self, rows: int, *, lora: bool, experts: bool = False) -> float:
        """Device seconds of the last decode step, replayed: the step without the host's work. lora: it has adapters;
        experts: that change experts.

        A replay reads and writes the same data as the step, so it changes nothing. NaN if steps are not captured.
        """
        if not getattr(self._decoding, "captures", True):
            return math.nan
        bucket, form = self._buckets.pick(rows), StepForm(StepMode.LORA if lora else StepMode.BASE)
        if experts:  # a GPU has captured it for the groups of projections that the adapters change
            captured = (each.form for each in self._graphs.report if each.bucket == bucket and each.mode is form.mode)
            form = next((each for each in captured if each.mixture), form)
        device = getattr(self.executor, "_device", None)
        with nullcontext() if device is None else device.scope(), torch.inference_mode():
            return self._context.timer.time(lambda: self._graphs.replay(bucket, form), capture=False).seconds

    def median_seconds(
        self, adapters: Sequence[str | None], prompt_tokens: int, steps: int, *, experts: bool = False
    ) -> tuple[float, float]:
        """Median seconds of so many decode steps of new requests, which are then aborted, and of the last one's replay
        alone. experts: see `replay_seconds`.
        """
        requests = self.decoding(adapters, prompt_tokens, steps)
        seconds = median(self.step_seconds(steps, len(adapters)))
        device = self.replay_seconds(len(adapters), lora=any(name is not None for name in adapters), experts=experts)
        self.clear(requests)
        return seconds, device

    def first_token_seconds(self, prompt_tokens: int, adapter: str | None = None) -> float:
        """Time to first token of a request that arrives now."""
        request = self.request(prompt_tokens, 1, adapter)
        began = time.perf_counter()
        self.engine.add_request(request)
        while not request.num_output_tokens:
            self.step()
        seconds = time.perf_counter() - began
        self.finish()
        return seconds

    def longest_step_until_first_token(self, prompt_tokens: int, adapter: str | None) -> float:
        """Seconds of the longest step until a request that joins the running ones has its first token."""
        request = self.add(prompt_tokens, 1, adapter)
        seconds = [0.0]
        while not request.num_output_tokens:
            seconds.append(self.timed_step()[1])
        return max(seconds)

    @property
    def num_captured(self) -> int:
        """Number of captured graphs."""
        return len(getattr(self.executor, "captured", ()))

    def merge(self, name: str) -> None:
        """Merge an adapter in an idle engine."""
        self.engine.merge(name)
        while self.engine.merging.is_under_way:
            self.engine.merging.advance(1.0)
        if self.engine.stats().merged_adapter != name:
            raise Unsettled(f"adapter {name!r} is not merged")

    def load(self, names: Sequence[str]) -> None:
        """Make adapters resident, by a request for each, one after another."""
        for name in names:
            self.add(1, 1, name)
            self.finish()
            self._expect(name, Tier.DEVICE)

    def to_host(self, name: str) -> None:
        """Remove an adapter from the device; its host image stays."""
        adapter = self.engine.store.get(name)
        if adapter.pages:
            self.engine.store.evict(adapter)
        self._expect(name, Tier.HOST)

    def to_disk(self, name: str) -> None:
        """Remove an adapter's pages and its host image."""
        store = self.engine.store
        path = store.get(name).manifest.path
        store.unregister(name)
        store.register(name, path)
        self._expect(name, Tier.DISK)

    def adapter_pages(self) -> list[int]:
        """Pages of resident adapters."""
        store = self.engine.store
        return sorted(page for name in store.names() for page in store.get(name).pages)

    @property
    def executor(self) -> Any:
        return self.engine.executor

    @property
    def arena_pages(self) -> torch.Tensor:
        """`[pages, elements]` of the device's arena."""
        return self.executor.arena.pages

    @property
    def _steps(self) -> Any:
        """The object that runs steps: the executor itself, or its steps."""
        return getattr(self.executor, "steps", self.executor)

    @property
    def _decoding(self) -> Any:
        """The object that captures decode steps."""
        return getattr(self._steps, "decoding", self._steps)

    @property
    def _graphs(self) -> GraphRunner:
        return self._decoding.graphs

    def _expect(self, name: str, tier: Tier) -> None:
        """Wait until a read whose bytes have all arrived has returned, too; raises Unsettled in any other tier."""
        store = self.engine.store
        adapter = store.get(name)
        while not store.poll() and store.tier(adapter) is Tier.LOADING:
            store.images.wait(0.01)
        if store.tier(adapter) is not tier:
            raise Unsettled(f"{adapter} should be in tier {tier} but is in {store.tier(adapter)}")


def _names(backends: GemmBackends) -> dict[str, str]:
    """The backend of each kind of GEMM that the library does not compute."""
    return {
        f"{kind.inputs} → {kind.outputs} in {kind.form}{', logits' * kind.is_head}": str(backend)
        for kind, backend in backends.items()
    }
