"""Sampling: the right tokens with the right frequencies, from nothing but (seed, position)."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode
from transformers import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from chorus.ops.cpu import native
from chorus.ops.library import native_library
from chorus.ops.sampling.sampling import (
    RowSamplingParams,
    TorchSampling,
    ban,
    first_above,
    pick,
    row_logprobs,
    sample,
    uniform,
)

from ..cpu.layerless import layerless_model

pytestmark = pytest.mark.wide

#: A grid of draws that reaches every token of a share above 1/4000.
GRID = (torch.arange(4000, dtype=torch.float64) + 0.5) / 4000


def draw(logits, u, temperature=1.0, top_k=0, top_p=1.0):
    """One row of logits, a draw per element of u."""
    return sample(logits.expand(len(u), -1), [RowSamplingParams(temperature, float(at), top_k, top_p) for at in u])


def kept_by_transformers(logits, temperature, top_k, top_p):
    """Probabilities after transformers' warpers, in their order."""
    scores = TemperatureLogitsWarper(temperature)(None, logits[None])
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1.0:
        scores = TopPLogitsWarper(top_p)(None, scores)
    return scores.softmax(-1)[0]


@given(
    seed=st.integers(0, 10_000),
    temperature=st.sampled_from([0.3, 0.7, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 2, 5, 19, 20, 500]),
    top_p=st.sampled_from([0.01, 0.3, 0.7, 0.95, 1.0]),
)
@settings(max_examples=20)
def test_shares_are_those_of_transformers(seed, temperature, top_k, top_p):
    """An even grid of draws gives every token its exact share; nothing outside top_k and top_p is ever drawn."""
    logits = torch.randn(20, generator=torch.Generator().manual_seed(seed)) * 2
    share = kept_by_transformers(logits, temperature, top_k, top_p)
    sampled = draw(logits, GRID, temperature, top_k, top_p).bincount(minlength=20) / len(GRID)
    torch.testing.assert_close(sampled, share, rtol=0, atol=2 / len(GRID))
    assert not sampled[share == 0].any()


@given(st.integers(0, 10_000), st.floats(0, 1, exclude_max=True))
def test_greedy_is_the_largest_logit_whatever_the_draw(seed, u):
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(seed))
    mixed = sample(
        logits,
        [
            RowSamplingParams(0.0, u),
            RowSamplingParams(1.0, u),
            RowSamplingParams(0.0, u, 3, 0.5),
            RowSamplingParams(0.5, u, 0, 0.9),
        ],
    )
    assert mixed[[0, 2]].tolist() == logits.argmax(-1)[[0, 2]].tolist()
    for row, parameters in ((1, (1.0, 0, 1.0)), (3, (0.5, 0, 0.9))):
        assert mixed[row] == draw(logits[row], [u], *parameters)[0], "a row depends on its neighbours"


@pytest.mark.parametrize("temperature", [1e-40, 1e-30, 1e-8, 1e-3])
def test_tiny_temperatures_are_greedy(temperature):
    logits = torch.tensor([1.0, 5.0, -2.0, 4.0])
    assert draw(logits, [0.0, 0.5, 0.999], temperature).tolist() == [1, 1, 1]


@pytest.mark.parametrize("temperature", [50.0, 100.0])
def test_large_temperatures_are_nearly_even(temperature):
    sampled = draw(torch.tensor([1.0, 5.0, -2.0, 4.0]), GRID, temperature).bincount(minlength=4) / len(GRID)
    assert (sampled - 0.25).abs().max() < 0.03


@pytest.mark.parametrize("parameters", [{"top_k": 1}, {"top_p": 1e-9}])
def test_smallest_limits_keep_the_best_token(parameters):
    logits = torch.tensor([1.0, 5.0, -2.0, 4.0])
    assert set(draw(logits, GRID, **parameters).tolist()) == {1}


def test_extreme_draws_stay_among_the_kept_tokens():
    logits = torch.tensor([-50.0, 1.0, 2.0, -50.0])
    assert draw(logits, [0.0, 1 - 2**-53], top_k=2).tolist() == [1, 2]


@given(st.integers(0, 1000), st.floats(0, 1, exclude_max=True), st.floats(1e-7, 1e-6))
def test_nearly_equal_logits_do_not_swap_places(seed, u, noise):
    """Rounding between batches moves a draw only when it hits a border, not whenever two logits swap ranks."""
    logits = torch.randn(10, generator=torch.Generator().manual_seed(seed))
    logits[7] = logits[2]
    shaken = logits.clone()
    shaken[7] += noise
    borders = logits.double().softmax(-1).cumsum(-1)
    assume((borders - u).abs().min() > 1e-5)
    assert draw(logits, [u]).item() == draw(shaken, [u]).item()


def test_seeded_draws_follow_the_distribution():
    """Pearson's chi-square over the generator's own draws."""
    logits = torch.randn(12, generator=torch.Generator().manual_seed(5))
    share = logits.softmax(-1)
    for seed in (0, 1, 2**62 + 17):
        count = 6000
        sampled = draw(logits, [uniform(seed, position) for position in range(count)]).bincount(minlength=12)
        chi_square = float(((sampled - count * share).square() / (count * share)).sum())
        assert chi_square < 31.3, "above the 99.9 % quantile for 11 degrees of freedom"


@given(st.integers(0, 2**63 - 1), st.integers(0, 10_000_000))
def test_uniform_is_a_function_into_the_unit_interval(seed, position):
    u = uniform(seed, position)
    assert 0 <= u < 1
    assert u == uniform(seed, position)


def test_uniform_has_known_values():
    """A change here changes every seeded answer ever given."""
    assert [uniform(0, 0), uniform(1, 0), uniform(0, 1)] == [
        0.5079605879681605,
        0.17601256256594233,
        0.4224192380508798,
    ]


@pytest.mark.parametrize(
    "numbers",
    [
        [uniform(7, position) for position in range(20_000)],
        [uniform(seed, 3) for seed in range(20_000)],
        [uniform(seed, seed) for seed in range(20_000)],
    ],
    ids=["positions", "seeds", "diagonal"],
)
def test_uniform_is_even_and_uncorrelated(numbers):
    values = torch.tensor(numbers, dtype=torch.float64)
    count = len(values)
    bins = torch.histc(values, bins=50, min=0, max=1)
    assert float(((bins - count / 50).square() / (count / 50)).sum()) < 85.4, "99.9 % quantile for 49 degrees"
    assert abs(float(values.mean()) - 0.5) < 4 / math.sqrt(12 * count)
    centred = values - values.mean()
    correlation = float((centred[1:] * centred[:-1]).mean() / centred.square().mean())
    assert abs(correlation) < 4 / math.sqrt(count)
    assert len(values.unique()) == count


# -- min_p, penalties


@given(
    seed=st.integers(0, 10_000),
    temperature=st.sampled_from([0.5, 1.0, 2.0]),
    min_p=st.sampled_from([0.01, 0.1, 0.5, 1.0]),
    top_k=st.sampled_from([0, 3, 8]),
    top_p=st.sampled_from([0.6, 1.0]),
)
@settings(max_examples=20)
def test_min_p_shares_are_those_of_transformers(seed, temperature, min_p, top_k, top_p):
    """min_p over the tempered distribution, then top_k, then top_p of the remaining tokens."""
    logits = torch.randn(20, generator=torch.Generator().manual_seed(seed)) * 2
    scores = MinPLogitsWarper(min_p)(None, TemperatureLogitsWarper(temperature)(None, logits[None]))
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1.0:
        scores = TopPLogitsWarper(top_p)(None, scores)
    share = scores.softmax(-1)[0]
    row_params = [RowSamplingParams(temperature, float(u), top_k, top_p, min_p) for u in GRID]
    sampled = sample(logits.expand(len(GRID), -1), row_params).bincount(minlength=20) / len(GRID)
    torch.testing.assert_close(sampled, share, rtol=0, atol=2 / len(GRID))
    assert not sampled[share == 0].any()


def test_min_p_of_one_row_does_not_touch_another():
    logits = torch.tensor([1.0, 2.0, 1.9]).expand(2 * len(GRID), -1)
    tokens = sample(logits, [RowSamplingParams(1.0, float(u), min_p=min_p) for min_p in (0.95, 0.0) for u in GRID])
    assert set(tokens[: len(GRID)].tolist()) == {1}
    assert tokens[len(GRID) :].tolist() == draw(logits[0], GRID).tolist()


# -- every implementation against plain float64 arithmetic

VOCABS = [1, 2, 7, 16, 33, 600, 9001]


def native_sampling(vocab, threads):
    """The sampling of a decoder of that vocabulary, which is never run."""
    if reason := native_library.why_unavailable(torch.float32):
        pytest.skip(f"no native library: {reason}")
    decoder = native.NativeDecoder(layerless_model(torch.zeros(vocab, 32)), threads)
    decoder.sampling.keeps = decoder  # as long as the threads' users
    return decoder.sampling


@pytest.mark.parametrize("implementation", ["torch", "native"])
@pytest.mark.parametrize("vocab", VOCABS)
def test_tokens_whose_bit_is_not_set_are_banned(monkeypatch, implementation, vocab):
    """Where all may come, where few do, at the end of the vocabulary, and of logits that are not finite."""
    if implementation == "torch":
        monkeypatch.setenv(native_library.ISA, "none")
    elif reason := native_library.why_unavailable(torch.float32):
        pytest.skip(f"no native library: {reason}")
    generator = np.random.default_rng(vocab)
    logits = torch.from_numpy(generator.standard_normal((6, vocab), np.float32))
    logits[2, 0], logits[3, -1] = torch.nan, torch.inf
    words = -(-vocab // 32)
    allowed = generator.random((5, words * 32)) < np.array([[0.5], [0.01], [0.99], [1.0], [0.0]])
    masks = np.empty((5, 1 + words), np.int32)
    masks[:, 0] = 5, 2, 3, 1, 0
    masks[:, 1:] = np.packbits(allowed, axis=1, bitorder="little").view(np.int32)
    want = logits.numpy().copy()
    for row, may in zip(masks[:, 0], allowed[:, :vocab], strict=True):
        want[row][~may] = -np.inf
    ban(logits, masks)
    assert np.array_equal(logits.numpy(), want, equal_nan=True)


@pytest.fixture(params=["torch", "native"], scope="module")
def implementations(request):
    """By size of the vocabulary."""
    if request.param == "torch":
        return dict.fromkeys(VOCABS, TorchSampling())
    return {vocab: native_sampling(vocab, 2) for vocab in VOCABS}


def reference(logits, one):
    """Masses of the tokens that may be drawn, by a full stable sort in float64."""
    x = logits.astype(np.float64)
    inverse = min(1 / one.temperature, 1e300)
    scaled = (x - x.max()) * inverse
    scaled[scaled < -700] = -np.inf
    with np.errstate(divide="ignore"):
        scaled[scaled < np.log(one.min_p)] = -np.inf
    order = np.argsort(-scaled, kind="stable")
    # temperatures near 0 make different logits equally hopeless, and their order does not matter
    if 0 < one.top_k < len(x):
        order = np.argsort(-np.where(np.isfinite(scaled), x, -np.inf), kind="stable")
        scaled[order[one.top_k :]] = -np.inf
    mass = np.exp(scaled)
    if one.top_p < 1:
        before = np.concatenate(([0.0], mass[order].cumsum()[:-1]))
        mass[order[before >= one.top_p * mass.sum()]] = 0.0
    return mass


def may_be_drawn(token, mass, u):
    """True if the number u falls into the token's share, up to rounding."""
    upto = mass.cumsum()
    low, high = upto[token] - mass[token], upto[token]
    return mass[token] > 0 and low - 1e-11 * upto[-1] <= u * upto[-1] <= high + 1e-11 * upto[-1]


logits_strategy = st.tuples(
    st.sampled_from(VOCABS),
    st.integers(0, 10_000),
    st.sampled_from([0.0, 0.1, 1.0, 5.0, 1000.0]),
    st.sampled_from(["plain", "ties", "holes", "one"]),
)
row_params_strategy = st.builds(
    RowSamplingParams,
    temperature=st.sampled_from([0.0, 1e-300, 1e-40, 1e-3, 0.3, 1.0, 2.0, 100.0]),
    u=st.one_of(st.floats(0, 1, exclude_max=True), st.sampled_from([0.0, 0.5, 1 - 2**-20])),
    top_k=st.sampled_from([0, 0, 1, 2, 5, 50, 700, 10_000]),
    top_p=st.sampled_from([1.0, 1.0, 1e-12, 0.1, 0.5, 0.9, 0.999]),
    min_p=st.sampled_from([0.0, 0.0, 1e-6, 0.05, 0.5, 1.0]),
)


def make_logits(vocab, seed, spread, kind, rows):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab, generator=generator) * spread
    if kind == "ties":
        logits = logits.mul(2).round().div(2)
    if kind == "holes":
        logits[torch.rand(rows, vocab, generator=generator) < 0.6] = -torch.inf
    if kind == "one":
        logits[:, 1:] = -torch.inf
    logits[:, seed % vocab] = logits[:, seed % vocab].nan_to_num(neginf=0.25)
    return logits


@given(shape=logits_strategy, row_params=st.lists(row_params_strategy, min_size=1, max_size=5))
@example(
    (9001, 1, 0.0, "plain"), [RowSamplingParams(1.0, 0.7, top_p=0.5), RowSamplingParams(1.0, 0.3, top_k=50, top_p=0.5)]
)
@example(
    (600, 3, 1.0, "ties"), [RowSamplingParams(1.0, 0.999, top_k=5), RowSamplingParams(0.5, 0.99, top_p=0.9, min_p=0.05)]
)
def test_draws_are_those_of_float64_arithmetic(implementations, shape, row_params):
    """Over ties, missing tokens, extreme temperatures and cuts, and vocabularies that fill no vector."""
    logits = make_logits(*shape, len(row_params))
    before = logits.clone()
    tokens = implementations[shape[0]].sample(logits, range(len(row_params)), row_params)
    assert torch.equal(logits, before)
    for row, token, one in zip(logits.numpy(), tokens, row_params, strict=True):
        if one.temperature == 0:
            assert token == row.argmax()
        else:
            assert may_be_drawn(token, reference(row, one), one.u)


@given(shape=logits_strategy, counts=st.lists(st.sampled_from([0, 1, 5, 20, 100]), min_size=1, max_size=5))
def test_scores_are_those_of_float64_arithmetic(implementations, shape, counts):
    """Of equal tokens the first are reported first."""
    vocab, rows = shape[0], len(counts)
    logits = make_logits(*shape, rows)
    tokens = [(shape[1] + index) % vocab for index in range(rows)]
    scores = implementations[vocab].row_logprobs(logits, range(rows), tokens, counts)
    x = logits.double().numpy()
    most = x.max(1, keepdims=True)
    want = x - most - np.log(np.exp(x - most).sum(1, keepdims=True))
    for index, count in enumerate(counts):
        order = np.argsort(-x[index], kind="stable")[:count]
        assert scores.ids[index][: len(order)] == order.tolist()
        np.testing.assert_allclose(scores.values[index][: len(order)], want[index][order], rtol=1e-12, atol=1e-12)
        assert scores.own[index] == pytest.approx(want[index][tokens[index]], rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_row_that_is_not_finite_is_told_and_spoils_no_other(implementations, bad):
    vocab = 600
    logits = make_logits(vocab, 1, 1.0, "plain", 4)
    row_params = [
        RowSamplingParams(1.0, 0.4),
        RowSamplingParams(1.0, 0.4, top_k=20, top_p=0.9),
        RowSamplingParams(1.0, 0.4, top_p=0.9),
        RowSamplingParams(0.0, 0.0),
    ]
    for one in row_params:
        want = implementations[vocab].sample(logits, [0, 2, 3], [one] * 3)
        sick = logits.clone()
        sick[1, 77] = bad
        found = implementations[vocab].sample(sick, range(4), [one] * 4)
        assert found == [want[0], -1, *want[1:]]
    banned = torch.full((1, vocab), -torch.inf)
    assert [implementations[vocab].sample(banned, [0], [one]) for one in row_params] == [[-1]] * 4
    scores = implementations[vocab].row_logprobs(sick, range(4), [3] * 4, [5] * 4)
    assert math.isnan(scores.own[1])
    assert not any(math.isnan(scores.own[index]) for index in (0, 2, 3))


@pytest.mark.parametrize("vocab", [600, 33_001])
def test_draws_do_not_depend_on_company_nor_on_threads(vocab):
    """The same bits: numbers next to a border would tell."""
    logits = make_logits(vocab, 5, 3.0, "plain", 12)
    ways = [{}, {"top_k": 40}, {"min_p": 0.01}, {"temperature": 50.0, "top_p": 0.99}]
    row_params = [
        RowSamplingParams(**{"temperature": 1.0, "u": uniform(3, i), **ways[i % len(ways)]}) for i in range(12)
    ]
    alone = native_sampling(vocab, 1)
    want = [alone.sample(logits, [i], [row_params[i]])[0] for i in range(12)]
    for threads in (1, 2, 3):
        together = native_sampling(vocab, threads)
        assert together.sample(logits, range(12), row_params) == want
        assert together.sample(logits, [7, 2, 11], [row_params[i] for i in (7, 2, 11)]) == [want[i] for i in (7, 2, 11)]
    assert TorchSampling().sample(logits, range(12), row_params) == want


def test_the_torch_draw_works_in_slices(monkeypatch):
    """So it is however few rows fit one."""
    logits = make_logits(600, 5, 3.0, "plain", 7)
    row_params = [RowSamplingParams(1.0, uniform(1, i), top_p=0.9 if i % 2 else 1.0) for i in range(7)]
    implementation = TorchSampling()
    want = (
        implementation.sample(logits, range(7), row_params),
        implementation.row_logprobs(logits, range(7), range(7), [3] * 7),
    )
    for size in (1, 2 * 600 * 16, 3 * 600 * 16):
        monkeypatch.setattr("chorus.ops.sampling.sampling.SLICE_BYTES", size)
        assert (implementation.sample(logits, range(7), row_params)) == want[0]
        assert implementation.row_logprobs(logits, range(7), range(7), [3] * 7) == want[1]


def test_nothing_is_sorted_where_nothing_is_cut(monkeypatch):
    """A row that keeps all tokens pays for no selection, nor does it for a neighbour's."""
    seen = []
    topk = torch.Tensor.topk

    def noted(self, *args, **kwargs):
        seen.append(tuple(self.shape))
        return topk(self, *args, **kwargs)

    def refused(*args, **kwargs):
        raise AssertionError("a row was sorted")

    monkeypatch.setattr(torch.Tensor, "topk", noted)
    monkeypatch.setattr(torch.Tensor, "sort", refused)
    logits = make_logits(9001, 5, 3.0, "plain", 8)
    TorchSampling().sample(logits, range(8), [RowSamplingParams(1.0, 0.3)] * 8)
    assert seen == []
    TorchSampling().sample(
        logits, range(8), [*[RowSamplingParams(1.0, 0.3)] * 7, RowSamplingParams(1.0, 0.3, top_p=0.5)]
    )
    assert seen == [(1, 9001)]


class Waits(TorchFunctionMode):
    """Refuses operations that make the host wait for a device. Reading values back is refused by the meta device, which
    has none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pinned: list[torch.Tensor] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            assert not any(isinstance(it, list) for it in index), "a list is brought to the device, and waited for"
        if func is torch.tensor:
            assert kwargs.get("device") is None, "values are brought to the device, and waited for"
        if func is torch.Tensor.pin_memory:  # which nothing can be without a GPU
            self.pinned.append(args[0])
            return args[0]
        if func is torch.Tensor.to and isinstance(args[1], torch.device) and args[1] != args[0].device:
            assert kwargs.get("non_blocking"), "a copy that is waited for"
            assert any(args[0] is it for it in self.pinned), "a copy of pageable memory, which may be waited for"
        return func(*args, **kwargs)


def test_the_host_waits_for_nothing_while_it_asks():
    """For log-probabilities, and all parameters but top_p: they are launched after the step, while that still runs."""
    logits = torch.empty(8, 9001, device="meta")
    ways = [{}, {"top_k": 40}, {"min_p": 0.01}, {"temperature": 0.0}]
    row_params = [RowSamplingParams(**{"temperature": 1.0, "u": 0.3, **ways[i % len(ways)]}) for i in range(6)]
    rows = [0, 2, 3, 4, 6, 7]
    with Waits():
        tokens = sample(pick(logits, rows), row_params)
        scores = row_logprobs(pick(logits, rows), tokens.clamp(min=0), 3)
    assert (tokens.shape, scores.shape) == ((6,), (6, 7))
    for waiting in (
        lambda: logits[[1, 2]],
        lambda: torch.tensor([1], device="meta"),
        lambda: torch.ones(2).to(logits.device),
        lambda: torch.ones(2).to(logits.device, non_blocking=True),
    ):
        with pytest.raises(AssertionError, match="waited for"), Waits():
            waiting()
    with pytest.raises((NotImplementedError, RuntimeError)), Waits():
        logits[0, 0].item()


def test_a_larger_width_draws_the_same():
    logits = make_logits(9001, 5, 0.1, "plain", 6)  # nearly even, so that half of the mass takes half of the tokens
    row_params = [RowSamplingParams(1.0, uniform(1, i), top_p=(1.0, 0.5)[i % 2]) for i in range(6)]
    want = sample(logits, row_params, 9001).tolist()
    for width in (1, 2, 512):
        assert sample(logits, row_params, width).tolist() == want


@given(
    mass=st.lists(st.sampled_from([0.0, 0.0, 1.0, 0.1, 1e-300, 3.7]), min_size=1, max_size=40),
    u=st.one_of(st.floats(0, 1, exclude_max=True), st.sampled_from([0.0, 1 - 2**-53])),
    block=st.sampled_from([1, 2, 7, 8, 64]),
)
def test_no_draw_falls_on_a_token_without_mass(mass, u, block):
    """Nor beyond the last, however the sums are rounded and wherever blocks end."""
    assume(any(mass))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("chorus.ops.sampling.sampling._BLOCK", block)
        token = first_above(torch.tensor([mass], dtype=torch.float64), torch.tensor([u], dtype=torch.float64)).item()
    assert may_be_drawn(token, np.array(mass), u)
