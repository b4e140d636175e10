"""With speculation an engine gives the tokens that it gives without, in fewer steps, and loses no page."""

from __future__ import annotations

import json
import random
from dataclasses import fields

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from chorus.core.config import EngineConfig
from chorus.core.executors.cuda import CudaShapes
from chorus.core.policies import Policies
from chorus.core.requests.draft_length import MOST_DRAFTS
from chorus.core.requests.plan_wire import plan_from_wire, plan_to_wire
from chorus.core.requests.record import from_record, to_record
from chorus.core.requests.request_params import InvalidRequest
from chorus.core.requests.types import FinishReason, positions_of
from chorus.graphs.runner import StepMode

from ...graphs.host_device import HostDevice
from ..merging.test_merged import merge
from .stand_ins import Drawn, Free, Right, Wrong

pytestmark = pytest.mark.native(needed=False)

ADAPTERS = [None, "r8-attention", "r33-all", "r1-all", None]
WAYS = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 5},
    {"temperature": 1.2, "top_p": 0.9, "min_p": 0.01},
    {"logprobs": 2},
    {"temperature": 1.0, "logprobs": 0},
    {"logprobs": 1, "logprob_token_ids": (5, 9)},
    {"prompt_logprobs": 1},
    {"temperature": 1.0, "logit_bias": {7: 4.0, 9: -100.0}},
    {"min_tokens": 6, "ignore_eos": False, "stop_token_ids": tuple(range(3, 40))},
    {"temperature": 1.0, "min_tokens": 3, "stop_token_ids": tuple(range(3, 20))},
    {"stop_token_ids": tuple(range(0, 160, 7))},
    {"repetition_penalty": 1.2},
    {"temperature": 1.0, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    {"bad_words": ((5,), (6, 7))},
    {"temperature": 1.0, "allowed_token_ids": tuple(range(3, 90))},
]
"""Sampling parameters, all that change what is sampled or reported."""

LOOKING_BACK = ({"repetition_penalty": 1.2}, {"presence_penalty": 0.5}, {"frequency_penalty": 0.5})


def prompts(it, count, seed, *, repeats=True):
    """Some repeat themselves, others are random."""
    rng = random.Random(seed)
    found = []
    for index in range(count):
        part = [rng.randrange(3, it.vocab_size) for _ in range(rng.randint(2, 9))]
        again = repeats and index % 2 == 0
        found.append(part * rng.randint(2, 5) if again else [rng.randrange(3, it.vocab_size) for _ in range(20)])
    return found


def ask(driver, it, asked):
    """Add requests; each is an adapter, a prompt, its choice group and parameters."""
    for index, (adapter, prompt, group, params) in enumerate(asked):
        driver.add(f"r{index}", adapter, prompt, choice_group=group, **{"max_tokens": 20, "seed": index, **params})


def edited(rng, tokens):
    """The tokens with a part of them replaced: a prediction that is nearly right."""
    begin, end = sorted(rng.randrange(len(tokens) + 1) for _ in range(2))
    return [*tokens[:begin], *(rng.choice(tokens) for _ in range(rng.randint(0, 3))), *tokens[end:]]


def one_of_each(it, max_tokens, seed):
    """A request of each of `ADAPTERS`."""
    found = zip(ADAPTERS, prompts(it, len(ADAPTERS), seed), strict=True)
    return [(adapter, prompt, "", {"max_tokens": max_tokens}) for adapter, prompt in found]


def same(found, wanted, kernels):
    """Compare answers: the native decoder's log-probabilities to the bit, others within rounding."""
    assert found.keys() == wanted.keys()
    for name, answer in found.items():
        want = wanted[name]
        for field in ("tokens", "finish_reason", "stop_token_id", "error"):
            assert getattr(answer, field) == getattr(want, field), (name, field)
        scores, expected = answer.logprobs, want.logprobs
        if kernels == "native":
            assert scores == expected, name
        else:
            assert [one.token_id for one in scores] == [one.token_id for one in expected]
            assert [one.logprob for one in scores] == pytest.approx([one.logprob for one in expected], abs=3e-4)
        assert (answer.prompt_logprobs is None) == (want.prompt_logprobs is None)


def drafted(driver):
    return [row for plan in driver.plans for row in plan.sequences if row.drafts]


@pytest.fixture
def known(subject, drive):
    """`known(asked, **config)`: the answers without speculation."""

    def answers(it, asked, **config):
        driver = drive(it, **config)
        ask(driver, it, asked)
        return driver.drain()

    return answers


# Engines are new in each example, so the fixtures may be used again; shrinking would take minutes.
@settings(
    max_examples=8,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    deadline=None,
)
@given(data=st.data())
def test_the_tokens_are_those_without_speculation(subject, drive, known, kernels, data):
    draw, it = data.draw, subject("gqa")
    slots = draw(st.integers(1, 6), label="slots")
    block = draw(st.sampled_from([4, 8, 16]), label="block")
    config = {
        "block_tokens": block,
        "max_num_seqs": slots,
        "max_num_batched_tokens": max(slots, draw(st.sampled_from([4, 8, 24, 256]))),
        "chunked_prefill": True,
        "prefix_cache": draw(st.booleans()),
        "preemption": draw(st.sampled_from(["swap", "recompute"])),
        "num_pages": draw(st.sampled_from([800, 1200, 6000])) // block,  # the largest adapter takes 480 tokens' room
        "max_adapters_per_step": draw(st.sampled_from([None, 1])),
    }
    seed = draw(st.integers(0, 10_000), label="seed")
    rng = random.Random(seed)
    asked = []
    for index, prompt in enumerate(prompts(it, draw(st.integers(1, 9)), seed)):
        group = "" if rng.random() < 0.7 else f"g{index}"
        adapter, params = rng.choice(ADAPTERS), rng.choice(WAYS)
        asked += [(adapter, prompt, group, params)] * (rng.randint(2, 3) if group else 1)
    wanted = known(it, asked, **config)
    kind = draw(st.sampled_from(["ngram", "right", "wrong", "drawn"]), label="proposer")

    def answer(request):
        return wanted[request.id].tokens

    proposer = {"ngram": None, "right": Right(answer), "wrong": Wrong(answer), "drawn": Drawn(answer, rng)}[kind]
    cached = draw(st.sampled_from([0, 100, 4096]), label="cached")
    config |= {"speculation": "ngram", "speculation_cache_tokens": cached}
    driver = drive(it, policies=Policies(proposer=proposer), **config)
    predicted = [
        (*each[:3], {**each[3], "prediction": edited(rng, wanted[f"r{index}"].tokens) if rng.random() < 0.5 else ()})
        for index, each in enumerate(asked)
    ]
    ask(driver, it, predicted)
    same(driver.drain(), wanted, kernels)
    assert all(plan.num_tokens <= config["max_num_batched_tokens"] for plan in driver.plans)
    stats = driver.engine.stats()
    assert stats.num_generated_tokens == sum(len(each.tokens) for each in wanted.values())
    assert stats.num_accepted_tokens <= stats.num_proposed_tokens
    assert kind != "wrong" or not stats.num_accepted_tokens


def test_right_proposals_are_accepted_and_save_steps(subject, drive, known, kernels):
    it = subject("gqa")
    asked = [
        (adapter, prompt, "", {"max_tokens": 64}) for adapter, prompt in zip(ADAPTERS, prompts(it, 5, 1), strict=True)
    ]
    wanted = known(it, asked)
    driver = drive(it, speculation="ngram", policies=Policies(proposer=Right(lambda each: wanted[each.id].tokens)))
    ask(driver, it, asked)
    same(driver.drain(), wanted, kernels)
    stats, steps = driver.engine.stats(), len(driver.plans)
    # a step for the prompts, then steps of 1 + 2, 1 + 4 and 1 + 8 tokens, and of one for the last tokens
    assert steps <= 3 + 64 // (1 + MOST_DRAFTS) + 2
    assert stats.num_proposed_tokens == stats.num_accepted_tokens == sum(row.drafts for row in drafted(driver))
    assert {row.lora_index for row in drafted(driver)} == {-1, 0, 1, 2}


@pytest.mark.parametrize("kernels", ["native"])
def test_bits_in_bfloat16_are_those_without_speculation(subject, drive, known, kernels):
    """The native decoder is batch-invariant, so tokens and log-probabilities are equal in any dtype."""
    it = subject("gqa")
    asked = [(*each[:3], {**each[3], **way}) for way in WAYS[:6] for each in one_of_each(it, 40, seed=11)]
    wanted = known(it, asked, dtype="bfloat16")
    for make in (Right, lambda answer: Drawn(answer, random.Random(3))):
        policies = Policies(proposer=make(lambda each: wanted[each.id].tokens))
        driver = drive(it, speculation="ngram", policies=policies, dtype="bfloat16")
        ask(driver, it, asked)
        same(driver.drain(), wanted, kernels)
        assert driver.engine.stats().num_accepted_tokens > 100


def test_steps_with_drafts_are_captured_as_other_decode_steps(subject, drive, known, kernels, monkeypatch):
    """Buckets count tokens: only steps with prompts are ragged, though sequences with and without drafts mix."""
    it = subject("gqa")
    asked = [(*each[:3], {**each[3], **way}) for way in WAYS[:3] for each in one_of_each(it, 40, seed=13)]
    wanted = known(it, asked, max_num_seqs=6)
    policies = Policies(proposer=Drawn(lambda each: wanted[each.id].tokens, random.Random(4)))
    driver = drive(it, speculation="ngram", max_num_seqs=6, policies=policies)
    steps, ragged = driver.executor.rank.steps, []
    run_ragged = steps._ragged  # noqa: SLF001
    monkeypatch.setattr(steps, "_ragged", lambda plan: (ragged.append(plan.step_id), run_ragged(plan))[1])
    ask(driver, it, asked)
    same(driver.drain(), wanted, kernels)
    with_prompts = [plan for plan in driver.plans if any(len(row.tokens) - row.drafts > 1 for row in plan.sequences)]
    assert ragged == [plan.step_id for plan in with_prompts]
    decoded = [plan for plan in driver.plans if plan.num_drafts and plan not in with_prompts]
    assert all(plan.bucket == plan.num_tokens for plan in decoded)
    assert any(len({row.drafts for row in plan.sequences}) > 2 and plan.sequences[-1].drafts == 0 for plan in decoded)
    assert {plan.bucket for plan in decoded} <= {bucket for bucket, _ in steps.graphs.keys}
    assert max(plan.bucket for plan in decoded) > 6


@pytest.mark.parametrize("kernels", ["native"])
def test_steps_with_drafts_use_merged_weights_as_other_decode_steps(subject, drive, kernels):
    """So bits in bfloat16 are the same, too, though most tokens of a step may be those of other adapters."""
    it, answers = subject("gqa"), {}
    asked = one_of_each(it, 40, seed=15)

    def answer(request):
        return answers["off"][request.id].tokens if request.id in answers["off"] else ()

    for speculation in ("off", "ngram"):
        policies = Policies(proposer=Right(answer))
        driver = drive(it, speculation=speculation, policies=policies, dtype="bfloat16")
        merge(driver, "r33-all")
        ask(driver, it, asked)
        answers[speculation] = {name: answer for name, answer in driver.drain().items() if name.startswith("r")}
    same(answers["ngram"], answers["off"], kernels)
    decoded = [plan for plan in driver.plans if plan.num_drafts and plan.bucket]
    assert decoded and {plan.mode for plan in decoded} == {StepMode.MERGED}


def test_drafts_stop_where_a_step_has_many_tokens(subject, drive, known, monkeypatch):
    """So that memory for logits and the number of captured sizes have a bound that many sequences don't raise."""
    monkeypatch.setattr("chorus.core.requests.draft_length.MOST_DRAFTED", 11)
    it = subject("gqa")
    asked = [(None, prompt, "", {"max_tokens": 40}) for prompt in prompts(it, 5, 14)]
    wanted = known(it, asked)
    policies = Policies(proposer=Right(lambda each: wanted[each.id].tokens))
    driver = drive(it, speculation="ngram", max_num_seqs=5, policies=policies)
    ask(driver, it, asked)
    assert {name: answer.tokens for name, answer in driver.drain().items()} == {
        name: answer.tokens for name, answer in wanted.items()
    }
    assert max(len(plan.sequences) + plan.num_drafts for plan in driver.plans) == 11


def test_wrong_proposals_cost_few_tokens(subject, drive, known, kernels):
    it = subject("gqa")
    asked = [
        (adapter, prompt, "", {"max_tokens": 64}) for adapter, prompt in zip(ADAPTERS, prompts(it, 5, 2), strict=True)
    ]
    wanted = known(it, asked)
    driver = drive(it, speculation="ngram", policies=Policies(proposer=Wrong(lambda each: wanted[each.id].tokens)))
    ask(driver, it, asked)
    same(driver.drain(), wanted, kernels)
    assert driver.engine.stats().num_accepted_tokens == 0
    assert 0 < driver.engine.stats().num_proposed_tokens <= 5 * 10
    assert all(plan.bucket is not None for plan in driver.plans if not plan.num_drafts and plan.step_id > 1)


def test_ngrams_of_a_prompt_that_repeats_itself(subject, drive, known, kernels):
    """A greedy answer that goes round is proposed from the answer itself."""
    it = subject("gqa")
    asked = [(None, [5, 6, 7, 8] * 8, "", {"max_tokens": 150}), ("r33-all", [9, 4, 5] * 8, "", {"max_tokens": 150})]
    wanted = known(it, asked)
    driver = drive(it, speculation="ngram")
    ask(driver, it, asked)
    same(driver.drain(), wanted, kernels)
    assert driver.engine.stats().num_proposed_tokens


def test_a_prediction_is_accepted_where_it_is_right(subject, drive, known, kernels):
    """Of an answer with one other token in it, nearly all tokens are accepted; a wrong prediction changes nothing."""
    it = subject("gqa")
    asked = [
        (adapter, prompt, "", {"max_tokens": 64})
        for adapter, prompt in zip(ADAPTERS, prompts(it, 5, 21, repeats=False), strict=True)
    ]
    wanted = known(it, asked)
    right = [wanted[f"r{index}"].tokens for index in range(len(asked))]
    near = [[*tokens[:30], tokens[30] ^ 1, *tokens[31:]] for tokens in right]
    accepted = []
    for predictions in ([()] * 5, near, right, [[3, 4] * 32] * 5):
        driver = drive(it, speculation="ngram")
        driver.engine.speculation.cost = Free()
        ask(driver, it, [(*each[:3], {**each[3], "prediction": p}) for each, p in zip(asked, predictions, strict=True)])
        same(driver.drain(), wanted, kernels)
        accepted.append(driver.engine.stats().num_accepted_tokens)
    none, nearly, all_of_it, _ = accepted
    assert all_of_it > 5 * 64 * 0.8 > none
    assert nearly > 5 * 64 * 0.7


def test_a_prediction_beyond_the_vocabulary_is_refused(subject, drive):
    it = subject("gqa")
    driver = drive(it, speculation="ngram")
    with pytest.raises(InvalidRequest, match=f"token id {it.vocab_size} is outside the vocabulary") as error:
        driver.add("a", None, [5, 6], prediction=[7, it.vocab_size])
    assert error.value.field == "prediction"


def test_a_prediction_moves_with_its_request(subject, drive):
    it = subject("gqa")
    driver = drive(it, speculation="ngram")
    driver.add("a", None, [5, 6], prediction=[7, 8], max_tokens=9)
    driver.step()
    record = json.loads(json.dumps(to_record(driver.engine.scheduler.get("a"), 0.0)))
    assert from_record(record, 0.0).prediction == [7, 8]


def test_outputs_have_one_token_each_and_tell_which_were_proposed(subject, drive, known):
    it = subject("gqa")
    asked = [(None, prompts(it, 1, 3)[0], "", {"max_tokens": 30, "logprobs": 1})]
    wanted = known(it, asked)["r0"].tokens
    right = wanted[:20] + [token - 1 for token in wanted[20:]]
    driver = drive(it, speculation="ngram", policies=Policies(proposer=Right(lambda each: right)))
    ask(driver, it, asked)
    outputs = []
    while driver.engine.has_work():
        outputs += driver.step()
    assert [output.token_ids for output in outputs] == [(token,) for token in wanted]
    assert [output.logprobs[0].token_id for output in outputs] == wanted
    assert [output.finish_reason for output in outputs] == [None] * 29 + [FinishReason.LENGTH]
    stats = driver.engine.stats()
    assert sum(output.was_draft for output in outputs) == stats.num_accepted_tokens > 10
    rejected = stats.num_proposed_tokens - stats.num_accepted_tokens
    assert sum(output.num_rejected_drafts for output in outputs) == rejected > 0
    assert not any(output.was_draft for output in outputs[20:])


@pytest.mark.parametrize("at", [2, 5, 9])
def test_a_stop_token_among_the_drafts_ends_the_request(subject, drive, known, at):
    """Drafts after it are dropped and count as rejected; the cache knows the tokens before it only."""
    it = subject("gqa")
    prompt = prompts(it, 1, 4)[0]
    plain = known(it, [(None, prompt, "", {"max_tokens": 30})])["r0"].tokens
    stop = next(token for token in plain[at:] if token not in plain[:at])
    asked = [(None, prompt, "", {"max_tokens": 30, "stop_token_ids": (stop,)})]
    driver = drive(it, speculation="ngram", block_tokens=4, policies=Policies(proposer=Right(lambda each: plain)))
    ask(driver, it, asked)
    answer = driver.drain()["r0"]
    assert (answer.finish_reason, answer.stop_token_id) == (FinishReason.STOP, stop)
    assert answer.tokens == plain[: plain.index(stop) + 1]
    again = driver.run("again", None, prompt + plain, max_tokens=1)
    # the stop token has no KV
    assert again.num_cached_tokens == (len(prompt) + plain.index(stop)) // 4 * 4


def test_accepted_tokens_are_cached_and_rejected_ones_are_not(subject, drive, known):
    """A second turn finds the first one's answer; what was rejected is in no block."""
    it = subject("gqa")
    prompt = prompts(it, 1, 5)[0]
    first = known(it, [("r33-all", prompt, "", {"max_tokens": 25})])["r0"].tokens
    turn = prompt + first + [4, 5, 6]
    second = known(it, [("r33-all", turn, "", {"max_tokens": 25})])["r0"].tokens
    for proposer in (Right(lambda each: first), Wrong(lambda each: first), Drawn(lambda each: first, random.Random(1))):
        driver = drive(it, speculation="ngram", block_tokens=4, policies=Policies(proposer=proposer))
        assert driver.run("a", "r33-all", prompt, max_tokens=25).tokens == first
        answer = driver.run("b", "r33-all", turn, max_tokens=25)
        assert answer.tokens == second
        assert answer.num_cached_tokens == (len(prompt) + len(first) - 1) // 4 * 4


@pytest.mark.usefixtures("crowded")
@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_preemption_with_drafts_loses_no_token_and_no_page(subject, drive, known, kernels, preemption):
    it = subject("gqa")
    asked = [(ADAPTERS[i % 2], prompt, "", {"max_tokens": 40}) for i, prompt in enumerate(prompts(it, 16, 6))]
    used = {name: it.adapters[name] for name in ADAPTERS[:2] if name}
    config = {"num_pages": 46, "max_num_batched_tokens": 64, "preemption": preemption, "adapters": used}
    wanted = known(it, asked, **config)
    for make in (Right, lambda answer: Drawn(answer, random.Random(2))):
        policies = Policies(proposer=make(lambda each: wanted[each.id].tokens))
        driver = drive(it, speculation="ngram", policies=policies, **config)
        ask(driver, it, asked)
        same(driver.drain(), wanted, kernels)
        assert driver.engine.stats().num_preemptions
        assert driver.engine.stats().num_accepted_tokens


def test_a_plan_for_another_process_has_its_drafts(subject, drive, known):
    it = subject("gqa")
    asked = one_of_each(it, 20, seed=12)
    wanted = known(it, asked)
    driver = drive(it, speculation="ngram", policies=Policies(proposer=Right(lambda each: wanted[each.id].tokens)))
    ask(driver, it, asked)
    driver.drain()
    plan = next(plan for plan in driver.plans if plan.num_drafts)
    adapters = {adapter.name: adapter for adapter in plan.adapters}
    sent = json.loads(json.dumps(plan_to_wire(plan)))
    received = plan_from_wire(sent, lambda entry: adapters[entry["name"]])
    assert received.num_drafts == plan.num_drafts
    assert [row.tokens for row in positions_of(received)] == [row.tokens for row in positions_of(plan)]


def test_an_abort_between_steps_with_drafts_frees_the_pages(subject, drive, known):
    it = subject("gqa")
    asked = [
        (adapter, prompt, "", {"max_tokens": 60}) for adapter, prompt in zip(ADAPTERS, prompts(it, 5, 7), strict=True)
    ]
    wanted = known(it, asked)
    driver = drive(it, speculation="ngram", policies=Policies(proposer=Right(lambda each: wanted[each.id].tokens)))
    ask(driver, it, asked)
    for _ in range(4):
        driver.step()
    assert drafted(driver)
    for index in range(5):
        assert driver.engine.abort(f"r{index}")
        driver.engine.check_integrity()
    assert driver.engine.stats().num_kv_pages == 0


def test_a_step_that_fails_is_repeated_row_by_row_with_its_drafts(subject, drive, known, kernels):
    it = subject("gqa")
    asked = [
        (adapter, prompt, "", {"max_tokens": 40}) for adapter, prompt in zip(ADAPTERS, prompts(it, 5, 8), strict=True)
    ]
    wanted = known(it, asked)
    failing = {4, 6}

    def fail(plan):
        if plan.step_id in failing and len(plan.sequences) > 1:
            raise RuntimeError("an injected fault")

    policies = Policies(proposer=Right(lambda each: wanted[each.id].tokens))
    driver = drive(it, speculation="ngram", before=fail, policies=policies)
    ask(driver, it, asked)
    same(driver.drain(), wanted, kernels)
    alone = [plan for plan in driver.plans if plan.num_drafts and len(plan.sequences) == 1]
    assert alone and all(plan.bucket == plan.num_tokens for plan in alone)


@pytest.mark.parametrize("params", [*LOOKING_BACK, {"bad_words": ((6, 7),)}], ids=str)
def test_requests_whose_tokens_change_the_next_ones_get_no_drafts(subject, drive, params):
    it = subject("gqa")
    driver = drive(it, speculation="ngram")
    driver.add("a", None, [5, 6, 7, 8] * 8, max_tokens=40, **params)
    driver.add("b", None, [5, 6, 7, 8] * 8, max_tokens=40)
    driver.drain()
    assert {row.request_id for row in drafted(driver)} == {"b"}


def test_drafts_take_what_the_step_has_left(subject, drive, known, kernels):
    """Prompts and other sequences come first: with as many sequences as tokens there is none for a draft."""
    it = subject("gqa")
    asked = [(None, prompt, "", {"max_tokens": 24}) for prompt in prompts(it, 6, 9)]
    wanted = known(it, asked)
    for most, limit in ((4, 4), (5, 4)):
        driver = drive(
            it,
            speculation="ngram",
            max_num_seqs=limit,
            max_num_batched_tokens=most,
            policies=Policies(proposer=Right(lambda each: wanted[each.id].tokens)),
        )
        ask(driver, it, asked)
        same(driver.drain(), wanted, kernels)
        full = [plan for plan in driver.plans if len(plan.sequences) == limit]
        assert full and all(plan.num_drafts <= most - limit for plan in full)


def test_nothing_is_proposed_beyond_the_last_token(subject, drive, known):
    it = subject("gqa")
    asked = [(None, prompts(it, 1, 10)[0], "", {"max_tokens": count}) for count in (1, 2, 3, 4, 9)]
    wanted = known(it, asked)
    longest = wanted["r4"].tokens
    driver = drive(it, speculation="ngram", policies=Policies(proposer=Right(lambda each: longest)))
    ask(driver, it, asked)
    answers = driver.drain()
    assert [len(answers[f"r{i}"].tokens) for i in range(5)] == [1, 2, 3, 4, 9]
    ends = {f"r{index}": len(asked[0][1]) + count for index, count in enumerate((1, 2, 3, 4, 9))}
    assert all(row.kv_len < ends[row.request_id] for row in drafted(driver))


@pytest.mark.parametrize("kernels", ["torch"])
@pytest.mark.parametrize(
    ("speculation", "is_ahead", "slots", "most"),
    [("off", True, 3, 0), ("off", False, 2, 0), ("ngram", True, 2, MOST_DRAFTS)],
)
def test_states_on_a_gpu_have_slots_for_steps_under_way(tiny, kernels, speculation, is_ahead, slots, most):
    """A step with drafts isn't launched ahead, and keeps their inputs."""
    model = tiny("qwen3.5").model
    config = EngineConfig(model=model, device="cuda", speculation=speculation, async_scheduling=is_ahead)
    layout = CudaShapes(config, device=HostDevice()).layout
    assert (layout.state_slots, layout.states.shape.most_drafts) == (slots, most)


def test_without_speculation_no_request_has_its_state(subject, drive):
    driver = drive(subject("gqa"))
    request = driver.add("a", None, [5, 6, 7, 8] * 8, max_tokens=20)
    driver.drain()
    assert request.draft_length is None and request.proposing is None
    assert not drafted(driver)
    names = {field.name for field in fields(driver.engine.stats())}
    assert {"num_proposed_tokens", "num_accepted_tokens"} <= names
