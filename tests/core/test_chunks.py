"""Attention to chunks of the text answers as transformers does, over the paths that depend on where a chunk begins."""

from __future__ import annotations

import pytest
import torch

from chorus.core.config import EngineConfig
from chorus.core.executors.cpu import CpuExecutor
from chorus.core.model.config import UnsupportedModel
from chorus.core.model.native_decoder import NativeDecoderModel
from chorus.ops import native_library

from .merging.test_merged import merge
from .test_family_paths import EVERY, answers, told

pytestmark = [pytest.mark.numerics, pytest.mark.wide]

FAMILIES = ["llama-4", "llama-4-dense", *(["llama-4-several"] if EVERY else [])]
"""Chunks of 32 and of 16 tokens, which are shorter than most prompts."""


@pytest.fixture
def kernels() -> str:
    """The native decoder, where it was built."""
    return "auto"


@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("family", FAMILIES)
def test_steps_of_any_size(tiny, drive, family, chunk):
    """Prompts are cut before, at and after the beginning of a chunk, and in one step there may be several chunks."""
    it = tiny(family)
    driver = drive(it, max_num_seqs=min(4, chunk), max_num_batched_tokens=chunk, block_tokens=8)
    is_native = native_library.available(torch.float32)
    assert isinstance(driver.executor.rank.decoder, NativeDecoderModel) == is_native
    want = answers(it, driver, 5, seed=1)
    assert told(driver, want) == want


@pytest.mark.parametrize("family", FAMILIES)
def test_prefixes_from_the_cache(tiny, drive, family):
    it = tiny(family)
    driver = drive(it, block_tokens=8, max_num_batched_tokens=40, max_num_seqs=8)
    for _ in range(2):
        want = answers(it, driver, 4, seed=2)
        assert told(driver, want) == want
        driver.answers.clear()
    assert driver.engine.stats().num_prefix_hit_tokens > 40


@pytest.mark.parametrize("family", FAMILIES)
def test_preempted_requests_swap_and_go_on(tiny, drive_crowded, family):
    """Pages of earlier chunks have left, and others come back."""
    it = tiny(family)
    driver = drive_crowded(it, block_tokens=8)
    want = answers(it, driver, 8, seed=4, lengths=(5, 20), tokens=50)
    assert told(driver, want) == want
    assert driver.engine.stats().num_swaps_out > 0


@pytest.mark.native
@pytest.mark.parametrize("family", FAMILIES)
def test_merged_weights_on_two_ranks_and_steps_ahead(tiny, drive, family):
    it = tiny(family)
    for options in ({"tensor_parallel_size": 2}, {"is_async": True}):
        driver = drive(it, max_num_seqs=8, max_num_batched_tokens=24, block_tokens=8, **options)
        merge(driver, "r3-all")
        want = answers(it, driver, 4, seed=5)
        assert told(driver, want) == want


def test_blocks_that_do_not_divide_a_chunk_are_refused(tiny):
    def settings(**changes):
        return EngineConfig(model=tiny("llama-4").model, memory_bytes=4 << 20, threads=1, device="cpu", **changes)

    with pytest.raises(UnsupportedModel, match=r"block_tokens is 24, .* chunks of 32 tokens; set it to a divisor"):
        CpuExecutor(settings(block_tokens=24))
    layout = CpuExecutor(settings(block_tokens=24, max_model_len=32)).layout
    assert not layout.has_windows, "no request leaves its first chunk"
    layout = CpuExecutor(settings(block_tokens=8)).layout
    assert layout.chunked
    assert set(layout.group_windows) == {None, 32}
