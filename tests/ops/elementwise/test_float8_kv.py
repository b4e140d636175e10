"""Keys and values in FP8: every number of E4M3 stays, others become the nearest one, and none is beyond the largest."""

from __future__ import annotations

import math

import pytest
import torch

from chorus.core.model.compose.composed import composed
from chorus.core.model.compose.decoder_layer import DecoderLayer
from chorus.core.model.program.native_binding import Tables, layer_bindings
from chorus.core.model.program.native_program import NativeProgram
from chorus.core.model.specs.attention import AttentionSpec
from chorus.core.model.specs.feed_forward import GatedSpec
from chorus.core.model.specs.norms import Norms, NormSpec
from chorus.core.model.weights.layer_weights import LayerWeights
from chorus.memory.pages.layer_projections import dense_projections
from chorus.ops.cpu import native
from chorus.ops.elementwise.elementwise import write_kv
from chorus.ops.elementwise.float8_kv import DTYPE, LARGEST, KvScales, inverse, rounded
from chorus.ops.elementwise.rotation import KvSlots
from chorus.ops.library import native_library, native_model
from chorus.ops.lora.sgmv import Segments

from ..cpu.layerless import layerless_model

NUMBERS = torch.arange(256, dtype=torch.uint8).view(DTYPE).float()
FINITE = NUMBERS[NUMBERS.isfinite()].sort().values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1.0, 0.25, 64.0])
def test_numbers_of_the_format_stay(dtype, scale):
    values = (FINITE * scale).to(dtype)
    assert torch.equal(rounded(values, scale).float() * scale, values.float())


@pytest.mark.parametrize("scale", [1.0, 0.003, 7.0])
def test_others_become_the_nearest(scale):
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(4000, generator=generator) * 2.0 ** torch.randint(-12, 9, (4000,), generator=generator)
    wide = values * inverse(scale)
    nearest = (wide.clamp(-LARGEST, LARGEST)[:, None] - FINITE).abs().min(1).values
    assert torch.equal((rounded(values, scale).float() - wide.clamp(-LARGEST, LARGEST)).abs(), nearest)


def test_the_bound_of_the_manual():
    """A sixteenth of a normal number, 2^-10 of others."""
    values = torch.logspace(-6, math.log2(LARGEST), 5000, base=2)
    assert float(((rounded(values, 1.0).float() - values) / values).abs().max()) <= 2**-4
    small = torch.linspace(-(2.0**-6), 2.0**-6, 5000)
    assert float((rounded(small, 1.0).float() - small).abs().max()) <= 2**-10


def test_values_beyond_the_range_become_its_end_and_those_that_are_not_finite_nan():
    values = torch.tensor([449.0, 1e30, -470.0, math.inf, -math.inf, math.nan])
    assert rounded(values, 1.0).float().nan_to_num(7).tolist() == [448, 448, -448, 7, 7, 7]
    assert rounded(values, 2.0).float()[:1].tolist() == [224]


def test_writes_go_where_they_belong_and_nowhere_else():
    caches = torch.full((6, 3, 2, 4, 2, 8), 0x11, dtype=torch.uint8)
    k_cache, v_cache = (caches.view(DTYPE)[:, 1, side] for side in (0, 1))
    page, offset = torch.tensor([3, 0, 5]), torch.tensor([1, 1, 0])
    k, v = torch.randn(2, 3, 2, 8)
    write_kv(KvSlots(k_cache, v_cache, page, offset, KvScales(0.5, 0.1)), k, v)
    for side, (values, scale) in enumerate(((k, 0.5), (v, 0.1))):
        for index in range(3):
            written = caches[page[index], 1, side, offset[index]].view(DTYPE)
            assert torch.equal(written.float(), rounded(values[index], scale).float())
    assert int((caches != 0x11).sum()) <= 2 * 3 * 2 * 8
    assert (caches[:, [0, 2]] == 0x11).all()


def a_layer_that_stores_its_inputs(values: torch.Tensor, scales: KvScales) -> native_model.NativeModel:
    """A model with one layer that stores `values` `[tokens, head_dim]` as keys and values, and adds what it attends to;
    a page has one token.
    """
    tokens, size = values.shape
    one, none = torch.eye(size, dtype=values.dtype), torch.zeros(size, size, dtype=values.dtype)
    weights = [torch.cat(parts) for parts in ((none, one, one), (one,), (none, none), (none,))]
    names = ("qkv", "o", "gate_up", "down")
    layer = LayerWeights(**{name: native_model.pack(weight) for name, weight in zip(names, weights, strict=True)})
    table = dense_projections(1, size, size, 1, 1, size)
    specs = [DecoderLayer(AttentionSpec(1, 1, size, 1.0, None), GatedSpec(size), Norms.AFTER)]
    program = NativeProgram([composed(spec, NormSpec(1e-6), size).program for spec in specs], size, table)
    ops = program.ops(layer_bindings(specs, [layer], Tables.of(specs, 1), kv_scales=[scales]))
    return layerless_model(
        torch.zeros_like(values),
        values,
        num_layers=1,
        ops=[op for op in ops if op.kind != "Norm"],
        registers=program.registers,
        gemm_shapes=table.gemm_shapes,
        gemm_shape_of=table.gemm_shape_of,
        block_tokens=1,
        arena=torch.zeros(tokens, 2 * size // values.itemsize, dtype=values.dtype),
        float8_kv=True,
    )


def attended(model: native_model.NativeModel, steps: int = 1) -> torch.Tensor:
    """Final hidden states `[tokens, head_dim]` of all tokens in some steps, each a sequence with a page of its own."""
    tokens = len(model.embed)
    decoder, rows, found = native.NativeDecoder(model, 1), native.NativeRows(), []
    for part in torch.arange(tokens).chunk(steps):
        rows.plan(range(len(part) + 1), part[:, None], [1] * len(part))
        place = torch.zeros_like(part)
        at = torch.arange(len(part))
        decoder.forward(part, place, part[None], place, rows, at[:1], Segments(), kept_tokens=at)
        found.append(decoder.hidden_states(0, len(part)))
    decoder.close()
    return torch.cat(found)


@pytest.fixture(params=native_library.levels())
def level(request, monkeypatch) -> str:
    monkeypatch.setenv(native_library.ISA, request.param)
    return request.param


@pytest.mark.native
@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scales", [KvScales(), KvScales(0.3, 1e-37)])
def test_the_native_decoder_stores_the_same_bytes(dtype, scales):
    """Of numbers of every size, halfway between two of the format and next to that, and of what is not finite."""
    between = torch.cat(((FINITE[1:] + FINITE[:-1]) / 2, FINITE, torch.tensor([448.0, 463.9, 464.0, 480.0, 1e30])))
    away = torch.tensor([math.inf] * len(between))
    generator = torch.Generator().manual_seed(0)
    random = torch.randn(4096, generator=generator) * 2.0 ** torch.randint(-30, 12, (4096,), generator=generator)
    near = [between, between.nextafter(away), between.nextafter(-away)]
    numbers = torch.cat([random, *near, *(each * scales.k for each in near)])
    values = numbers[: len(numbers) // 32 * 32].view(-1, 32).to(dtype)
    values = torch.cat((values, values[:2]))
    values[-2, 7], values[-1, 3] = math.nan, -math.inf
    model = a_layer_that_stores_its_inputs(values, scales)
    attended(model)
    stored = model.arena.view(torch.uint8).view(-1, 2, 32)
    product = values.float() @ torch.eye(32)  # of what is not finite, everything is NaN
    for side, scale in enumerate(scales):
        assert torch.equal(stored[:, side], rounded(product.to(dtype), scale).view(torch.uint8))


@pytest.mark.native
@pytest.mark.usefixtures("level")
@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 2e-6), (torch.bfloat16, 2**-8)], ids=str)
@pytest.mark.parametrize("steps", [1, 32], ids=["at once", "few by few"])
def test_the_native_decoder_reads_every_number(dtype, error, steps):
    """Each is added to itself; small ones, too, are compared by their own size."""
    values = FINITE.repeat(32)[torch.randperm(32 * len(FINITE), generator=torch.Generator().manual_seed(0))]
    values = values.view(-1, 32).to(dtype)
    found = attended(a_layer_that_stores_its_inputs(values, KvScales()), steps)
    twice = 2 * values.double()
    want = twice / (twice.square().mean(1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(found.double(), want, rtol=error, atol=0.0)
