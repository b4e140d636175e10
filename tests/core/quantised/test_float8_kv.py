"""An FP8 KV cache: what is said of it, and refused. Its tokens are in the table of `paths`."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from chorus.core.config import EngineConfig
from chorus.core.executors.base import ModelExecutor
from chorus.core.executors.cpu import CpuExecutor
from chorus.core.model.specs.config import UnsupportedModel

from ..paths.float8_caches import Float8Cache

pytestmark = [pytest.mark.native(needed=False), pytest.mark.wide]


def test_rounding_matters(tiny):
    """Comparisons mean something: some answers differ from those without rounding."""
    it, other = tiny("llama3"), Float8Cache(tiny("llama3"))
    cases = [other.case(None, 40, seed) for seed in range(12)]
    assert any(want != it.greedy(None, prompt, len(want))[0] for prompt, want in cases)


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
