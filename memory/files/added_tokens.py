"""Tokens that an adapter's own tokenizer files add to its base model's tokenizer.

Of a `tokenizer.json` only the beginning is read, up to the vocabulary, which is compared with the base model's where
the adapter has tokens that the base model's tokenizer lacks.

Tests: tests/memory/files/test_added_tokens.py
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from . import strict_json
from .base_tokens import BaseTokens
from .directory import AdapterDirectory
from .error import AdapterFormatError, shown
from .tokenizer_json import MAX_BYTES, PARTS, TOKENIZER, read_members, vocabulary_in, with_parts

LISTED, CONFIG, NAMED = "added_tokens.json", "tokenizer_config.json", "special_tokens_map.json"
TOKENIZER_FILES = (TOKENIZER, CONFIG, LISTED, NAMED)
TEMPLATE_FILE = "chat_template.jinja"
TEXT_FILES = (*TOKENIZER_FILES, TEMPLATE_FILE)
"""Files that an adapter may have next to its configuration and weights: its own tokenizer and template."""

_KIND = "a tokenizer's file"
_BEGINNING = 256 << 10

#: Fields of a tokenizer's configuration that name one token, and those that name several.
NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_MORE = ("additional_special_tokens", "extra_special_tokens")

_FLAGS = ("special", "single_word", "lstrip", "rstrip", "normalized")


class AddedToken(NamedTuple):
    """A token added to a tokenizer's vocabulary; the flags are those of the `tokenizers` library."""

    id: int
    text: str
    special: bool = False
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = False


@dataclass(frozen=True)
class OwnTokens:
    """The tokens of an adapter's tokenizer that its base model's lacks."""

    tokens: tuple[AddedToken, ...]
    """All its added tokens, by id; those that the base model's tokenizer has, too, with its own flags."""

    named: tuple[tuple[str, str], ...] = ()
    """Fields of `NAMES` and the tokens that they name."""

    parts: str = ""
    """JSON of its normaliser and the like (`PARTS`); empty without that file."""

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(repr((self.tokens, self.named, self.parts)).encode()).hexdigest()


class _Listed(NamedTuple):
    """A token, and the file that it is in."""

    token: AddedToken
    file: Path


def added_beyond(directory: AdapterDirectory, num_tokens: int) -> dict[int, str]:
    """Tokens with ids from `num_tokens` on, in any tokenizer file of the directory; empty where it has none."""
    found = _read(directory, _contents(directory)).tokens
    return {id_: one.token.text for id_, one in found.items() if id_ >= num_tokens}


def has_tokenizer_file(directory: AdapterDirectory) -> bool:
    """True if the directory has any file of a tokenizer."""
    return any(map(directory.has, TOKENIZER_FILES))


def own_tokens(
    directory: AdapterDirectory, base: BaseTokens, vocab_size: int | None, added: Collection[int] = ()
) -> OwnTokens | None:
    """The adapter's tokenizer if it names tokens that the base model's tokenizer lacks; None if not.

    vocab_size: of the base model's embeddings. Tokens beyond them have no row, so they are no tokens of a prompt, but
    for those of `added`.
    Raises AdapterFormatError for files that can't be read, and for a token that isn't the base model's. Files that
    equal another adapter's without such tokens are not parsed again.
    """
    contents = _contents(directory)
    key = _digest(contents)
    if key in base.plain:
        return None
    found = _read(directory, contents)
    for id_, (token, file) in found.tokens.items():
        known = base.id_of(token.text)
        if known is not None and known != id_:
            raise AdapterFormatError(
                f"{file}: token {shown(token.text)} has id {id_}, in the base model's tokenizer it has {known}; train "
                "with the base model's tokenizer, and only add tokens to it"
            )
    served = {id_: one for id_, one in found.tokens.items() if vocab_size is None or id_ < vocab_size or id_ in added}
    if all(base.id_of(one.token.text) is not None for one in served.values()):
        if not found.is_beyond:
            base.plain.add(key)
        return None
    _check_ids(served, base)
    _check_parts(directory.path / TOKENIZER, found.parts)
    if directory.has(TOKENIZER):
        _check_vocabulary(directory, base)
    return _shared(OwnTokens(tuple(one.token for one in served.values()), tuple(found.named.items()), found.parts))


@lru_cache(1024)
def _shared(own: OwnTokens) -> OwnTokens:
    """Equal ones as one object: adapters of one training set have the same."""
    return own


class _Found(NamedTuple):
    """What the files of a directory say."""

    tokens: dict[int, _Listed]
    named: dict[str, str]
    parts: str
    is_beyond: bool
    """True if more than the beginning of `tokenizer.json` says it."""


def _contents(directory: AdapterDirectory) -> dict[str, bytes]:
    """The directory's files by name, of `tokenizer.json` its beginning."""
    files = {name: directory.read(name, MAX_BYTES, _KIND) for name in (CONFIG, LISTED, NAMED) if directory.has(name)}
    if directory.has(TOKENIZER):
        files[TOKENIZER] = directory.read_beginning(TOKENIZER, _BEGINNING, _KIND)
    return files


def _digest(contents: Mapping[str, bytes]) -> bytes:
    digest = hashlib.sha256()
    for name, data in contents.items():
        digest.update(f"{name} {len(data)}\n".encode())
        digest.update(data)
    return digest.digest()


def _read(directory: AdapterDirectory, contents: Mapping[str, bytes]) -> _Found:
    config, named_in = (_object(directory.path / name, contents.get(name)) for name in (CONFIG, NAMED))
    named, specials = _named(directory, {CONFIG: config, NAMED: named_in})
    tokens: dict[int, _Listed] = {}
    parts, is_beyond = "", False
    if TOKENIZER in contents:
        members, is_beyond = _beginning(directory, contents[TOKENIZER])
        parts = json.dumps({name: members.get(name) for name in PARTS})
        _put(tokens, directory, TOKENIZER, _listed(directory.path / TOKENIZER, members.get("added_tokens")))
    _put(tokens, directory, CONFIG, _decoded(directory.path / CONFIG, config.get("added_tokens_decoder")))
    listed = _object(directory.path / LISTED, contents.get(LISTED))
    _put(tokens, directory, LISTED, _numbered(directory.path / LISTED, listed, specials))
    return _Found(dict(sorted(tokens.items())), named, parts, is_beyond)


def _object(file: Path, data: bytes | None) -> dict[str, Any]:
    """A file's JSON object; empty without the file."""
    if data is None:
        return {}
    try:
        raw = strict_json.loads(data)
    except ValueError as error:
        raise AdapterFormatError(f"{file}: not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise AdapterFormatError(f"{file}: holds {shown(raw)}; a JSON object is needed")
    return raw


def _beginning(directory: AdapterDirectory, data: bytes) -> tuple[dict[str, Any], bool]:
    """The members of `tokenizer.json` but for the vocabulary, and whether more than its beginning was needed."""
    file = directory.path / TOKENIZER
    try:
        return read_members(data)[0], False
    except ValueError:
        pass  # cut off, or other members after the vocabulary
    try:
        return read_members(directory.read(TOKENIZER, MAX_BYTES, _KIND))[0], True
    except ValueError as error:
        raise AdapterFormatError(f"{file}: {error}") from error


def _put(tokens: dict[int, _Listed], directory: AdapterDirectory, name: str, listed: Iterator[AddedToken]) -> None:
    """Add a file's tokens to those of others. Raises AdapterFormatError where they contradict each other."""
    file = directory.path / name
    ids = {one.token.text: id_ for id_, one in tokens.items()}
    for token in listed:
        other = tokens.get(token.id)
        if other is not None and other.token.text != token.text:
            raise AdapterFormatError(
                f"{file}: token {token.id} is {shown(token.text)}, in {other.file.name} it is "
                f"{shown(other.token.text)}; save the tokenizer again"
            )
        if ids.setdefault(token.text, token.id) != token.id:
            where = tokens[ids[token.text]].file.name
            raise AdapterFormatError(
                f"{file}: token {shown(token.text)} has id {token.id}, in {where} it has {ids[token.text]}; save the "
                "tokenizer again"
            )
        tokens.setdefault(token.id, _Listed(token, file))


def _listed(file: Path, entries: Any) -> Iterator[AddedToken]:
    """Of a list of tokens with their ids."""
    if entries is None:
        return
    if not isinstance(entries, list):
        raise AdapterFormatError(f"{file}: added_tokens is {shown(entries)}; a list of tokens is needed")
    for index, entry in enumerate(entries):
        where = f"added_tokens[{index}]"
        if not isinstance(entry, dict):
            raise AdapterFormatError(f"{file}: {where} is {shown(entry)}; an object with id and content is needed")
        yield _token(file, where, entry.get("id"), entry)


def _decoded(file: Path, decoder: Any) -> Iterator[AddedToken]:
    """Of an object from ids to tokens."""
    if decoder is None:
        return
    if not isinstance(decoder, dict):
        raise AdapterFormatError(f"{file}: added_tokens_decoder is {shown(decoder)}; an object of tokens is needed")
    for key, entry in decoder.items():
        if not isinstance(entry, dict):
            raise AdapterFormatError(
                f"{file}: added_tokens_decoder[{shown(key)}] is {shown(entry)}; an object with content is needed"
            )
        id_ = int(key) if key.isascii() and key.isdecimal() and len(key) < 10 else key
        yield _token(file, f"added_tokens_decoder[{shown(key)}]", id_, entry)


def _numbered(file: Path, ids: dict[str, Any], specials: set[str]) -> Iterator[AddedToken]:
    """Of an object from tokens to ids. specials: tokens that other files call special."""
    for text, id_ in ids.items():
        yield _token(file, shown(text), id_, {"content": text, "special": text in specials})


def _token(file: Path, where: str, id_: Any, entry: dict[str, Any]) -> AddedToken:
    text, flags = entry.get("content"), {name: entry.get(name, False) for name in _FLAGS}
    if type(id_) is not int or not 0 <= id_ < 1 << 31:
        raise AdapterFormatError(f"{file}: the id of {where} is {shown(id_)}; a token's number is needed")
    if not isinstance(text, str) or not text:
        raise AdapterFormatError(f"{file}: content of {where} is {shown(text)}; the token's text is needed")
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise AdapterFormatError(f"{file}: {name} of {where} is {shown(value)}; it is true or false")
    return AddedToken(id_, text, **flags)


def _named(directory: AdapterDirectory, files: dict[str, dict[str, Any]]) -> tuple[dict[str, str], set[str]]:
    """The tokens that fields name, of two files the first's, and all tokens that are called special."""
    named: dict[str, str] = {}
    specials: set[str] = set()
    for name, raw in files.items():
        for field in NAMES:
            if raw.get(field) is None:
                continue
            if (text := _text(raw[field])) is None:
                raise AdapterFormatError(
                    f"{directory.path / name}: {field} is {shown(raw[field])}; a token's text is needed"
                )
            named.setdefault(field, text)
        specials.update(_specials(raw))
    return named, specials.union(named.values())


def _specials(raw: dict[str, Any]) -> Iterator[str]:
    """Texts of the special tokens without a name."""
    for field in _MORE:
        several = raw.get(field)
        several = several.values() if isinstance(several, dict) else several
        yield from filter(None, map(_text, several if isinstance(several, Iterable) else ()))


def _text(token: Any) -> str | None:
    """The text of a token, which may be an object; None for anything else."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _check_ids(served: dict[int, _Listed], base: BaseTokens) -> None:
    """Refuse a token whose id the `tokenizers` library would not give it: it numbers them after the vocabulary."""
    vocabulary = base.vocabulary
    texts = base.added | {id_: one.token.text for id_, one in served.items()}
    after = len(vocabulary)
    for id_, text in sorted(texts.items()):
        given = vocabulary.get(text, after)
        after = max(after, given + 1)
        if given == id_ or id_ not in served:
            continue
        taken = base.text_of(id_)
        why = (
            f"the next free id is {given}" if taken is None else f"the base model's tokenizer has {shown(taken)} there"
        )
        raise AdapterFormatError(
            f"{served[id_].file}: token {shown(text)} has id {id_}, and {why}; add tokens behind the base model's"
        )


def _check_parts(file: Path, parts: str) -> None:
    """Refuse a normaliser or the like that the `tokenizers` library can't read."""
    if parts:
        try:
            with_parts(parts)
        except ValueError as error:
            raise AdapterFormatError(f"{file}: {error}; save the tokenizer again") from error


def _check_vocabulary(directory: AdapterDirectory, base: BaseTokens) -> None:
    """Refuse a vocabulary that isn't the base model's, added tokens aside."""
    file, data = directory.path / TOKENIZER, directory.read(TOKENIZER, MAX_BYTES, _KIND)
    digest = hashlib.sha256(data).digest()
    if digest in base.same:
        return
    try:
        own = vocabulary_in(data)
    except ValueError as error:
        raise AdapterFormatError(f"{file}: {error}") from error
    theirs = base.vocabulary
    if own != theirs:
        different = (text for text in (*own, *theirs) if own.get(text) != theirs.get(text))
        text = next(different)
        raise AdapterFormatError(
            f"{file}: its vocabulary has token {shown(text)} as {shown(own.get(text))}, the base model's as "
            f"{shown(theirs.get(text))}; train with the base model's tokenizer, and only add tokens to it"
        )
    base.same.add(digest)
