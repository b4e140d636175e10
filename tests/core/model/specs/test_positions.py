"""Tables of positions: sinusoids as transformers has them, and a request's end at the last position."""

from __future__ import annotations

import pytest
import torch

from chorus.core.config import EngineConfig
from chorus.core.executors.choice import open_executor
from chorus.core.model.specs.positions import sinusoids

from ...tiny_families import save_family


@pytest.mark.parametrize("width", [8, 64, 66, 13])
def test_sinusoids_equal_transformers_bit_for_bit(width):
    from transformers.models.xglm.modeling_xglm import XGLMSinusoidalPositionalEmbedding

    want = XGLMSinusoidalPositionalEmbedding.get_embedding(300, width)
    assert torch.equal(sinusoids(300, width), want)


@pytest.mark.parametrize("family", ["gpt-2", "opt", "xglm"])
def test_no_request_can_be_longer_than_the_table(tmp_path, family):
    save_family(family, tmp_path)
    config = EngineConfig(model=tmp_path, max_model_len=257, memory_bytes=4 << 20)
    with pytest.raises(ValueError, match="max_position_embeddings 256"):
        open_executor(config)
