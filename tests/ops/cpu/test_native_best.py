"""The native decoder's argmax and sampled tokens are those of its logits, whichever thread saw them."""

from __future__ import annotations

import math

import pytest
import torch

from chorus.ops.cpu import native
from chorus.ops.lora.sgmv import Segments
from chorus.ops.sampling.sampling import RowSamplingParams, TorchSampling

from .layerless import layerless_model

pytestmark = [pytest.mark.native, pytest.mark.wide]

HIDDEN, NAN, INF = 32, math.nan, math.inf


class Head:
    """A model without layers: row i's logits are the products of the head with normalised embedding i."""

    def __init__(self, head, embed, dtype, threads):
        count = len(embed)
        model = layerless_model(head.to(dtype), embed.to(dtype))
        self.decoder = native.NativeDecoder(model, threads)
        self.rows = native.NativeRows()
        self.rows.plan(range(count + 1), torch.zeros(count, 1, dtype=torch.long), [1] * count)
        self.count = count

    def forward(self, keep, logit_tokens=None, kept_tokens=None):
        """keep: all logits, none, or those of a list."""
        zeros = torch.zeros(self.count, dtype=torch.long)
        every = torch.arange(self.count)
        self.decoder.kept = None if keep is True else keep or ()
        wanted = every if logit_tokens is None else logit_tokens
        return self.decoder.forward(every, zeros, zeros, zeros, self.rows, wanted, Segments(), kept_tokens=kept_tokens)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(("vocab", "rows"), [(1, 1), (31, 3), (33, 8), (1000, 13), (257, 50), (640, 300)])
def test_best_is_the_argmax_of_the_logits(dtype, threads, vocab, rows):
    generator = torch.Generator().manual_seed(vocab)
    head = torch.randn(vocab, HIDDEN, generator=generator)
    model = Head(head, torch.randn(rows, HIDDEN, generator=generator), dtype, threads)
    for _ in range(3):
        logits = model.forward(keep=True)
        assert model.decoder.best == logits.argmax(-1).tolist()
        want = model.decoder.best
        assert model.forward(keep=False).shape == (0, vocab)
        assert model.decoder.best == want


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_of_equal_logits_the_first_is_best(threads):
    """Repeated a few times, since it depends on the threads' luck who sees which panel first."""
    head = torch.randn(7, HIDDEN, generator=torch.Generator().manual_seed(1)).repeat(200, 1)
    model = Head(head, torch.randn(20, HIDDEN), torch.float32, threads)
    for _ in range(20):
        logits = model.forward(keep=True)
        assert model.decoder.best == logits.argmax(-1).tolist()
        assert max(model.decoder.best) < 7


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("at", [0, 5, 40, 99])
def test_a_row_with_nan_or_infinity_has_no_best(threads, bad, at):
    embed = torch.ones(4, HIDDEN)
    embed[2, 3] = bad  # of this row alone
    model = Head(torch.rand(100, HIDDEN), embed, torch.float32, threads)
    logits = model.forward(keep=False)
    assert [token >= 0 for token in model.decoder.best] == [True, True, False, True]
    head = torch.rand(100, HIDDEN)
    head[at] = bad  # of one logit of every row
    model = Head(head, torch.rand(4, HIDDEN), torch.float32, threads)
    logits = model.forward(keep=True)
    assert not logits[:, at].isfinite().any()
    assert model.decoder.best == [-1] * 4


def test_minus_infinity_is_no_harm_unless_all_are():
    head = torch.rand(70, HIDDEN)
    head[:69] = -INF
    model = Head(head, torch.rand(3, HIDDEN), torch.float32, 2)
    model.forward(keep=False)
    assert model.decoder.best == [69] * 3
    head[69] = -INF
    model = Head(head, torch.rand(3, HIDDEN), torch.float32, 2)
    model.forward(keep=False)
    assert model.decoder.best == [-1] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("vocab", "rows"), [(1, 1), (33, 8), (1000, 13), (257, 50), (640, 300)])
def test_rows_whose_logits_are_kept_have_them_in_order(dtype, threads, vocab, rows):
    """The same bits as when all are kept; nothing is written for the others."""
    generator = torch.Generator().manual_seed(vocab)
    head = torch.randn(vocab, HIDDEN, generator=generator)
    model = Head(head, torch.randn(rows, HIDDEN, generator=generator), dtype, threads)
    every = model.forward(keep=True).clone()
    best = model.decoder.best
    for kept in ([], [0], [rows - 1], list(range(0, rows, 3)), list(range(rows))):
        assert torch.equal(model.forward(kept), every[kept])
        assert model.decoder.best == best


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("threads", [1, 2])
def test_logits_of_prompt_tokens_come_in_slices(dtype, threads):
    """In addition to the step's own, however many, and without room for all of them at once."""
    vocab, rows = 257, 60
    generator = torch.Generator().manual_seed(3)
    head = torch.randn(vocab, HIDDEN, generator=generator)
    model = Head(head, torch.randn(rows, HIDDEN, generator=generator), dtype, threads)
    every = model.forward(keep=True).clone()
    best = model.decoder.best
    scored = torch.arange(1, rows)
    own = model.forward([0], torch.tensor([59, 3]), scored)
    assert torch.equal(own, every[[59]])
    assert model.decoder.best == [best[59], best[3]]
    for begin, end in ((0, 7), (7, 8), (8, 59), (0, 59)):
        torch.testing.assert_close(model.decoder.prompt_logits(begin, end), every[scored[begin:end]], rtol=0, atol=0)


def test_a_step_without_kept_tokens_has_no_logits_of_them():
    """Logits that an earlier step kept, of other requests, are not accessible."""
    model = Head(torch.rand(100, HIDDEN), torch.rand(5, HIDDEN), torch.float32, 1)
    model.forward(keep=True, kept_tokens=torch.arange(4))
    assert len(model.decoder.prompt_logits(0, 4)) == 4
    model.forward(keep=True)
    with pytest.raises(RuntimeError, match="kept the hidden states of 0 tokens, not 1"):
        model.decoder.prompt_logits(0, 1)


def test_room_for_logits_is_that_of_the_rows_that_are_kept():
    """A long prompt's scores take a slice, greedy steps nothing."""
    model = Head(torch.rand(100, HIDDEN), torch.rand(50, HIDDEN), torch.float32, 1)
    logits = model.forward(keep=False, logit_tokens=torch.tensor([49]), kept_tokens=torch.arange(49))
    assert logits.untyped_storage().nbytes() == 0
    for begin in range(0, 49, 7):
        assert model.decoder.prompt_logits(begin, begin + 7).untyped_storage().nbytes() == 7 * 100 * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(("vocab", "rows"), [(1, 1), (31, 3), (33, 8), (1000, 13), (257, 50), (4097, 300)])
def test_drawn_tokens_are_those_drawn_from_the_logits(dtype, threads, vocab, rows):
    """Tokens that torch draws from them, whatever the temperature and whoever else draws; nothing is kept for it."""
    generator = torch.Generator().manual_seed(vocab)
    head = torch.randn(vocab, HIDDEN, generator=generator)
    model = Head(head, torch.randn(rows, HIDDEN, generator=generator), dtype, threads)
    logits = model.forward(keep=True).clone()
    best = model.decoder.best
    u = [0.0, 1 - 2**-53, *torch.rand(rows, generator=generator, dtype=torch.float64).tolist()]
    for temperature in (1.0, 0.01, 1e-300, 100.0, 0.7):
        u = u[1:] + u[:1]
        sampled = {row: RowSamplingParams(temperature, u[row]) for row in range(0, rows, 1 + (temperature == 0.7))}
        want = list(best)
        for row, token in zip(
            sampled, TorchSampling().sample(logits, list(sampled), list(sampled.values())), strict=True
        ):
            want[row] = token
        model.decoder.row_params = sampled
        assert model.forward(keep=False).shape == (0, vocab)
        assert model.decoder.best == want
        kept = list(range(0, rows, 3))
        assert torch.equal(model.forward(kept), logits[kept])
        assert model.decoder.best == want


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_row_that_is_not_finite_draws_nothing_and_spoils_no_other(bad):
    head = torch.rand(100, HIDDEN)
    head[:90] = -INF  # whole panels without any chance
    embed = torch.ones(4, HIDDEN)
    embed[2, 3] = bad
    model = Head(head, embed, torch.float32, 2)
    model.decoder.row_params = {row: RowSamplingParams(1.0, 0.25 * row) for row in range(4)}
    model.forward(keep=False)
    assert [token >= 90 for token in model.decoder.best] == [True, True, False, True]
    assert model.decoder.best[2] == -1


CUTS = [
    {"top_p": 0.9},
    {"top_p": 1e-12},
    {"top_p": 1 - 2**-53},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 5000},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"min_p": 1e-9, "top_k": 40, "top_p": 0.7},
    {},
]


def make_head(kind, vocab, generator):
    head = torch.rand(vocab, HIDDEN, generator=generator)
    if kind == "ties":  # of a few different logits
        head = head[torch.randint(min(vocab, 13), (vocab,), generator=generator)]
    if kind == "flat":
        head.fill_(0.5)
    if kind == "peaked":
        head[vocab // 2] += 10.0
    if kind == "wide":
        head = torch.randn(vocab, HIDDEN, generator=generator) * 8
    if kind == "holes":  # whole panels of them too
        head[torch.rand(vocab, generator=generator) < 0.6] = -INF
        head[vocab // 3 : vocab // 2] = -INF
        head[0] = 0.25
    return head


@pytest.mark.parametrize("kind", ["plain", "ties", "flat", "peaked", "wide", "holes"])
@pytest.mark.parametrize(("vocab", "threads"), [(1, 1), (33, 2), (4099, 2), (9001, 3)])
def test_cut_draws_are_those_of_the_plain_path(kind, vocab, threads):
    """The same tokens whether the head finds them, from kept logits or not, or they are drawn from the logits later."""
    generator = torch.Generator().manual_seed(vocab)
    rows = 2 * len(CUTS)
    embed = torch.rand(rows, HIDDEN, generator=generator) + 0.1
    model = Head(make_head(kind, vocab, generator), embed, torch.float32, threads)
    logits = model.forward(keep=True).clone()
    for temperature in (1.0, 0.05, 30.0):
        u = [0.0, 1 - 2**-53, *torch.rand(rows - 2, generator=generator, dtype=torch.float64).tolist()]
        sampled = {row: RowSamplingParams(temperature, u[row], **CUTS[row // 2]) for row in range(rows)}
        want = TorchSampling().sample(logits, list(sampled), list(sampled.values()))
        assert model.decoder.sampling.sample(logits, list(sampled), list(sampled.values())) == want
        model.decoder.row_params = sampled
        for keep in (True, False, list(range(0, rows, 3))):
            model.forward(keep)
            assert model.decoder.best == want
        for row, row_params in sampled.items():  # nor does a draw depend on whoever else draws
            model.decoder.row_params = {row: row_params}
            model.forward(keep=[row])
            assert model.decoder.best[row] == want[row]
        model.decoder.row_params = {}
