"""What a prompt's text has at the places of its images.

Tests: tests/core/media/test_places.py, tests/core/media/test_seeing_families.py
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class ImagePlaces(NamedTuple):
    """How the texts of a prompt's images are written in it: some models write more than each image's own."""

    placeholder: str = ""
    """What a chat template writes for an image."""
    number: tuple[str, str] | None = None
    """What stands before and behind an image's number in the prompt, counted from 0, which its text begins with."""
    mark: str = ""
    """The mark that each image's text begins and ends with, where images next to each other share one. A word behind it
    is parted from it by a space."""

    def count(self, prompt: str) -> int:
        """Places of images in a chat template's text."""
        return prompt.count(self.placeholder)

    def written(self, prompt: str, texts: Iterable[str]) -> str:
        """A chat template's text with those of images, of which there are as many as places."""
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
