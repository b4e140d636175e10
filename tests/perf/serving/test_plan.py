"""The requests of a workload: served names for its adapters, prompts of its lengths, questions with known answers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chorus.perf import serving
from chorus.perf.serving.answers import Questions, has_skills, judge
from chorus.perf.serving.options import parse, workload
from chorus.perf.serving.plan import Names, with_prompts, with_questions
from chorus.perf.serving.prompts import TokenPrompts, find_prompts, shorten, word_prompts
from chorus.perf.workload.request import TraceRequest
from chorus.server.demo.builtin import BUILTIN_MODEL, BUILTIN_NAME
from chorus.server.demo.skills import BASE, SKILLS, held_out

CARD = {"id": "m", "root": str(BUILTIN_MODEL)}


def wanted(index: int = 0, adapter: str | None = None, prompt: int = 10, output: int = 5, **more) -> TraceRequest:
    return TraceRequest(index, index * 0.5, adapter, prompt, output, **more)


def test_served_names_stay_and_others_are_stood_for_in_turn():
    names = Names(["x", "y"])
    asked = ["p", "y", "q", "r", "p", None]
    assert [names.serve(wanted(adapter=name)).adapter for name in asked] == ["x", "y", "y", "x", "x", None]
    assert names.substituted == 3
    with pytest.raises(match="wants the adapter p and none is to be used"):
        Names([]).serve(wanted(adapter="p"))


def test_token_prompts_have_the_very_length_and_no_special_token():
    prompts = find_prompts(CARD, 1, as_text=False)
    made = [prompts.make(wanted(index, prompt=40)) for index in range(20)]
    assert prompts.exact
    assert {len(ids) for ids in made} == {40}
    assert made[0] == find_prompts(CARD, 1, as_text=False).make(wanted(0, prompt=40))
    assert made[0] != made[1]
    assert made[0] != find_prompts(CARD, 2, as_text=False).make(wanted(0, prompt=40))

    from tokenizers import Tokenizer

    added = Tokenizer.from_file(str(BUILTIN_MODEL / "tokenizer.json")).get_added_tokens_decoder()
    special = {index for index, token in added.items() if token.special}
    assert special
    assert not special & {token for ids in made for token in ids}


@pytest.mark.parametrize("tokens", [1, 7, 3000])
def test_words_are_as_many_as_tokens(tokens):
    made = word_prompts(0).make(wanted(3, prompt=tokens))
    assert isinstance(made, str) and len(made.split()) == tokens
    assert made == word_prompts(0).make(wanted(3, prompt=tokens))
    assert tokens < 7 or made != word_prompts(0).make(wanted(4, prompt=tokens))


@pytest.mark.wide
def test_questions_are_held_out_and_of_the_adapters_skill():
    ask = Questions(seed=2)
    for name in SKILLS:
        for adapter in (name, f"{name}-00017"):
            question = ask.of(wanted(9, adapter), "model")
            assert question.skill == name
            assert held_out(question.text)
    assert ask.of(wanted(9), "model").skill == BASE.name
    assert ask.of(wanted(1, "sort"), "m") != ask.of(wanted(2, "sort"), "m")
    assert ask.of(wanted(1, "sort"), "m") == Questions(seed=2).of(wanted(1, "sort"), "m")


def test_the_served_model_s_own_tokenizer_is_found():
    assert isinstance(find_prompts(CARD, 0, as_text=False), TokenPrompts)
    made = find_prompts({"id": "somebody/model"}, 0, as_text=False).make(wanted())
    assert made == word_prompts(0).make(wanted())
    assert isinstance(find_prompts(CARD, 0, as_text=True).make(wanted()), str)
    twelve = word_prompts(0).make(wanted(prompt=12))
    assert isinstance(twelve, str) and len(twelve.split()) == 12


@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(30, 4096), st.booleans())
def test_shortened_requests_fit(prompt, output, limit, exact):
    request = wanted(prompt=prompt, output=output)
    cut = shorten(request, limit, exact=exact)
    assert cut.prompt_tokens + cut.output_tokens <= max(limit, 2)
    assert 1 <= cut.prompt_tokens <= prompt
    assert 1 <= cut.output_tokens <= output
    if prompt + output <= limit - 24:
        assert cut is request
    assert shorten(request, None, exact=exact) is request


def test_a_plan_has_the_workload_s_times_models_and_lengths():
    requests = [wanted(0, "a", 8, 3), wanted(1, None, 90, 30)]
    first, second = with_prompts(requests, "base", TokenPrompts(range(50), 0), 64, chat=False, plain=False)
    sizes = [(one.at, one.model, len(one.body["prompt"]), one.body["max_tokens"]) for one in (first, second)]
    assert sizes == [(0.0, "a", 8, 3), (0.5, "base", 34, 30)]
    assert not first.shortened and second.shortened
    assert first.body["ignore_eos"]
    assert "ignore_eos" not in next(with_prompts(requests, "base", word_prompts(0), None, chat=True, plain=True)).body


def test_questions_are_judged_and_cross_talk_is_seen():
    assert has_skills(BUILTIN_NAME, ["upper", "rot13-00017"])
    assert not has_skills(BUILTIN_NAME, ["mine"])
    assert not has_skills("other", ["upper"])
    requests = [wanted(0, "upper"), wanted(1, "upper"), wanted(2, "rot13-00017"), wanted(3), wanted(4, "upper")]
    plan = list(with_questions(requests, BUILTIN_NAME, Questions(0), chat=False))
    assert [request.model for request in plan] == ["upper", "upper", "rot13-00017", BUILTIN_NAME, "upper"]
    texts = [request.question.text for request in plan if request.question is not None]
    assert all(request.body["prompt"] == text + "\n" for request, text in zip(plan, texts, strict=True))
    answers = [texts[0].upper(), SKILLS["double"].apply(texts[1]), SKILLS["rot13"].apply(texts[2]), texts[3], None]
    found = judge([request.question for request in plan], answers)
    assert (found["checked"], found["accuracy"], found["cross_talk"]) == (4, 3 / 4, 1)
    assert "gave double's answer" in found["crossed"][0]
    assert found["models"]["upper"] == 1 / 2, "what failed was not answered"
    assert next(with_questions(requests, "b", Questions(0), chat=True)).body["messages"][0]["content"] == texts[0]


def test_settings_describe_a_workload():
    flags = ["--set", "requests=5", "--set", "arrivals.process=constant", "--set", "arrivals.rate=2"]
    args = parse(["http://x", *flags], serving.__spec__, "a\n\nb")
    spec = workload(args, 3)
    assert spec.arrivals.model_dump() == {"process": "constant", "rate": 2.0}
    requests = list(spec)
    assert len(requests) == 5
    assert {request.adapter for request in requests} <= {f"adapter-{i:05d}" for i in range(3)}
    assert all((r.prompt_tokens, r.output_tokens) == (128, 64) for r in requests)
    assert {request.adapter for request in workload(args, 0)} == {None}
