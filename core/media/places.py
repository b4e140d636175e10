"""Writes the texts of images into a prompt.

Tests: tests/core/media/test_places.py, tests/core/media/test_seeing_families.py
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class ImagePlaces(NamedTuple):
    """How a model's prompts show images: each placeholder of the chat template becomes the text of one image."""

    placeholder: str = ""
    """What a chat template writes for an image."""
    number: tuple[str, str] | None = None
    """Texts around the number, from 0 on, with which an image's text begins. None: images have no numbers."""
    mark: str = ""
    """What begins and ends each image's text, once between neighbouring images; a space parts it from words behind it.
    Empty: there is nothing.
    """

    def count(self, prompt: str) -> int:
        """Placeholders in a chat template's text."""
        return prompt.count(self.placeholder)

    def written(self, prompt: str, texts: Iterable[str]) -> str:
        """A chat template's text with the placeholders replaced by `texts`, one each, in order."""
        first, *others = prompt.split(self.placeholder)
        if self.number is not None:
            before, behind = self.number
            texts = (f"{before}{index}{behind}{text}" for index, text in enumerate(texts))
        found = first + "".join(text + rest for text, rest in zip(texts, others, strict=True))
        return self._parted(found.replace(self.mark * 2, self.mark)) if self.mark else found

    def _parted(self, prompt: str) -> str:
        """As transformers' processor does it: not before white space, nor before another mark."""
        first, *others = prompt.split(self.mark)
        spaces = ("" if not rest or rest[0] == "<" or rest[0].isspace() else " " for rest in others)
        return first + "".join(f"{self.mark}{space}{rest}" for space, rest in zip(spaces, others, strict=True))
