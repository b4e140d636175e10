"""Spans of a step: off by default, with stable names, and around the operations that they name."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from types import ModuleType

import pytest
import torch

from chorus.core.config import EngineConfig
from chorus.core.executors.cpu import CpuExecutor
from chorus.core.model import decoder as model_module
from chorus.core.model import nvtx_spans
from chorus.core.model.batch import StepBatch
from chorus.core.model.program import torch_step


def test_off_by_default(monkeypatch):
    monkeypatch.setitem(sys.modules, "nvtx", None)  # not even looked for
    span = nvtx_spans.make_span(False)
    with span("layer.0"), span("attn.qkv"):
        pass


def test_without_the_package_it_says_what_to_install(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "nvtx", None)
    with nvtx_spans.make_span(True)("layer.0"):
        pass
    assert "chorus-lora[profile]" in caplog.text


def test_marks_with_nvtx(monkeypatch):
    marked = []

    @contextmanager
    def annotate(name, domain):
        marked.append((name, domain))
        yield

    nvtx = ModuleType("nvtx")
    nvtx.annotate = annotate
    monkeypatch.setitem(sys.modules, "nvtx", nvtx)
    span = nvtx_spans.make_span(True)
    with span("layer.0"), span("mlp"):
        pass
    assert marked == [("layer.0", "chorus"), ("mlp", "chorus")]


class Lora:
    """Records the model's calls for a step's adapters."""

    def __init__(self, log):
        self._log = log

    def wait(self, layer):
        self._log.append(f"wait.{layer}")

    def offload(self, gemm, x, layer):
        """Nothing is."""

    def known(self, token_ids):
        return token_ids

    def embed(self, rows, token_ids):
        """Nothing is added."""

    def logits(self):
        """Nothing is added."""

    def add(self, gemm, y, x, layer):
        self._log.append(f"{('qkv', 'o', 'gate_up', 'down')[gemm]}.{layer}")


@pytest.mark.parametrize("lora", [False, True])
def test_the_spans_of_a_step(subject, monkeypatch, lora):
    """A layer's adapters are waited for before the layer's first product with them."""
    config = EngineConfig(model=subject("gqa").model, num_pages=8, cpu_kernels="torch", max_model_len=32)
    log = []

    @contextmanager
    def span(name):
        log.append(name)
        yield

    monkeypatch.setattr(model_module, "span", span)
    monkeypatch.setattr(nvtx_spans, "span", span)
    monkeypatch.setattr(torch_step, "span", span)
    executor = CpuExecutor(config)
    decoder = executor.decoder
    attention = decoder.new_attention()
    attention.plan([0, 2], torch.tensor([[1]]), [2])
    tokens = torch.tensor([3, 4])
    decoder.forward(
        StepBatch(
            tokens,
            torch.arange(2),
            torch.arange(2),
            torch.ones_like(tokens)[None],
            attention,
            Lora(log) if lora else None,
        )
    )
    plain = ["layer.{}", "attn.qkv", "attn.rope", "attn.run", "attn.o", "mlp", "mlp.gate_up", "mlp.down"]
    attention = ["attn.qkv", "lora.qkv", "qkv.{}", "attn.rope", "attn.run", "attn.o", "lora.o", "o.{}"]
    mlp = ["mlp", "mlp.gate_up", "lora.gate_up", "gate_up.{}", "mlp.down", "lora.down", "down.{}"]
    full = ["layer.{}", "wait.{}", *attention, *mlp]
    layers = decoder.config.num_layers
    want = [name.format(layer) for layer in range(layers) for name in (full if lora else plain)]
    assert log == [*want, "logits"]
