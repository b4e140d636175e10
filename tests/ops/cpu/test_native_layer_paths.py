"""Kinds of dense layers on the native decoder's other paths: merged weights, ranks, offload workers, kept logits."""

from __future__ import annotations

import ctypes
import math
import mmap
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from chorus.core.model.specs.attention import HeadNorm, OutputGate
from chorus.core.model.specs.feed_forward import Activation, UngatedActivation
from chorus.core.model.specs.norms import NormKind, Norms
from chorus.ops.cpu import native
from chorus.ops.cpu.lora_offload import OffloadedSegments, OffloadWorkers
from chorus.ops.elementwise.float8_kv import UNSCALED
from chorus.ops.library import native_library
from chorus.ops.lora.sgmv import Segments
from chorus.ops.ranks.ranks import Ranks
from chorus.ops.sampling.sampling import RowSamplingParams

from .layerless import layerless_model
from .native_layers import BLOCK, LAYERS, Kind, Model, reference, shares, step
from .test_native_layers import BOUND, LEVELS

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(not LEVELS, reason="needs the native library"),
    pytest.mark.wide,
]

KINDS = {
    "Granite": Kind(residual_multiplier=0.22, embedding_multiplier=6.0, scale=0.1, logits_scale=0.3, biased=True),
    "Gemma 2": Kind(
        norms=Norms.AROUND,
        activation=Activation.GELU_TANH,
        window=16,
        alternating=True,
        softcap=5.0,
        logits_softcap=3.0,
        embedding_multiplier=7.0,
    ),
    "EXAONE 4": Kind(norms=Norms.AFTER, head_norm=HeadNorm.EACH, window=16, alternating=True),
    "OLMo 2": Kind(norms=Norms.AFTER, head_norm=HeadNorm.ALL),
    "GLM-4": Kind(norms=Norms.AROUND, interleaved=True, rotated=0.5),
    "Cohere 2": Kind(
        norms=Norms.PARALLEL, norm_kind=NormKind.LAYER, interleaved=True, window=16, alternating=True, logits_scale=0.2
    ),
    "StarCoder 2": Kind(
        norm_kind=NormKind.BIASED_LAYER, activation=UngatedActivation.GELU_TANH, biased=True, window=16
    ),
    "Apertus": Kind(activation=UngatedActivation.XIELU, head_norm=HeadNorm.EACH),
    "Granite SWA": Kind(sinks=True, window=16, alternating=True),
    "Hunyuan": Kind(head_norm=HeadNorm.ROTATED, biased=True),
    "Command R+": Kind(norms=Norms.PARALLEL, norm_kind=NormKind.LAYER, head_norm=HeadNorm.OWN, interleaved=True),
    "AFMoE": Kind(norms=Norms.AROUND, head_norm=HeadNorm.EACH, output_gate=OutputGate.PER_ELEMENT),
    "gates between queries": Kind(head_norm=HeadNorm.ALL, output_gate=OutputGate.BESIDE_QUERIES),
    "LFM3": Kind(head_norm=HeadNorm.EACH, output_gate=OutputGate.PER_HEAD),
    "Llama 4": Kind(head_norm=HeadNorm.BARE, window=16, chunked=True, alternating=True, interleaved=True),
    "nanochat": Kind(head_norm=HeadNorm.BARE, embedding_norm=True, logits_softcap=3.0),
    "BLOOM": Kind(
        slopes=True,
        rotated=0.0,
        embedding_norm=True,
        norm_kind=NormKind.BIASED_LAYER,
        biased=True,
        activation=UngatedActivation.GELU_TANH,
    ),
    "MPT": Kind(
        slopes=True, rotated=0.0, norm_kind=NormKind.LAYER, activation=UngatedActivation.GELU, clip=1.0, kv_heads=4
    ),
    "Persimmon": Kind(
        head_norm=HeadNorm.BIASED,
        norm_kind=NormKind.BIASED_LAYER,
        biased=True,
        rotated=0.5,
        activation=UngatedActivation.RELU_SQUARED,
    ),
    "Laguna": Kind(head_norm=HeadNorm.EACH, output_gate=OutputGate.PER_HEAD, softplus_gates=True, window=16),
    "GPT-NeoX": Kind(
        norms=Norms.PARALLEL_TWO_NORMS, norm_kind=NormKind.BIASED_LAYER, activation=UngatedActivation.GELU
    ),
    "Phi-2": Kind(norms=Norms.PARALLEL, norm_kind=NormKind.BIASED_LAYER, head_biased=True, biased=True, rotated=0.5),
    "Gemma 4": Kind(
        norms=Norms.AROUND, head_norm=HeadNorm.EACH, value_norm=True, keys_are_values=True, scaled=True, window=16
    ),
    "two mixers": Kind(two_mixers=True),
}
KINDS = {name: replace(kind, ffn=64) for name, kind in KINDS.items()}
LENGTH = 75


@pytest.fixture(params=KINDS)
def kind(request) -> Kind:
    return KINDS[request.param]


def assert_near(found: torch.Tensor, want: torch.Tensor, bound: float = BOUND[torch.float32]) -> None:
    assert (found - want).abs().max() < bound * want.std()


def test_ranks_add_up_to_the_model(kind):
    model = Model(kind, torch.float32)
    tokens, pages = model.tokens(LENGTH), model.take(LENGTH)
    floats = 2 * LENGTH * 256
    memory = mmap.mmap(-1, Ranks.num_bytes(2, floats))
    ranks = [Ranks(memory, rank, 2, floats, 60.0) for rank in range(2)]
    decoders = [native.NativeDecoder(*own) for own in zip(shares(model, 2, LENGTH), [1, 1], ranks, strict=True)]
    begin, found = 0, []
    with ThreadPoolExecutor(2) as pool:
        for number, end in enumerate((60, 61, 62, LENGTH), start=1):
            for each in ranks:
                each.begin(number)
            parts = [(tokens, pages, begin, end, None)]
            columns = list(pool.map(lambda decoder, parts=parts: step(decoder, model, parts)[0], decoders))
            found.append(torch.cat(columns, dim=1))
            assert decoders[0].best == found[-1].argmax(-1).tolist()
            begin = end
    assert_near(torch.cat(found), reference(model, tokens))
    for decoder in decoders:
        decoder.close()


def test_merged_weights_are_computed_alike(kind):
    model = Model(kind, torch.float32)
    adapter = model.add_adapter()
    tokens, pages = model.tokens(LENGTH), model.take(LENGTH)
    decoder = native.NativeDecoder(model.native(LENGTH), 2)
    merged = []
    for index, layer in enumerate(weights.packed() for weights in model.weights):
        parts = {name: torch.empty_like(layer[name]) for name in ("qkv", "o", "gate_up", "down")}
        for name, out in parts.items():
            decoder.merge(index, name, model.rows[adapter], layer[name], out)
        merged.append(layer | parts)
    decoder.use_merged(model.program(model.specs, model.table, merged, LENGTH)["ops"])
    found = step(decoder, model, [(tokens, pages, 0, LENGTH, None)], merged=True)[0]
    assert_near(found, reference(model, tokens, adapter))
    assert_near(step(decoder, model, [(tokens, pages, 0, LENGTH, None)])[0], reference(model, tokens))
    decoder.close()


class Offload:
    """Offloads every layer of a step with one adapter."""

    def __init__(self, model: Model) -> None:
        (rows,) = model.rows
        self._workers = OffloadWorkers(model.table.gemm_shapes, model.dtype, len(rows) * LENGTH, [None])
        pages = rows[0].pages
        self._rows = [replace(part, pages=range(len(pages))) for part in rows]
        self._image = model.arena[pages].contiguous()
        self._layers = ctypes.c_int32(LAYERS)
        model.arena[pages] = math.nan
        self.offloaded: OffloadedSegments | None = None

    def begin(self, segments: Segments) -> OffloadedSegments:
        count, parts = segments.end[0] - segments.begin[0], len(self._rows)
        row = [count * part for part in range(parts + 1)]
        workers, share = self._workers, [0, row[-1]]
        workers.begin(self._rows, row, share, [self._image] * parts)
        ready = [ctypes.addressof(self._layers)] * parts
        self.offloaded = OffloadedSegments(workers.ranks, range(parts), row, share, ready, workers.exchanges)
        return self.offloaded

    def end(self) -> None:
        self._workers.end()


def test_offload_workers_add_to_every_kind(kind):
    model = Model(kind, torch.float32)
    adapter = model.add_adapter()
    tokens, pages = model.tokens(LENGTH), model.take(LENGTH)
    decoder = native.NativeDecoder(model.native(LENGTH), 1)
    offload = decoder.offloading = Offload(model)
    arrived = ctypes.c_int32(0)
    found = step(
        decoder, model, [(tokens, pages, 0, LENGTH, adapter)], ready=ctypes.addressof(arrived), max_stall=60.0
    )[0]
    offload.end()
    assert offload.offloaded is not None
    assert offload.offloaded.layers == [sum(at >= 0 for at in part.first_elem) for part in model.rows[0]]
    assert_near(found, reference(model, tokens, adapter))
    decoder.close()


def test_prompt_logits_and_sampled_tokens_are_of_the_same_logits(kind):
    """Logits that are computed again for a sample have the model's scale and soft cap, too."""
    model = Model(kind, torch.float32)
    tokens, pages = model.tokens(LENGTH), model.take(LENGTH)
    decoder = native.NativeDecoder(model.native(LENGTH), 2)
    (whole,) = step(decoder, model, [(tokens, pages, 0, LENGTH, None)])
    found = step(decoder, model, [(tokens, pages, 0, LENGTH, None)], prompt_logprobs=True)[0]
    assert torch.equal(found, whole)
    assert torch.equal(decoder.prompt_logits(3, LENGTH), whole[3:])
    params = {row: RowSamplingParams(0.7, (row + 0.5) / LENGTH) for row in range(LENGTH)}
    decoder.row_params = params
    step(decoder, model, [(tokens, pages, 0, LENGTH, None)])
    kept = decoder.best
    assert kept == decoder.sampling.sample(whole, list(params), list(params.values()))
    decoder.kept = ()
    step(decoder, model, [(tokens, pages, 0, LENGTH, None)])
    assert decoder.best == kept
    decoder.close()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kv_scales", [None, UNSCALED], ids=["own dtype", "FP8"])
@pytest.mark.parametrize("window", [1, 2, 7, 15, 16, 17, 40])
def test_what_lies_before_the_window_is_not_read(monkeypatch, level, dtype, window, kv_scales):
    """Not even where it is not finite; pages that a window has left may hold anything."""
    monkeypatch.setenv(native_library.ISA, level)
    model = Model(Kind(window=window, heads=6, kv_heads=2, kv_scales=kv_scales), dtype)
    tokens, pages = model.tokens(LENGTH), model.take(LENGTH)
    decoder = native.NativeDecoder(model.native(LENGTH), 1)
    (clean,) = step(decoder, model, [(tokens, pages, 0, LENGTH, None)])
    assert clean.isfinite().all()
    per_token = model.arena.view(torch.uint8).view(model.pages, LAYERS * 2, BLOCK, -1)
    for begin in (window, window + 1, 50, LENGTH - 1):
        step(decoder, model, [(tokens, pages, 0, begin, None)])
        for position in range(begin - window + 1):
            per_token[pages[position // BLOCK], :, position % BLOCK] = 0xFF  # NaN of any dtype
        for end in (begin + 1, LENGTH):
            (found,) = step(decoder, model, [(tokens, pages, begin, end, None)])
            assert torch.equal(found, clean[begin:end]), (begin, end)
    decoder.close()


def test_a_window_costs_what_it_sees():
    """Decoding after 6,000 tokens with a window of 64 takes a fraction of the time without."""
    length, seconds = 6000, {}
    for window in (None, 64):
        model = Model(Kind(window=window, heads=4, kv_heads=4, head_dim=64), torch.float32, pages=2 + length // BLOCK)
        model.arena.zero_()
        tokens, pages = model.tokens(length), model.take(length)
        decoder = native.NativeDecoder(model.native(length), 1)
        times = []
        for _ in range(15):
            began = time.thread_time()
            step(decoder, model, [(tokens, pages, length - 1, length, None)])
            times.append(time.thread_time() - began)
        seconds[window] = min(times)
        decoder.close()
    assert seconds[64] < 0.5 * seconds[None]


@pytest.mark.parametrize("level", LEVELS)
def test_soft_cap_keeps_the_digits_of_small_logits(monkeypatch, level):
    monkeypatch.setenv(native_library.ISA, level)
    values = torch.tensor([2.0**i for i in range(-40, 40)] + [0.3, 0.7, 1.7, 3.3, math.inf, math.nan, 0.0])
    values = torch.cat((values, -values))
    head = torch.zeros(len(values), 32)
    head[:, 0] = values
    model = layerless_model(head, torch.ones(1, 32), eps=0.0, logits_scale=0.5, logits_softcap=30.0)
    decoder, rows = native.NativeDecoder(model, 1), native.NativeRows()
    rows.plan([0, 1], torch.zeros(1, 1, dtype=torch.long), [1])
    zero = torch.zeros(1, dtype=torch.long)
    (found,) = decoder.forward(zero, zero, zero, zero, rows, zero, Segments())
    want = 30 * torch.tanh(values.double() * 0.5 / 30)
    torch.testing.assert_close(found.double(), want, rtol=1e-6, atol=0.0, equal_nan=True)
    decoder.close()
