"""From logits to tokens and log-probabilities, each row by its own parameters, as transformers and OpenAI do."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from chorus.core.model import sampler
from chorus.core.model.sampler import (
    ALL_BANNED,
    DeviceSampling,
    add_prompt_logprobs,
    max_fetched_values,
    needs_logits,
    plain_row_params,
)
from chorus.core.requests.request_params import MAX_LOGPROBS, InvalidRequest, RequestParams
from chorus.core.requests.types import BASE_LORA_INDEX, FinishReason, ScheduledSequence, StepResult
from chorus.ops.sampling.sampling import TorchSampling, greedy, pick, sample

pytestmark = pytest.mark.wide

VOCAB = 12
EOS = (0, 1)


def row(name, prompt, output=(), *, tokens=None, samples=True, seed=0, **params):
    """The row that computes the last known token, or the last `tokens`."""
    known = [*prompt, *output]
    count = tokens or 1
    return ScheduledSequence(
        request_id=name,
        lora_index=BASE_LORA_INDEX,
        tokens=known[len(known) - count :],
        start=len(known) - count,
        pages=[],
        params=RequestParams(**{"temperature": 0.0, "max_tokens": 50, **params}),
        seed=seed,
        samples=samples,
        token_ids=known,
        num_prompt_tokens=len(prompt),
    )


def logits_of(seed, rows=1, vocab=VOCAB):
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def draw(rows, logits):
    """The sampling of an executor without a native decoder, a row of logits for each row; a GPU's gives the same."""
    asking = {index: index for index, it in enumerate(rows) if needs_logits(it)}
    result = sampler.sample_tokens(
        rows, greedy(logits), sampler.RowLogits(logits.clone(), asking), TorchSampling(), EOS
    )
    assert draw_on_device(rows, logits) == result
    return result


def draw_on_device(rows, logits):
    """Return the tokens that an executor on a GPU samples."""
    return DeviceSampling(rows, chosen_of(logits), logits, EOS, fetch).result()


def fetch(values):
    return lambda: values


def test_what_a_draw_fetches_has_its_most():
    """The most likely tokens of one row, and named tokens of another, are columns of all rows that are scored."""
    vocab, fetched = 2 * MAX_LOGPROBS, []
    named = {"logprobs": 0, "logprob_token_ids": tuple(range(MAX_LOGPROBS))}
    rows = [row("a", [3], logprobs=MAX_LOGPROBS), row("b", [3], **named)]
    logits = logits_of(0, len(rows), vocab)
    DeviceSampling(rows, chosen_of(logits), logits, EOS, lambda values: fetched.append(values) or fetch(values))
    assert fetched[0].dtype is torch.float64
    assert fetched[0].numel() == max_fetched_values(len(rows))


def chosen_of(logits):
    """Return the argmax that a step on a GPU leaves next to its logits, and whether it is well defined."""
    best, tokens = logits.max(-1)
    return torch.stack((tokens, best.isfinite().long()))


def tokens_of(rows, logits):
    result = draw(rows, logits)
    assert not result.errors
    return [result.tokens[row.request_id] for row in rows]


prompts = st.lists(st.integers(2, VOCAB - 1), min_size=1, max_size=6)
outputs = st.lists(st.integers(2, VOCAB - 1), max_size=6)


@given(seed=st.integers(0, 10_000), prompt=prompts, output=outputs, penalty=st.floats(0.5, 3.0))
def test_repetition_penalty_counts_prompt_and_output(seed, prompt, output, penalty):
    logits = logits_of(seed)
    want = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([prompt + output]), logits.clone()).argmax(-1)
    assert tokens_of([row("a", prompt, output, repetition_penalty=penalty)], logits) == want.tolist()


@given(seed=st.integers(0, 10_000), prompt=prompts, output=outputs, minimum=st.integers(0, 8))
def test_min_tokens_is_that_of_transformers(seed, prompt, output, minimum):
    """Counted over new tokens; holds back the model's ends and the request's stop tokens."""
    logits = logits_of(seed)
    logits[0, [*EOS, 5]] += 4
    processor = MinNewTokensLengthLogitsProcessor(len(prompt), minimum, [*EOS, 5], device="cpu")
    want = processor(torch.tensor([prompt + output]), logits.clone()).argmax(-1)
    got = tokens_of([row("a", prompt, output, min_tokens=minimum, stop_token_ids=(5,))], logits)
    assert got == want.tolist()


@given(
    seed=st.integers(0, 10_000),
    prompt=prompts,
    output=st.lists(st.integers(2, 4), max_size=6),
    words=st.lists(st.lists(st.integers(2, 5), min_size=1, max_size=3), min_size=1, max_size=6),
)
def test_bad_words_are_those_of_transformers(seed, prompt, output, words):
    """Only over generated tokens: a word that begins in the prompt does not count as generated."""
    logits = logits_of(seed)
    logits[0, 2:6] += 6
    generated = torch.tensor([[99, *output]])  # transformers needs a token to look at
    want = NoBadWordsLogitsProcessor(words, eos_token_id=list(EOS))(generated, logits.clone()).argmax(-1)
    got = tokens_of([row("a", prompt, output, bad_words=tuple(map(tuple, words)))], logits)
    assert got == want.tolist()


@given(seed=st.integers(0, 10_000), bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100), max_size=5))
def test_logit_bias_is_that_of_transformers(seed, bias):
    logits = logits_of(seed)
    want = logits.argmax(-1)
    if bias:
        processor = SequenceBiasLogitsProcessor([[[token], value] for token, value in bias.items()])
        want = processor(torch.tensor([[3]]), logits.clone()).argmax(-1)
    assert tokens_of([row("a", [3], logit_bias=bias)], logits) == want.tolist()


@given(
    seed=st.integers(0, 10_000), prompt=prompts, output=outputs, presence=st.floats(-2, 2), frequency=st.floats(-2, 2)
)
def test_presence_and_frequency_count_generated_tokens_only(seed, prompt, output, presence, frequency):
    logits = logits_of(seed)
    counts = torch.tensor([output.count(token) for token in range(VOCAB)])
    want = (logits[0] - counts * frequency - (counts > 0) * presence).argmax(-1)
    got = tokens_of([row("a", prompt, output, presence_penalty=presence, frequency_penalty=frequency)], logits)
    assert got == [int(want)]


@given(seed=st.integers(0, 10_000), prompt=prompts, output=outputs)
def test_everything_at_once_is_applied_in_the_documented_order(seed, prompt, output):
    logits = logits_of(seed)
    params = {
        "min_tokens": 3,
        "bad_words": ((4,), (3, 6)),
        "logit_bias": {2: 2.5, 7: -3.0, 0: 9.0},
        "repetition_penalty": 1.7,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
    }
    ids, scores = torch.tensor([prompt + output]), logits.clone()
    scores = MinNewTokensLengthLogitsProcessor(len(prompt), 3, list(EOS), device="cpu")(ids, scores)
    scores = NoBadWordsLogitsProcessor([[4], [3, 6]])(torch.tensor([[99, *output]]), scores)
    scores = SequenceBiasLogitsProcessor([[[2], 2.5], [[7], -3.0], [[0], 9.0]])(ids, scores)
    scores = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.7)])(ids, scores)
    counts = torch.tensor([output.count(token) for token in range(VOCAB)])
    want = (scores[0] - counts * 0.25 - (counts > 0) * 0.5).argmax(-1)
    assert tokens_of([row("a", prompt, output, **params)], logits) == [int(want)]


WAYS = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 3, "top_p": 0.9, "min_p": 0.05},
    {"temperature": 1.0, "repetition_penalty": 1.5, "presence_penalty": 1.0},
    {"min_tokens": 9, "logit_bias": {0: 50.0, 3: 4.0}},
    {"bad_words": ((3,), (4, 5))},
]


def test_rows_do_not_touch_each_other():
    """A row samples the same token alone and with rows of other parameters, and the logits stay as they are."""
    rows = [row(str(i), [2, 3], [4, 4], seed=i, **params) for i, params in enumerate(WAYS * 3)]
    logits = logits_of(5, len(rows))
    before = logits.clone()
    together = tokens_of(rows, logits)
    assert torch.equal(logits, before), "static buffers were changed"
    assert together == [tokens_of([one], logits[i : i + 1])[0] for i, one in enumerate(rows)]


def test_chosen_tokens_are_not_drawn_again_but_scored():
    """A row of which the model's own kernels drew the token may still ask for log-probabilities."""
    logits = logits_of(5, rows=3)
    tokens = [7, 8, 9]
    rows = [row(name, [2, 3], temperature=1.0, top_p=0.5, logprobs=2) for name in "abc"]
    result = sampler.sample_tokens(
        rows, tokens, sampler.RowLogits(logits, {0: 0, 1: 1, 2: 2}), TorchSampling(), EOS, chosen={0, 2}
    )
    alone = tokens_of([rows[1]], logits[1:2])
    assert list(result.tokens.values()) == [7, *alone, 9]
    want = logits.log_softmax(-1)
    for index, name in enumerate("abc"):
        found = result.logprobs[name]
        assert found.token_id == result.tokens[name]
        assert found.logprob == pytest.approx(float(want[index, found.token_id]), abs=1e-5)


def test_a_gpu_is_waited_for_once_whatever_rows_ask_for(monkeypatch):
    """Draws, edits, log-probabilities and the tokens of the others come back together."""
    rows = [row(str(i), [2, 3], [4, 4], seed=i, logprobs=i % 3 or None, **params) for i, params in enumerate(WAYS)]
    logits, fetched = logits_of(5, len(rows)), []
    want = draw_on_device(rows, logits)

    def sample_into(tokens, logits, rows, row_params):
        tokens[:, torch.tensor(rows)] = sample(pick(logits, rows), row_params, VOCAB)

    monkeypatch.setattr(sampler, "sample_into", sample_into)
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: fetched.append(self) or tolist(self))
    result = draw_on_device(rows, logits)
    assert result == want
    assert len(result.tokens) == len(rows)
    assert len(result.logprobs) == 4
    assert len(fetched) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_of_16_bits_are_drawn_from_as_their_float32_copy_is(dtype, monkeypatch):
    """Edits are of a copy in float32: a bias of 0.01 would be lost in bfloat16. Steps without edits make no copy."""
    ways = [{}, {"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.8, "logprobs": 3}, {"logprobs": 2}]
    edits = [
        {"logit_bias": {5: 0.01}, "temperature": 1.0},
        {"repetition_penalty": 1.3, "logprobs": 1},
        {"min_tokens": 3, "presence_penalty": 0.3},
        {"allowed_token_ids": (3, 4), "temperature": 1.0, "logprobs": 2},
    ]
    copied, plain = [], torch.Tensor.float
    monkeypatch.setattr(torch.Tensor, "float", lambda self: copied.append(self.shape) or plain(self))
    for more in ([], edits):
        rows = [row(str(at), [2, 3], [4], seed=at, **way) for at, way in enumerate([*ways, *more])]
        logits = logits_of(9, len(rows)).to(dtype)
        before = logits.clone()
        want = draw_on_device(rows, plain(logits))
        copied.clear()
        assert draw_on_device(rows, logits) == want
        assert torch.equal(logits, before)
        assert copied == [logits.shape] * bool(more)


def test_only_rows_with_the_models_own_logits_are_left_to_its_kernels():
    assert plain_row_params(row("greedy", [2])) is None
    assert plain_row_params(row("chunk", [2, 3], temperature=1.0, samples=False)) is None
    assert plain_row_params(row("edited", [2], temperature=1.0, top_p=0.5, logit_bias={3: 1.0})) is None
    assert not plain_row_params(row("whole", [2], temperature=1.0)).cuts
    for cut in ({"top_p": 0.5}, {"min_p": 0.1}, {"top_k": 3}, {"top_k": 10**30}):
        assert plain_row_params(row("cut", [2], temperature=1.0, logprobs=1, **cut)).cuts


def test_only_rows_that_ask_draw_and_padding_is_ignored():
    rows = [row("a", [2, 3], [4]), row("chunk", [2, 3, 4], samples=False), row("b", [2, 3], [5])]
    logits = logits_of(1, 5)
    logits[3:] = torch.nan
    result = draw(rows, logits)
    assert result.tokens == {"a": int(logits[0].argmax()), "b": int(logits[2].argmax())}
    assert not result.errors


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf], ids=str)
@pytest.mark.parametrize("params", WAYS)
def test_logits_that_are_not_finite_fail_their_row_alone(bad, params):
    rows = [row("a", [2], **params), row("sick", [2], **params), row("b", [2], **params)]
    logits = logits_of(2, 3)
    healthy = tokens_of([rows[0], rows[2]], logits[[0, 2]])
    logits[1] = bad
    result = draw(rows, logits)
    assert result.errors == {"sick": "the model produced logits that are not finite"}
    assert [result.tokens["a"], result.tokens["b"]] == healthy


@given(seed=st.integers(0, 1000), count=st.sampled_from([0, 1, 3, VOCAB, 100]))
def test_logprobs_are_of_the_raw_distribution(seed, count):
    """Temperature, penalties and bias, which bend the choice, are not in it."""
    logits = logits_of(seed)
    asking = row("a", [2], [3], logprobs=count, temperature=2.0, seed=seed, logit_bias={3: 5.0}, presence_penalty=1.0)
    result = draw([asking, row("quiet", [2])], logits.repeat(2, 1))
    assert set(result.logprobs) == {"a"}
    found, want = result.logprobs["a"], logits[0].log_softmax(-1)
    assert found.token_id == result.tokens["a"]
    assert found.logprob == pytest.approx(float(want[found.token_id]), abs=1e-5)
    order = want.argsort(descending=True)[:count].tolist()
    assert [token for token, _ in found.top] == order
    assert [value for _, value in found.top] == pytest.approx(want[order].tolist(), abs=1e-5)


@given(seed=st.integers(0, 1000), ids=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=2 * VOCAB))
def test_named_tokens_are_scored_instead_of_the_likeliest(seed, ids):
    logits = logits_of(seed, 3)
    asking = row("a", [2], [3], logprobs=4, temperature=2.0, seed=seed, logprob_token_ids=tuple(ids), bad_words=((5,),))
    result = draw([row("most", [2], logprobs=2), asking, row("one", [2], logprobs=0, logprob_token_ids=(7,))], logits)
    assert len(result.logprobs["most"].top) == 2
    for index, name, named in ((1, "a", ids), (2, "one", [7])):
        found, want = result.logprobs[name], logits[index].log_softmax(-1)
        assert {token for token, _ in found.top} == {*named, result.tokens[name]}
        assert list(found.top) == sorted(found.top, key=lambda pair: -pair[1])
        assert dict(found.top) == pytest.approx({token: float(want[token]) for token, _ in found.top}, abs=1e-5)


def test_prompt_tokens_are_scored_by_the_logits_before_them(monkeypatch):
    """In slices, whatever the rows that they belong to; a row that asks for none has none."""
    monkeypatch.setattr(sampler, "logprob_rows", lambda vocab: 3)
    prompt = [2, 7, 3, 9, 4]
    logits = logits_of(3, 7)  # of four tokens of the first row, then of three of the last
    rows = [
        row("a", prompt, tokens=5, prompt_logprobs=2),
        row("b", prompt),
        row("c", [*prompt, 8, 8], tokens=3, prompt_logprobs=0),
    ]
    rows[2].start, rows[2].tokens = 2, prompt[2:5]
    result, asked = StepResult(), []

    def slice_of(begin, end):
        asked.append((begin, end))
        return logits[begin:end]

    add_prompt_logprobs(rows, slice_of, TorchSampling(), VOCAB, result)
    assert asked == [(0, 3), (3, 6), (6, 7)]
    want = logits.log_softmax(-1)
    assert set(result.prompt_logprobs) == {"a", "c"}
    for name, first, following, count in (("a", 0, prompt[1:], 2), ("c", 4, [9, 4, 8], 0)):
        scored = result.prompt_logprobs[name]
        assert [it.token_id for it in scored] == following
        own = [float(want[first + i, token]) for i, token in enumerate(following)]
        assert [it.logprob for it in scored] == pytest.approx(own, abs=1e-5)
        assert [it.rank for it in scored] == [
            1 + int((want[first + i] > want[first + i, token]).sum()) for i, token in enumerate(following)
        ]
        tops = [[t for t, _ in it.top] for it in scored]
        assert tops == [want[first + i].topk(count).indices.tolist() for i in range(len(scored))]


def test_prompt_scores_that_are_not_finite_fail_their_row_alone():
    logits = logits_of(4, 4)
    logits[1, 3] = torch.nan
    rows = [row(name, [2, 3, 4], tokens=3, prompt_logprobs=2) for name in ("sick", "well")]
    result = StepResult(tokens={"sick": 3, "well": 4})
    add_prompt_logprobs(rows, lambda begin, end: logits[begin:end], TorchSampling(), VOCAB, result)
    assert result.errors == {"sick": sampler.NOT_FINITE}
    assert result.tokens == {"well": 4}
    assert set(result.prompt_logprobs) == {"well"}


BANS = [
    {"allowed_token_ids": (3, 4), "bad_words": ((3,), (4,))},
    {"allowed_token_ids": EOS, "min_tokens": 5},
    {"bad_words": tuple((token,) for token in range(VOCAB))},
    {"bad_words": (*((token,) for token in range(VOCAB - 1)), (4, VOCAB - 1))},  # the last after a 4 only
]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("params", BANS)
def test_when_every_token_is_banned_the_row_fails_alone(params, temperature):
    rows = [row("a", [2]), row("none", [2], [4], temperature=temperature, **params), row("b", [2], temperature=1.0)]
    logits = logits_of(6, 3)
    result = draw(rows, logits)
    assert result.errors == {"none": ALL_BANNED}
    assert set(result.tokens) == {"a", "b"}


@given(
    seed=st.integers(0, 1000),
    allowed=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=5),
    prompt=prompts,
    output=outputs,
    temperature=st.sampled_from([0.0, 1.0]),
)
def test_only_allowed_tokens_are_drawn(seed, allowed, prompt, output, temperature):
    """As if the model knew no others: all other parameters apply to the remaining tokens."""
    logits = logits_of(seed)
    params = {"temperature": temperature, "seed": seed, "logit_bias": {3: 2.0}, "presence_penalty": 1.0, "top_p": 0.9}
    found = tokens_of([row("a", prompt, output, allowed_token_ids=tuple(allowed), **params)], logits.clone())
    assert found[0] in allowed
    masked = torch.full_like(logits, -torch.inf)
    masked[0, allowed] = logits[0, allowed]
    assert found == tokens_of([row("a", prompt, output, **params)], masked)


@pytest.mark.wide
@given(
    steps=st.lists(st.integers(2, VOCAB - 1), min_size=1, max_size=40),
    prompt=prompts,
    seed=st.integers(0, 99),
    repetition=st.sampled_from([1.0, 1.4]),
    presence=st.sampled_from([0.0, 0.8]),
    frequency=st.sampled_from([0.0, 0.3]),
    bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-9, 9), max_size=4),
)
def test_counts_that_are_kept_are_those_of_all_tokens(steps, prompt, seed, repetition, presence, frequency, bias):
    """A row that continues from step to step samples as a new one with the same tokens does."""
    params = {
        "repetition_penalty": repetition,
        "presence_penalty": presence,
        "frequency_penalty": frequency,
        "logit_bias": bias,
        "bad_words": ((2, 3), (5, 6, 7), (5, 6, 8), (9,)),
        "temperature": 1.0,
    }
    going = row("a", prompt, **params)
    going.token_ids = list(prompt)
    for index, token in enumerate(steps):
        logits = logits_of(seed + index)
        going.start, going.tokens = len(going.token_ids) - 1, going.token_ids[-1:]
        fresh = row("b", prompt, going.token_ids[len(prompt) :], **params)
        assert tokens_of([going], logits) == tokens_of([fresh], logits)
        going.token_ids.append(token)


def test_a_row_of_another_request_has_counts_of_its_own():
    """Engines use the objects of rows anew."""
    params = {"frequency_penalty": 2.0, "temperature": 0.0}
    one = row("a", [2], [3] * 5, **params)
    logits = torch.zeros(1, VOCAB)
    logits[0, 3] = 1.0
    assert tokens_of([one], logits) == [0]
    one.token_ids, one.start = [2, 4], 1
    assert tokens_of([one], logits) == [3]


def test_repetition_penalty_next_to_nothing_is_no_overflow():
    logits = torch.tensor([[1.0, 2.0, 3.0] + [0.0] * (VOCAB - 3)])
    for temperature in (0.0, 1.0):
        assert tokens_of([row("a", [1], repetition_penalty=1e-44, temperature=temperature)], logits) == [1]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("logit_bias", dict.fromkeys(range(1025), 1.0), "has 1025 entries; at most 1024"),
        ("bad_words", ((1,) * 16000, (2,) * 1000), "has 17000 tokens in all; at most 16384"),
        ("allowed_token_ids", tuple(range(16385)), "has 16385 entries; at most 16384"),
        ("allowed_token_ids", (), "one token id at least"),
        ("allowed_token_ids", (4, -1), "-1 among others"),
    ],
)
def test_what_changes_logits_is_bounded(field, value, message):
    with pytest.raises(InvalidRequest, match=message) as refused:
        RequestParams(**{field: value})
    assert refused.value.field == field


class TestEngine:
    """Through a whole engine, against transformers and peft."""

    @pytest.fixture
    def gqa(self, subject):
        return subject("gqa")

    @pytest.fixture(scope="class")
    def logits(self, subject):
        """What the reference computes for an adapter and tokens, once."""
        return cache(lambda adapter, tokens: subject("gqa").logits(adapter, list(tokens)))

    #: Ways in which a prompt may be computed.
    CONFIGS = [
        {},
        {"max_num_batched_tokens": 33, "max_num_seqs": 8},
        {"block_tokens": 4, "num_pages": 80, "max_num_batched_tokens": 40},
        {"prefix_cache": False},
        {"max_num_batched_tokens": 1, "max_num_seqs": 1},
    ]

    @pytest.mark.parametrize("config", CONFIGS, ids=["whole", "chunked", "small arena", "no cache", "one by one"])
    def test_logprobs_and_prompt_logprobs_are_those_of_a_full_forward(self, gqa, drive, logits, config, monkeypatch):
        """Prompts share beginnings, which the cache knows: scores must come all the same, in slices of few rows."""
        monkeypatch.setattr(sampler, "logprob_rows", lambda vocab: 7)
        driver = drive(gqa, adapters={name: gqa.adapters[name] for name in ("r1-all", "r8-attention")}, **config)
        length = 20 if config.get("max_num_batched_tokens") == 1 else 40  # a step for each token
        stem = torch.randint(3, 160, (length,), generator=torch.Generator().manual_seed(1)).tolist()
        asked = {}
        for round_ in range(2):
            for adapter in (None, "r1-all", "r8-attention"):
                for scored in (5, 0, None):
                    name = f"{round_} {adapter} {scored}"
                    asked[name] = (adapter, [*stem, 9 + round_], scored)
                    driver.add(name, *asked[name][:2], max_tokens=6, logprobs=3, prompt_logprobs=scored)
            driver.drain()
        for name, (adapter, prompt, scored) in asked.items():
            answer = driver.answers[name]
            want = logits(adapter, (*prompt, *answer.tokens[:-1])).log_softmax(-1)
            self.check(answer.logprobs, answer.tokens, want[len(prompt) - 1 :], 3)
            if scored is None:
                assert answer.prompt_logprobs is None
                hit = answer.num_cached_tokens > 0
                assert hit == config.get("prefix_cache", True) or name.startswith("0"), "the cache was not in play"
            else:
                assert answer.num_cached_tokens == 0
                self.check(answer.prompt_logprobs, prompt[1:], want[: len(prompt) - 1], scored)

    def check(self, found, tokens, want, count):
        assert [it.token_id for it in found] == list(tokens)
        assert all(len(it.top) == count for it in found)
        own = want[range(len(tokens)), tokens]
        torch.testing.assert_close(torch.tensor([it.logprob for it in found]), own, rtol=0, atol=2e-4)
        if count:
            named, values = torch.tensor([it.top for it in found], dtype=torch.float64).unbind(-1)
            best, scores = want.topk(count).values, want.gather(1, named.long())
            torch.testing.assert_close(values.float(), best, rtol=0, atol=2e-4)
            torch.testing.assert_close(values.float(), scores, rtol=0, atol=2e-4)

    def test_prompt_of_one_token_has_nothing_to_score(self, gqa, drive):
        answer = drive(gqa).run("a", None, [5], max_tokens=2, prompt_logprobs=3)
        assert answer.prompt_logprobs == ()

    @pytest.mark.parametrize("after", [1, 3])
    def test_preemption_scores_the_prompt_once(self, gqa, drive, after):
        driver = drive(gqa, max_num_batched_tokens=16, max_num_seqs=4)
        prompt = gqa.prompt("r1-all", 40, 6, seed=3)
        request = driver.add("a", "r1-all", prompt, max_tokens=6, prompt_logprobs=1, logprobs=0)
        for _ in range(after):
            driver.step()
        driver.engine.scheduler.lifecycle.preempt(request)
        answer = driver.drain()["a"]
        assert answer.tokens == gqa.greedy("r1-all", prompt, 6)
        want = gqa.logits("r1-all", prompt + answer.tokens[:-1]).log_softmax(-1)
        self.check(answer.prompt_logprobs, prompt[1:], want[: len(prompt) - 1], 1)
        self.check(answer.logprobs, answer.tokens, want[len(prompt) - 1 :], 0)

    def test_rows_that_run_alone_score_their_prompt(self, gqa, drive):
        """Each step fails as a whole, so that its rows are run again one by one."""

        def fail(plan):
            if len(plan.sequences) > 1:
                raise RuntimeError("two rows are too many")

        prompt = gqa.prompt("r1-all", 18, 4, seed=3)
        driver = drive(gqa, before=fail, max_num_seqs=2, max_num_batched_tokens=2)
        driver.add("b", None, [5], max_tokens=30)
        driver.step()
        driver.add("a", "r1-all", prompt, max_tokens=4, prompt_logprobs=1)
        answer = driver.drain()["a"]
        assert driver.answers["b"].error is None
        want = gqa.logits("r1-all", prompt + answer.tokens[:-1]).log_softmax(-1)
        self.check(answer.prompt_logprobs, prompt[1:], want[: len(prompt) - 1], 1)

    def test_penalised_greedy_tokens_are_those_of_generate(self, gqa, drive):
        """transformers' own generation loop with its processors, over adapters and the base."""
        driver = drive(gqa, max_num_batched_tokens=33)
        want = {}
        for adapter in (None, "r1-all", "r33-all"):
            prompt = gqa.prompt(adapter, 12, 12, seed=21)
            plain = gqa.greedy(adapter, prompt, 12)
            words = [[plain[2]], [plain[4], plain[5]]]
            model = gqa.use(adapter)
            with torch.inference_mode():
                output = model.generate(
                    input_ids=torch.tensor([prompt]),
                    max_new_tokens=12,
                    do_sample=False,
                    repetition_penalty=1.3,
                    bad_words_ids=words,
                    eos_token_id=2,
                    min_new_tokens=12,
                    pad_token_id=0,
                    attention_mask=torch.ones(1, 12, dtype=torch.long),
                )
            want[str(adapter)] = output[0, 12:].tolist()
            assert want[str(adapter)] != plain
            driver.add(
                str(adapter),
                adapter,
                prompt,
                max_tokens=12,
                repetition_penalty=1.3,
                min_tokens=12,
                ignore_eos=False,
                bad_words=tuple(map(tuple, words)),
            )
        answers = driver.drain()
        assert {name: answer.tokens for name, answer in answers.items()} == want

    def test_a_request_that_bans_every_token_ends_with_an_error_and_no_other_does(self, gqa, drive):
        prompt = gqa.prompt(None, 10, 12, seed=2)
        driver = drive(gqa)
        pairs = ((5, 5), (5, 6), (6, 5), (6, 6))  # so nothing may follow the first token
        driver.add("none", None, prompt, max_tokens=12, allowed_token_ids=(5, 6), bad_words=pairs)
        driver.add("some", None, prompt, max_tokens=12, allowed_token_ids=(5, 6), temperature=1.0, seed=3)
        driver.add("all", None, prompt, max_tokens=12)
        answers = driver.drain()
        assert answers["none"].finish_reason is FinishReason.ERROR
        assert answers["none"].error == ALL_BANNED
        assert set(answers["some"].tokens) <= {5, 6}
        assert answers["all"].tokens == gqa.greedy(None, prompt, 12)

    def test_allowed_tokens_must_be_in_the_vocabulary(self, gqa, drive):
        with pytest.raises(InvalidRequest, match="token id 999999 is outside the vocabulary") as refused:
            drive(gqa).add("a", None, [5], max_tokens=2, allowed_token_ids=(5, 999999))
        assert refused.value.field == "allowed_token_ids"

    @pytest.mark.parametrize("more", [{"bad_words": ((5,), (6,))}, {"min_tokens": 1, "stop_token_ids": (5, 6)}])
    def test_a_request_that_leaves_no_first_token_is_refused(self, gqa, drive, more):
        with pytest.raises(InvalidRequest, match="ban all of them") as refused:
            drive(gqa).add("a", None, [5], max_tokens=2, allowed_token_ids=(5, 6), **more)
        assert refused.value.field == "allowed_token_ids"

    def test_min_tokens_holds_back_every_end(self, gqa, drive):
        prompt = gqa.prompt(None, 10, 12, seed=2)
        plain = gqa.greedy(None, prompt, 12)
        driver = drive(gqa)
        driver.add("free", None, prompt, max_tokens=12, stop_token_ids=(plain[1],))
        driver.add("held", None, prompt, max_tokens=12, stop_token_ids=(plain[1],), min_tokens=5)
        answers = driver.drain()
        assert answers["free"].finish_reason is FinishReason.STOP
        assert len(answers["free"].tokens) <= 2
        assert plain[1] not in answers["held"].tokens[:5]
        assert len(answers["held"].tokens) >= 5
