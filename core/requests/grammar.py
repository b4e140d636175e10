"""Grammars: the texts that an output may be."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class GrammarKind(StrEnum):
    """Form in which a grammar is written."""

    JSON_SCHEMA = "json_schema"  # JSON Schema, draft 2020-12
    JSON_OBJECT = "json_object"  # any JSON object; has no text
    REGEX = "regex"  # Rust's syntax, without look-around; the whole answer matches
    CHOICE = "choice"  # a JSON list of strings, one of which is the answer
    GRAMMAR = "grammar"  # Lark's syntax as llguidance reads it, or llama.cpp's GBNF
    CALLS = "calls"  # rules in Lark's syntax that this program wrote around JSON schemas of a client
    STRUCTURAL_TAG = "structural_tag"  # JSON: `triggers`, and `structures` of `begin`, `schema` and `end`; else free


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar of a request. Whether it can be served only `Grammars.compile` can tell.

    kind: one of GrammarKind. around: rules in Lark's syntax as llguidance reads it, in which `@content` is the
    grammar of kind and text; "": the whole answer is that.
    """

    kind: str
    text: str = ""
    around: str = ""

    def __post_init__(self) -> None:
        GrammarKind(self.kind)
