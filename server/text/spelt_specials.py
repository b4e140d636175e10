"""Keeps special tokens that a client writes in a conversation as text: only the template's become tokens.

Tests: tests/server/text/test_spelt_specials.py, tests/server/text/test_joined_specials.py
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

from .own_tokenizer import sharing

if TYPE_CHECKING:
    from tokenizers import Encoding

    from .own_tokenizer import CalledTokenizer

GUARD = "\ue000begin\ue000"
"""Token before a part of a text, because some vocabularies treat the beginning of a text differently."""

MOST_CHARACTERS = 64
"""Characters of a special token that are searched for; text that only begins like one stays text anyway."""

_KEEPS_LETTERS = {"Sequence", "Prepend", "Replace", "Strip", "ByteLevel"}
"""Normalizers that make no special token of other characters: those of SentencePiece's blanks, mostly."""


class SpeltSpecials:
    """Finds special tokens written in strings, breaks them, and encodes the text that a template made of these strings.

    A mark after the first character breaks the written token: digits, which templates do not change. The whole text is
    encoded unchanged, so the special tokens found in it are the template's. A part between two of these that contains a
    mark is encoded again without it, by a copy of the tokenizer that knows no special tokens. All other parts keep
    their usual tokens. A special token of one character can't be broken.

    A template may also put strings side by side that spell a token together, or with its own text: `torn` has a mark
    wherever a token may begin or end, so the text of a template that is given this has the template's tokens alone.
    """

    def __init__(self, backend: CalledTokenizer) -> None:
        self._backend = backend
        self._special = {i: token.content for i, token in backend.get_added_tokens_decoder().items() if token.special}
        self._words = [content for content in self._special.values() if len(content) > 1]
        cut = [content[:MOST_CHARACTERS] for content in self._words]
        self._begins = re.compile(_any_of(cut)) if cut else None
        self._torn_by = lru_cache(64)(self._tearing)

    def are_in(self, value: Any) -> bool:
        """True if a string, or any string in a list or mapping, contains a special token."""
        return self.marked(value, "0") is not value

    def marked(self, value: Any, mark: str) -> Any:
        """The value with a mark inside each special token in its strings; the value itself if there is none."""
        return _changed(value, lambda text: self._broken(text, mark))

    def _broken(self, text: str, mark: str) -> str:
        begins, parts, at = self._begins, [], 0
        while begins is not None and (found := begins.search(text, at)) is not None:
            parts += text[at : found.start() + 1], mark
            at = found.start() + 1
        return "".join((*parts, text[at:])) if parts else text

    def torn(self, value: Any, mark: str, names: frozenset[str]) -> Any:
        """The value with a mark in its strings wherever a special token may begin or end, and in each string that may
        be in the middle of one; the value itself if there is none.

        names: strings that the template looks for, which stay as they are.
        """
        tearing = self._torn_by(names)

        def tear(text: str) -> str:
            torn = tearing(self._broken(text, mark), mark)
            if torn == text and text not in names and self._is_middle(inside := text.strip()):
                return text.replace(inside[0], inside[0] + mark, 1)
            return text if torn == text else torn

        return _changed(value, tear)

    def in_order(self, text: str) -> list[str]:
        """The special tokens that are spelt in a text."""
        return [] if self._whole is None else self._whole.findall(text)

    @cached_property
    def may_be_respelt(self) -> bool:
        """True if the tokenizer finds a special token in other characters than its own, such as capitals."""
        normalizer = self._backend.backend.normalizer
        if normalizer is None or not any(
            token.normalized and token.special for token in self._backend.get_added_tokens_decoder().values()
        ):
            return False
        kinds = set(re.findall(r'"type":\s*"(\w+)"', normalizer.__getstate__().decode()))
        return bool(kinds - _KEEPS_LETTERS)

    @cached_property
    def _whole(self) -> re.Pattern[str] | None:
        return re.compile(_any_of(self._words, longest=True)) if self._words else None

    def _is_middle(self, text: str) -> bool:
        """True if a text is part of a special token."""
        return 0 < len(text) < MOST_CHARACTERS and text in self._joined

    @cached_property
    def _joined(self) -> str:
        return "\0".join(self._words)

    def _tearing(self, names: frozenset[str]) -> Callable[[str, str], str]:
        """Sets marks behind characters that begin a special token, and before those that end one. names: see `torn`."""
        firsts, lasts = ({word[at] for word in self._words if not word[at].isalnum()} for at in (0, -1))
        ends = firsts | lasts
        if not ends:
            return lambda text, _: text
        kept = sorted((name for name in names if ends & {*name} and self._is_no_part(name)), key=len, reverse=True)
        pattern = re.compile("|".join(map(re.escape, (*kept, *ends))))

        def tear(text: str, mark: str) -> str:
            def torn(found: re.Match[str]) -> str:
                end = found[0]
                return f"{mark if end in lasts else ''}{end}{mark if end in firsts else ''}"

            return pattern.sub(torn, text)

        return tear

    def _is_no_part(self, name: str) -> bool:
        """True if a special token can't begin or end within a text, or be in it."""
        heads, tails = self._parts
        pieces = range(1, len(name) + 1)
        return not (
            any(name[-count:] in heads or name[:count] in tails for count in pieces)
            or (self._begins is not None and self._begins.search(name))
        )

    @cached_property
    def _parts(self) -> tuple[set[str], set[str]]:
        """How special tokens begin, and how they end."""
        cuts = [(word, at) for word in self._words for at in range(1, min(len(word), MOST_CHARACTERS))]
        return {word[:at] for word, at in cuts}, {word[-at:] for word, at in cuts}

    def encode(self, text: str, mark: str, *, add_special_tokens: bool) -> list[int]:
        """The tokens of a text whose marks break strings that are not meant as special tokens."""
        encoding = self._backend.encode(text, add_special_tokens=add_special_tokens)
        ids: list[int] = []
        begin, since = 0, 0
        for index, (start, end, is_broken) in self._ends(text, encoding):
            part = text[begin:start]
            if mark in part or is_broken:
                ids += self._as_text(part.replace(mark, ""), is_first=begin == 0)
            else:
                ids += encoding.ids[since:index]
            ids += encoding.ids[index : index + 1]
            begin, since = end, index + 1
        return ids

    def _ends(self, text: str, encoding: Encoding) -> Iterable[tuple[int, tuple[int, int, bool]]]:
        """Index and position in the text of each special token, and of the end; and whether the part before it contains
        a special token in another spelling, which a normalizer may allow.
        """
        has_text = is_broken = False
        for index, (token_id, (start, end)) in enumerate(zip(encoding.ids, encoding.offsets, strict=True)):
            content = self._special.get(token_id)
            if content is None:
                has_text = True
            elif start == end:  # added by the tokenizer at an end of the text
                place = len(text) if has_text else 0
                yield index, (place, place, is_broken)
                is_broken = False
            elif text[start:end].strip() == content.strip():
                yield index, (start, end, is_broken)
                has_text, is_broken = True, False
            else:
                has_text = is_broken = True
        yield len(encoding.ids), (len(text), len(text), is_broken)

    def _as_text(self, part: str, *, is_first: bool) -> list[int]:
        ids = self._plain.encode(part if is_first else GUARD + part, add_special_tokens=False).ids
        return ids if is_first else ids[1:]

    @cached_property
    def _plain(self) -> CalledTokenizer:
        from tokenizers import AddedToken, Tokenizer

        backend = sharing(self._backend.backend)
        added = self._backend.get_added_tokens_decoder()
        backend.add_tokens([added[id_] for id_ in sorted(added)])
        if any(backend.token_to_id(token.content) != id_ for id_, token in added.items()):  # they leave ids out
            backend = Tokenizer.from_str(self._backend.to_str())
        backend.add_tokens([AddedToken(GUARD, normalized=False)])
        backend.encode_special_tokens = True
        return self._backend.with_backend(backend)


def _changed(value: Any, change: Callable[[str], str]) -> Any:
    """The value with all its strings changed; the value itself if none is."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return _changed_pairs(value, change)
    if isinstance(value, list | tuple):
        items = [_changed(each, change) for each in value]
        return value if all(a is b for a, b in zip(items, value, strict=True)) else items
    return value


def _changed_pairs(value: Mapping[Any, Any], change: Callable[[str], str]) -> Mapping[Any, Any]:
    pairs = {_changed(key, change): _changed(each, change) for key, each in value.items()}
    same = all(a is b and c is d for (a, c), (b, d) in zip(pairs.items(), value.items(), strict=False))
    return value if same and len(pairs) == len(value) else pairs


def new_mark() -> str:
    """A mark that no client can predict."""
    return f"{secrets.randbelow(10**12):012d}"


def _any_of(words: Iterable[str], *, longest: bool = False) -> str:
    """A regular expression that matches where any of the words begins, in a time independent of their number.

    longest: it matches the longest of the words there, otherwise the shortest.
    """
    tree: dict[str, Any] = {}
    for word in words:
        node = tree
        for character in word:
            node = node.setdefault(character, {})
        node[""] = {}
    return _pattern(tree, longest=longest)


def _pattern(node: dict[str, Any], *, longest: bool) -> str:
    if "" in node and (len(node) == 1 or not longest):
        return ""
    parts = [re.escape(character) + _pattern(rest, longest=longest) for character, rest in node.items() if character]
    one = parts[0] if len(parts) == 1 and "" not in node else f"(?:{'|'.join(parts)})"
    return f"{one}?" if "" in node else one
