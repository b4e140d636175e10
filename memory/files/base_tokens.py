"""The tokens of a base model's tokenizer, with which adapters' own are compared.

Tests: tests/memory/files/test_added_tokens.py
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from .tokenizer_json import TOKENIZER, read_members, vocabulary_in


@dataclass(eq=False)
class BaseTokens:
    """Reads the file when it is first asked; the vocabulary only where an added token doesn't decide.

    Raises OSError or ValueError if it can't be read.
    """

    directory: Path
    same: set[bytes] = field(default_factory=set)
    """Digests of adapters' files whose vocabulary is this one."""
    plain: set[bytes] = field(default_factory=set)
    """Digests of adapters' tokenizer files that name no other tokens."""

    @property
    def is_there(self) -> bool:
        return (self.directory / TOKENIZER).is_file()

    @cached_property
    def added(self) -> dict[int, str]:
        """Added tokens by id."""
        members, _ = read_members(self._data())
        return {token["id"]: token["content"] for token in members.get("added_tokens") or ()}

    @cached_property
    def vocabulary(self) -> dict[str, int]:
        """Ids of all tokens but for added ones."""
        return vocabulary_in(self._data())

    def id_of(self, text: str) -> int | None:
        return found if (found := self._ids.get(text)) is not None else self.vocabulary.get(text)

    def text_of(self, id_: int) -> str | None:
        if (text := self.added.get(id_)) is not None:
            return text
        return next((text for text, own in self.vocabulary.items() if own == id_), None)

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {text: id_ for id_, text in self.added.items()}

    def _data(self) -> bytes:
        return (self.directory / TOKENIZER).read_bytes()
