"""Mixers of one part give what transformers makes, however prompts are cut, and with drafts."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from chorus.core.model.families.zamba.headed_scan import HeadedScanSpec
from chorus.core.model.families.zaya.head_conv import HeadConvSpec
from chorus.ops.mixers.mamba2 import MambaWeights
from chorus.ops.mixers.recurrent import RecurrentState, RecurrentWeights, scanned
from chorus.ops.mixers.rg_lru import RgLruWeights
from chorus.ops.mixers.short_conv import ShortConvWeights

pytestmark = [pytest.mark.native(needed=False), pytest.mark.wide]

TOLERANCE = {"rtol": 2e-4, "atol": 2e-5}
MOST = 5
"""Drafts of a step."""


class Layer:
    """transformers' module with random weights, and the same as `RecurrentWeights`."""

    module: Any
    weights: RecurrentWeights
    shapes: tuple[tuple[int, ...], ...]

    def __init__(self, make: Any, config: Any) -> None:
        torch.manual_seed(0)
        self.module = make(config, 0).eval()
        with torch.no_grad():
            for name, parameter in self.module.named_parameters():
                if name in ("D", "dt_bias") or name.endswith("bias"):
                    parameter.normal_()
                elif name == "norm.weight":
                    parameter.uniform_(0.5, 1.5)

    def state(self, sequences: int, drafts: int = 0) -> RecurrentState:
        conv, recurrent, draft = self.shapes
        kept = torch.full((sequences, drafts, *draft), torch.nan) if drafts else None
        fresh = torch.ones(sequences, dtype=torch.bool)
        return RecurrentState(torch.zeros(sequences, *conv), torch.zeros(sequences, *recurrent), kept, fresh)

    @torch.no_grad()
    def rows(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.module.in_proj(hidden)

    @torch.no_grad()
    def out(self, mixed: torch.Tensor) -> torch.Tensor:
        return self.module.out_proj(mixed)

    @torch.no_grad()
    def want(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.module(hidden[None])[0]


class Conv(Layer):
    def __init__(self, bias: bool) -> None:
        from transformers import Lfm2Config
        from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv

        config = Lfm2Config(hidden_size=48, num_hidden_layers=1, layer_types=["conv"], conv_L_cache=4, conv_bias=bias)
        super().__init__(Lfm2ShortConv, config)
        conv = self.module.conv
        self.weights = ShortConvWeights(conv.weight.detach().squeeze(1).T, conv.bias.detach() if bias else None)
        self.shapes = (3, 48), (0,), (48,)


class Mamba(Layer):
    def __init__(self, groups: int) -> None:
        from transformers import GraniteMoeHybridConfig
        from transformers.models.granitemoehybrid.modeling_granitemoehybrid import GraniteMoeHybridMambaLayer

        config = GraniteMoeHybridConfig(
            hidden_size=48, num_hidden_layers=1, layer_types=["linear_attention"], mamba_n_heads=6, mamba_d_head=16,
            mamba_n_groups=groups, mamba_d_state=24, mamba_chunk_size=32,
        )  # fmt: skip
        super().__init__(GraniteMoeHybridMambaLayer, config)
        it = {name: parameter.detach() for name, parameter in self.module.named_parameters()}
        own = (it[name] for name in ("conv1d.bias", "dt_bias", "A_log", "D", "norm.weight"))
        self.weights = MambaWeights(it["conv1d.weight"].squeeze(1).T, *own, config.rms_norm_eps, groups)
        channels = 96 + 2 * groups * 24
        self.shapes = (3, channels), (6, 24, 16), (channels + 6,)


class Heads(Layer):
    def __init__(self) -> None:
        from transformers import ZambaConfig
        from transformers.models.zamba.modeling_zamba import ZambaMambaMixer

        config = ZambaConfig(
            hidden_size=48, num_hidden_layers=1, layers_block_type=["mamba"], n_mamba_heads=3, mamba_d_state=12,
            mamba_dt_rank=6,
        )  # fmt: skip
        super().__init__(ZambaMambaMixer, config)
        with torch.no_grad():
            self.module.x_proj_weight.normal_(0, 0.2)
        it = {f"mamba.{name}": parameter.detach() for name, parameter in self.module.named_parameters()}
        self.weights = HeadedScanSpec(3, 32, 12, 6).weights(it)
        self.shapes = (3, 96), (3, 12, 32), (96,)


class Units(Layer):
    def __init__(self) -> None:
        from transformers import RecurrentGemmaConfig
        from transformers.models.recurrent_gemma.modeling_recurrent_gemma import RecurrentGemmaRecurrentBlock

        config = RecurrentGemmaConfig(
            hidden_size=48, num_hidden_layers=1, num_attention_heads=4, lru_width=80, block_types=["recurrent"]
        )
        super().__init__(RecurrentGemmaRecurrentBlock, config)
        it = {name: parameter.detach() for name, parameter in self.module.named_parameters()}
        with torch.no_grad():
            for name in ("input_gate_weight", "recurrent_gate_weight"):
                it[f"rg_lru.{name}"].normal_(0, 0.3)
            it["rg_lru.recurrent_param"].uniform_(-5, 1)
        gates, biases = (
            torch.stack([it[f"rg_lru.{gate}_gate_{part}"] for gate in ("input", "recurrent")])
            for part in ("weight", "bias")
        )
        rates = 8 * torch.nn.functional.softplus(it["rg_lru.recurrent_param"])
        self.weights = RgLruWeights(it["conv_1d.weight"].squeeze(1).T, it["conv_1d.bias"], gates, biases, rates)
        self.shapes = (3, 80), (4, 20), (80,)

    @torch.no_grad()
    def rows(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.cat((self.module.linear_y(hidden), self.module.linear_x(hidden)), 1)

    @torch.no_grad()
    def out(self, mixed: torch.Tensor) -> torch.Tensor:
        return self.module.linear_out(mixed)

    @torch.no_grad()
    def want(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.module(hidden[None], torch.arange(len(hidden))[None], None, use_cache=False)[0][0]


class Convolved(Layer):
    def __init__(self, *sizes: int) -> None:
        from transformers import ZayaConfig
        from transformers.models.zaya.modeling_zaya import ZayaAttention

        first, second = sizes
        config = ZayaConfig(
            hidden_size=48, num_hidden_layers=1, num_attention_heads=6, num_key_value_heads=2, head_dim=8,
            cca_time0=first, cca_time1=second,
        )  # fmt: skip
        super().__init__(ZayaAttention, config)
        it = {f"self_attn.{name}": parameter.detach() for name, parameter in self.module.named_parameters()}
        with torch.no_grad():
            it["self_attn.qk_norm.temp"].uniform_(0.5, 1.5)
        spec = HeadConvSpec(6, 2, 8, (first, second))
        self.weights = spec.weights({name: it[name] for name in spec.tensors})
        self.shapes = (max(1, first + second - 2), 72), (0,), (72,)

    @torch.no_grad()
    def rows(self, hidden: torch.Tensor) -> torch.Tensor:
        own = self.module.qkv_proj
        inputs = own.q_proj, own.k_proj, own.v_proj_current, own.v_proj_delayed
        return torch.cat([each(hidden) for each in inputs], 1)

    def out(self, mixed: torch.Tensor) -> torch.Tensor:
        return mixed

    @torch.no_grad()
    def want(self, hidden: torch.Tensor) -> torch.Tensor:
        q, k, v = self.module.qkv_proj(hidden[None], None)
        return torch.cat([each[0].flatten(1) for each in (*self.module.qk_norm(q, k), v)], 1)


@pytest.fixture(
    scope="module",
    params=["conv", "conv-biased", "mamba", "mamba-groups", "heads", "units", "convolved", "convolved-delayed"],
)
def layer(request) -> Layer:
    return {
        "conv": lambda: Conv(bias=False),
        "conv-biased": lambda: Conv(bias=True),
        "mamba": lambda: Mamba(1),
        "mamba-groups": lambda: Mamba(3),
        "heads": Heads,
        "units": Units,
        "convolved": lambda: Convolved(2, 3),
        "convolved-delayed": lambda: Convolved(1, 1),
    }[request.param]()


@pytest.mark.parametrize("size", [1, 7, 64, 150])
def test_a_prompt_is_what_transformers_makes_of_it(layer, size):
    hidden, state = torch.randn(150, 48), layer.state(1)
    parts = layer.rows(hidden).split(size)
    got = torch.cat([layer.weights.mix(rows, state, [0, len(rows)]) for rows in parts])
    torch.testing.assert_close(layer.out(got), layer.want(hidden), **TOLERANCE)


def test_a_sequence_does_not_depend_on_its_batch(layer):
    rows = [layer.rows(torch.randn(length, 48)) for length in (70, 3, 1, 1)]
    together = layer.state(4)
    together.conv.normal_()
    together.recurrent.normal_()
    together.fresh.fill_(False)
    before = together.ahead()
    indptr = [0, *itertools.accumulate(map(len, rows))]
    got = layer.weights.mix(torch.cat(rows), together, indptr).split([len(each) for each in rows])
    for index, own in enumerate(rows):
        alone = before.of(slice(index, index + 1))
        found = layer.weights.mix(own, alone, [0, len(own)])
        torch.testing.assert_close(found, got[index], rtol=2e-6, atol=2e-6)
        torch.testing.assert_close(alone.recurrent[0], together.recurrent[index], rtol=2e-6, atol=2e-6)


def test_bfloat16_is_computed_in_float32(layer):
    rows = layer.rows(torch.randn(70, 48)).bfloat16()
    got, want = (layer.weights.mix(each, layer.state(1), [0, 70]) for each in (rows, rows.float()))
    assert torch.equal(got, want.bfloat16())


def verified(rng: random.Random, left: int) -> Iterator[tuple[int, int]]:
    """Steps that compute `left` tokens: how many drafts of each are right, and how many are wrong."""
    while left > 0:
        right = min(rng.randint(0, 2), left - 1)
        yield right, rng.randint(1, MOST - right)
        left -= 1 + right


@pytest.mark.parametrize("is_captured", [False, True], ids=["mix", "step"])
def test_rejected_drafts_leave_no_trace(layer, is_captured):
    """Two sequences; steps that verify drafts give the known and the accepted tokens what one token at a time gives."""
    rng, length = random.Random(0), 25
    rows, plain = [layer.rows(torch.randn(length, 48)) for _ in range(2)], layer.state(2)
    want = [
        layer.weights.mix(torch.cat(pair), plain, [0, 1, 2])
        for pair in zip(*(each.split(1) for each in rows), strict=True)
    ]
    state, done, accepted = layer.state(2, MOST), [0, 0], [0, 0]
    for steps in zip(*(verified(rng, length) for _ in rows), strict=False):
        drafts, parts = [sum(step) for step in steps], []
        for own, at, (right, wrong) in zip(rows, done, steps, strict=True):
            parts.append(torch.cat((own[at : at + 1 + right], torch.randn(wrong, own.shape[1]))))
        lengths = [len(part) for part in parts]
        indptr = [0, *itertools.accumulate(lengths)]
        if is_captured:
            numbers = (torch.tensor(each) for each in (indptr[:2], lengths, accepted))
            out = layer.weights.step(torch.cat(parts), state, *numbers)
        else:
            out = layer.weights.mix(torch.cat(parts), state, indptr, accepted, drafts)
        for index, (found, (right, _)) in enumerate(zip(out.split(lengths), steps, strict=True)):
            for token in range(1 + right):
                torch.testing.assert_close(found[token], want[done[index] + token][index], **TOLERANCE)
            done[index] += 1 + right
        accepted = [right for right, _ in steps]
    assert max(done) == length


def test_padding_of_a_step_changes_nothing(layer):
    """A sequence without tokens, whose first is beyond the last, and another order of sequences."""
    rows = layer.rows(torch.randn(2, 48))
    want = layer.weights.mix(rows, layer.state(2), [0, 1, 2])
    numbers = torch.tensor([[1, 0, 2], [1, 1, 0], [0, 0, 0]])
    got = layer.weights.step(rows, layer.state(3, 2), *numbers)
    torch.testing.assert_close(got, want, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("tokens", [1, 2, 3, 31, 64])
def test_spans_join_to_a_linear_recurrence(tokens):
    decay, added = torch.rand(tokens, 5), torch.randn(tokens, 5)
    left, found = scanned(decay, added)
    h, product = torch.zeros(5), torch.ones(5)
    for token in range(tokens):
        h, product = decay[token] * h + added[token], product * decay[token]
        torch.testing.assert_close(found[token], h)
        torch.testing.assert_close(left[token], product)
