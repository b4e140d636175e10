"""Gated DeltaNet gives what transformers' module gives, however prompts are cut and whatever else is in the batch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers.models.qwen3_5 import modeling_qwen3_5 as reference
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

from chorus.ops.mixers.gated_delta import DeltaWeights
from chorus.ops.mixers.recurrent import RecurrentState

from .delta_layers import DeltaLayer, ModuleLayer, copy, verified_steps

pytestmark = [pytest.mark.native(needed=False), pytest.mark.wide]

#: heads of keys and of values, and their widths
SHAPES = [(2, 4, 16, 24), (1, 1, 8, 8), (3, 3, 32, 16), (2, 6, 128, 128)]
TOLERANCE = {"rtol": 2e-4, "atol": 2e-5}


class Layer(ModuleLayer):
    """transformers' module with random weights, and the same as `DeltaWeights`."""

    def __init__(self, k_heads: int, v_heads: int, k_dim: int, v_dim: int, seed: int = 0) -> None:
        config = Qwen3_5TextConfig(
            hidden_size=48,
            linear_num_key_heads=k_heads,
            linear_num_value_heads=v_heads,
            linear_key_head_dim=k_dim,
            linear_value_head_dim=v_dim,
            num_hidden_layers=4,
        )
        torch.manual_seed(seed)
        self.module: Any = reference.Qwen3_5GatedDeltaNet(config, 0).eval()
        with torch.no_grad():
            self.module.norm.weight.uniform_(0.5, 1.5)
            self.module.dt_bias.normal_()
            self.module.in_proj_a.weight.mul_(3)
            self.module.in_proj_b.weight.mul_(3)
        self.weights = DeltaWeights(
            self.module.conv1d.weight.detach().squeeze(1).T.contiguous(),
            self.module.dt_bias.detach(),
            self.module.A_log.detach(),
            self.module.norm.weight.detach(),
            config.rms_norm_eps,
        )
        self.recurrent_shape = v_heads, k_dim, v_dim
        self.channels = 2 * k_heads * k_dim + v_heads * v_dim

    def state(self, sequences: int) -> RecurrentState:
        return RecurrentState(torch.zeros(sequences, 3, self.channels), torch.zeros(sequences, *self.recurrent_shape))

    def hidden(self, tokens: int) -> torch.Tensor:
        return torch.randn(tokens, 48)

    @torch.no_grad()
    def mixed(self, hidden: torch.Tensor) -> torch.Tensor:
        parts = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
        return torch.cat([getattr(self.module, part)(hidden) for part in parts], dim=-1)

    @torch.no_grad()
    def out(self, attended: torch.Tensor) -> torch.Tensor:
        return self.module.out_proj(attended)


@pytest.fixture(params=SHAPES, ids=str)
def layer(request) -> Iterator[Layer]:
    yield Layer(*request.param)


def cut(mixed: torch.Tensor, size: int) -> Iterator[torch.Tensor]:
    return iter(mixed.split(size))


@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 150])
def test_a_prompt_is_what_transformers_makes_of_it(layer, tokens):
    hidden = layer.hidden(tokens)
    (got,) = layer.run([layer.mixed(hidden)], layer.state(1))
    torch.testing.assert_close(layer.out(got), layer.want(hidden), **TOLERANCE)


@pytest.mark.parametrize("size", [1, 7, 64, 100])
def test_a_cut_prompt_is_what_transformers_makes_of_the_whole(layer, size):
    hidden, state = layer.hidden(150), layer.state(1)
    got = [layer.run([rows], state)[0] for rows in cut(layer.mixed(hidden), size)]
    torch.testing.assert_close(layer.out(torch.cat(got)), layer.want(hidden), **TOLERANCE)


@pytest.mark.parametrize(("cuts", "whole"), [(1, 150), (7, 64)])
def test_the_state_does_not_depend_on_how_a_prompt_is_cut(layer, cuts, whole):
    mixed, states = layer.mixed(layer.hidden(150)), []
    for size in (cuts, whole):
        states.append(layer.state(1))
        for rows in cut(mixed, size):
            layer.run([rows], states[-1])
    one, other = states
    assert torch.equal(one.conv, other.conv)
    torch.testing.assert_close(one.recurrent, other.recurrent, **TOLERANCE)


def test_the_rules_are_transformers_own_from_any_state(layer):
    """The functions that transformers has for a prompt and for a token, from a state in which something is."""
    mixed, state = layer.mixed(layer.hidden(90)), layer.state(1)
    state.conv.normal_()
    state.recurrent.normal_()
    v_heads, k_dim, v_dim = layer.recurrent_shape
    k_size = (layer.channels - v_heads * v_dim) // 2
    seen = torch.cat((state.conv[0], mixed[:, : layer.channels])).T[None]
    conv = torch.nn.functional.conv1d(seen, layer.module.conv1d.weight, groups=layer.channels)
    q, k, v = torch.nn.functional.silu(conv).transpose(1, 2).split((k_size, k_size, v_heads * v_dim), -1)
    b, a = mixed[None, :, -2 * v_heads :].chunk(2, -1)
    inputs = {
        "query": q.unflatten(-1, (-1, k_dim)),
        "key": k.unflatten(-1, (-1, k_dim)),
        "value": v.unflatten(-1, (-1, v_dim)),
        "g": -layer.weights.a_log.exp() * torch.nn.functional.softplus(a + layer.weights.dt_bias),
        "beta": b.sigmoid(),
        "initial_state": state.recurrent.clone(),
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": True,
    }
    with torch.no_grad():
        for rule, size in (
            (reference.torch_chunk_gated_delta_rule, 90),
            (reference.torch_recurrent_gated_delta_rule, 1),
        ):
            own = RecurrentState(state.conv.clone(), state.recurrent.clone())
            got = torch.cat([layer.run([rows], own)[0] for rows in cut(mixed, size)])
            out, final = rule(**inputs)
            z = mixed[:, layer.channels : -2 * v_heads].reshape(-1, v_dim)
            want = layer.module.norm(out[0].reshape(-1, v_dim), z).view(90, -1)
            torch.testing.assert_close(got, want, **TOLERANCE)
            torch.testing.assert_close(own.recurrent, final, **TOLERANCE)


@pytest.mark.parametrize("lengths", [(1, 1, 1), (5, 70, 2), (100, 64, 1, 1), (3, 1)])
def test_a_sequence_does_not_depend_on_its_batch(layer, lengths):
    """But for rounding: torch computes the last elements of a tensor by other instructions."""
    mixed = [layer.mixed(layer.hidden(length)) for length in lengths]
    together = layer.state(len(lengths))
    together.conv.normal_()
    together.recurrent.normal_()
    before = RecurrentState(together.conv.clone(), together.recurrent.clone())
    got = layer.run(mixed, together)
    for index, rows in enumerate(mixed):
        alone = before.of(slice(index, index + 1))
        torch.testing.assert_close(layer.run([rows], alone)[0], got[index], rtol=2e-6, atol=1e-6)
        assert torch.equal(alone.conv[0], together.conv[index])
        torch.testing.assert_close(alone.recurrent[0], together.recurrent[index], rtol=2e-6, atol=1e-6)


def test_sequences_go_on_from_their_states_in_other_batches(layer):
    """Prompts in one step, then tokens of both, one of them alone, and a chunk of one with a token of the other."""
    hidden = [layer.hidden(80), layer.hidden(40)]
    mixed = [layer.mixed(each) for each in hidden]
    state = layer.state(2)
    got = [layer.run([mixed[0][:30], mixed[1][:20]], state)]
    got += [layer.run([mixed[0][30 + t : 31 + t], mixed[1][20 + t : 21 + t]], state) for t in range(5)]
    got += [[layer.run([mixed[0][35:50]], state.of(slice(0, 1)))[0], mixed[1].new_empty(0, got[0][0].shape[1])]]
    got += [layer.run([mixed[0][50:], mixed[1][25:26]], state)]
    for index, length in enumerate((80, 26)):
        out = layer.out(torch.cat([step[index] for step in got]))
        torch.testing.assert_close(out, layer.want(hidden[index])[:length], **TOLERANCE)


def test_bfloat16_is_computed_in_float32(layer):
    mixed = layer.mixed(layer.hidden(70)).bfloat16()
    (got,), (want,) = (layer.run([rows], layer.state(1)) for rows in (mixed, mixed.float()))
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, want.bfloat16())


def test_prompts_come_first(layer):
    with pytest.raises(ValueError, match="rows with more than one token must come before"):
        layer.run([layer.mixed(layer.hidden(1)), layer.mixed(layer.hidden(2))], layer.state(2))


@pytest.mark.parametrize("shape", [(2, 4, 16, 24, 4), (1, 2, 8, 8, 2)], ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_rejected_drafts_leave_no_trace(shape, seed):
    """Steps that verify drafts give the known and the accepted tokens what steps of one token each give."""
    layer, lengths, most = DeltaLayer(*shape), (30, 17, 24), 8
    rows, steps = verified_steps(layer, lengths, most, seed)
    state = layer.state(len(lengths), most)
    plain = copy(state)
    want = [
        torch.cat([layer.weights.mix(row, plain.of(slice(i, i + 1)), [0, 1]) for row in own.split(1)])
        for i, own in enumerate(rows)
    ]
    done = [0] * len(rows)
    for at, (parts, accepted, drafts) in enumerate(steps):
        order = sorted(range(len(parts)), key=lambda index: len(parts[index]) == 1)  # several tokens come first
        counts = [len(parts[index]) for index in order]
        assert state.drafts is not None
        own = RecurrentState(state.conv[order], state.recurrent[order], state.drafts[order])
        out = layer.weights.mix(
            torch.cat([parts[index] for index in order]),
            own,
            [0, *itertools.accumulate(counts)],
            [accepted[index] for index in order],
            [drafts[index] for index in order],
        )
        state.conv[order], state.recurrent[order], state.drafts[order] = own.conv, own.recurrent, own.drafts
        following = steps[at + 1][1] if at + 1 < len(steps) else [0] * len(parts)
        for index, found in zip(order, out.split(counts), strict=True):
            kept = len(found) - drafts[index] + following[index]
            begin, end = done[index], min(done[index] + kept, lengths[index])
            torch.testing.assert_close(found[: max(0, end - begin)], want[index][begin:end], **TOLERANCE)
            done[index] += kept
