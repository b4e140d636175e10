"""The tokens of a base model's tokenizer, with which adapters' own are compared.

Tests: tests/memory/files/tokens/test_added_tokens.py
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ..json_stream import PIECE_BYTES, JsonStream
from .tokenizer_json import MAX_ADDED, MAX_BYTES, PARTS, TOKENIZER, Model, read_members, read_model
from .torchvision import mend_torchvision

log = logging.getLogger(__name__)

MAX_TEXT_BYTES = 2 << 20
"""Bytes of an adapter's tokenizer file other than `tokenizer.json`; more where the base model's own file is larger."""

CONFIG = "tokenizer_config.json"

MORE_TOKENS = 4096
"""Added tokens that an adapter may have more than its base model."""


@dataclass(eq=False)
class BaseTokens:
    """Reads the file when it is first asked; the vocabulary only where an added token doesn't decide.

    Raises OSError or ValueError if it can't be read.
    """

    directory: Path
    same: set[bytes] = field(default_factory=set)
    """Digests of adapters' files, from their vocabulary on, that have this model's."""
    plain: set[tuple[int, bytes]] = field(default_factory=set)
    """Adapters' tokenizer files that have the same tokens and parts: bytes of `tokenizer.json`, and a digest of its
    beginning and of the others.
    """

    @property
    def is_there(self) -> bool:
        return (self.directory / TOKENIZER).is_file()

    @cached_property
    def added(self) -> dict[int, str]:
        """Added tokens by id."""
        return {id_: token["content"] for id_, token in self._added.items()}

    @property
    def most_added(self) -> int:
        """Added tokens that a file of an adapter may have."""
        return max(MAX_ADDED, len(self.added) + MORE_TOKENS) if self.is_there else MAX_ADDED

    def most_bytes(self, name: str) -> int:
        """Bytes that a tokenizer file of an adapter may have."""
        if name == TOKENIZER:
            return MAX_BYTES
        try:
            return max(MAX_TEXT_BYTES, 2 * (self.directory / name).stat().st_size)
        except OSError:
            return MAX_TEXT_BYTES

    @cached_property
    def model(self) -> Model:
        """The vocabulary, with what else makes tokens of it."""
        return read_model(JsonStream(self._pieces()))

    @property
    def vocabulary(self) -> Mapping[str, int]:
        """Ids of all tokens but for added ones."""
        return self.model.vocabulary

    def id_of(self, text: str) -> int | None:
        return found if (found := self._ids.get(text)) is not None else self.vocabulary.get(text)

    def text_of(self, id_: int) -> str | None:
        if (text := self.added.get(id_)) is not None:
            return text
        return next((text for text, own in self.vocabulary.items() if own == id_), None)

    def has_part(self, name: str, value: Any) -> bool:
        """True if a value of `PARTS`, as JSON, is that of the base model's tokenizer: as in its file, as the library
        writes that again, or as transformers loads it, which changes some parts.
        """
        return any(form.get(name) == value for form in self._forms())

    def has_field(self, name: str, value: Any) -> bool:
        """The same for a field of the vocabulary's model."""
        if self.model.fields.get(name) == value:
            return True
        loaded = getattr(self._loaded, "model", None)
        if name == "type":
            return type(loaded).__name__ == value
        return hasattr(loaded, name) and getattr(loaded, name) == value

    def has_flags(self, id_: int, flags: Mapping[str, bool]) -> bool:
        """The same for flags of an added token."""
        tokens = (form[id_] for form in self._added_forms() if id_ in form)
        return any(flags == {name: _flag(token, name) for name in flags} for token in tokens)

    def has_digest(self, digest: bytes) -> bool:
        """True for the digest of bytes, from the vocabulary on, that are the file's own, or known to mean the same."""
        return digest in self.same or digest == self._digest

    def _forms(self) -> Iterator[Mapping[str, Any]]:
        yield self._members
        yield self._rewritten
        yield {name: _state(getattr(self._loaded, name, None)) for name in PARTS}

    def reloaded_parts(self, parts: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
        """Of `PARTS`, as JSON, those that the base model's tokenizer gets when transformers saves it and loads it
        again, where all of `parts` are of that form: empty if they are of none. They are made from its files alone.
        """
        if not self._reloaded or any(parts.get(name) != self._reloaded[name] for name in PARTS):
            return ()
        return tuple((name, json.dumps(self._reloaded[name])) for name in PARTS)

    def _added_forms(self) -> Iterator[Mapping[int, Any]]:
        """Added tokens by id: of the file, of the configuration beside it, and as transformers loads them."""
        yield self._added
        yield self._configured
        yield {} if self._loaded is None else self._loaded.get_added_tokens_decoder()

    @cached_property
    def _added(self) -> dict[int, dict[str, Any]]:
        return {token["id"]: token for token in self._members.get("added_tokens") or ()}

    @cached_property
    def _configured(self) -> dict[int, dict[str, Any]]:
        try:
            config = json.loads((self.directory / CONFIG).read_bytes())
            return {int(id_): token for id_, token in config.get("added_tokens_decoder", {}).items()}
        except (OSError, ValueError, AttributeError) as error:  # it need not be there
            log.debug("no tokens of %s: %s", self.directory / CONFIG, error)
            return {}

    @cached_property
    def _digest(self) -> bytes:
        with (self.directory / TOKENIZER).open("rb") as file:
            file.seek(self._beginning[1])
            return hashlib.file_digest(file, "sha256").digest()

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {text: id_ for id_, text in self.added.items()}

    @property
    def _members(self) -> dict[str, Any]:
        return self._beginning[0]

    @cached_property
    def _beginning(self) -> tuple[dict[str, Any], int]:
        """The members of the file but for the vocabulary, and where that begins if nothing else follows it, else 0."""
        stream = JsonStream(self._pieces())
        members, is_model_next = read_members(stream, None)
        return members, stream.position if is_model_next else 0

    @cached_property
    def _rewritten(self) -> dict[str, Any]:
        """The parts in the form of the installed library."""
        try:
            found = made_parts({name: self._members.get(name) for name in PARTS})
        except Exception as error:  # the library raises nothing narrower
            log.debug("parts of %s are not read without a vocabulary: %s", self.directory / TOKENIZER, error)
            return {}
        return {name: _state(part) for name, part in found.items()}

    @cached_property
    def _loaded(self) -> Any:
        """The tokenizer as transformers loads it, for requests; None if it can't."""
        return getattr(_load(self.directory), "backend_tokenizer", None)

    @cached_property
    def _reloaded(self) -> dict[str, Any]:
        """The parts that it has once transformers has saved and loaded it again, in which some of its classes change
        them: Llama's drops `legacy`. Empty if it can't.
        """
        found = _load(self.directory)
        if found is None:
            return {}
        with TemporaryDirectory(prefix="chorus-tokenizer-") as directory:
            try:
                found.save_pretrained(directory)
            except Exception as error:  # as in `_load`
                log.debug("transformers does not save the tokenizer of %s: %s", self.directory, error)
                return {}
            found = _load(Path(directory))
        backend = getattr(found, "backend_tokenizer", None)
        return {} if backend is None else {name: _state(getattr(backend, name)) for name in PARTS}

    def _pieces(self) -> Iterator[bytes]:
        with (self.directory / TOKENIZER).open("rb") as file:
            while piece := file.read(PIECE_BYTES):
                yield piece


def made_parts(parts: Mapping[str, Any]) -> dict[str, Any]:
    """The library's objects of parts as `tokenizer.json` has them."""
    from tokenizers import Tokenizer

    model = {"type": "BPE", "vocab": {}, "merges": []}
    made = Tokenizer.from_str(json.dumps({"version": "1.0", "added_tokens": [], **parts, "model": model}))
    return {name: getattr(made, name) for name in parts}


def _load(directory: Path) -> Any:
    """The tokenizer of a base model as transformers loads it; None if it can't."""
    mend_torchvision()
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
    except Exception as error:  # whatever it raises: the server reports it where it needs it
        log.debug("transformers does not load the tokenizer of %s: %s", directory, error)
        return None


def _flag(token: Any, name: str) -> bool:
    """A flag of an added token, as JSON or of the library."""
    return bool(token.get(name) if isinstance(token, Mapping) else getattr(token, name, False))


def _state(part: Any) -> Any:
    """A part of the library's tokenizer as JSON."""
    return None if part is None else json.loads(part.__getstate__())
