"""Reads `tokenizer.json`, the file of the `tokenizers` library, member by member.

Tests: tests/memory/files/tokens/test_added_tokens.py, tests/memory/files/test_hostile_files.py
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..error import shown
from ..json_stream import MAX_KEY, JsonStream, MalformedJson

TOKENIZER = "tokenizer.json"
KIND = "a tokenizer's file"

#: Members other than the vocabulary and the added tokens that make tokens of a text, or a text of tokens.
PARTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")

MAX_BYTES = 64 << 20

MAX_ADDED = 1 << 14
"""Added tokens of a file. Gemma 3 has 6,414, and an adapter may train 4,096."""

_ALL = frozenset(("added_tokens", *PARTS))


class DifferentModel(ValueError):
    """A vocabulary that is not the base model's; the message says where it differs."""


@dataclass(frozen=True)
class Model:
    """The vocabulary of a file, and what tells others apart."""

    vocabulary: Mapping[str, int]
    """Ids of all tokens but for added ones."""
    merges: bytes
    """Digest of the merges, and of the scores of tokens, in order."""
    fields: Mapping[str, Any]
    """All other fields that are set."""


def read_members(stream: JsonStream, most_added: int | None) -> tuple[dict[str, Any], bool]:
    """The members of the file's object up to `model` if all that matter come before it, else all but that; and whether
    `model` is next. most_added: added tokens that it may have; None: any number. Raises ValueError if it can't be read.
    """
    members: dict[str, Any] = {}
    has_model = False
    for key in stream.members():
        if key in members or (key == "model" and has_model):
            raise MalformedJson(f"key {shown(key)} occurs twice")
        if key == "added_tokens":
            members[key] = _entries(stream, most_added)
        elif key != "model":
            members[key] = stream.value()
        elif members.keys() >= _ALL:
            return members, True
        else:
            has_model = True
            stream.skip()
    stream.finish()
    return members, False


def _entries(stream: JsonStream, most: int | None) -> Any:
    if stream.next_mark() != "[":
        return stream.value()
    entries = []
    for index in stream.entries():
        if most is not None and index == most:
            raise MalformedJson(f"more than {most} added tokens")
        entries.append(stream.value(MAX_KEY))
    return entries


def read_model(stream: JsonStream) -> Model:
    """The vocabulary of a file from a trusted source. Raises ValueError if it can't be read."""
    vocabulary: dict[str, int] = {}
    fields, merges = _model(stream, vocabulary.__setitem__)
    return Model(vocabulary, merges, fields)


def compare_model(stream: JsonStream, base: Model) -> dict[str, Any]:
    """Read a file's vocabulary up to the first difference from the base model's, and return its other fields. Nothing
    else of it is kept.

    Raises DifferentModel, and ValueError if it can't be read.
    """
    seen = set[str]()

    def compare(text: str, id_: int) -> None:
        if base.vocabulary.get(text) != id_:
            raise DifferentModel(
                f"its vocabulary has token {shown(text)} as {shown(id_)}, the base model's as "
                f"{shown(base.vocabulary.get(text))}"
            )
        if text in seen:
            raise DifferentModel(f"its vocabulary has token {shown(text)} twice")
        seen.add(text)

    fields, merges = _model(stream, compare)
    if len(seen) < len(base.vocabulary):
        raise DifferentModel(f"its vocabulary has {len(seen)} tokens, the base model's has {len(base.vocabulary)}")
    if merges != base.merges:
        raise DifferentModel("the merges, or scores, of its vocabulary are not the base model's")
    return fields


def _model(stream: JsonStream, take: Callable[[str, int], object]) -> tuple[dict[str, Any], bytes]:
    """The other fields, and the digest, of the value of `model`. take: called with each token and its id."""
    found: tuple[dict[str, Any], bytes] | None = None
    for key in stream.members():
        if key != "model":
            stream.skip()
        elif found is not None:
            raise MalformedJson("key 'model' occurs twice")
        else:
            found = _model_fields(stream, take)
    stream.finish()
    if found is None:
        raise MalformedJson("it has no model")
    return found


def _model_fields(stream: JsonStream, take: Callable[[str, int], object]) -> tuple[dict[str, Any], bytes]:
    fields: dict[str, Any] = {}
    digest = hashlib.sha256()
    for name in stream.members():
        if name in fields:
            raise MalformedJson(f"key {shown(name)} occurs twice")
        fields[name] = None
        if name == "vocab":
            lines = _take(_vocabulary(stream), take)
        elif name == "merges":
            lines = _merges(stream)
        else:
            lines, fields[name] = (), stream.value(MAX_KEY)
        for line in lines:
            digest.update(f"{line}\n".encode("utf-8", "surrogatepass"))
    if "vocab" not in fields:
        raise MalformedJson("its model has no vocab")
    # Versions of the library differ in what they write of fields that are not set.
    return {name: value for name, value in fields.items() if _is_set(value)}, digest.digest()


def _take(entries: Iterable[tuple[str, int, float | None]], take: Callable[[str, int], object]) -> Iterator[str]:
    """The scores of entries that have any; `take` is called with each token and its id."""
    for text, id_, score in entries:
        take(text, id_)
        if score is not None:
            yield repr(score)


def _is_set(value: Any) -> bool:
    return value is not None and value is not False and value != ""


def _vocabulary(stream: JsonStream) -> Iterator[tuple[str, int, float | None]]:
    """Tokens with their ids, and with their scores where the model has any."""
    if stream.next_mark() == "{":
        for text in stream.members():
            id_ = stream.value(MAX_KEY)
            if type(id_) is not int:
                raise MalformedJson("vocab of its model is not an object of tokens and ids")
            yield text, id_, None
        return
    if stream.next_mark() != "[":
        raise MalformedJson("vocab of its model is not an object of tokens and ids")
    for id_ in stream.entries():
        match stream.value(MAX_KEY):
            case [str(text), int() | float() as score]:
                yield text, id_, float(score)
            case _:
                raise MalformedJson("vocab of its model is not a list of tokens and scores")


def _merges(stream: JsonStream) -> Iterator[str]:
    """Pairs of tokens, which newer versions of the library write as lists: their tokens may have spaces and ends of
    lines.
    """
    if stream.next_mark() == "n" and stream.value(MAX_KEY) is None:
        return
    for _ in stream.entries():
        match stream.value(MAX_KEY):
            case [str(first), str(second)]:
                yield repr((first, second))
            case str(pair):
                yield repr(tuple(pair.split(" ")))
            case _:
                raise MalformedJson("merges of its model is not a list of pairs")
