"""What an answer must match."""

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
    STRUCTURAL_TAG = "structural_tag"  # JSON: `triggers`, and `structures` of `begin`, `schema` and `end`; else free


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar of a request. kind: one of GrammarKind. Whether it can be served only `Grammars.compile` can tell."""

    kind: str
    text: str = ""

    def __post_init__(self) -> None:
        GrammarKind(self.kind)
