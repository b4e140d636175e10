"""Compares an adapter's `tokenizer.json` with its base model's: whatever differs but added tokens is refused.

Tests: tests/memory/files/tokens/test_added_tokens.py, tests/server/text/test_altered_tokenizers.py
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from ..directory import AdapterDirectory
from ..error import AdapterFormatError, shown
from ..json_stream import JsonStream, MalformedJson
from .base_tokens import BaseTokens
from .tokenizer_json import KIND, MAX_BYTES, PARTS, TOKENIZER, DifferentModel, compare_model

_ADVICE = (
    "train with the base model's tokenizer, and only add tokens to it, or delete the file to serve the adapter with "
    "the base model's"
)


def checked_parts(file: Path, members: Mapping[str, Any], base: BaseTokens) -> tuple[tuple[str, str], ...]:
    """`OwnTokens.parts`. Raises AdapterFormatError for a normaliser or the like that isn't the base model's, and for
    added tokens that are listed otherwise. Normalisers are programs: only those run that the base model's files make.

    members: of the file's object, but for the vocabulary.
    """
    other = next((name for name in PARTS if not base.has_part(name, members.get(name))), None)
    parts = () if other is None else base.reloaded_parts(members)
    if other is not None and not parts:
        raise AdapterFormatError(
            f"{file}: its {other} is not that of the base model's tokenizer; {_ADVICE}. If it was, load that anew with "
            "AutoTokenizer.from_pretrained, add the tokens in the order of their ids, and save it in place of this one"
        )
    _check_listed(file, members.get("added_tokens") or (), base)
    return parts


def _check_listed(file: Path, entries: Iterable[Mapping[str, Any]], base: BaseTokens) -> None:
    """Refuse a file without an added token of the base model's, whose text it would split, and one that lists tokens in
    another order than that of their ids: the library numbers those outside the vocabulary as they come.
    """
    listed = {entry["id"]: entry["content"] for entry in entries}
    for id_, text in base.added.items():
        if id_ not in listed:
            raise AdapterFormatError(
                f"{file}: added_tokens lacks {shown(text)}, {id_} in the base model's tokenizer; {_ADVICE}"
            )
    for before, id_ in pairwise(listed):
        if id_ < before and listed[id_] not in base.vocabulary:
            raise AdapterFormatError(
                f"{file}: added_tokens has {shown(listed[id_])} of id {id_} after {shown(listed[before])} of id "
                f"{before}; list them by id"
            )


def check_vocabulary(directory: AdapterDirectory, model_at: int | None, base: BaseTokens) -> None:
    """Refuse a vocabulary that isn't the base model's, added tokens aside. One of equal bytes is parsed only once."""
    digest = hashlib.sha256()
    for piece in directory.pieces(TOKENIZER, model_at or 0, MAX_BYTES, KIND):
        digest.update(piece)
    if base.has_digest(key := digest.digest()):
        return
    file, pieces = directory.path / TOKENIZER, directory.pieces(TOKENIZER, 0, MAX_BYTES, KIND)
    try:
        fields = compare_model(JsonStream(pieces), base.model)
    except DifferentModel as error:
        raise AdapterFormatError(f"{file}: {error}; {_ADVICE}") from None
    except MalformedJson as error:
        raise AdapterFormatError(f"{file}: {error}") from error
    finally:
        pieces.close()
    for name in sorted(fields.keys() | base.model.fields.keys()):
        if not base.has_field(name, fields.get(name)):
            theirs = shown(base.model.fields.get(name))
            raise AdapterFormatError(
                f"{file}: {name} of its model is {shown(fields.get(name))}, the base model's is {theirs}; {_ADVICE}"
            )
    base.same.add(key)
