"""Grammars of tool calls allow exactly the format that a family of models writes and its reader parses."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial

import pytest
from llguidance import LLTokenizer
from tokenizers import AddedToken

from chorus.core.requests.grammar import Grammar
from chorus.core.requests.grammars import Grammars
from chorus.server.api.output_grammar import output_grammar
from chorus.server.text.call_styles import wide
from chorus.server.text.channel_formats import ATEM, HARMONY, INKLING
from chorus.server.text.channel_parser import ChannelParser
from chorus.server.text.output_parser import OutputParser
from chorus.server.text.output_parts import ParsedMessage
from chorus.server.text.output_syntax import OutputSyntax
from chorus.server.text.tokenizer import Tokenizer
from chorus.server.text.tool_call_formats import HERMES, REASONING_FORMATS, TOOL_CALL_FORMATS

from ...tiny_tokenizer import save_tokenizer
from ..written_calls import written_calls

FORMATS = {each.name: each for each in TOOL_CALL_FORMATS}
TOOLS = {
    "f": {
        "type": "object",
        "properties": {
            "a": {"type": "string"},
            "u": {"type": "string", "enum": ["C", "F"]},
            "n": {"$ref": "#/$defs/n"},
        },
        "required": ["a", "n"],
        "$defs": {"n": {"type": "integer"}},
        "additionalProperties": False,
    },
    "g": {"type": "object", "properties": {}, "additionalProperties": False},
}
SEED, BRACKETS, *_, THINK = REASONING_FORMATS

MARKS = (
    "[TOOL_CALLS]",
    "[ARGS]",
    "<|python_tag|>",
    "<seed:tool_call>",
    "</seed:tool_call>",
    "[THINK]",
    "[/THINK]",
    wide("<|tool_calls_begin|>"),
    wide("<|tool_sep|>"),
)
F, G = ("f", {"a": 'x"é', "u": "C", "n": -3}), ("g", {})


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """Special tokens of all families, and grammars over them."""
    return with_specials(tmp_path_factory.mktemp("model"), MARKS)


def with_specials(path, marks):
    """A tokenizer with these special tokens, and grammars over it."""
    backend = save_tokenizer(path)
    backend.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
    backend.save(str(path / "tokenizer.json"))
    return backend, Grammars(path, backend.get_vocab_size(), [backend.token_to_id("</s>")])


def accepts(tokenizer, syntax, text, tools=TOOLS, *, forced=True, parallel=True, reasons_already=False, budget=None):
    """Whether an answer may be the text. budget: of reasoning."""
    syntax = syntax.bounded(budget)
    backend, grammars = tokenizer
    added = {token.content: id for id, token in backend.get_added_tokens_decoder().items() if token.special}
    specials = {mark: id for mark, id in added.items() if mark in syntax.marks}
    syntax = replace(syntax, reasons_already=reasons_already)
    lark = output_grammar(syntax, tools, specials, forced=forced, parallel=parallel)
    matcher = grammars.compile(Grammar("grammar", lark))
    tokens = backend.encode(text, add_special_tokens=False).ids
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def written(form, *calls):
    return written_calls(form, TOOLS, calls)


def read(syntax, text):
    reader, said = OutputParser(syntax, TOOLS), ParsedMessage()
    said.add(reader.read(text, final=True))
    return [(call.name, json.loads(call.arguments)) for call in said.calls]


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_forced_is_what_is_read(tokenizer, name):
    form = FORMATS[name]
    syntax = OutputSyntax(form)
    ok = partial(accepts, tokenizer, syntax)
    one, two = written(form, F), written(form, F, G)
    for text, calls in ((one, [F]), (two, [F, G])):
        assert ok(text) and read(syntax, text) == calls
        assert ok(text, forced=False)
    assert ok(written(form, G)) and ok(one, parallel=False) and not ok(two, parallel=False)
    assert not ok("") and not ok("Well") and not ok(written(form, ("h", {})))
    for wrong in (("f", {"a": "x"}), ("f", {"a": "x", "n": "y"}), ("f", {"a": "x", "u": "K", "n": 1}), ("g", {"b": 1})):
        assert not ok(written(form, wrong)) and not ok(written(form, wrong), forced=False), wrong
    assert ok("", forced=False) and ok("Well, {} and <b>", forced=False)
    assert ok(f"Well. {one}", forced=False) or form.bare


@pytest.mark.parametrize(("name", "reasoning"), [("hermes", THINK), ("mistral", BRACKETS), ("seed_oss", SEED)])
def test_reasoning_comes_before_forced_calls(tokenizer, name, reasoning):
    marks = reasoning
    syntax = OutputSyntax(FORMATS[name], marks)
    one = written(FORMATS[name], F)
    ok = partial(accepts, tokenizer, syntax)
    assert ok(one) and ok(f"{marks.open}\nSo {{.\n{marks.close}\n\n{one}")
    assert ok(f"So.{marks.close}{one}", reasons_already=True) and not ok(one, reasons_already=True)
    assert not ok(f"{marks.open}So.{marks.close}No.") and not ok(f"So.{one}")
    assert ok(f"{marks.open}So.{marks.close}No.", forced=False)


QWEN3_MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")


@pytest.mark.parametrize("special", [False, True], ids=["plain", "special"])
@pytest.mark.parametrize("forced", [False, True], ids=["free", "forced"])
def test_marks_that_are_tokens_are_taken_as_these_tokens(tmp_path, special, forced):
    """Qwen3's are added tokens, but not special ones."""
    backend = save_tokenizer(tmp_path)
    backend.add_tokens([AddedToken(mark, special=special, normalized=False) for mark in QWEN3_MARKS])
    backend.save(str(tmp_path / "tokenizer.json"))
    grammars = Grammars(tmp_path, backend.get_vocab_size(), [backend.token_to_id("</s>")])
    syntax = OutputSyntax(HERMES, REASONING_FORMATS[-1])
    specials = Tokenizer.load(tmp_path).specials_in(syntax.marks)
    lark = output_grammar(syntax, TOOLS, specials, forced=forced, parallel=True)
    matcher = grammars.compile(Grammar("grammar", lark))
    tokens = backend.encode(f"<think>\nhm\n</think>\n\n{written(HERMES, F)}", add_special_tokens=False).ids
    assert {backend.token_to_id(mark) for mark in QWEN3_MARKS} <= set(tokens)
    assert matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def test_the_tokens_that_a_grammar_has_by_their_ids_are_llguidances(tmp_path):
    words = ["<a>", "[THINK]", "<seed:think>", wide("<|sep|>"), "<a", "a>", "<a b>", "```json", "f<x>"]
    backend = save_tokenizer(tmp_path)
    backend.add_tokens([AddedToken(word, special=False, normalized=False) for word in words])
    backend.add_special_tokens([AddedToken("[MASK]", special=True)])
    backend.save(str(tmp_path / "tokenizer.json"))
    theirs = LLTokenizer(backend.to_str(), eos_token=[backend.token_to_id("</s>")])
    added = {word: backend.token_to_id(word) for word in [*words, "[MASK]"]}
    found = Tokenizer.load(tmp_path).specials_in(" ".join(added))
    assert found == {word: token for word, token in added.items() if theirs.is_special_token(token)}


CONTENTS = [
    (Grammar("json_schema", '{"type": "integer"}'), "7"),
    (Grammar("json_object"), '{"a": 1}'),
    (Grammar("regex", "[xy]+"), "xyx"),
    (Grammar("choice", '["one", "two"]'), "two"),
    (Grammar("grammar", 'start: "a" B\nB: /[0-9]/'), "a7"),
    (Grammar("grammar", 'root ::= "a" [0-9]'), "a7"),
    (
        Grammar(
            "structural_tag",
            json.dumps(
                {"triggers": ["<f"], "structures": [{"begin": "<f>", "schema": {"type": "integer"}, "end": "</f>"}]}
            ),
        ),
        "hm <f>5</f>",
    ),
]


@pytest.mark.parametrize(("content", "text"), CONTENTS)
def test_content_that_matches_has_reasoning_or_calls_beside_it(tokenizer, content, text):
    backend, grammars = tokenizer

    def ok(answer, syntax, tools, reasons_already=False):
        syntax = replace(syntax, reasons_already=reasons_already)
        lark = output_grammar(syntax, tools, {}, forced=False, parallel=True, content=True)
        matcher = grammars.compile(replace(content, around=lark))
        tokens = backend.encode(answer, add_special_tokens=False).ids
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()

    thinks = REASONING_FORMATS[-1]
    hermes = TOOL_CALL_FORMATS[-1]
    both = OutputSyntax(hermes, thinks)
    call = written(hermes, G)
    for syntax, tools in ((OutputSyntax(None, thinks), {}), (both, TOOLS)):
        assert ok(text, syntax, tools) and ok(f"<think>\nhm</think>\n\n{text}", syntax, tools)
        assert ok(f"hm</think>\n\n{text}", syntax, tools, reasons_already=True)
        if content.kind != "structural_tag":
            assert not ok("hm" + text, syntax, tools) and not ok(text + call, syntax, tools)
    assert (
        ok(call, both, TOOLS) and ok(f"<think>hm</think>{call}", both, TOOLS) and ok(call, OutputSyntax(hermes), TOOLS)
    )


@pytest.mark.parametrize("reasons_already", [False, True])
def test_a_budget_bounds_reasoning_in_tokens(tokenizer, reasons_already):
    syntax = OutputSyntax(None, REASONING_FORMATS[1])
    backend, _ = tokenizer
    thought, begin = "a, b and c", "" if reasons_already else "[THINK]"
    used = len(backend.encode(thought, add_special_tokens=False).ids)
    ok = partial(accepts, tokenizer, syntax, tools={}, forced=False, reasons_already=reasons_already)
    answer = f"{begin}{thought}[/THINK]\n\nThe answer, which may be long"
    assert ok(answer, budget=used) and ok(answer, budget=used + 1) and not ok(answer, budget=used - 1)
    assert ok(f"{begin}[/THINK]x", budget=0) and not ok(f"{begin}a[/THINK]x", budget=0)
    assert not ok(f"{answer}[THINK]{thought}[/THINK]", budget=used), "reasoning is at the beginning"
    assert ok("No thought at all", budget=1) is not reasons_already
    calls = OutputSyntax(FORMATS["mistral"], REASONING_FORMATS[1])
    call = f"{begin}{thought}[/THINK]{written(FORMATS['mistral'], F)}"
    for forced in (True, False):
        call_ok = partial(accepts, tokenizer, calls, call, forced=forced, reasons_already=reasons_already)
        assert call_ok(budget=used) and not call_ok(budget=used - 1)


@pytest.mark.parametrize("form", [HARMONY, ATEM, INKLING], ids=["harmony", "muse_glimmer", "inkling"])
@pytest.mark.parametrize("special", [False, True], ids=["plain", "special"])
def test_messages_are_forced_as_they_are_read(tokenizer, tmp_path, form, special):
    """Thoughts, and then calls or an answer; the functions, and what they are called with, are the schema's."""
    if special:
        marks = (form.start, form.message, *form.ends, "<|channel|>", "<|constrain|>")
        tokenizer = with_specials(tmp_path, marks)
    ok = partial(accepts, tokenizer, OutputSyntax(form.calls, channels=form))
    thought = f"{form.thinks}So {{.{form.continues}"
    answer = f"{form.answers}It rains."
    name, _ = F
    call = written_calls(form.calls, TOOLS, [F])
    one = f" to={name}{form.message}{call}" if form is ATEM else call
    for text in (one, thought + one, thought * 2 + one):
        assert ok(text), text
        reader, said = ChannelParser(form, TOOLS), ParsedMessage()
        said.add(reader.read(text, final=True))
        assert [(each.name, json.loads(each.arguments)) for each in said.calls] == [F]
    assert not ok(answer) and not ok(thought) and not ok(thought + answer) and not ok("It rains.")
    assert ok(answer, forced=False) and ok(thought + answer, forced=False) and ok(thought + one, forced=False)
    assert not ok("It rains.", forced=False)
    if form.announces:
        announced = f"{form.announces}I look.{form.continues}{one}"
        assert ok(announced, forced=False) and ok(thought + announced, forced=False) and not ok(announced)
    for mark in ("to={}", "functions.{}", "<|message_model|>{}"):
        other = one.replace(mark.format(name), mark.format("h"))
        assert other == one or not ok(other), "this is a thought"
    assert not ok(one.replace(">C<", ">K<").replace('"u": "C"', '"u": "K"'))


@pytest.mark.parametrize("form", [HARMONY, ATEM, INKLING], ids=["harmony", "muse_glimmer", "inkling"])
def test_a_budget_bounds_the_thoughts_of_messages(tmp_path, form):
    """In one message, which then ends; calls or an answer follow."""
    backend, grammars = with_specials(tmp_path, (form.start, form.message, *form.ends, "<|channel|>", "<|constrain|>"))
    ok = partial(accepts, (backend, grammars), OutputSyntax(form.calls, channels=form), tools=TOOLS)
    words = "a, b and c"
    used = len(backend.encode(words, add_special_tokens=False).ids)
    thought, answer = f"{form.thinks}{words}{form.continues}", f"{form.answers}It rains."
    call = written_calls(form.calls, TOOLS, [F])
    call = f" to={F[0]}{form.message}{call}" if form is ATEM else call
    for forced, text in ((False, answer), (False, call), (True, call)):
        assert ok(thought + text, forced=forced, budget=used) and ok(text, forced=forced, budget=0)
        assert ok(thought + text, forced=forced, budget=used + 1)
        assert not ok(thought + text, forced=forced, budget=used - 1)
        assert not ok(thought * 2 + text, forced=forced, budget=2 * used), "a second one would have a bound of its own"
        assert ok(f"{form.thinks}{form.continues}{text}", forced=forced, budget=0)
    assert ok(thought + answer, tools={}, forced=False, budget=used)
    assert not ok(thought + answer, tools={}, forced=False, budget=used - 1)
