"""Products of whole-number weights on the native decoder, against float64, at every ISA level."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import pytest
import torch

from chorus.core.model.checkpoints.quantization.rounded_inputs import RoundedInputs
from chorus.ops.cpu import native
from chorus.ops.library import native_library
from chorus.ops.library.native_integers import integer_sizes, pack_integers
from chorus.ops.lora.sgmv import Segments

from ..cpu.layerless import layerless_model
from ..cpu.native_layers import Kind, Model
from ..cpu.test_native_layers import SINGLE, check
from ..gemm.whole_numbers import WholeNumbers

pytestmark = pytest.mark.wide

LEVELS = native_library.levels()
FORMS = [(8, 1 << 20, False), (8, 128, True), (4, 128, False), (4, 32, True), (4, 64, False), (8, 96, False)]
INPUTS = [(16, 256), (8, 64), (8, 128)]
"""Bits of activations, and inputs of a block."""
SHAPES = [(1, 8), (33, 20), (97, 136), (64, 288), (130, 576)]


@pytest.fixture(params=LEVELS)
def level(request, monkeypatch) -> str:
    monkeypatch.setenv(native_library.ISA, request.param)
    return request.param


@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (32, 8), (33, 20), (70, 9)])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_word_holds_the_inputs_where_the_library_reads_them(bits, outputs, inputs):
    generator = torch.Generator().manual_seed(inputs)
    half = 1 << (bits - 1)
    integers = torch.randint(-half, half, (outputs, inputs), generator=generator).to(torch.int8)
    scales = torch.rand(outputs, -(-inputs // 8), generator=generator)
    packed = pack_integers(integers, scales, None, bits=bits, group=8)
    words = packed.data.view(torch.int32).flatten(2)
    per_word = 32 // bits
    for row, column in product(range(outputs), range(inputs)):
        word = int(words[row // 32, column // per_word, row % 32])
        place = column % per_word
        stored = word >> (16 * (place % 2) + bits * (place // 2)) & (1 << bits) - 1
        assert stored - half == integers[row, column]
        assert packed.scales[row // 32, column // 8, row % 32] == scales[row, column // 8]


@pytest.mark.parametrize(
    ("bits", "group", "message"),
    [(3, 8, "weights of 3 bits can't be packed; 4 or 8 bits can"), (4, 12, "groups of 12 .* a multiple of 8")],
)
def test_what_the_library_can_not_multiply_is_refused(bits, group, message):
    with pytest.raises(ValueError, match=message):
        integer_sizes(32, 64, bits, group)


def hidden_states(rows: int, inputs: int, dtype: torch.dtype) -> torch.Tensor:
    """Embeddings with outliers."""
    x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(rows))
    x[:, :: 1 + inputs // 3] *= 40
    return x.to(dtype)


def logits_of(
    head: WholeNumbers, embed: torch.Tensor, steps: Sequence[Sequence[int]], threads: int
) -> list[torch.Tensor]:
    """Logits of a model without layers, of some rows in each step."""
    plain = torch.zeros(len(head.integers), embed.shape[1], dtype=embed.dtype)
    decoder = native.NativeDecoder(layerless_model(plain, embed, lm_head=head.packed()), threads)
    found = []
    for rows in steps:
        count = len(rows)
        attention = native.NativeRows()
        attention.plan(range(count + 1), torch.zeros(count, 1, dtype=torch.long), [1] * count)
        zeros, every = torch.zeros(count, dtype=torch.long), torch.arange(count)
        ids = torch.tensor(rows)
        found.append(decoder.forward(ids, zeros, zeros[None], zeros, attention, every, Segments()).clone())
    decoder.close()
    return found


@pytest.mark.native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize(("bits", "group", "zeros"), FORMS)
@pytest.mark.parametrize(("input_bits", "most_block"), INPUTS)
def test_products_keep_the_bound(level, dtype, outputs, inputs, bits, group, zeros, input_bits, most_block):
    """The error of an activation of 16 bits is at most 1/65534 of the largest of its block, in float32 2^-31 of it.

    One of 8 bits is that of `RoundedInputs`; near the middle of two steps it may be either.
    """
    head = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(outputs))
    whole = replace(WholeNumbers.of(head, bits, group, zeros), input_bits=input_bits, input_block=most_block)
    count = min(40, outputs)  # the model has no token beyond its vocabulary
    embed = hidden_states(count, inputs, dtype)
    x = embed.double()
    x = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    if dtype == torch.bfloat16 and level in ("avx512bf16", "amx"):
        x = x.bfloat16().double()
    block = most_block if group >= inputs else math.gcd(group, most_block)
    most = torch.stack([part.abs().amax(-1) for part in x.split(block, 1)], 1)
    most = most.repeat_interleave(block, 1)[:, :inputs]
    fixed = most / (65534 if dtype == torch.bfloat16 else 1 << 31)
    if input_bits == 8:
        step = most / 127
        is_between = ((x / step).abs() % 1 - 0.5).abs() < 1e-3
        fixed, x = step * is_between + 1e-6 * most, RoundedInputs(block)(x.float()).double()
    size = whole.weight.abs()
    bound = fixed @ size.T + 1e-6 * (x.abs() @ size.T) + 1e-6
    (found,) = logits_of(whole, embed, [range(count)], 1)
    error = (found - x @ whole.weight.T).abs()
    assert (error <= bound).all(), (error / bound).max()


@pytest.mark.native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("bits", "group", "zeros"), FORMS)
@pytest.mark.parametrize(("input_bits", "block"), INPUTS[:2])
def test_a_row_has_the_same_bits_in_any_batch(level, dtype, bits, group, zeros, input_bits, block):
    whole = WholeNumbers.of(torch.randn(97, 288, generator=torch.Generator().manual_seed(1)), bits, group, zeros)
    whole = replace(whole, input_bits=input_bits, input_block=block)
    embed = hidden_states(230, 288, dtype)
    (every,) = logits_of(whole, embed, [range(230)], 3)
    steps = [[0], [7], [229], *(range(100, 100 + count) for count in range(2, 14)), range(30, 70)]
    for rows, found in zip(steps, logits_of(whole, embed, steps, 1), strict=True):
        assert torch.equal(found, every[list(rows)])


@pytest.mark.native
@pytest.mark.skipif(len(LEVELS) < 2, reason="one level at most is built")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("bits", "group", "zeros"), FORMS)
@pytest.mark.parametrize(("input_bits", "block"), INPUTS[:2])
def test_levels_give_the_same_bits(monkeypatch, dtype, bits, group, zeros, input_bits, block):
    """Of the same activations: levels with products of bf16 round them to it."""
    whole = WholeNumbers.of(torch.randn(97, 288, generator=torch.Generator().manual_seed(2)), bits, group, zeros)
    whole = replace(whole, input_bits=input_bits, input_block=block)
    signs = torch.randint(0, 2, (20, 288), generator=torch.Generator().manual_seed(3)) * 2 - 1
    embed = signs.to(dtype) if dtype == torch.bfloat16 else hidden_states(20, 288, dtype)
    found = []
    for level in LEVELS:
        monkeypatch.setenv(native_library.ISA, level)
        found += logits_of(whole, embed, [range(20)], 1)
    close = [torch.equal(each, found[0]) for each in found]
    if dtype == torch.float32:
        assert all(close)
    else:  # 1 / sqrt(1 + 1e-6) is rounded to 1 in bf16
        assert all(torch.allclose(each, found[0], rtol=1e-4, atol=1e-3) for each in found)


@pytest.mark.native
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("input_bits", [16, 8])
def test_a_value_that_is_not_finite_spoils_its_own_row(level, value, input_bits):
    whole = WholeNumbers.of(torch.randn(70, 136, generator=torch.Generator().manual_seed(4)), 4, 128)
    whole = replace(whole, input_bits=input_bits)
    embed = hidden_states(9, 136, torch.bfloat16)
    (want,) = logits_of(whole, embed, [range(9)], 1)
    embed[4, 130] = value
    (found,) = logits_of(whole, embed, [range(9)], 1)
    assert not found[4].isfinite().any()
    others = [row for row in range(9) if row != 4]
    assert torch.equal(found[others], want[others])


@pytest.mark.native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("bits", "group", "name"), [(8, 1 << 20, "plain"), (4, 32, "gelu in panels of its own"), (4, 128, "norms around")]
)
def test_layers_with_adapters(level, dtype, bits, group, name):
    check(Kind(**SINGLE[name]), dtype, adapted=True, whole=(bits, group))


@pytest.mark.native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("bits", "group", "zeros"), FORMS)
def test_merged_weights_are_the_dequantised_ones_with_the_adapter(level, dtype, bits, group, zeros):
    model = Model(Kind(hidden=136), dtype)
    adapter = model.add_adapter()
    model.quantise(bits, group, zeros)
    decoder, packed = native.NativeDecoder(model.native(16), 2), model.weights[0].packed()
    for name in ("qkv", "down"):
        weights = getattr(model.weights[0], name)
        origin = packed[name]
        out = torch.empty(
            -(-len(weights) // 32), weights.shape[1] * dtype.itemsize // 4, 32, 4 // dtype.itemsize, dtype=dtype
        )
        growth = decoder.merge(0, name, model.rows[adapter], origin, out)
        assert 0 < growth < 10
        found = out.transpose(1, 2).flatten(2).flatten(0, 1)[: len(weights)]
        names = ("q", "k", "v") if name == "qkv" else ("down",)
        parts = [model.adapters[adapter][0, f"{each}_proj"] for each in names]
        want = weights + torch.cat([b @ a.double() for a, b in parts])
        assert (found.double() - want).abs().max() <= want.abs().max() * (2**-8 if dtype == torch.bfloat16 else 1e-6)
    decoder.close()
