"""Grammars over the tokens of one model: which of them may come next.

Tests: tests/core/test_grammars.py.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import takewhile
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

from ..cpus import available_cpus
from .grammar import Grammar, GrammarKind
from .grammar_work import GrammarState, GrammarWork
from .json_schemas import check_optional, located, subschemas
from .speller import ANY_TEXT, Speller

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions

#: Compiled grammars that are kept. One has kilobytes as a rule, and as many states as `_LIMITS` allow at most.
MAX_COMPILED = 64

#: Bytes of their texts: a regular expression of 8 KiB can take 35 MB once compiled, which is the most for its length.
MAX_COMPILED_BYTES = 64 << 10

#: Work and memory of a stranger's grammar, in llguidance's units: 50,000 units of its lexer's fuel, or 20,000 items of
#: its parser, take a few milliseconds, and a state one or two kilobytes.
_LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 200_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 20_000,
    "max_lexer_states": 10_000,
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}

#: Items of the parser for one byte, which bound the time of a token. An ambiguous rule compares each item with all
#: others: 500 take up to 6 ms for a token, 2,000 take 100 ms. An optional property of an object takes four, each
#: compared with few others.
MAX_ITEMS, MAX_SCHEMA_ITEMS = 500, 4000

#: At most one blank between the tokens of JSON. A schema can't choose another way, nor have keywords ignored.
JSON_OPTIONS: JsonCompileOptions = {"whitespace_pattern": " ", "lenient": False}

_CUT = "<non-verbose/>"  # llguidance's, where a message would go on with its state
_TRACE = "\n<backtrace>"  # of a panic within it
_NO_TEXT = "NoExtensionBias"
_PREFIX_SPACE = re.compile(r'"add_prefix_space"\s*:\s*true')
_RULES = re.compile(r"\n *\d+ \| ")  # before the first of the rules, which its messages repeat
_PLACE = re.compile(r"^at \d+\(\d+\): (failed to compile JSON schema: )?")  # in them


class InvalidGrammar(ValueError):
    """A grammar that can't be served; the text says why, and where."""


class Grammars:
    """Compiles grammars against a model's vocabulary, which is read when one is first asked for. Any thread."""

    def __init__(self, model: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """model: a directory with a tokenizer.json. vocab_size: of the model's logits."""
        self._model = model
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self.compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        """Compiled grammars, least recently used first."""
        self._lock = Lock()  # of `compiled`
        self._loading = Lock()
        self._tokenizer: LLTokenizer | None = None
        self._work: GrammarWork

    def compile(self, grammar: Grammar) -> LLMatcher:
        """Return a matcher at the beginning of an answer. Raises InvalidGrammar.

        The first mask is computed here, too: it takes longest, and tells whether any text matches.
        """
        with self._lock:
            if (found := self.compiled.get(grammar)) is not None:
                self.compiled.move_to_end(grammar)
                return found.deep_copy()
        found = self._compile(grammar)
        with self._lock:
            self.compiled[grammar] = found
            size = sum(len(each.text) + len(each.around) for each in self.compiled)
            while len(self.compiled) > MAX_COMPILED or (size > MAX_COMPILED_BYTES and len(self.compiled) > 1):
                oldest, _ = self.compiled.popitem(last=False)
                size -= len(oldest.text) + len(oldest.around)
        return found.deep_copy()

    def masks(self, matchers: Sequence[LLMatcher]) -> np.ndarray:
        """Return which tokens each matcher of `compile` allows next, `[matchers, words]` int32: a bit for each token of
        the model, or of the tokenizer where that has more, the lowest first.

        A matcher allows none if its next mask would take too much work.
        """
        return self.advance([GrammarState(matcher) for matcher in matchers])

    def advance(self, states: Sequence[GrammarState]) -> np.ndarray:
        """Consume the pending tokens of grammar states; return the masks that `masks` returns of their matchers."""
        self._load()
        return self._work.masks(states)

    def forced(self, matcher: LLMatcher) -> list[int]:
        """Return tokens of the only text that may come next; none where several may. Its last token may be another, as
        the text goes on.
        """
        if tokens := matcher.compute_ff_tokens():
            return tokens
        text = matcher.compute_ff_bytes()
        return self._load().tokenize_bytes(text) if text else []

    def known(self, tokens: list[int]) -> list[int]:
        """Return the beginning of tokens that has none of an adapter's own: grammars know the model's only."""
        most = self._load().vocab_size
        return list(takewhile(lambda token: token < most, tokens))

    def _compile(self, grammar: Grammar) -> LLMatcher:
        from llguidance import LLMatcher, LLParserLimits

        tokenizer = self._load()
        try:
            tagged = grammar.kind == GrammarKind.STRUCTURAL_TAG
            source = _of_structural_tag(grammar.text, tokenizer) if tagged else _SOURCES[grammar.kind](grammar.text)
            if grammar.around:
                source = _within(grammar.around, source)
        except (ValueError, TypeError, KeyError, RecursionError, AssertionError) as error:
            raise InvalidGrammar(_told(str(error) or type(error).__name__)) from None
        items = MAX_ITEMS if grammar.kind == GrammarKind.GRAMMAR else MAX_SCHEMA_ITEMS
        limits = LLParserLimits(max_items_in_row=items, **_LIMITS)
        matcher = LLMatcher(tokenizer, source, log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()
        if matcher.is_error():
            message = _of_client(_told(matcher.get_error()), grammar)
            raise InvalidGrammar("no text matches it" if message == _NO_TEXT else message)
        return matcher

    def _load(self) -> LLTokenizer:
        with self._loading:
            if self._tokenizer is None:
                self._tokenizer = self._read()
                self._work = _work(self._tokenizer)
            return self._tokenizer

    def _read(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        if not self._eos_token_ids:
            raise InvalidGrammar("this model has no end-of-sequence token, by which an answer that matches would end")
        try:
            text = _within_texts((self._model / "tokenizer.json").read_text(encoding="utf-8"))
            try:
                return LLTokenizer(text, n_vocab=self._vocab_size, eos_token=self._eos_token_ids)
            except ValueError:  # the tokenizer has more tokens than the model
                return LLTokenizer(text, eos_token=self._eos_token_ids)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise InvalidGrammar(f"this model's tokenizer.json can't be used with grammars: {reason}") from None


@lru_cache(8)
def grammars_of(model: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> Grammars:
    """Return a model's grammars, one object per process: the API compiles those that the engine needs later."""
    return Grammars(model, vocab_size, eos_token_ids)


def _work(tokenizer: LLTokenizer) -> GrammarWork:
    from llguidance import LLExecutor, LLMatcher

    spare, count = LLMatcher(tokenizer, "", log_level=0), available_cpus()
    assert spare.is_error()
    return GrammarWork(LLExecutor(count), count, -(-tokenizer.vocab_size // 32), spare)


def _within_texts(tokenizer: str) -> str:
    """A tokenizer.json without the space before each text: what a grammar forces stands within an answer. llguidance
    drops other tokenizers' spaces itself.
    """
    if _PREFIX_SPACE.search(tokenizer) is None:
        return tokenizer
    read = json.loads(tokenizer)
    first = read.get("pre_tokenizer") or {}
    for each in (first, *first.get("pretokenizers", ())):
        if each.get("type") == "ByteLevel":
            each["add_prefix_space"] = False
    return json.dumps(read, ensure_ascii=False)


def _told(message: str) -> str:
    return message.partition(_CUT)[0].partition(_TRACE)[0].strip()


def _of_client(message: str, grammar: Grammar) -> str:
    """A message without rules that this program wrote, and with the path in a schema that it is about."""
    if grammar.around or grammar.kind in (GrammarKind.CALLS, GrammarKind.STRUCTURAL_TAG):
        message = _PLACE.sub("", _RULES.split(message, maxsplit=1)[0])
    if grammar.kind == GrammarKind.JSON_SCHEMA:
        return located(message, json.loads(grammar.text)) or message
    if grammar.kind == GrammarKind.STRUCTURAL_TAG:
        for number, structure in enumerate(json.loads(grammar.text)["structures"]):
            if (found := located(message, structure.get("schema"), f"structures[{number}].schema")) is not None:
                return found
    return message


def _within(around: str, source: str) -> str:
    """llguidance's JSON of a grammar in which `@content` is another one."""
    content = json.loads(source)["grammars"] if source.startswith("{") else [{"lark_grammar": source}]
    return json.dumps({"grammars": [{"lark_grammar": around}, *({**each, "name": "content"} for each in content)]})


def _of_schema(text: str) -> str:
    from llguidance import LLMatcher

    schema = json.loads(text)
    check_optional(schema)
    if harmless := [each for _, each in subschemas(schema) if each.get("uniqueItems") is False]:
        for each in harmless:
            del each["uniqueItems"]
        text = json.dumps(schema)
    return LLMatcher.grammar_from_json_schema(text, overrides=JSON_OPTIONS)


def _of_regex(text: str) -> str:
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_regex(text)


def _of_choice(text: str) -> str:
    from llguidance import LLMatcher

    choices = json.loads(text)
    if not isinstance(choices, list) or not choices or not all(isinstance(each, str) for each in choices):
        raise ValueError("choices are a list of strings, one at least")
    return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(each) for each in choices))


def _of_rules(text: str) -> str:
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_lark(text)


def _of_lark(text: str) -> str:
    from llguidance import grammar_from

    return grammar_from("grammar", text)


def _of_structural_tag(text: str, tokenizer: LLTokenizer) -> str:
    """Free text in which a trigger, as text or as its token, begins one of the structures."""
    asked, tags, rules = json.loads(text), [], ["%llguidance {}", ANY_TEXT]
    for number, structure in enumerate(asked["structures"]):
        begin, end, tag = structure["begin"], structure["end"], f"tag_{number}"
        if not isinstance(begin, str) or not isinstance(end, str):
            raise ValueError(f"begin and end of structure {number} must be strings")
        trigger = next((trigger for trigger in asked["triggers"] if begin.startswith(trigger)), "")
        if not trigger:
            raise ValueError(f"no trigger is how {begin!r} begins")
        spelt = Speller({**_specials_in(begin, tokenizer), **_specials_in(end, tokenizer)})
        rules.append(f"{tag}_trigger[lazy]: TEXT {json.dumps(trigger)}")
        begins = f"{tag}_trigger {spelt(begin[len(trigger) :])}"
        if token := spelt.first_of(begin):
            begins = f"({begins} | TEXT {spelt(token)} {spelt(begin[len(token) :])})"
        check_optional(structure["schema"], f"structures[{number}].schema")
        schema = {**structure["schema"], "x-guidance": JSON_OPTIONS}
        rules.append(f"{tag}: {begins} %json {json.dumps(schema)} {spelt(end)}")
        tags.append(tag)
    if not tags:
        raise ValueError("there are no structures")
    return "\n".join((*rules, f"start: ({' | '.join(tags)})* TEXT"))


def _specials_in(text: str, tokenizer: LLTokenizer) -> dict[str, int]:
    """The special tokens that are spelt in a text."""
    ids = set(tokenizer.tokenize_str(text))
    return {tokenizer.decode_str([each]): each for each in ids if tokenizer.is_special_token(each)}


_SOURCES: dict[str, Callable[[str], str]] = {
    GrammarKind.JSON_SCHEMA: _of_schema,
    GrammarKind.JSON_OBJECT: lambda _: _of_schema('{"type": "object"}'),
    GrammarKind.REGEX: _of_regex,
    GrammarKind.CHOICE: _of_choice,
    GrammarKind.GRAMMAR: _of_lark,
    GrammarKind.CALLS: _of_rules,
}
