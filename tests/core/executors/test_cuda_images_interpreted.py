"""Images on the CUDA executor, on a CPU: rows, additions and positions in eager steps, and answers in captured ones.

Run in a process that interprets, see `tests/interpreted.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from chorus.core.config import EngineConfig
from chorus.core.engine import Engine
from chorus.core.executors.cuda import CudaExecutor
from chorus.core.media.serving import open_encoder
from chorus.graphs.runner import EagerReason
from chorus.ops.elementwise import elementwise
from chorus.perf.inline_reads import InlineReads

from ...graphs.late_device import LateDevice
from ..conftest import ticking
from ..media.test_served_images import Asked, answers, picture
from ..media.tiny_vision import needs_vision

pytestmark = [pytest.mark.vision, needs_vision]

SMALL = (20, 24)
"""Of an image: the interpreter takes milliseconds for each row."""


@pytest.fixture(autouse=True)
def elementwise_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms, rotary embeddings and activations by a GPU's kernels, too."""
    monkeypatch.setattr(elementwise, "_uses_kernels", lambda _: True)


Open = Callable[..., Engine]


@pytest.fixture
def on_gpu() -> Iterator[Open]:
    opened: list[Engine] = []

    def make(asked: Asked, *adapters: str, **fields: Any) -> Engine:
        usual: dict[str, Any] = {
            "dtype": "float32", "device": "cuda", "max_num_seqs": 3, "max_num_batched_tokens": 24, "block_tokens": 8,
            "memory_bytes": 8 << 20, "max_lora_rank": 16, "threads": 1, "mixed_graph_tokens": 24, "max_model_len": 160,
            "graph_capture": "lazy",
        }  # fmt: skip
        config = EngineConfig(model=asked.reference.path, **usual | fields)
        executor = CudaExecutor(config, LateDevice())
        assert executor.model.why_blind is None
        rows = (config, executor.whole, executor.dtype)
        engine = Engine(
            config,
            executor,
            ticking(),
            InlineReads(),
            encoder=lambda wake, budget: open_encoder(*rows, wake, budget, executor.torch_device),
        )
        opened.append(engine)
        for name in adapters:
            engine.store.register(name, asked.reference.path / "adapters" / name)
        return engine

    yield make
    for engine in opened:
        engine.close()


def check(asked: Asked, engine: Engine, *cases: tuple[str | None, int]) -> None:
    """Requests of (adapter, images) get the tokens of transformers and peft."""
    wanted = {}
    for number, (adapter, count) in enumerate(cases):
        images = [picture(number + index, SMALL) for index in range(count)]
        request = asked.request(f"{number}", adapter, images, count=4)
        wanted[request.id] = asked.wanted[request.id]
        engine.add_request(request)
    assert answers(engine) == wanted


def test_positions_on_axes_and_additions(on_gpu: Open) -> None:
    """Chunks end inside images; answers behind them are captured steps, and so are chunks of text."""
    asked = Asked("qwen3_vl")
    engine = on_gpu(asked, "linear")
    check(asked, engine, ("linear", 1), (None, 1), (None, 0))
    executor = engine.executor
    assert isinstance(executor, CudaExecutor)
    assert executor.eager_steps[EagerReason.IMAGES] > 1 and executor.captured


@pytest.mark.slow
@pytest.mark.parametrize("family", ["smolvlm", "mistral3", "qwen2_5_vl", "qwen3_5", "gemma4_inputs", "granite_vision"])
@pytest.mark.parametrize("mixed_graph_tokens", [0, 24])
def test_families(on_gpu: Open, family: str, mixed_graph_tokens: int) -> None:
    asked = Asked(family)
    engine = on_gpu(asked, "linear", "tower", mixed_graph_tokens=mixed_graph_tokens)
    check(asked, engine, ("linear", 1), (None, 2), ("tower", 1), (None, 0))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma3", "gemma4", "paligemma2"])
def test_tokens_that_see_each_other_by_pytorchs_operators(on_gpu: Open, family: str) -> None:
    asked = Asked(family)
    engine = on_gpu(asked, "linear", attention="torch", max_num_batched_tokens=96)
    check(asked, engine, ("linear", 1), (None, 1), (None, 0))


@pytest.mark.slow
def test_drafts_behind_images(on_gpu: Open) -> None:
    asked = Asked("qwen2_5_vl")
    engine = on_gpu(asked, speculation="ngram")
    request = asked.request("told", None, [picture(3, SMALL)], count=10)
    wanted = asked.wanted["told"]
    request.prediction = [*wanted[:5], (wanted[5] + 1) % 50, *wanted[6:]]
    engine.add_request(request)
    assert answers(engine)["told"] == wanted and engine.stats().num_accepted_tokens > 2
