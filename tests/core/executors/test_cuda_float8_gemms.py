"""Products of activations in FP8 with weights in FP8: the choice at the start, by values and by a clock of the test."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from chorus.core.executors import cuda_float8_gemms
from chorus.core.executors.cuda_float8_gemms import check_float8_gemms, choose_float8_gemms
from chorus.core.model.batch import GemmBackend
from chorus.core.model.checkpoints.quantization.round_to_nearest import RoundToNearest
from chorus.core.model.compose.decoder_layer import DecoderLayer
from chorus.core.model.decoder import DecoderModel
from chorus.core.model.specs.attention import AttentionSpec
from chorus.core.model.specs.config import UnsupportedModel
from chorus.core.model.specs.feed_forward import GatedSpec
from chorus.core.model.specs.rope_config import RopeConfig
from chorus.core.model.weights.dummy_weights import DummyWeights
from chorus.core.model.weights.weight_plan import NARROW
from chorus.memory.pages.arena import Arena
from chorus.memory.pages.layout import PageLayout
from chorus.ops.gemm import float8_rows

from ...graphs.late_device import LateDevice
from ...tables import LAYER_MATRICES
from ..tiny_config import LLAMA

ATTENTION = AttentionSpec(2, 1, 32, 0.25, RopeConfig(32), qkv_bias=True)
CONFIG = replace(LLAMA, vocab_size=80, hidden_size=64, layers=(DecoderLayer(ATTENTION, GatedSpec(96)),) * 3)


def decoder_of(*, float8_inputs: bool = True) -> DecoderModel:
    layout = PageLayout(num_layers=3, kv_heads=1, head_dim=32, block_tokens=16, itemsize=2)
    weights = DummyWeights(CONFIG, torch.bfloat16)
    weights.quantiser, weights.plan = RoundToNearest("fp8"), replace(NARROW, float8_inputs=float8_inputs)
    return DecoderModel(CONFIG, weights, Arena(layout, 2, torch.bfloat16, "cpu"), 64)


class Clock:
    """Runs the work, and says what each kind takes. speeds: of widened products and of FP8's, by group."""

    def __init__(self, *speeds: tuple[float, float]) -> None:
        self._left = [each for pair in speeds for each in pair]

    def __call__(self, work) -> float:
        work()
        return self._left.pop(0)

    def is_done(self) -> bool:
        return not self._left


def chosen(decoder: DecoderModel) -> list[set[bool]]:
    """By group, how the layers' weights are multiplied."""
    return [{layer[name].multiplies_float8 for layer in decoder.layers} for name in LAYER_MATRICES]


def test_each_kind_takes_the_faster_way_in_all_layers(caplog):
    caplog.set_level("INFO")
    decoder = decoder_of()
    clock = Clock((2.0, 1.0), (1.0, 2.0), (1.0, 1.01), (1.0, 1.03))
    choose_float8_gemms(decoder, 72, LateDevice(), clock)
    assert chosen(decoder) == [{True}, {False}, {True}, {False}]
    assert clock.is_done()
    assert (
        "products of qkv 64 → 128 with activations in FP8: in FP8 (µs of 72 rows, 3 layers: 1000000, 2000000)"
        in caplog.text
    )


def test_wrong_values_and_failures_leave_them_widened(monkeypatch, caplog):
    inner, calls = vars(torch)["_scaled_mm"], []

    def broken(*args, **kwargs):
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("no kernel\nmore lines")
        return inner(*args, **kwargs) * (1.0 if len(calls) > 2 else 1.1)

    monkeypatch.setattr(torch, "_scaled_mm", broken)
    decoder = decoder_of()
    choose_float8_gemms(decoder, 72, LateDevice(), Clock((2.0, 1.0), (2.0, 1.0)))
    assert chosen(decoder) == [{False}, {False}, {True}, {True}]
    assert "of qkv are not used: RuntimeError: no kernel" in caplog.text
    assert "of o are not used: they differ by" in caplog.text


def test_nothing_is_chosen_for_weights_that_keep_activations():
    decoder = decoder_of(float8_inputs=False)
    choose_float8_gemms(decoder, 72, LateDevice(), Clock())
    assert chosen(decoder) == [{False}] * 4
    assert not any(layer[name].rounds_inputs for layer in decoder.layers for name in LAYER_MATRICES)


def test_both_ways_compute_a_step_from_the_same_rounded_rows(monkeypatch):
    """Every product of the decoder rounds its rows, the norm's and the activation's, once."""
    decoder, seen = decoder_of(), []
    inner = float8_rows.quantised
    monkeypatch.setattr(float8_rows, "quantised", lambda x: seen.append(x) or inner(x))
    generator = torch.Generator().manual_seed(1)
    widths = [decoder.layers[0][name].shape[1] for name in LAYER_MATRICES]
    inputs = [torch.randn(5, width, generator=generator).bfloat16() for width in widths]
    found = []
    for is_float8 in (False, True):
        for layer in decoder.layers:
            for name in LAYER_MATRICES:
                layer[name] = replace(layer[name], multiplies_float8=is_float8)
        places = [places[0] for places in decoder.gemms().values() if places[0].layer is not None]
        found.append([decoder.run_gemm(place, GemmBackend.LIBRARY, x) for place, x in zip(places, inputs, strict=True)])
    assert len(seen) == 8
    assert all(torch.equal(one, other) for one, other in zip(seen[:4], seen[4:], strict=True))
    for one, other in zip(*found, strict=True):
        assert (one.float() - other.float()).abs().max() <= 2.0**-6 * one.float().abs().max()


def test_where_they_can_not_be_multiplied_it_is_refused(monkeypatch):
    with pytest.raises(UnsupportedModel, match="but dtype is float16; leave it out, or set dtype to bfloat16"):
        check_float8_gemms(torch.float16, torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 6))
    with pytest.raises(UnsupportedModel, match=r"needs compute capability 8\.9, cuda:0 has 8\.6; leave it out"):
        check_float8_gemms(torch.bfloat16, torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: cuda_float8_gemms.LEAST_CAPABILITY)
    check_float8_gemms(torch.bfloat16, torch.device("cuda", 0))
