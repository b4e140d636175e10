"""The tokens of a base model's tokenizer, with which adapters' own are compared.

Tests: tests/memory/files/test_added_tokens.py
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from .json_stream import PIECE_BYTES, JsonStream
from .tokenizer_json import MAX_ADDED, MAX_BYTES, PARTS, TOKENIZER, Model, read_members, read_model

log = logging.getLogger(__name__)

MAX_TEXT_BYTES = 2 << 20
"""Bytes of an adapter's tokenizer file other than `tokenizer.json`; more where the base model's own file is larger."""

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
    plain: set[bytes] = field(default_factory=set)
    """Digests of adapters' tokenizer files that name no other tokens."""

    @property
    def is_there(self) -> bool:
        return (self.directory / TOKENIZER).is_file()

    @cached_property
    def added(self) -> dict[int, str]:
        """Added tokens by id."""
        return {token["id"]: token["content"] for token in self._members.get("added_tokens") or ()}

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
        return (type(loaded).__name__ if name == "type" else getattr(loaded, name, None)) == value

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

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {text: id_ for id_, text in self.added.items()}

    @cached_property
    def _members(self) -> dict[str, Any]:
        return read_members(JsonStream(self._pieces()), None)[0]

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
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
    except Exception as error:  # whatever it raises: the server reports it where it needs it
        log.debug("transformers does not load the tokenizer of %s: %s", directory, error)
        return None


def _state(part: Any) -> Any:
    """A part of the library's tokenizer as JSON."""
    return None if part is None else json.loads(part.__getstate__())
