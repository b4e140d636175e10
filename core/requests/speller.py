"""Texts as a grammar in llguidance's dialect of Lark has them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping


class Speller:
    """Writes texts as a grammar has them: special tokens by their ids, since no text in a grammar matches these."""

    def __init__(self, specials: Mapping[str, int]) -> None:
        """specials: ids of the special tokens that texts may have, by their spelling."""
        self.specials = specials
        longest_first = sorted(specials, key=len, reverse=True)
        self._pattern = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if specials else None

    def __call__(self, text: str) -> str:
        parts = [text] if self._pattern is None else self._pattern.split(text)
        return " ".join(f"<[{self.specials[p]}]>" if p in self.specials else json.dumps(p) for p in parts if p)

    def first_of(self, text: str) -> str:
        """The special token that a text begins with; "": none."""
        found = None if self._pattern is None else self._pattern.match(text)
        return "" if found is None else found[0]

    def text_up_to(self, rule: str, end: str) -> str:
        """A rule: any text up to the first end, and the end."""
        return f"{rule}{'' if end in self.specials else '[lazy]'}: TEXT {self(end)}"


ANY_TEXT = "TEXT: /(.|\\n)*/"
"""The rule that `Speller.text_up_to` needs."""
