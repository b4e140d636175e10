"""Reads `tokenizer.json`, the file of the `tokenizers` library, without the vocabulary where that is not needed.

Tests: tests/memory/files/test_added_tokens.py
"""

from __future__ import annotations

import codecs
import json
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZER = "tokenizer.json"

#: Members other than the vocabulary and the added tokens that make tokens of a text, or a text of tokens.
PARTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")

MAX_BYTES = 64 << 20

_MAX_CONTAINERS = 1 << 20
"""Lists and objects of a file: the merges of large vocabularies have half as many, and each takes memory."""

_SPACE = re.compile(r"[ \t\r\n]*")
_VOCABULARY = re.compile(r'"vocab"\s*:\s*')
_ALL = frozenset(("added_tokens", *PARTS))
_DECODER = json.JSONDecoder()


class MalformedTokenizer(ValueError):
    """A file that the library didn't write."""


def read_members(data: bytes) -> tuple[dict[str, Any], int]:
    """The members of the file's object up to `model` if all that matter come before it, else all but that; and where
    the value of `model` begins. data: the file, or its beginning. Raises ValueError if it can't be read, or ends too
    early.
    """
    _check_containers(data)
    text = codecs.getincrementaldecoder("utf-8")().decode(data)
    members: dict[str, Any] = {}
    model_at = -1
    at = _after(text, 0, "{")
    while True:
        at = _SPACE.match(text, at).end()  # pyright: ignore[reportOptionalMemberAccess]  # it matches nothing, too
        if text.startswith("}", at):
            return members, model_at
        key, at = _value(text, at)
        at = _after(text, at, ":")
        at = _SPACE.match(text, at).end()  # pyright: ignore[reportOptionalMemberAccess]
        if key == "model":
            model_at = at
            if members.keys() >= _ALL:
                return members, model_at
        value, at = _value(text, at)
        if key != "model":
            members[str(key)] = value
        at = _SPACE.match(text, at).end()  # pyright: ignore[reportOptionalMemberAccess]
        if text.startswith(",", at):
            at += 1
        elif not text.startswith("}", at):
            raise MalformedTokenizer(f"not JSON: character {at} is not a comma or the end")


def vocabulary_in(data: bytes) -> dict[str, int]:
    """The ids of a file's tokens but for added ones. Raises ValueError if it can't be read."""
    _check_containers(data)
    text = data.decode("utf-8")
    _, at = read_members(data)
    found = None if at < 0 else _VOCABULARY.search(text, at)
    if found is None:
        raise MalformedTokenizer("its model has no vocab")
    vocabulary, _ = _value(text, found.end())
    if isinstance(vocabulary, list):  # with scores
        return {str(entry[0]): id_ for id_, entry in enumerate(vocabulary) if isinstance(entry, list) and entry}
    if not isinstance(vocabulary, dict) or not all(type(id_) is int for id_ in vocabulary.values()):
        raise MalformedTokenizer("vocab of its model is not an object of tokens and ids")
    return vocabulary


def with_parts(text: str) -> Tokenizer:
    """The library's tokenizer with an empty vocabulary and the parts in a JSON text. Raises ValueError."""
    from tokenizers import Tokenizer

    model = {"type": "BPE", "vocab": {}, "merges": []}
    whole = {"version": "1.0", "added_tokens": [], **json.loads(text), "model": model}
    try:
        return Tokenizer.from_str(json.dumps(whole))
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"its {', '.join(PARTS)} can't be read: {error}") from None


def _check_containers(data: bytes) -> None:
    if data.count(b"[") + data.count(b"{") > _MAX_CONTAINERS:
        raise MalformedTokenizer(f"more than {_MAX_CONTAINERS} lists and objects, nested or not")


def _after(text: str, at: int, mark: str) -> int:
    at = _SPACE.match(text, at).end()  # pyright: ignore[reportOptionalMemberAccess]
    if not text.startswith(mark, at):
        raise MalformedTokenizer(f"not JSON: character {at} is not {mark!r}")
    return at + 1


def _value(text: str, at: int) -> tuple[Any, int]:
    try:
        return _DECODER.raw_decode(text, at)
    except RecursionError:
        raise MalformedTokenizer("nested too deeply") from None
    except StopIteration as error:
        raise MalformedTokenizer(f"not JSON: it ends at character {error.value}") from None
    except json.JSONDecodeError as error:
        raise MalformedTokenizer(f"not JSON: {error}") from None
