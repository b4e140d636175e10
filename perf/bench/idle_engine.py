"""An engine on a fake GPU that does nothing.

Tests: tests/perf/bench/test_host_time.py, tests/perf/bench/test_launches.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from ...core.config import EngineConfig
from ...core.engine import Engine
from ...core.executors import cuda
from ...core.executors.cuda import CudaExecutor
from ...core.model.decoder import DecoderModel
from ...core.model.lora.lora_state_cuda import CudaLoraState
from ...core.requests.request import Request
from ...core.requests.request_params import RequestParams
from ...graphs.device import CudaDevice
from ...ops.attention.attention import AttentionSetup
from ..inline_reads import InlineReads
from .models import random_model
from .models.sizes import Geometry

GEOMETRY = Geometry(hidden=64, ffn=64, layers=8, heads=4, kv_heads=1, vocab=320, positions=1 << 16)
_RANK = 16


class StubDevice(CudaDevice):
    """A device that completes everything at once; captured work runs during capture, and replays do nothing.

    launched: called with `graph` for every replay.
    """

    def __init__(self, launched: Callable[[str], object] = lambda _: None) -> None:
        self.torch_device = torch.device("cpu")
        self._launched = launched

    def scope(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def pinned(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def event(self) -> Any:
        return SimpleNamespace(record=_nothing, synchronize=_nothing)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def capture(self, work: Callable[[], object]) -> Callable[[], None]:
        def replay() -> None:
            self._launched("graph")

        work()
        return replay

    def memory(self) -> tuple[int, int]:
        return 1 << 40, 1 << 40

    def peak_bytes(self, work: Callable[[], object]) -> int:
        return 0

    def synchronize(self) -> None: ...

    def failure(self) -> str | None:
        return None

    def release(self) -> None: ...


def _nothing(*_: Any, **__: Any) -> None: ...


def _forward(decoder: DecoderModel, batch: Any, logits: torch.Tensor) -> torch.Tensor:
    """No computation: the logits are what they were."""
    return logits


class Wrapper:
    """Any of FlashInfer's wrappers; here they plan nothing and compute nothing."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    plan = reset_workspace_buffer = _nothing

    def run(self, q: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return q


_FLASHINFER = SimpleNamespace(
    __version__="stub",
    BatchPrefillWithPagedKVCacheWrapper=Wrapper,
    BatchDecodeWithPagedKVCacheWrapper=Wrapper,
    decode=SimpleNamespace(fast_decode_plan=_nothing),
)


@contextmanager
def idle_engine(
    rows: int, max_len: int, lora: bool, work_dir: Path, device: StubDevice, *, forward: bool = False, **fields: Any
) -> Iterator[Engine]:
    """Engine on a fake device. forward: steps compute, as far as the caller allows. fields: more of `EngineConfig`."""
    model = random_model.RandomModel(GEOMETRY, (_RANK,) * rows if lora else ())
    pages_per_row = -(-max_len // 16) + 1
    adapter_pages = 64 * rows
    config = EngineConfig(
        model=random_model.checkpoint(model, work_dir),
        device="cuda",
        max_num_seqs=rows,
        max_model_len=max_len,
        max_num_batched_tokens=max(8192, rows),
        num_pages=2 + rows * pages_per_row + adapter_pages,
        max_lora_rank=_RANK,
        prefix_cache=False,
        lookahead=rows,
        graph_capture="lazy",
        small_gemm="off",
        **{"mixed_graph_tokens": 0, **fields},
    )

    def flashinfer(setup: AttentionSetup, *wishes: Any) -> Any:
        from ...ops.attention.attention_flashinfer import FlashInferBackend  # an optional dependency's

        return FlashInferBackend(setup, num_sms=2, module=_FLASHINFER, new_event=device.event)

    with ExitStack() as stack:
        stack.enter_context(patch.object(cuda, "choose_attention", flashinfer))
        stack.enter_context(patch.object(CudaLoraState, "warm_up", _nothing))
        if not forward:
            stack.enter_context(patch.object(DecoderModel, "forward", _forward))
        executor = CudaExecutor(config, device)
        executor.steps.outputs.logits[:, 1] = 1.0  # token 1 for every sequence
        engine = Engine(config, executor, reads=InlineReads())
        for name, path in random_model.adapters(model, work_dir).items():
            engine.store.register(name, path)
        try:
            yield engine
        finally:
            engine.close()


def add(engine: Engine, name: str, adapter: str | None, prompt: int, max_tokens: int) -> None:
    """Add a request for so many tokens after a prompt of so many tokens."""
    params = RequestParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    engine.add_request(Request(name, [1] * prompt, params, adapter))


def decoding(engine: Engine, adapters: Sequence[str | None], prompt: int, max_tokens: int) -> list[str]:
    """Add a request for each adapter and run steps until all of them decode; return their ids."""
    ids = [f"r{index}" for index in range(len(adapters))]
    for name, adapter in zip(ids, adapters, strict=True):
        add(engine, name, adapter, prompt, max_tokens)
    while any(engine.scheduler.get(name).num_output_tokens == 0 for name in ids):
        engine.step()
    return ids
