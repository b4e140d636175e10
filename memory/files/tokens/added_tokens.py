"""Tokens that an adapter's own tokenizer files add to its base model's tokenizer.

Only these tokens, and flags of added tokens, are the adapter's own: the vocabulary, the normaliser and the other parts
are the base model's, and an adapter that has others is refused. The beginning of a `tokenizer.json` is parsed, up to
the vocabulary; the rest is read, and parsed only if its bytes are not the base model's or another adapter's. Nothing of
a file is given to the `tokenizers` library but the texts and flags of tokens.

Tests: tests/memory/files/tokens/test_added_tokens.py, tests/memory/files/test_hostile_files.py
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from ..directory import AdapterDirectory
from ..error import AdapterFormatError, shown
from ..json_stream import JsonStream, MalformedJson, pieces_of
from .base_tokens import CONFIG, MAX_TEXT_BYTES, BaseTokens
from .compared_tokenizer import check_vocabulary, checked_parts
from .tokenizer_json import KIND, MAX_ADDED, MAX_BYTES, TOKENIZER, read_members

LISTED, NAMED = "added_tokens.json", "special_tokens_map.json"
TOKENIZER_FILES = (TOKENIZER, CONFIG, LISTED, NAMED)
TEMPLATE_FILE = "chat_template.jinja"
TEXT_FILES = (*TOKENIZER_FILES, TEMPLATE_FILE)
"""Files that an adapter may have next to its configuration and weights: its own tokenizer and template."""

_BEGINNING = 256 << 10

MAX_TOKEN = 1024
"""Characters of an added token."""

#: Fields of a tokenizer's configuration that name one token, and those that name several.
NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_MORE = ("additional_special_tokens", "extra_special_tokens")

_DECODER = "added_tokens_decoder"
_MAX_MEMBER = 1 << 20

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

    @property
    def flags(self) -> dict[str, bool]:
        return {name: getattr(self, name) for name in _FLAGS}


@dataclass(frozen=True)
class OwnTokens:
    """The added tokens of an adapter's tokenizer, where its base model's lacks any or has other flags."""

    tokens: tuple[AddedToken, ...]
    """All its added tokens, by id; those that the base model's tokenizer has, too, with its own flags."""

    named: tuple[tuple[str, str], ...] = ()
    """Fields of `NAMES` and the tokens that they name."""

    parts: tuple[tuple[str, str], ...] = ()
    """A normaliser and the like, as JSON, where they are not those of the base model's tokenizer but those that it gets
    when transformers saves and loads it again; see `BaseTokens.reloaded_parts`."""

    @cached_property
    def digest(self) -> str:
        parts = (self.parts,) if self.parts else ()
        return hashlib.sha256(repr((self.tokens, self.named, *parts)).encode()).hexdigest()


class _Listed(NamedTuple):
    """A token, and the file that it is in."""

    token: AddedToken
    file: Path


def added_beyond(directory: AdapterDirectory, num_tokens: int, base: BaseTokens | None = None) -> dict[int, str]:
    """Tokens with ids from `num_tokens` on, in any tokenizer file of the directory; empty where it has none."""
    found = _read(directory, _contents(directory, base), base).tokens
    return {id_: one.token.text for id_, one in found.items() if id_ >= num_tokens}


def has_tokenizer_file(directory: AdapterDirectory) -> bool:
    """True if the directory has any file of a tokenizer."""
    return any(map(directory.has, TOKENIZER_FILES))


def own_tokens(
    directory: AdapterDirectory, base: BaseTokens, vocab_size: int | None, added: Collection[int] = ()
) -> OwnTokens | None:
    """The adapter's added tokens if the base model's tokenizer lacks some, or has them with other flags; None if not.

    vocab_size: of the base model's embeddings. Tokens beyond them have no row, so they are no tokens of a prompt, but
    for those of `added`.
    Raises AdapterFormatError for files that can't be read, for a token that isn't the base model's, and for a tokenizer
    that differs in anything else. Files like another adapter's without such tokens (equal, of `tokenizer.json` equal in
    the beginning and in size) are not read again: trainers save the tokenizer with each of thousands of adapters.
    """
    contents = _contents(directory, base)
    size = directory.size(TOKENIZER, KIND) if TOKENIZER in contents else 0
    key = size, _digest(contents)
    if key in base.plain:
        return None
    found = _read(directory, contents, base)
    _check_known(found.tokens, base)
    served = {id_: one for id_, one in found.tokens.items() if vocab_size is None or id_ < vocab_size or id_ in added}
    is_plain = all(_is_of_base(one, base) for one in served.values())
    if not is_plain:
        _check_ids(served, base)
    parts: tuple[tuple[str, str], ...] = ()
    if found.parts is not None:
        parts = checked_parts(directory.path / TOKENIZER, found.parts, base)
        check_vocabulary(directory, found.model_at, base)
    if is_plain and not parts:
        if not found.is_beyond:
            base.plain.add(key)
        return None
    own = OwnTokens(tuple(one.token for one in served.values()), tuple(found.named.items()), parts)
    return _known.setdefault(own.digest, own)


def _is_of_base(listed: _Listed, base: BaseTokens) -> bool:
    """True for a token that the base model's tokenizer has, too, and treats alike. `added_tokens.json` has no flags."""
    token, file = listed
    if file.name == LISTED:
        return base.id_of(token.text) is not None
    return base.added.get(token.id) == token.text and base.has_flags(token.id, token.flags)


_known: WeakValueDictionary[str, OwnTokens] = WeakValueDictionary()
"""By digest: adapters of one training set have the same, and share one object."""


class _Found(NamedTuple):
    """What the files of a directory say."""

    tokens: dict[int, _Listed]
    named: dict[str, str]
    parts: Mapping[str, Any] | None
    """Members of `tokenizer.json` but for the vocabulary; None without that file."""
    model_at: int | None
    """Where its vocabulary begins, if nothing else follows that; in bytes."""
    is_beyond: bool
    """True if more than the beginning of `tokenizer.json` says it."""


def _contents(directory: AdapterDirectory, base: BaseTokens | None) -> dict[str, bytes]:
    """The directory's files by name, of `tokenizer.json` its beginning."""
    files = {
        name: directory.read(name, MAX_TEXT_BYTES if base is None else base.most_bytes(name), KIND)
        for name in (CONFIG, LISTED, NAMED)
        if directory.has(name)
    }
    if directory.has(TOKENIZER):
        files[TOKENIZER] = directory.read_beginning(TOKENIZER, _BEGINNING, KIND)
    return files


def _digest(contents: Mapping[str, bytes]) -> bytes:
    digest = hashlib.sha256()
    for name, data in contents.items():
        digest.update(f"{name} {len(data)}\n".encode())
        digest.update(data)
    return digest.digest()


def _read(directory: AdapterDirectory, contents: Mapping[str, bytes], base: BaseTokens | None) -> _Found:
    most = MAX_ADDED if base is None else base.most_added
    config, named_in, listed = (
        _members(directory.path / name, contents.get(name), most) for name in (CONFIG, NAMED, LISTED)
    )
    named, specials = _named(directory, {CONFIG: config, NAMED: named_in})
    tokens: dict[int, _Listed] = {}
    parts, model_at, is_beyond = None, None, False
    if TOKENIZER in contents:
        parts, model_at, num_bytes = _tokenizer(directory, contents[TOKENIZER], most)
        is_beyond = num_bytes > len(contents[TOKENIZER])
        _put(tokens, directory, TOKENIZER, _listed(directory.path / TOKENIZER, parts.get("added_tokens")))
    _put(tokens, directory, CONFIG, _decoded(directory.path / CONFIG, config.get(_DECODER)))
    _put(tokens, directory, LISTED, _numbered(directory.path / LISTED, listed, specials))
    return _Found(dict(sorted(tokens.items())), named, parts, model_at, is_beyond)


def _members(file: Path, data: bytes | None, most: int) -> dict[str, Any]:
    """The members of a file's JSON object; empty without the file. most: tokens that it may name."""
    if data is None:
        return {}
    stream, found = JsonStream.of(data), {}
    try:
        if stream.next_mark() != "{":
            raise AdapterFormatError(f"{file}: holds {shown(stream.value())}; a JSON object is needed")
        _take_members(stream, found, most)
        stream.finish()
    except MalformedJson as error:
        raise AdapterFormatError(f"{file}: {error}") from error
    return found


def _take_members(stream: JsonStream, found: dict[str, Any], most: int) -> None:
    """Read an object. One that lists tokens by id is read entry by entry, too."""
    for key in stream.members():
        if key in found:
            raise MalformedJson(f"key {shown(key)} occurs twice")
        if len(found) == most:
            raise MalformedJson(f"more than {most} added tokens")
        found[key] = None
        if key == _DECODER and stream.next_mark() == "{":
            found[key] = {}
            _take_members(stream, found[key], most)
        else:
            found[key] = stream.value(_MAX_MEMBER)


def _tokenizer(directory: AdapterDirectory, beginning: bytes, most: int) -> tuple[dict[str, Any], int | None, int]:
    """The members of `tokenizer.json` but for the vocabulary, where that begins, and the bytes that were read."""
    rest = directory.pieces(TOKENIZER, len(beginning), MAX_BYTES, KIND)
    stream = JsonStream(chain(pieces_of(beginning), rest))
    try:
        members, is_model_next = read_members(stream, most)
    except MalformedJson as error:
        raise AdapterFormatError(f"{directory.path / TOKENIZER}: {error}") from error
    finally:
        rest.close()
    return members, stream.position if is_model_next else None, stream.num_bytes


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
        if other is None or name == CONFIG:  # whose flags transformers takes, of two
            tokens[token.id] = _Listed(token, file)


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
    if len(text) > MAX_TOKEN or not _is_unicode(text):
        raise AdapterFormatError(
            f"{file}: content of {where} is {shown(text)}; at most {MAX_TOKEN} characters of Unicode are served"
        )
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise AdapterFormatError(f"{file}: {name} of {where} is {shown(value)}; it is true or false")
    return AddedToken(id_, text, **flags)


def _is_unicode(text: str) -> bool:
    """False for half of a surrogate pair."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _named(directory: AdapterDirectory, files: dict[str, dict[str, Any]]) -> tuple[dict[str, str], set[str]]:
    """The tokens that fields name, of two files the first's, and all tokens that are called special."""
    named: dict[str, str] = {}
    specials: set[str] = set()
    for name, raw in files.items():
        for field in NAMES:
            if raw.get(field) is None:
                continue
            text = _text(raw[field])
            if text is None or len(text) > MAX_TOKEN or not _is_unicode(text):
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


def _check_known(tokens: Mapping[int, _Listed], base: BaseTokens) -> None:
    """Refuse a token that has another id in the base model's tokenizer."""
    for id_, (token, file) in tokens.items():
        known = base.id_of(token.text)
        if known is not None and known != id_:
            raise AdapterFormatError(
                f"{file}: token {shown(token.text)} has id {id_}, in the base model's tokenizer it has {known}; train "
                "with the base model's tokenizer, and only add tokens to it"
            )


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
