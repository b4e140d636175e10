"""Both parts of Mamba 1 give what transformers' module gives, however prompts are cut, and with drafts."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from chorus.ops.mixers.recurrent import RecurrentState
from chorus.ops.mixers.selective_scan import ScanInputs, SelectiveScanWeights

pytestmark = [pytest.mark.native(needed=False), pytest.mark.wide]

TOLERANCE = {"rtol": 2e-4, "atol": 2e-5}
SIZE, STATE, RANK, HEADS, MOST = 96, 12, 6, 4, 5


class Layer:
    """transformers' module with random weights, and both parts of the same."""

    def __init__(self) -> None:
        from transformers import MambaConfig
        from transformers.models.mamba.modeling_mamba import MambaMixer

        torch.manual_seed(0)
        config = MambaConfig(hidden_size=48, state_size=STATE, time_step_rank=RANK, num_hidden_layers=1)
        self.module = MambaMixer(config, 0).eval()
        with torch.no_grad():
            self.module.D.normal_()
            self.module.conv1d.bias.normal_()
        it = {name: parameter.detach() for name, parameter in self.module.named_parameters()}
        self.first = ScanInputs(it["conv1d.weight"].squeeze(1).T, it["conv1d.bias"])
        self.second = SelectiveScanWeights(self.first, it["A_log"].exp().T, it["D"])

    def states(self, sequences: int, drafts: int = 0) -> tuple[RecurrentState, RecurrentState]:
        kept = [torch.full((sequences, drafts, width), torch.nan) for width in (SIZE, 2 * SIZE + STATE)]
        conv, heads = torch.zeros(sequences, 3, SIZE), torch.zeros(sequences, HEADS, STATE, SIZE // HEADS)
        none = torch.empty(sequences, 0)
        return RecurrentState(conv, none, kept[0]), RecurrentState(none.clone(), heads, kept[1])

    @torch.no_grad()
    def rows(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.module.in_proj(hidden)

    @torch.no_grad()
    def inner(self, rows: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """What the second part takes."""
        low, b, c = self.module.x_proj(x).split((RANK, STATE, STATE), 1)
        return torch.cat((x, self.module.dt_proj(low), b, c, rows[:, SIZE:]), 1)

    def mix(self, rows: torch.Tensor, states: tuple[RecurrentState, RecurrentState], *how) -> torch.Tensor:
        x = self.first.mix(rows, states[0], *how)
        return self.second.mix(self.inner(rows, x), states[1], *how)

    def step(self, rows: torch.Tensor, states: tuple[RecurrentState, RecurrentState], *how) -> torch.Tensor:
        x = self.first.step(rows, states[0], *how)
        return self.second.step(self.inner(rows, x), states[1], *how)

    @torch.no_grad()
    def want(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.module(hidden[None])[0]


@pytest.fixture(scope="module")
def layer() -> Layer:
    return Layer()


@pytest.mark.parametrize("size", [1, 7, 64, 150])
def test_a_prompt_is_what_transformers_makes_of_it(layer, size):
    hidden, states = torch.randn(150, 48), layer.states(1)
    parts = layer.rows(hidden).split(size)
    got = torch.cat([layer.mix(rows, states, [0, len(rows)]) for rows in parts])
    with torch.no_grad():
        torch.testing.assert_close(layer.module.out_proj(got), layer.want(hidden), **TOLERANCE)


def test_the_parts_share_a_state_and_a_drafts_inputs(layer):
    first, second = layer.first.part, layer.second.part
    assert (first.has_conv, first.has_heads, second.has_conv, second.has_heads) == (True, False, False, True)
    columns = [*range(3 * SIZE + STATE)]
    assert columns[first.drafts] + columns[second.drafts] == columns


@pytest.mark.parametrize("is_captured", [False, True], ids=["mix", "step"])
def test_rejected_drafts_leave_no_trace(layer, is_captured):
    """Two sequences; steps that verify drafts give the known and the accepted tokens what one token at a time gives."""
    rng, length = random.Random(0), 25
    rows, plain = [layer.rows(torch.randn(length, 48)) for _ in range(2)], layer.states(2)
    pairs = zip(*(each.split(1) for each in rows), strict=True)
    want = [layer.mix(torch.cat(pair), plain, [0, 1, 2]) for pair in pairs]
    states, at, accepted = layer.states(2, MOST), 0, [0, 0]
    while at < length:
        right = min(rng.randint(0, 2), length - at - 1)
        drafts = [right + rng.randint(1, MOST - right) for _ in rows]
        parts = [
            torch.cat((own[at : at + 1 + right], torch.randn(count - right, own.shape[1])))
            for own, count in zip(rows, drafts, strict=True)
        ]
        lengths = [len(part) for part in parts]
        indptr = [0, *itertools.accumulate(lengths)]
        if is_captured:
            numbers = [torch.tensor(each) for each in (indptr[:2], lengths, accepted)]
            out = layer.step(torch.cat(parts), states, *numbers)
        else:
            out = layer.mix(torch.cat(parts), states, indptr, accepted, drafts)
        for index, found in enumerate(out.split(lengths)):
            for token in range(1 + right):
                torch.testing.assert_close(found[token], want[at + token][index], **TOLERANCE)
        at, accepted = at + 1 + right, [right, right]
