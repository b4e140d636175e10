"""Answers with grammars are those without speculation; forced text is proposed, and no draft violates its grammar."""

from __future__ import annotations

import json
import random
import shutil

import pytest
from tokenizers import Tokenizer

from chorus.core.policies import Policies
from chorus.core.requests.grammar import Grammar
from chorus.core.requests.grammar_work import GrammarState
from chorus.core.requests.grammars import Grammars
from chorus.core.requests.request import Request
from chorus.core.requests.request_params import RequestParams
from chorus.core.speculation.grammar_drafts import GrammarDrafts
from chorus.core.speculation.ngrams import NgramProposer

from ...conftest import Subject
from ...tiny_tokenizer import save_tokenizer
from ..tiny_families import make_tiny
from .stand_ins import Drawn, Free, Wrong
from .test_speculation import drafted, same

pytestmark = [pytest.mark.native(needed=False), pytest.mark.wide]

EOS = 2
SCHEMA = {
    "type": "object",
    "properties": {"name_of_the_city": {"enum": ["Rome", "Paris"]}, "number_of_people": {"type": "integer"}},
    "required": ["name_of_the_city", "number_of_people"],
    "additionalProperties": False,
}
GRAMMARS = [
    Grammar("json_schema", json.dumps(SCHEMA)),
    Grammar("regex", r"[a-f]{2,9}-(\d{3}|é+)x"),
    Grammar("choice", json.dumps(["yes", "yes, sir", 'n"o\n', "né"])),
    Grammar("grammar", 'start: "a" start "b" | "c"'),
]
WAYS = [
    {},
    {"temperature": 1.0, "top_p": 0.9, "logprobs": 2},
    {"temperature": 1.0, "repetition_penalty": 1.3},
    {"temperature": 1.0, "logit_bias": {80: 5.0}, "min_tokens": 4},
    {"temperature": 1.3, "ignore_eos": False},
    {"allowed_token_ids": tuple(range(3, 300))},
]


@pytest.fixture(autouse=True)
def no_heavy_grammars(monkeypatch):
    """On a slow or busy machine a mask may take as long as a heavy grammar's, which gets no proposals."""
    monkeypatch.setattr("chorus.core.requests.grammar_work.HEAVY_SECONDS", 60.0)


@pytest.fixture(scope="module")
def wide(subject, tmp_path_factory) -> Subject:
    found, model = subject("wide_heads"), tmp_path_factory.mktemp("grammars") / "model"
    shutil.copytree(found.model, model)
    save_tokenizer(model)
    return Subject(model, found.adapters)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory) -> Subject:
    """Shaped like Qwen3.5: three of four layers have states, of heads 128 wide, two of values for one of keys."""
    shape = {
        "vocab_size": 300,
        "num_hidden_layers": 4,
        "full_attention_interval": 4,
        "head_dim": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    }
    it, model = make_tiny("qwen3.5", shape), tmp_path_factory.mktemp("hybrid") / "model"
    shutil.copytree(it.model, model)
    save_tokenizer(model)
    return Subject(model, it.adapters)


@pytest.fixture(scope="module")
def grammars(wide) -> Grammars:
    return Grammars(wide.model, 300, (EOS,))


def ask(driver, wide, count=24):
    adapters = [None, *list(wide.adapters)[:3]]
    for index in range(count):
        grammar = GRAMMARS[index % len(GRAMMARS)] if index % 6 else None
        params = {"max_tokens": 60, "ignore_eos": False, "seed": index, "grammar": grammar, **WAYS[index % len(WAYS)]}
        driver.add(f"r{index}", adapters[index % 4], [5, 6, 7, 8, 5, 6], **params)


@pytest.mark.parametrize("kind", ["ngram", "drawn", "wrong"])
def test_the_answers_are_those_without_speculation(wide, drive, kernels, kind):
    driver = drive(wide)
    ask(driver, wide)
    wanted = driver.drain()

    def answer(request):
        return wanted[request.id].tokens

    rng = random.Random(1)
    proposer = {"ngram": NgramProposer(), "drawn": Drawn(answer, rng), "wrong": Wrong(answer)}[kind]
    driver = drive(wide, speculation="ngram", policies=Policies(proposer=proposer))
    driver.engine.speculation.cost = Free()
    ask(driver, wide)
    same(driver.drain(), wanted, kernels)
    with_grammars = [row for row in drafted(driver) if row.params.grammar is not None]
    assert with_grammars and all(row.params.repetition_penalty == 1.0 for row in with_grammars)
    assert driver.engine.stats().num_accepted_tokens > 20


@pytest.mark.parametrize("kind", ["ngram", "drawn"])
def test_recurrent_states_take_in_the_drafts_that_a_grammar_allows(hybrid, drive, kernels, kind):
    """Forced text, and other proposals that are pruned; some are rejected, as the sampler chose another spelling."""
    limits = {"block_tokens": 64, "memory_bytes": 64 << 20, "max_num_seqs": 4}
    driver = drive(hybrid, **limits)
    assert driver.engine.executor.layout.states is not None
    ask(driver, hybrid, 12)
    wanted = driver.drain()
    proposer = NgramProposer() if kind == "ngram" else Drawn(lambda each: wanted[each.id].tokens, random.Random(3))
    driver = drive(hybrid, speculation="ngram", policies=Policies(proposer=proposer), **limits)
    driver.engine.speculation.cost = Free()
    ask(driver, hybrid, 12)
    same(driver.drain(), wanted, kernels)
    forced = [row for row in drafted(driver) if row.params.grammar is not None]
    assert len(forced) > 5
    stats = driver.engine.stats()
    assert 20 < stats.num_accepted_tokens < stats.num_proposed_tokens


def test_a_token_of_an_adapter_s_own_ends_a_proposal(wide, grammars):
    """Grammars know the model's tokens only; asked about another one, a matcher would be in an error from then on."""
    a = Tokenizer.from_file(str(wide.model / "tokenizer.json")).token_to_id("a")
    request = Request("r", [5, 6, 300], RequestParams(grammar=GRAMMARS[1]))
    request.sampler.grammar = GrammarState(grammars.compile(GRAMMARS[1]), 3)
    drafts = GrammarDrafts(grammars)
    assert drafts.allowed(request, [a, a, 300, a]) == [a, a]
    assert drafts.allowed(request, [300]) == [] and drafts.allowed(request, [a, EOS]) == [a]


def test_text_that_a_grammar_forces_takes_few_steps(wide, drive, kernels):
    """Of an answer with the keys of a schema, most tokens are forced: they need neither a match nor a trial."""
    text = Tokenizer.from_file(str(wide.model / "tokenizer.json"))
    params = {"max_tokens": 80, "ignore_eos": False, "grammar": GRAMMARS[0], "bad_words": ((text.token_to_id("0"),),)}
    plain = drive(wide)
    wanted = plain.run("a", None, [5, 6], **params)
    driver = drive(wide, speculation="ngram")
    driver.engine.speculation.cost = Free()
    found = driver.run("a", None, [5, 6], **params)
    assert found.tokens == wanted.tokens
    assert text.decode(found.tokens).startswith("{")
    assert driver.engine.stats().num_accepted_tokens > 20
    assert len(driver.plans) < len(plain.plans) - 15


def test_no_proposal_violates_the_grammar(wide, drive):
    """Each draft of a request is allowed after the known tokens and the drafts before it."""
    compiled = Grammars(wide.model, 300, (EOS,))
    driver = drive(wide, speculation="ngram", policies=Policies(proposer=Drawn(lambda each: [5, 6], random.Random(2))))
    driver.engine.speculation.cost = Free()
    ask(driver, wide)
    seen = 0
    while driver.engine.has_work():
        before = {each.id: list(each.token_ids) for each in driver.engine.scheduler.running}
        count = len(driver.plans)
        driver.step()
        for plan in driver.plans[count:]:
            for row in plan.sequences:
                if not row.drafts or row.params.grammar is None:
                    continue
                known = before[row.request_id]
                matcher = compiled.compile(row.params.grammar)
                assert not known[row.num_prompt_tokens :] or matcher.consume_tokens(known[row.num_prompt_tokens :])
                drafts = row.tokens[-row.drafts :]
                assert matcher.validate_tokens(drafts) == len(drafts)
                seen += 1
    assert seen > 10


def test_a_heavy_grammar_is_not_speculated_with(wide, drive):
    driver = drive(wide, speculation="ngram")
    request = driver.add("a", None, [5, 6], max_tokens=60, grammar=GRAMMARS[0], ignore_eos=False)
    driver.engine.speculation.cost = Free()
    driver.step()
    drafts = driver.engine.speculation
    request.sampler.grammar.seconds = 0.0
    assert drafts.drafts([request], 100, lambda *_: True)
    request.sampler.grammar.seconds = 1.0
    assert not drafts.drafts([request], 100, lambda *_: True)


@pytest.mark.parametrize("kernels", ["torch"])
def test_a_matcher_in_an_error_has_no_proposals(wide, drive):
    driver = drive(wide, speculation="ngram")
    request = driver.add("a", None, [5, 6], max_tokens=60, grammar=GRAMMARS[0], ignore_eos=False)
    driver.step()
    driver.step()
    assert not request.sampler.grammar.matcher.consume_tokens([EOS])
    assert driver.drain()["a"].error


def test_a_state_after_drafts_leaves_the_request_where_it_is(grammars):
    state = GrammarState(grammars.compile(GRAMMARS[0]), 2)
    opening = grammars.forced(state.matcher)
    assert opening
    state.see([5, 6, *opening])
    assert (state.pending, state.num_seen) == (opening, 2 + len(opening))
    later = state.after(grammars.forced(state.after(()).consume()))
    assert later.consume() is not None and not later.pending
    assert state.pending == opening
    masks = grammars.advance([state])
    fresh = grammars.compile(GRAMMARS[0])
    fresh.consume_tokens(opening)
    assert (masks == grammars.masks([fresh])).all()
