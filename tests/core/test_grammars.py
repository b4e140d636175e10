"""Answers that match a grammar: on every backend, batch-invariant, and wherever a request continues."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, pre_tokenizers

from chorus.core.requests.grammar import Grammar
from chorus.core.requests.grammars import MAX_COMPILED, MAX_COMPILED_BYTES, Grammars, InvalidGrammar
from chorus.core.requests.request_params import InvalidRequest
from chorus.core.requests.types import ALL_BANNED, FinishReason

from ..conftest import Subject
from ..tiny_tokenizer import save_tokenizer
from .conftest import Answer, exported

pytestmark = pytest.mark.wide

EOS = 2
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "tags": {"type": "array", "items": {"enum": ["a", "b", 3, None]}, "maxItems": 3},
        "size": {"type": "integer", "minimum": -5, "maximum": 40},
        "inner": {
            "type": "object",
            "properties": {"on": {"type": "boolean"}},
            "required": ["on"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "tags", "size", "inner"],
    "additionalProperties": False,
}
TAG = {
    "triggers": ["<f"],
    "structures": [{"begin": "<f=1>", "schema": {"type": "integer", "minimum": 0, "maximum": 99}, "end": "</f>"}],
}


def is_of_schema(text: str) -> bool:
    value = json.loads(text)
    return (
        list(value) == list(SCHEMA["properties"])
        and len(value["name"]) <= 6
        and len(value["tags"]) <= 3
        and all(tag in ("a", "b", 3, None) for tag in value["tags"])
        and -5 <= value["size"] <= 40
        and isinstance(value["inner"]["on"], bool)
        and not re.search(r"\s\s", text.replace(value["name"], ""))
    )


def matches(pattern: str) -> Callable[[str], bool]:
    return lambda text: re.fullmatch(pattern, text) is not None


#: For each kind a grammar, and a check whether a text matches.
GRAMMARS: dict[str, tuple[Grammar, Callable[[str], bool]]] = {
    "schema": (Grammar("json_schema", json.dumps(SCHEMA)), is_of_schema),
    "regex": (Grammar("regex", r"[a-f]{2,9}-(\d{3}|é+)x"), matches(r"[a-f]{2,9}-(\d{3}|é+)x")),
    "choice": (
        Grammar("choice", json.dumps(["yes", "yes, sir", 'n"o\n', "né"])),
        lambda text: text in ("yes", "yes, sir", 'n"o\n', "né"),
    ),
    "lark": (
        Grammar("grammar", 'start: "a" start "b" | "c"'),
        lambda text: text == "a" * (len(text) // 2) + "c" + "b" * (len(text) // 2),
    ),
    "gbnf": (Grammar("grammar", 'root ::= ("x" | "yz")+ "."'), matches(r"(x|yz)+\.")),
}


@pytest.fixture(scope="module")
def wide(subject, tmp_path_factory) -> Subject:
    found, model = subject("wide_heads"), tmp_path_factory.mktemp("grammars") / "model"
    shutil.copytree(found.model, model)
    save_tokenizer(model)
    return Subject(model, found.adapters)


@pytest.fixture(scope="module")
def tokenizer(wide):
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(wide.model / "tokenizer.json"))


@pytest.fixture(scope="module")
def grammars(wide) -> Grammars:
    return Grammars(wide.model, 300, (EOS,))


def asked(index: int) -> dict[str, Any]:
    """Ways to sample that a grammar goes together with."""
    ways = [
        {},
        {"top_p": 0.9, "logprobs": 2},
        {"repetition_penalty": 1.3, "presence_penalty": 0.5},
        {"logit_bias": {80: 5.0}, "top_k": 40},
        {"temperature": 0.0, "ignore_eos": False},
        {"bad_words": ((70, 71),)},
    ]
    return {"temperature": 1.0, "seed": index, "max_tokens": 120, "grammar": None, **ways[index % len(ways)]}


def test_answers_of_mixed_batches_match_and_are_those_that_requests_have_alone(wide, tokenizer, drive):
    adapters = [None, *list(wide.adapters)[:3]]
    wanted = {}
    for index, (name, (grammar, _)) in enumerate([*GRAMMARS.items(), *GRAMMARS.items(), ("none", (None, None))]):
        params = asked(index) | {"grammar": grammar} | ({} if grammar else {"max_tokens": 8})
        wanted[f"{name}{index}"] = (adapters[index % len(adapters)], [5 + index, 70, 80], params)
    driver = drive(wide, max_num_seqs=16)
    for name, (adapter, prompt, params) in wanted.items():
        driver.add(name, adapter, prompt, **params)
    for seed in range(2):  # several answers of a call
        driver.add(
            f"schema{seed}of",
            adapters[1],
            [9, 9],
            "call",
            **asked(0) | {"seed": seed, "grammar": GRAMMARS["schema"][0]},
        )
    answers = dict(driver.drain())
    for name, answer in answers.items():
        assert answer.error is None
        kind = re.sub(r"\d.*", "", name)
        if kind == "none":
            continue
        *rest, last = answer.tokens
        assert (answer.finish_reason is FinishReason.STOP) == (last == EOS)
        if last == EOS:
            assert GRAMMARS[kind][1](tokenizer.decode(rest)), (name, tokenizer.decode(rest))
    ended = {re.sub(r"\d.*", "", name) for name, answer in answers.items() if answer.finish_reason is FinishReason.STOP}
    assert ended >= GRAMMARS.keys(), "answers were cut before they matched"
    for name in ("schema0", "regex6", "none10"):
        adapter, prompt, params = wanted[name]
        assert driver.run("alone", adapter, prompt, **params) == answers[name]


def test_greedy_tokens_are_the_likeliest_that_the_grammar_allows(wide, tokenizer, grammars, drive):
    adapter, prompt = "r8-attention", [40, 41, 42]
    matcher = grammars.compile(GRAMMARS["schema"][0])
    tokens: list[int] = []
    while EOS not in tokens and len(tokens) < 60:
        allowed = np.unpackbits(grammars.masks([matcher])[0].view(np.uint8), bitorder="little")[:300].astype(bool)
        logits = wide.logits(adapter, prompt + tokens)[-1].masked_fill(~torch.from_numpy(allowed), -torch.inf)
        tokens.append(int(logits.argmax()))
        matcher.consume_tokens(tokens[-1:])
    params = {"max_tokens": 60, "ignore_eos": False, "grammar": GRAMMARS["schema"][0]}
    assert drive(wide).run("a", adapter, prompt, **params).tokens == tokens


def test_log_probabilities_are_those_without_the_grammar(wide, drive):
    params = {"grammar": GRAMMARS["schema"][0], "logprobs": 3, "temperature": 1.0, "max_tokens": 12}
    answer = drive(wide).run("a", None, [5, 6], **params)
    want = wide.logits(None, [5, 6, *answer.tokens[:-1]])[1:].log_softmax(-1)
    for scores, found, token in zip(want, answer.logprobs, answer.tokens, strict=True):
        assert found.logprob == pytest.approx(float(scores[token]), abs=2e-4)
        assert [value for _, value in found.top] == pytest.approx(scores.topk(3).values.tolist(), abs=2e-4)


@pytest.mark.parametrize("kernels", ["torch"])
@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_the_place_in_the_grammar_is_found_again(wide, drive, preemption):
    """After preemption between chunks and tokens."""
    prompt = [3 + index % 200 for index in range(40)]
    params = asked(1) | {"grammar": GRAMMARS["schema"][0], "max_tokens": 50}
    want = drive(wide).run("a", "r2-qv", prompt, **params).tokens
    driver = drive(wide, preemption=preemption, max_num_batched_tokens=16, max_num_seqs=4)
    request = driver.add("a", "r2-qv", prompt, **params)
    for step in range(16):
        driver.step()
        if step % 3 == 2 and request.is_running:
            driver.engine.scheduler.lifecycle.preempt(request)
    assert request.num_output_tokens > 2 and driver.engine.stats().num_preemptions > 2
    assert driver.drain()["a"].tokens == want


@pytest.mark.parametrize(("kernels", "ahead"), [("torch", True)])
def test_a_record_goes_on_elsewhere(wide, drive):
    """Also where steps are launched ahead, whose masks are computed once the token before is known."""
    params = asked(0) | {"grammar": GRAMMARS["schema"][0]}
    driver = drive(wide)
    driver.add("a", None, [8, 9], **params)
    for _ in range(9):
        driver.step()
    record = json.loads(json.dumps(exported(driver.engine, "a")))
    want = driver.drain()["a"].tokens
    assert driver.engine.stats().num_async_steps > 8
    other = drive(wide)
    other.answers["a"] = Answer()
    other.engine.resume(record)
    assert record["tokens"][2:] + other.drain()["a"].tokens == want


@pytest.mark.parametrize("kernels", ["torch"])
class TestEnds:
    """An end of sequence comes only where the grammar may end; where nothing else can, the answer ends."""

    def test_an_answer_that_is_complete_ends(self, wide, tokenizer, drive):
        for ignore_eos in (False, True):
            params = {"grammar": Grammar("choice", '["yes"]'), "max_tokens": 20, "ignore_eos": ignore_eos}
            answer = drive(wide).run("a", None, [5], **params)
            assert tokenizer.decode(answer.tokens) == "yes" and answer.finish_reason is FinishReason.STOP

    def test_ignoring_ends_goes_on_as_long_as_it_can(self, wide, tokenizer, drive):
        params = {"grammar": Grammar("regex", "a{1,9}"), "max_tokens": 20, "logit_bias": {EOS: 100.0}}
        driver = drive(wide)
        assert tokenizer.decode(driver.run("a", None, [5], ignore_eos=False, **params).tokens) == "a"
        assert tokenizer.decode(driver.run("b", None, [5], ignore_eos=True, **params).tokens) == "a" * 9

    def test_min_tokens_and_bans_hold_beside_a_grammar(self, wide, tokenizer, drive):
        driver, grammar = drive(wide), Grammar("regex", "a+|b+")
        (a,) = tokenizer.encode("a").ids
        params = {"grammar": grammar, "ignore_eos": False, "logit_bias": {EOS: 100.0}}
        answer = driver.run("a", None, [5], min_tokens=6, max_tokens=20, bad_words=((a,),), **params)
        assert tokenizer.decode(answer.tokens) == "b" * 6
        assert driver.run("b", None, [5], allowed_token_ids=(a, EOS), **params).tokens == [a, EOS]
        answer = driver.run("c", None, [5], grammar=Grammar("regex", "a"), min_tokens=4)
        assert answer.error == ALL_BANNED

    def test_a_grammar_that_gives_up_ends_its_own_request_with_an_error(self, wide, drive):
        driver = drive(wide)
        driver.add(
            "bad", None, [5], temperature=1.0, grammar=Grammar("regex", "(.*a.{900}b.*c.{900}d)"), max_tokens=240
        )
        driver.add("good", None, [5], grammar=GRAMMARS["regex"][0], ignore_eos=False, max_tokens=30)
        driver.step()
        edits = driver.engine.scheduler.get("bad").sampler.edits
        assert not edits.grammar_state.matcher.consume_tokens(
            [EOS]
        )  # as after too much work: it is in an error from here on
        answers = driver.drain()
        assert answers["bad"].error == ALL_BANNED and answers["good"].finish_reason is FinishReason.STOP


@pytest.mark.parametrize("kernels", ["torch"])
def test_a_grammar_that_cannot_be_served_is_refused_before_it_is_queued(wide, subject, drive):
    driver = drive(wide)
    with pytest.raises(InvalidRequest, match=r"minimum .5. is greater than maximum") as refused:
        driver.add("a", None, [5], grammar=Grammar("json_schema", '{"type":"integer","minimum":5,"maximum":3}'))
    assert refused.value.field == "grammar" and not driver.engine.has_work()
    with pytest.raises(InvalidRequest, match=r"tokenizer.json can't be used"):
        drive(subject("mha")).add("a", None, [5], grammar=GRAMMARS["regex"][0])
    with pytest.raises(ValueError, match="is not a valid GrammarKind"):
        Grammar("ebnf", "")


BAD = {
    "json_schema": [
        "{",
        "[]",
        "true",
        '{"type": "foo"}',
        '{"enum": []}',
        '{"not": {}}',
        '{"$ref": "#"}',
        '{"const": "\\ud800"}',
        '{"$ref": "http://127.0.0.1:9/a.json"}',
        '{"$ref": "file:///etc/passwd"}',
        '{"type": "string", "format": "x"}',
        '{"type":"array","items":' * 5000 + "{}" + "}" * 5000,
    ],
    "regex": ["((", "(?=a)b", "[^\\s\\S]", "(" * 5000 + "a" + ")" * 5000],
    "grammar": ["start: foo", "foo: 'a'", "start: a\na: a", "", "start: " + "(" * 5000 + '"a"' + ")" * 5000],
    "choice": ["[]", '"a"', "[1]", "{"],
    "structural_tag": [
        "{}",
        '{"structures": [], "triggers": []}',
        '{"structures": [{}], "triggers": ["<"]}',
        '{"structures": [{"begin": "a", "schema": {}, "end": ""}], "triggers": ["<"]}',
        "[]",
        '{"structures": [{"begin": null, "schema": {}, "end": ""}], "triggers": ["<"]}',
        '{"structures": [{"begin": "<", "schema": {}, "end": 5}], "triggers": ["<"]}',
        '{"structures": [{"begin": "<\\ud800", "schema": {}, "end": ""}], "triggers": ["<"]}',
        '{"structures": [{"begin": "<", "schema": {"$ref": "http://127.0.0.1:9/"}, "end": ""}],"triggers": ["<"]}',
    ],
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_grammars_are_told_by_what_is_wrong(grammars, kind):
    for text in BAD[kind]:
        with pytest.raises(InvalidGrammar) as refused:
            grammars.compile(Grammar(kind, text))
        assert str(refused.value).strip(), text


def test_a_structural_tag_leaves_all_else_free(grammars, tokenizer):
    def fits(text: str) -> bool:
        matcher = grammars.compile(Grammar("structural_tag", json.dumps(TAG)))
        tokens = tokenizer.encode(text).ids
        return matcher.validate_tokens([*tokens, EOS]) == len(tokens) + 1

    assert fits("hello") and fits("so <f=1>12</f> and <f=1>3</f>.") and fits("")
    assert not fits("<f=1>abc</f>") and not fits("<f=2>1</f>") and not fits("<f=1>1")


CALLS = {
    "triggers": ["<tool_call>", "<f", "<g"],
    "structures": [
        {"begin": '<tool_call>\n{"name": "f", "arguments": ', "schema": {"type": "integer"}, "end": "}\n</tool_call>"},
        {"begin": "<f><tool_call>", "schema": {"type": "boolean"}, "end": "</f>"},
        {"begin": "<g>", "schema": {"type": "null"}, "end": "</g>"},
    ],
}


@pytest.mark.parametrize("special", [False, True], ids=["plain", "special"])
def test_tokens_in_structural_tags_are_taken_as_tokens(tmp_path, special):
    """Of structures whose trigger is a token (Qwen's), is a part of one, and is followed by one."""
    backend = save_tokenizer(tmp_path)
    marks = ["<tool_call>", "</tool_call>", "<g>"]
    backend.add_tokens([AddedToken(mark, special=special, normalized=False) for mark in marks])
    backend.save(str(tmp_path / "tokenizer.json"))
    grammars = Grammars(tmp_path, backend.get_vocab_size(), (EOS,))
    plain = Tokenizer.from_str(backend.to_str())
    plain.encode_special_tokens = special

    def fits(text: str, encoded_by: Tokenizer = backend) -> bool:
        matcher = grammars.compile(Grammar("structural_tag", json.dumps(CALLS)))
        tokens = encoded_by.encode(text, add_special_tokens=False).ids
        return matcher.validate_tokens([*tokens, EOS]) == len(tokens) + 1

    call = '<tool_call>\n{"name": "f", "arguments": %s}\n</tool_call>'
    assert len({backend.token_to_id(mark) for mark in marks} & set(backend.encode(call % 1 + "<g>").ids)) == 3
    assert fits("") and fits("so") and fits(f"so {call % 12} and {call % -3}.") and fits(call % 1 + call % 2)
    assert fits("<g>null</g>") and fits("a <f><tool_call>true</f>" + call % 7)
    assert not fits(call % '"a"') and not fits("<tool_call>") and not fits("<g>") and not fits("<f><tool_call>1</f>")
    assert not fits("<f>true</f>") and not fits(call.replace("</", "<f") % 1)
    if special:  # a trigger that is spelt by other tokens is one, too
        assert not fits("<tool_call>", plain) and not fits("<g>", plain) and not fits("<f>", plain)


def test_compiled_grammars_are_kept_up_to_a_number_and_lent_as_copies(wide):
    grammars = Grammars(wide.model, 300, (EOS,))
    one, two = (grammars.compile(Grammar("regex", "[ab]c")) for _ in range(2))
    one.consume_tokens([3 + ord("a")])
    first, second = grammars.masks([one, two])
    assert not np.array_equal(first, second)
    for index in range(MAX_COMPILED + 5):
        grammars.compile(Grammar("regex", f"a{index}"))
    assert len(grammars.compiled) == MAX_COMPILED
    for index in range(12):
        grammars.compile(Grammar("regex", "ab" * 4000 + str(index)))
    assert sum(len(each.text) for each in grammars.compiled) <= MAX_COMPILED_BYTES and len(grammars.compiled) == 8


schemas = st.recursive(
    st.sampled_from(
        [
            {"type": "integer", "minimum": -9, "maximum": 99},
            {"type": "boolean"},
            {"type": "null"},
            {"type": "string", "maxLength": 4},
            {"enum": ["x", 1, None, "é"]},
            {"const": {"a": [1]}},
            {"type": "string", "pattern": "^[a-c]{1,3}$"},
        ]
    ),
    lambda inner: st.one_of(
        st.builds(lambda each: {"type": "array", "items": each, "maxItems": 2}, inner),
        st.builds(
            lambda each: {
                "type": "object",
                "properties": {f"p{i}": it for i, it in enumerate(each)},
                "required": ["p0"],
                "additionalProperties": False,
            },
            st.lists(inner, min_size=1, max_size=3),
        ),
        st.builds(lambda each: {"anyOf": each}, st.lists(inner, min_size=1, max_size=3)),
    ),
    max_leaves=5,
)


@settings(max_examples=25)
@given(schema=schemas, seed=st.integers(0, 1 << 30))
def test_random_texts_of_random_schemas_are_valid(grammars, tokenizer, schema, seed):
    jsonschema = pytest.importorskip("jsonschema")
    random = np.random.default_rng(seed)
    matcher, tokens = grammars.compile(Grammar("json_schema", json.dumps(schema))), []
    while not tokens or tokens[-1] != EOS:
        allowed = np.flatnonzero(np.unpackbits(grammars.masks([matcher])[0].view(np.uint8), bitorder="little"))
        tokens.append(int(random.choice(allowed)))
        assert tokens[-1] == EOS or matcher.consume_tokens(tokens[-1:])
        assert len(tokens) < 500
    text = tokenizer.decode(tokens[:-1])
    jsonschema.validate(json.loads(text), schema)
    assert "  " not in text.replace('"', "") or "  " in "".join(re.findall(r'"[^"]*"', text))


@pytest.mark.parametrize("place", ["alone", "in a sequence"])
def test_a_tokenizer_that_puts_a_space_before_texts_puts_none_into_answers(tmp_path, place):
    """What a grammar forces stands within an answer: "hello" was forced as " hello", or failed within llguidance."""
    backend = save_tokenizer(tmp_path)
    split = pre_tokenizers.ByteLevel(add_prefix_space=True)
    backend.pre_tokenizer = split if place == "alone" else pre_tokenizers.Sequence([pre_tokenizers.Digits(), split])
    backend.save(str(tmp_path / "tokenizer.json"))
    grammars = Grammars(tmp_path, backend.get_vocab_size(), [backend.token_to_id("</s>")])
    schema = {"type": "object", "properties": {"a": {"const": "alice"}}, "required": ["a"]}
    for grammar, wanted in (
        (Grammar("choice", '["hello", "world"]'), {"hello", "world"}),
        (Grammar("regex", "hello"), {"hello"}),
        (Grammar("json_schema", json.dumps({**schema, "additionalProperties": False})), {'{"a":"alice"}'}),
    ):
        matcher, told = grammars.compile(grammar), []
        while not matcher.is_stopped() and len(told) < 40:
            (allowed,) = np.unpackbits(grammars.masks([matcher]).view(np.uint8), axis=1, bitorder="little").nonzero()[
                1:
            ]
            forced = grammars.forced(matcher)
            assert matcher.validate_tokens(forced) == len(forced), (grammar, forced)
            token = forced[0] if forced else int(allowed[0])
            assert token in allowed and matcher.consume_token(token)
            told.append(token)
        text = backend.decode(told, skip_special_tokens=True)
        assert text.replace(" ", "") in wanted and not text.startswith(" "), text
