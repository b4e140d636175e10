"""Attention to chunks of the text: sizes of blocks, and what refuses it. For paths, see `paths`."""

from __future__ import annotations

import pytest

from chorus.core.config import EngineConfig
from chorus.core.executors.cpu import CpuExecutor
from chorus.core.model.specs.config import UnsupportedModel

pytestmark = [pytest.mark.native(needed=False), pytest.mark.wide]


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
