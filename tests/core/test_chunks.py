"""Attention to chunks of the text: sizes of blocks, and what refuses it. For paths, see `paths`."""

from __future__ import annotations

import pytest
import torch

from chorus.core.config import EngineConfig
from chorus.core.executors.cpu import CpuExecutor
from chorus.core.model.config import UnsupportedModel
from chorus.core.model.native_decoder import why_unsupported
from chorus.core.model.read_config import read_model_config

from .tiny_families import save_family

pytestmark = [pytest.mark.numerics, pytest.mark.wide]


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


def test_the_native_decoder_refuses_chunks(tmp_path):
    save_family("llama-4", tmp_path, moe_layers=[])
    config = read_model_config(tmp_path)
    assert not config.num_experts, "else they are what it refuses"
    assert "chunks of attention" in (why_unsupported(config, torch.float32) or "")
