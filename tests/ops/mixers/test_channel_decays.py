"""Decays of channels (Kimi Delta Attention) give what transformers' module gives, however prompts are cut."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers.models.kimi_linear import modeling_kimi_linear as reference
from transformers.models.kimi_linear.configuration_kimi_linear import KimiLinearConfig

from chorus.ops.mixers.gated_delta import DeltaWeights
from chorus.ops.mixers.recurrent import RecurrentState

from .delta_layers import ModuleLayer

pytestmark = [pytest.mark.native(needed=False), pytest.mark.wide]

#: heads, their width, taps of the convolution, and the largest logarithm of a decay's rate
SHAPES = [(2, 16, 4, 1.0), (1, 8, 2, -3.0), (3, 20, 3, 6.0), (2, 128, 4, 3.0)]
TOLERANCE = {"rtol": 2e-4, "atol": 2e-5}


class Layer(ModuleLayer):
    """transformers' module with random weights, and the same as `DeltaWeights`."""

    def __init__(self, heads: int, dim: int, taps: int, rate: float) -> None:
        config = KimiLinearConfig(
            hidden_size=48,
            linear_num_heads=heads,
            linear_head_dim=dim,
            linear_conv_kernel_dim=taps,
            layer_types=["linear_attention"],
            num_hidden_layers=1,
        )
        torch.manual_seed(0)
        self.heads, self.dim, self.taps = heads, dim, taps
        module: Any = reference.KimiLinearDeltaAttention(config, 0).eval()
        with torch.no_grad():
            module.o_norm.weight.uniform_(0.5, 1.5)
            module.forget_gate.dt_bias.normal_()
            module.forget_gate.A_log.uniform_(rate - 4, rate)
            module.forget_gate.f_b_proj.weight.mul_(3)
            module.b_proj.weight.mul_(3)
        self.module = module
        self.weights = DeltaWeights(
            module.conv1d.weight.detach().squeeze(1).T.contiguous(),
            module.forget_gate.dt_bias.detach(),
            module.forget_gate.A_log.detach().flatten(),
            module.o_norm.weight.detach(),
            config.rms_norm_eps,
            by_channel=True,
        )

    def state(self, sequences: int) -> RecurrentState:
        conv = torch.zeros(sequences, self.taps - 1, 3 * self.heads * self.dim)
        return RecurrentState(conv, torch.zeros(sequences, self.heads, self.dim, self.dim))

    @torch.no_grad()
    def mixed(self, hidden: torch.Tensor) -> torch.Tensor:
        it = self.module
        gates, decays = it.g_b_proj(it.g_a_proj(hidden)), it.forget_gate.f_b_proj(it.forget_gate.f_a_proj(hidden))
        first = [part(hidden) for part in (it.q_proj, it.k_proj, it.v_proj)]
        return torch.cat([*first, gates, it.b_proj(hidden), decays], dim=-1)

    @torch.no_grad()
    def out(self, attended: torch.Tensor) -> torch.Tensor:
        return self.module.o_proj(attended)


@pytest.fixture(params=SHAPES, ids=str)
def layer(request) -> Iterator[Layer]:
    yield Layer(*request.param)


@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 150])
def test_a_prompt_is_what_transformers_makes_of_it(layer, tokens):
    hidden = torch.randn(tokens, 48)
    (got,) = layer.run([layer.mixed(hidden)], layer.state(1))
    torch.testing.assert_close(layer.out(got), layer.want(hidden), **TOLERANCE)


@pytest.mark.parametrize("size", [1, 7, 64, 100])
def test_a_cut_prompt_is_what_transformers_makes_of_the_whole(layer, size):
    hidden, state = torch.randn(150, 48), layer.state(1)
    got = [layer.run([rows], state)[0] for rows in layer.mixed(hidden).split(size)]
    torch.testing.assert_close(layer.out(torch.cat(got)), layer.want(hidden), **TOLERANCE)


@pytest.mark.parametrize("shape", [each for each in SHAPES if each[1] % 8 == 0], ids=str)
def test_bits_do_not_depend_on_the_batch(shape):
    """Of whole vectors: PyTorch computes the last elements of others otherwise, wherever these are."""
    layer = Layer(*shape)
    mixed = [layer.mixed(torch.randn(tokens, 48)) for tokens in (70, 3, 1, 1)]
    together, alone = layer.state(4), [layer.state(1) for _ in mixed]
    got = layer.run(mixed, together)
    for index, (rows, state) in enumerate(zip(mixed, alone, strict=True)):
        assert torch.equal(layer.run([rows], state)[0], got[index])
        assert torch.equal(state.recurrent[0], together.recurrent[index])


def test_drafts_change_no_state_until_they_are_accepted(layer):
    mixed = layer.mixed(torch.randn(12, 48))
    plain = layer.state(1)
    want = [layer.run([rows], plain)[0] for rows in mixed.split(1)]
    state = layer.state(1)
    state.drafts = torch.zeros(1, 3, layer.weights.draft_inputs(mixed[:1], state).shape[1])
    layer.run([mixed[:5]], state)
    got = layer.weights.mix(mixed[5:9], state, [0, 4], drafts=[3])
    torch.testing.assert_close(got, torch.cat(want[5:9]), **TOLERANCE)
    got = layer.weights.mix(mixed[8:9], state, [0, 1], accepted=[2])
    torch.testing.assert_close(got, want[8], **TOLERANCE)
    rest = layer.run([mixed[9:]], state)[0]
    torch.testing.assert_close(rest, torch.cat(want[9:]), **TOLERANCE)
