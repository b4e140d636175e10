"""Kernels of products of few rows, compiled for a GPU that is not there."""

from __future__ import annotations

import threading
from unittest.mock import patch

import pytest
import torch

triton = pytest.importorskip("triton")

from triton import compiler  # noqa: E402

from chorus.core.executors.cuda_products import NAMES, compile_ahead  # noqa: E402
from chorus.core.model.batch import Way  # noqa: E402
from chorus.core.model.config import ModelConfig  # noqa: E402
from chorus.core.model.decoder import DecoderModel, Layer, Residual  # noqa: E402
from chorus.core.model.dummy_weights import DummyWeights  # noqa: E402
from chorus.core.model.lora_state import GATE_UP, QKV  # noqa: E402
from chorus.core.model.rope_config import RopeConfig  # noqa: E402
from chorus.memory.pages.arena import Arena  # noqa: E402
from chorus.memory.pages.layout import PageLayout  # noqa: E402
from chorus.ops import small_gemm_triton  # noqa: E402
from chorus.perf.kernels.idle_triton import idle_compiler, idle_kernels  # noqa: E402

CONFIG = ModelConfig(
    "LlamaForCausalLM", vocab_size=80, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=2, num_kv_heads=1,
    head_dim=16, rms_norm_eps=1e-5, rope=RopeConfig(), max_position_embeddings=64, sliding_window=None,
    tie_word_embeddings=True, qkv_bias=True, o_bias=False, mlp_bias=False, qk_norm=False, dtype="bfloat16",
    bos_token_id=None, eos_token_ids=(),
)  # fmt: skip
WAYS = {group: [Way.SMALL, *([Way.NORMED] if group in (QKV, GATE_UP) else [])] for group in NAMES}


class NoLora:
    """Adapters that add nothing."""

    def add(self, *_):
        """Nothing."""

    def wait(self, *_):
        """Nothing is on its way."""


@pytest.fixture
def decoder():
    layout = PageLayout(num_layers=2, kv_heads=1, head_dim=16, block_tokens=16, itemsize=2)
    arena = Arena(layout, 2, torch.bfloat16, "cpu")
    return DecoderModel(CONFIG, DummyWeights(CONFIG, torch.bfloat16), arena, 64)


def test_all_variants_are_compiled_ahead_beside_each_other(decoder):
    """No step launches what was not compiled then: base or LoRA, of the first layer and of others, of any rows."""
    threads: list[str] = []
    with idle_compiler():
        inner = compiler.compile

        def compile(source, *args, **kwargs):
            if source.fn is small_gemm_triton.multiply_rows:
                threads.append(threading.current_thread().name)
            return inner(source, *args, **kwargs)

        with patch.object(compiler, "compile", compile):
            compile_ahead(decoder, WAYS)
            assert all(name.startswith("ThreadPoolExecutor") for name in threads), threads
            assert len(threads) == 12
            with idle_kernels(), patch.object(compiler, "compile", compile):
                for rows in (1, 7, 16):
                    launch_all(decoder, rows)
    assert len(threads) == 12, "a product was compiled when it was launched"


def launch_all(decoder: DecoderModel, rows: int) -> None:
    """Every product by every way, in a first layer and behind it, with LoRA and without."""
    x = torch.zeros(rows, 32, dtype=torch.bfloat16)
    for group, ways in WAYS.items():
        for way in ways:
            weight = decoder.weight(group)
            decoder.run_products(
                group, way, torch.zeros(rows, weight.shape[1], dtype=x.dtype), x.clone(), decoder.layers
            )
    for way in (Way.NORMED,):
        for added in (None, x):
            layer = Layer(decoder.layers[0], 0, (way,) * 4, NoLora())
            layer.qkv(Residual(x, 1e-5, added))
        Layer(decoder.layers[0], 0, (way,) * 4, NoLora())._normed_product(  # noqa: SLF001
            GATE_UP, Residual(x, 1e-5, x), decoder.layers[0].post_attention_norm, decoder.layers[0].gate_up, None
        )
