"""Numbers of rows for n-grams, and the convolution behind them, are transformers', however texts are cut, and with
drafts.
"""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from chorus.core.model.families.qwen4_exp.ngrams import NgramSpec
from chorus.ops.mixers.ngrams import multipliers
from chorus.ops.mixers.recurrent import RecurrentState
from chorus.ops.mixers.table_sizes import table_sizes

pytestmark = [pytest.mark.native(needed=False), pytest.mark.wide]

VOCAB, END, HIDDEN, STREAMS = 150, 2, 8, 3
MOST = 4
"""Drafts of a step."""


class Embedding:
    """transformers' module, which gives the numbers that it looks up."""

    def __init__(self, size: int, place: int) -> None:
        from transformers import Qwen4ExpTextConfig
        from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextPLELayer

        torch.manual_seed(3)
        config = Qwen4ExpTextConfig(
            vocab_size=VOCAB, hidden_size=HIDDEN, num_hidden_layers=3, layer_types=["linear_attention"] * 3,
            ple_layer_ids=[1, 2, 3], hc_count=STREAMS, ple_embed_dim=24, ngram_size=size, heads_per_ngram=2,
            ngram_vocab_size_base=50, make_ngram_vocab_size_divisible_by=8, eos_token_id=[END, 5],
            ple_conv_kernel_size=3, seed=77,
        )  # fmt: skip
        self.layer = Qwen4ExpTextPLELayer(config, 0, place).eval()
        with torch.no_grad():
            self.layer.conv1d.weight.normal_()
        self.shape = tuple(self.layer.ple_embedding.ngram_embedding.weight.shape)
        self.spec = NgramSpec(
            STREAMS, HIDDEN, size, 2, 24, taps=3, vocab=VOCAB, least_rows=50, multiple=8, seed=77, end=END, place=place
        )
        self.weights = self.spec.weights({name: self.layer.conv1d.weight.detach() for name in self.spec.tensors})

    def numbers(self, tokens: list[int]) -> torch.Tensor:
        found = []
        hook = self.layer.ple_embedding.ngram_embedding.register_forward_pre_hook(lambda _, given: found.append(*given))
        self.layer.ple_embedding(torch.tensor([tokens]), None)
        hook.remove()
        return found[0][0]

    @torch.no_grad()
    def convolved(self, rows: torch.Tensor) -> torch.Tensor:
        return self.layer._short_conv(rows[None], None)[0]  # noqa: SLF001 - transformers has no other way to it

    def state(self, sequences: int, drafts: int = 0) -> RecurrentState:
        conv, tokens = self.spec.conv_shape, self.spec.recurrent_shape
        kept = torch.full((sequences, drafts, self.spec.draft_size), torch.nan) if drafts else None
        return RecurrentState(torch.zeros(sequences, *conv), torch.zeros(sequences, *tokens), kept)

    def of(self, part, state: RecurrentState) -> RecurrentState:
        """A part's share of a state, whose drafts are columns of the same memory."""
        drafts = None if state.drafts is None else state.drafts[..., part.part.drafts]
        return RecurrentState(state.conv, state.recurrent, drafts)


@pytest.fixture(scope="module", params=[(2, 0), (3, 2), (4, 1)], ids=str)
def it(request):
    return Embedding(*request.param)


def text(length: int, seed: int = 0) -> list[int]:
    """Tokens, of which every fifth ends a text."""
    rng = random.Random(seed)
    return [END if rng.random() < 0.2 else rng.randrange(VOCAB) for _ in range(length)]


def test_tables_are_as_large_as_transformers(it):
    assert it.spec.table_shape == it.shape
    own = it.layer.ple_embedding
    assert it.weights.first.factors.tolist() == own.layer_multipliers.tolist()
    assert it.weights.first.sizes.tolist() == own.ngram_heads_vocab_sizes.tolist()
    assert it.weights.first.firsts.tolist() == own.ngram_heads_offsets.tolist()


def test_sizes_and_factors_of_the_published_geometry():
    from transformers.models.qwen4_exp.modeling_qwen4_exp import _build_layer_multipliers, _find_nth_prime_after

    assert table_sizes(20_000_000, 15, 2) == tuple(_find_nth_prime_after(19_999_999, count) for count in (16, 17))
    assert multipliers(248_320, 3, 2, 1234) == _build_layer_multipliers(248_320, 3, 2, 1234).tolist()


@pytest.mark.parametrize("size", [1, 2, 7, 40])
def test_numbers_are_transformers_however_a_text_is_cut(it, size):
    tokens, state = text(40), it.state(1)
    rows = torch.tensor(tokens)[:, None]
    got = torch.cat([it.weights.first.mix(part, state, [0, len(part)]) for part in rows.split(size)])
    assert torch.equal(got, it.numbers(tokens))


@pytest.mark.parametrize("size", [1, 5, 30])
def test_rows_are_convolved_as_in_transformers(it, size):
    rows, state = torch.randn(30, STREAMS * HIDDEN), it.state(1)
    got = torch.cat([it.weights.mix(part, state, [0, len(part)]) for part in rows.split(size)])
    torch.testing.assert_close(got, it.convolved(rows))


def test_a_sequence_does_not_depend_on_its_batch(it):
    texts = [text(length, length) for length in (9, 4, 1, 1)]
    indptr = [0, *itertools.accumulate(map(len, texts))]
    got = it.weights.first.mix(torch.tensor([[*itertools.chain(*texts)]]).T, it.state(4), indptr)
    want = [it.weights.first.mix(torch.tensor([own]).T, it.state(1), [0, len(own)]) for own in texts]
    assert torch.equal(got, torch.cat(want))


@pytest.mark.parametrize("is_captured", [False, True], ids=["mix", "step"])
@pytest.mark.parametrize("is_first", [True, False], ids=["numbers", "convolved"])
def test_rejected_drafts_leave_no_trace(it, is_captured, is_first):
    part, rng = it.weights.first if is_first else it.weights, random.Random(1)
    tokens, rows = text(25), torch.randn(25, STREAMS * HIDDEN)
    known = torch.tensor(tokens)[:, None] if is_first else rows
    wrong = torch.tensor([[END], [7], [9], [4]]) if is_first else torch.randn(4, STREAMS * HIDDEN)
    want = it.numbers(tokens) if is_first else it.convolved(rows)
    state, done, accepted = it.of(part, it.state(1, MOST)), 0, 0
    while done < len(known):
        right = min(rng.randint(0, 2), len(known) - done - 1)
        given = torch.cat((known[done : done + 1 + right], wrong[: rng.randint(1, MOST - right)]))
        if is_captured:
            begins, counts, taken = (torch.tensor([each]) for each in (0, len(given), accepted))
            got = part.step(given, state, begins, counts, taken)
        else:
            got = part.mix(given, state, [0, len(given)], [accepted], [len(given) - 1])
        torch.testing.assert_close(got[: 1 + right], want[done : done + 1 + right])
        done, accepted = done + 1 + right, right
