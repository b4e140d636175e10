"""Tokens that an adapter's own tokenizer files add, by id."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from . import strict_json
from .directory import AdapterDirectory
from .error import AdapterFormatError

_MAX_BYTES = 64 << 20
_FILES = ("added_tokens.json", "tokenizer_config.json", "tokenizer.json")


def added_beyond(directory: AdapterDirectory, num_tokens: int) -> dict[int, str]:
    """Tokens with ids from `num_tokens` on, in any tokenizer file of the directory; empty where it has none."""
    found: dict[int, str] = {}
    for name in _FILES:
        if directory.has(name):
            found |= {id_: text for id_, text in _tokens(name, _read(directory, name)) if id_ >= num_tokens}
    return dict(sorted(found.items()))


def _read(directory: AdapterDirectory, name: str) -> Any:
    try:
        return strict_json.loads(directory.read(name, _MAX_BYTES, "a tokenizer's file"))
    except ValueError as error:
        raise AdapterFormatError(f"{directory.path / name}: not JSON: {error}") from error


def _tokens(name: str, raw: Any) -> Iterator[tuple[int, str]]:
    """Ids and texts; what is not as tokenizers write it is passed over, as nothing but ids is taken from it."""
    if not isinstance(raw, dict):
        return iter(())
    if name == "added_tokens.json":
        return ((id_, text) for text, id_ in raw.items() if type(id_) is int)
    if name == "tokenizer_config.json":
        return _decoded(raw.get("added_tokens_decoder"))
    return _listed(raw.get("added_tokens"))


def _decoded(decoder: Any) -> Iterator[tuple[int, str]]:
    """Of an object from ids to tokens."""
    for id_, entry in decoder.items() if isinstance(decoder, dict) else ():
        if id_.isdecimal() and len(id_) < 10:
            yield int(id_), str(entry.get("content")) if isinstance(entry, dict) else ""


def _listed(entries: Any) -> Iterator[tuple[int, str]]:
    """Of a list of tokens with their ids."""
    for entry in entries if isinstance(entries, list) else ():
        if isinstance(entry, dict) and type(entry.get("id")) is int:
            yield entry["id"], str(entry.get("content"))
