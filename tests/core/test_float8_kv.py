"""An FP8 KV cache over every path of an engine: the tokens of transformers + peft whose cache rounds alike."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from transformers.cache_utils import Cache

from chorus.core.config import EngineConfig
from chorus.core.executors.base import ModelExecutor
from chorus.core.executors.cpu import CpuExecutor
from chorus.core.model.config import UnsupportedModel
from chorus.core.model.decoder import DecoderModel
from chorus.core.model.native_decoder import NativeDecoderModel
from chorus.graphs.runner import StepMode
from chorus.ops.float8_kv import UNSCALED, KvScales

from ..greedy import after_drafts
from .merging.test_merged import merge
from .tiny_families import ADAPTERS, Tiny

pytestmark = [pytest.mark.numerics, pytest.mark.wide]

#: Least lead of a choice. Keys that differ in the last bit of float32 may be rounded to two neighbours in FP8.
CLEAR = 0.03

#: Full attention, windows, soft caps, norms of heads, sinks, linear attention and experts.
FAMILIES = ["llama3", "qwen3", "qwen2-window", "gemma-2", "gemma-3", "olmo-3", "gpt-oss", "mixtral", "qwen3.5"]


def as_stored(x: torch.Tensor, scale: float) -> torch.Tensor:
    """What FP8 makes of x."""
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype) * scale


@contextmanager
def rounded_caches(scales: list[KvScales] | None = None) -> Iterator[None]:
    """Have caches of transformers keep keys and values in FP8."""
    update = Cache.update

    def rounded(self: Any, k: torch.Tensor, v: torch.Tensor, layer: int, *args: Any, **more: Any) -> Any:
        of_layer = UNSCALED if scales is None else scales[layer]
        return update(self, as_stored(k, of_layer.k), as_stored(v, of_layer.v), layer, *args, **more)

    Cache.update = rounded
    try:
        yield
    finally:
        Cache.update = update


def reference(it: Tiny, adapter: str | None, prompt: list[int], count: int) -> tuple[list[int], float]:
    """Greedy tokens, and by how much the closest one leads. The drafts are an engine's, whose cache doesn't round. It
    ends at a choice that is not clear.
    """
    model = it.use(adapter)
    it.router_margins.clear()

    def logits(tokens: list[int]) -> torch.Tensor:
        with rounded_caches():
            return model(torch.tensor([tokens]), use_cache=True).logits[0]

    tokens, margin = after_drafts(logits, partial(it.draft, adapter), prompt, count, CLEAR)
    return tokens, min(margin, *(10 * each for each in it.router_margins), 1.0)


@dataclass
class Case:
    adapter: str | None
    prompt: list[int]
    want: list[int]


def make_cases(it: Tiny, count: int, *, adapters=(None, *ADAPTERS), lengths=(5, 70), tokens=8) -> list[Case]:
    rng, cases = random.Random(count), []
    while len(cases) < count:
        adapter = adapters[len(cases) % len(adapters)]
        prompt = [rng.randrange(3, 150) for _ in range(rng.randint(*lengths))]
        want, margin = it.kept.get(["fp8", adapter, prompt, tokens], partial(reference, it, adapter, prompt, tokens))
        if margin >= CLEAR:
            cases.append(Case(adapter, prompt, want))
    return cases


def check(driver, cases):
    for index, case in enumerate(cases):
        driver.add(str(index), case.adapter, case.prompt, max_tokens=len(case.want))
    answers = driver.drain()
    assert [answers[str(index)].tokens for index in range(len(cases))] == [case.want for case in cases]


@pytest.fixture
def drive8(drive):
    def make(it, **config):
        driver = drive(it, kv_cache_dtype="fp8", **config)
        assert driver.executor.layout.float8_kv
        return driver

    return make


@pytest.mark.parametrize("family", FAMILIES)
def test_mixed_batch_equals_transformers_whose_cache_rounds(tiny, drive8, family, kernels):
    it = tiny(family)
    driver = drive8(it, cpu_kernels=kernels, max_num_seqs=8, max_num_batched_tokens=24, max_model_len=128)
    assert isinstance(driver.executor.rank.decoder, NativeDecoderModel if kernels == "native" else DecoderModel)
    check(driver, make_cases(it, 8))
    chunks = [row for plan in driver.plans for row in plan.sequences if row.start > 0 and len(row.tokens) > 1]
    assert chunks, "no prompt was cut"
    assert max(plan.num_adapters for plan in driver.plans) == 3


def test_rounding_matters(tiny):
    """Comparisons mean something: some answers differ from those without rounding."""
    it = tiny("llama3")
    assert any(case.want != it.greedy(case.adapter, case.prompt, len(case.want))[0] for case in make_cases(it, 16))


@pytest.mark.parametrize("family", ["llama3", "gemma-3"])
@pytest.mark.parametrize("chunk", [1, 7])
def test_chunks_of_any_size_and_cached_prefixes(tiny, drive8, family, chunk):
    it = tiny(family)
    driver = drive8(it, max_num_seqs=min(4, chunk), max_num_batched_tokens=chunk, block_tokens=8)
    cases = make_cases(it, 4)
    check(driver, cases)
    driver.answers.clear()
    check(driver, cases)
    assert driver.engine.stats().num_prefix_hit_tokens > 40


@pytest.mark.usefixtures("crowded")
@pytest.mark.parametrize("family", ["llama3", "gemma-3"])
def test_preempted_requests_swap_and_go_on(tiny, drive8, family):
    it = tiny(family)
    limits = {
        "block_tokens": 8,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "preemption": "swap",
        "prefix_cache": False,
        "max_model_len": 128,
        "adapters": {},
    }
    few = 2 + drive8(it, **limits).executor.layout.pages_for_tokens(128, chunk=64)
    driver = drive8(it, num_pages=few, **limits)
    check(driver, make_cases(it, 8, adapters=(None,), lengths=(5, 20), tokens=30))
    assert driver.engine.stats().num_swaps_out > 0


def test_merged_weights_beside_other_adapters(tiny, drive8):
    it = tiny("llama3")
    driver = drive8(it, max_num_seqs=8, max_num_batched_tokens=24)
    merge(driver, "r3-all")
    check(driver, make_cases(it, 8))
    assert {plan.mode for plan in driver.plans} == {StepMode.MERGED}


@pytest.mark.native  # it adds up what ranks have computed
@pytest.mark.parametrize("family", ["llama3", "gemma-3"])
def test_two_ranks(tiny, drive8, family):
    it = tiny(family)
    driver = drive8(it, tensor_parallel_size=2, max_num_seqs=8, max_num_batched_tokens=24)
    assert driver.executor.rank.layout.float8_kv
    check(driver, make_cases(it, 6))


def test_speculation(tiny, drive8):
    """Rejected tokens' keys and values are overwritten."""
    it = tiny("llama3")
    driver = drive8(it, speculation="ngram", max_num_seqs=4, max_num_batched_tokens=64)
    check(driver, make_cases(it, 6, tokens=24))
    assert any(plan.num_drafts for plan in driver.plans)


def settings_of(model, **config) -> EngineConfig:
    return EngineConfig(model=model, memory_bytes=4 << 20, threads=1, device="cpu", kv_cache_dtype="fp8", **config)


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_what_scales_a_checkpoint_has_is_said(tiny, caplog, kernels):
    settings = settings_of(tiny("llama3").model, dtype="float32", cpu_kernels=kernels)
    caplog.set_level("INFO")
    CpuExecutor(settings).close()
    assert [record.getMessage() for record in caplog.records if "FP8" in record.getMessage()] == [
        "the KV cache is in FP8: the checkpoint has scales for 0 of 2 layers, others have 1",
    ]


def test_a_page_too_small_for_a_recurrent_state_is_refused_by_name(tiny):
    model = tiny("qwen3.5").model
    with pytest.raises(UnsupportedModel, match=r"block_tokens is 1, but a page has \d+ bytes, and a part of a layer's"):
        ModelExecutor(settings_of(model, dtype="float32", block_tokens=1))
    settings = settings_of(model, dtype="float32", block_tokens=32)
    plain = ModelExecutor(settings.model_copy(update={"kv_cache_dtype": "auto"})).layout
    float8 = ModelExecutor(settings).layout
    assert plain.page_bytes == 4 * float8.page_bytes
    assert plain.state_pages < float8.state_pages, "states stay float32"


def test_its_names():
    assert EngineConfig(model=".", kv_cache_dtype="fp8_e4m3").kv_cache_dtype == "fp8"  # pyright: ignore[reportArgumentType]
    for name in ("fp8_e5m2", "int8", "bfloat16"):
        with pytest.raises(ValidationError, match="'auto' or 'fp8'"):
            EngineConfig.model_validate({"model": ".", "kv_cache_dtype": name})
