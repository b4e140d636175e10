"""The CPU executor by itself."""

from __future__ import annotations

import gc
import re
import weakref

import pytest
import torch

from chorus.core.config import EngineConfig
from chorus.core.executors import cpu_setup
from chorus.core.executors.cpu import CpuExecutor
from chorus.core.model.specs.config import UnsupportedModel
from chorus.core.requests.request_params import RequestParams
from chorus.core.requests.types import BASE_LORA_INDEX, ScheduledSequence, StepPlan
from chorus.memory.files.tensor_file import ITEM_BYTES
from chorus.ops.cpu.native import NativeSampling
from chorus.ops.library import native_library
from chorus.ops.library.native_descriptors import Element

from ...tables import LAYER_MATRICES


def test_a_closed_executor_frees_its_arena_at_once(subject, kernels):
    """By reference counts alone: the next engine may need the memory before the collector runs."""
    model = subject("wide_heads")
    settings = EngineConfig(model=model.model, dtype="float32", memory_bytes=8 << 20, cpu_kernels=kernels, threads=1)
    executor = CpuExecutor(settings)
    row = ScheduledSequence("one", BASE_LORA_INDEX, [3], 0, [1], RequestParams(temperature=0.0), 0, True, [3], 1)
    assert executor.execute(StepPlan(1, [row], [], bucket=1)).tokens.keys() == {"one"}
    arena = weakref.ref(executor.arena.pages)
    gc.collect()
    gc.disable()
    try:
        executor.close()
        del executor
        assert arena() is None
    finally:
        gc.enable()


class Old:
    """A library of a processor that can't run it."""

    def chorus_supported(self):
        return 0


@pytest.mark.parametrize(
    ("found", "isa", "reason"),
    [
        (None, "", "it is not built: install a C++ compiler"),
        (Old(), "", "it is built for amx, avx512bf16, avx512, avx2, neon, which this processor lacks: install Chorus"),
        (Old(), "none", "CHORUS_CPU_ISA is 'none'"),
    ],
)
def test_why_steps_are_slow_is_said(subject, monkeypatch, caplog, found, isa, reason):
    """Torch's operators take many times as long; whoever measures or serves with them by accident is told."""
    monkeypatch.setattr(native_library, "built", lambda level: found)
    monkeypatch.setenv("CHORUS_CPU_ISA", isa)
    settings = EngineConfig(model=subject("wide_heads").model, dtype="float32", memory_bytes=8 << 20, threads=1)
    with caplog.at_level("WARNING", logger="chorus"):
        CpuExecutor(settings).close()
        assert [reason in record.message for record in caplog.records] == [True]
        caplog.clear()
        CpuExecutor(settings.model_copy(update={"cpu_kernels": "torch"})).close()
        assert not caplog.records, "it was asked for"
    with pytest.raises(UnsupportedModel, match=re.escape(f"cpu_kernels is 'native', but {reason}")):
        CpuExecutor(settings.model_copy(update={"cpu_kernels": "native"}))


def test_logits_that_no_one_edits_are_drawn_from_once_and_alike_by_all_kernels(subject, monkeypatch):
    """The native head samples by itself, as torch does from the same step's logits, without a second pass over them."""
    ways = [
        {"temperature": 1.0},
        {"temperature": 0.9, "top_p": 0.7},
        {"temperature": 1.3, "top_k": 5, "top_p": 0.9},
        {"temperature": 1.0, "min_p": 0.2, "logprobs": 3},
        {"temperature": 2.0, "top_k": 10**30, "logprobs": 0},
        {"temperature": 0.0, "logprobs": 2},
    ]
    rows = [
        ScheduledSequence(
            f"r{i}", BASE_LORA_INDEX, [3 + i], 0, [1 + i], RequestParams(**ways[i % 6]), i, True, [3 + i], 1
        )
        for i in range(12)
    ]
    monkeypatch.setattr(NativeSampling, "sample", None)
    results = []
    for kernels in ["torch", "native"] if native_library.available(torch.float32) else ["torch"]:
        settings = EngineConfig(
            model=subject("wide_heads").model, dtype="float32", memory_bytes=8 << 20, cpu_kernels=kernels, threads=2
        )
        executor = CpuExecutor(settings)
        results.append(executor.execute(StepPlan(1, rows, [], bucket=None)))
        executor.close()
    assert len(results[0].tokens) == 12
    assert not results[0].errors
    assert [it.tokens for it in results[1:]] == [results[0].tokens] * (len(results) - 1)
    for result in results:
        assert result.logprobs.keys() == {row.request_id for row in rows if row.params.logprobs is not None}
        assert all(result.logprobs[name].token_id == result.tokens[name] for name in result.logprobs)


def test_files_and_the_reader_count_element_types_alike():
    """A header's number goes to the library as it is: another order would read bfloat16 as float16."""
    assert {name: number for number, name in enumerate(ITEM_BYTES)} == Element.__members__


@pytest.mark.parametrize(
    ("fast", "total", "dtype", "said"),
    [
        (True, 64 << 30, torch.bfloat16, []),
        (False, 64 << 30, torch.float32, ["weights are kept as float32 too"]),
        (False, 16 << 20, torch.bfloat16, ["are more than the 0 MiB that are left for them"]),
    ],
)
def test_where_the_processor_is_slow_in_the_models_dtype_torch_computes_in_float32(
    subject, monkeypatch, caplog, fast, total, dtype, said
):
    """By the processor's features and the machine's memory alone; pages hold the checkpoint's dtype."""
    monkeypatch.setattr(cpu_setup, "has_fast_gemms", lambda name: fast or name != "bfloat16")
    monkeypatch.setattr(cpu_setup, "total_bytes", lambda: total)
    config = {"model": subject("wide_heads").model, "memory_bytes": 8 << 20, "cpu_kernels": "torch", "threads": 1}
    with caplog.at_level("WARNING", logger="chorus"):
        executor = CpuExecutor(EngineConfig(dtype="bfloat16", **config))
    assert [text in record.message for record, text in zip(caplog.records, said, strict=True)] == [True] * len(said)
    assert executor.arena.pages.dtype == torch.bfloat16
    assert {layer[name].dtype for layer in executor.decoder.layers for name in LAYER_MATRICES} == {dtype}
    row = ScheduledSequence(
        "one", BASE_LORA_INDEX, [3, 5, 7], 0, [1], RequestParams(temperature=0.0), 0, True, [3, 5, 7], 3
    )
    with torch.inference_mode():
        logits = executor.steps.forward(StepPlan(1, [row], [], bucket=None)).clone()
        reference = CpuExecutor(EngineConfig(dtype="float32", **config))
        want = reference.steps.forward(StepPlan(1, [row], [], bucket=None))
    assert (logits - want).norm() / want.norm() < 5e-2  # weights and KV are rounded
    executor.close()
    reference.close()
