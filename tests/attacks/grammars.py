"""Random schemas, which must give valid answers, and hostile grammars, which must cost little: `python -m
tests.attacks.grammars`.

Of each random JSON schema a random text is drawn over the built-in model's vocabulary, each token among the tokens that
the grammar allows; the text must parse and be valid by the `jsonschema` package. The schemas of the
JSON-Schema-Test-Suite (`--suite DIR`) are tried in the same way, and their grammars must not let an invalid instance of
the suite pass. A hostile grammar within the API's limits must be refused or compiled, and give its masks, within the
bars; seconds are of the CPU.
"""

from __future__ import annotations

import json
import random
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from chorus.core.requests.grammar import Grammar, GrammarKind
from chorus.core.requests.grammars import Grammars, InvalidGrammar
from chorus.perf.report.command import conclude, parser
from chorus.server.access.limits import RequestLimits
from chorus.server.api.grammar_fields import GrammarFields
from chorus.server.demo.builtin import BUILTIN_MODEL
from chorus.server.errors import ApiError

EOS = 0
VOCAB = 259
MOST_TOKENS = 600
COMPILE_BAR, MASK_BAR = 2.0, 0.5
"""Seconds of the CPU that a hostile grammar may take to compile, and for one token."""

_LEAVES: tuple[dict[str, Any], ...] = (
    {"type": "string", "maxLength": 5},
    {"type": "string", "minLength": 2, "maxLength": 4},
    {"type": "boolean"},
    {"type": "string", "pattern": "^[a-c]+(-[0-9]{2})?$"},
    {"type": "null"},
    {"type": "integer", "multipleOf": 7},
    {"type": "integer", "minimum": -20, "exclusiveMaximum": 1000},
    {"type": "number", "minimum": 0, "maximum": 1.5},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "uuid"},
    {"enum": ["é", '\\"', 1, None, [2]]},
    {"const": {"a b": ["\n", 1.5]}},
    {"type": ["integer", "null"], "maximum": 9, "minimum": 0},
)


def random_schema(draw: random.Random, depth: int = 3) -> dict[str, Any]:
    kind = draw.choice(("leaf", "leaf", "array", "object", "object", "any", "tuple", "map") if depth else ("leaf",))
    if kind == "leaf":
        return draw.choice(_LEAVES)
    inner = [random_schema(draw, depth - 1) for _ in range(draw.randint(1, 3))]
    if kind == "any":
        return {"anyOf": inner}
    if kind == "array":
        least = draw.randint(0, 2)
        return {"type": "array", "items": inner[0], "minItems": least, "maxItems": least + draw.randint(0, 2)}
    if kind == "tuple":
        return {"type": "array", "prefixItems": inner, "items": False, "minItems": len(inner)}
    if kind == "map":
        return {"type": "object", "additionalProperties": inner[0], "maxProperties": 2}
    names = draw.sample(["a", "b b", "ü", "d-e", '"f"'], len(inner))
    required = draw.sample(names, draw.randint(0, len(names)))
    return {
        "type": "object",
        "properties": dict(zip(names, inner, strict=True)),
        "required": required,
        "additionalProperties": False,
    }


def hostile() -> dict[str, dict[str, Any]]:
    """Fields of bodies, each as large or as tangled as the API's limits let it be."""
    text = {"type": "string"}
    doubled = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(25)}
    return {
        "stars": {"regex": "a*" * 4096},
        "optional": {"regex": "a?" * 4096},
        "literal": {"regex": "ab" * 4096},
        "powers": {"regex": "(((((a{100}){100}){100}){100}){100})"},
        "far apart": {"regex": "(.*a.{500}b.*c.{500}d)"},
        "classes": {"regex": r"(\p{L}|\p{N}|\p{S}){1,999}" * 100},
        "parentheses": {"regex": "(" * 4000 + "a" + ")" * 4000},
        "words": {"regex": "|".join(f"word{i}" for i in range(900))},
        "rules": {"ebnf": "\n".join(["start: r0", *(f"r{i}: r{i + 1} r{i + 1}" for i in range(40)), 'r40: "a"'])},
        "ambiguous": {"ebnf": 'start: s\ns: s s | s s s | s s s s | /[a-z]+/ | /[a-z0-9]+/ | /.*/ | "a" |'},
        "left recursion": {"ebnf": 'start: start start | "a"'},
        "endless": {"ebnf": "start: a\na: b\nb: a"},
        "repeated": {"ebnf": 'start: x{1000}\nx: y{1000}\ny: "a"{1000}'},
        "deep rules": {"ebnf": "start: " + "(" * 4000 + '"a"' + ")" * 4000},
        "gbnf": {"ebnf": "root ::= " + "(" * 2000 + '"a"' + ")" * 2000},
        "choices": {"guided_choice": [f"choice {i}" for i in range(2000)]},
        "properties": {"json_schema": {"type": "object", "properties": {f"p{i}": text for i in range(1000)}}},
        "one of": {
            "json_schema": {
                "oneOf": [
                    {
                        "type": "object",
                        "properties": {f"k{i}": text},
                        "required": [f"k{i}"],
                        "additionalProperties": False,
                    }
                    for i in range(250)
                ]
            }
        },
        "doubled": {"json_schema": {"$ref": "#/$defs/d0", "$defs": {**doubled, "d25": {"type": "object"}}}},
        "crossed": {
            "json_schema": {
                "allOf": [{"anyOf": [{"properties": {f"p{i}": {"const": j}}} for j in range(4)]} for i in range(14)]
            }
        },
        "itself": {"json_schema": {"$ref": "#"}},
        "list": {"json_schema": {"properties": {"n": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "type": "object"}},
        "far": {"json_schema": {"$ref": "http://127.0.0.1:9/schema.json"}},
        "file": {"json_schema": {"$ref": "file:///etc/passwd"}},
        "items": {"json_schema": {"type": "array", "minItems": 10**6, "items": {"type": "array", "minItems": 10**6}}},
        "length": {"json_schema": {"type": "string", "minLength": 10**6, "maxLength": 10**7}},
        "patterns": {
            "json_schema": {
                "type": "object",
                "properties": {f"p{i}": {"type": "string", "pattern": f".*a.{{{200 + i}}}b"} for i in range(300)},
            }
        },
        "multiple": {"json_schema": {"type": "integer", "multipleOf": 99999989, "minimum": 3}},
        "multiples": {"json_schema": {"type": "integer", "allOf": [{"multipleOf": 999983}, {"multipleOf": 999979}]}},
        "deep": {"json_schema": '{"items":' * 3000 + "{}" + "}" * 3000},
    }


@dataclass
class Tally:
    """Counts of the outcomes."""

    schemas: int = 0
    refused: int = 0
    cut: int = 0
    unchecked: int = 0
    invalid: list[str] = field(default_factory=list)

    def try_schema(self, grammars: Grammars, schema: Any, draw: random.Random, name: str) -> bool:
        """Draw a text that a schema allows and validate it. False: the schema is refused."""
        import jsonschema

        self.schemas += 1
        try:
            text, _ = answer(grammars, Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)), draw, MOST_TOKENS)
        except InvalidGrammar:
            self.refused += 1
            return False
        if text is None:
            self.cut += 1
            return True
        try:
            jsonschema.validate(json.loads(text), schema)
        except jsonschema.SchemaError:  # such as a pattern that Python's `re` does not have
            self.unchecked += 1
        except ValueError as error:
            self.invalid.append(f"{name}: {error!r:.200}")
        except jsonschema.ValidationError as error:
            self.invalid.append(f"{name}: {text!r:.200} by {json.dumps(schema):.300}: {error.message:.100}")
        return True

    def try_suite(self, grammars: Grammars, suite: Path, draws: int) -> None:
        """Do so with all schemas of the suite's latest draft, and refuse its invalid instances."""
        for path in sorted((suite / "tests" / "draft2020-12").rglob("*.json")):
            formats = "format" in path.parts  # annotations, unless a validator is told to look at these
            if path.stem == "ecmascript-regex":  # optional; patterns are Rust's here, in which U+FEFF is no blank
                continue
            for group in json.loads(path.read_text(encoding="utf-8")):
                name, schema = f"{path.stem}: {group['description']}", group["schema"]
                tried = (self.try_schema(grammars, schema, random.Random(seed), name) for seed in range(draws))
                if not all(tried) or formats:
                    continue
                for test in group["tests"]:
                    text = json.dumps(test["data"], ensure_ascii=False)
                    if not test["valid"] and accepts(grammars, schema, text.encode("utf-8", "surrogatepass")):
                        self.invalid.append(f"{name}: takes {text:.100} ({test['description']})")


def answer(grammars: Grammars, grammar: Grammar, draw: random.Random, most: int) -> tuple[bytes | None, float]:
    """Bytes of a random text that matches, or None if it was cut or stopped; seconds of its worst token."""
    matcher, text, worst = grammars.compile(grammar), b"", 0.0
    for _ in range(most):
        began = time.process_time()
        mask = grammars.masks([matcher])[0]
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
        token = draw.choice(allowed) if allowed else None
        if token is not None and token != EOS:
            matcher.consume_tokens([token])
        worst = max(worst, time.process_time() - began)
        if token is None:
            return None, worst
        if token == EOS:
            return text, worst
        text += spelt(token)
    return None, worst


def accepts(grammars: Grammars, schema: Any, text: bytes) -> bool:
    """Whether an answer may be the text."""
    matcher = grammars.compile(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)))
    tokens = [_TOKENS.index(bytes([byte])) for byte in text]
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def spelt(token: int) -> bytes:
    return bytes(_TOKENS[token])


def main() -> int:
    from tokenizers import Tokenizer

    from chorus.server.text.own_tokenizer import CalledTokenizer
    from chorus.server.text.vocabulary import Vocabulary

    command = parser(__spec__, __doc__)
    command.add_argument("--schemas", type=int, default=10_000, help="how many to draw")
    command.add_argument("--seed", type=int, default=0, help="of the first")
    command.add_argument("--suite", type=Path, help="a copy of the JSON-Schema-Test-Suite")
    command.add_argument("--draws", type=int, default=3, help="texts of each of its schemas")
    args = command.parse_args()
    vocabulary = Vocabulary(CalledTokenizer(Tokenizer.from_file(str(BUILTIN_MODEL / "tokenizer.json"))))
    _TOKENS.extend(vocabulary.bytes_of(token) for token in range(VOCAB))
    grammars, tally = Grammars(BUILTIN_MODEL, VOCAB, (EOS,)), Tally()
    for seed in range(args.seed, args.seed + args.schemas):
        draw = random.Random(seed)
        tally.try_schema(grammars, random_schema(draw), draw, f"seed {seed}")
    if args.suite is not None:
        tally.try_suite(grammars, args.suite, args.draws)
    print(*tally.invalid[:40], sep="\n")
    costs, late = {}, []
    for name, body in hostile().items():
        began, worst, said = time.process_time(), 0.0, ""
        try:
            found = GrammarFields(**body).asked_grammar(RequestLimits())
            assert found is not None
            grammars.compile(found[1])
            seconds = time.process_time() - began
            _, worst = answer(grammars, found[1], random.Random(0), 40)
        except (ApiError, InvalidGrammar) as error:
            seconds, said = time.process_time() - began, " ".join(str(error).split())[:60]
        costs[name] = seconds, worst
        if seconds > COMPILE_BAR or worst > MASK_BAR:
            late.append(name)
        print(f"{name:16s} compiled in {seconds:6.3f} s, {worst:6.3f} s for a token  {said}", flush=True)
    met = not tally.invalid and not late
    result = {**vars(tally), "invalid": len(tally.invalid), "costs": costs, "late": late, "met": met}
    return conclude(result, met)


_TOKENS: list[bytes] = []

if __name__ == "__main__":
    sys.exit(main())
