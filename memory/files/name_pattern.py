"""Regular expressions that an untrusted file matches module names with, as `re` does, in a bounded number of steps.

No backtracking: a step leads from the set of all places where a prefix of the pattern may end to the set of places
where a longer prefix may end, in all module names at once. Supported is what PEFT's files use: literals, `.`, classes,
groups, alternatives, repeats and look-ahead. The rest is refused by name.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .error import shown
from .module_names import ModuleNames

MAX_CHARACTERS = 2000
MAX_REPEATS = 255
MAX_DEPTH = 20

#: Steps that all patterns of one file may take together, half a second at most. A thousand plain names take 25,000.
MAX_STEPS = 50_000

_STEPS_AT_ONCE = 64
_STEPS_OF_A_CLASS = 10  # `re` compiles it

_WORD = re.compile(r"[A-Za-z0-9_]+(?![*+?{])")
_REPEAT = re.compile(r"\{(\d{0,3})(,?)(\d{0,3})\}")
_AMBIGUOUS = ("--", "&&", "~~", "||")


class PatternError(ValueError):
    """Reason why something is no pattern of the kind that is served."""


class Steps:
    """Budget of steps that the patterns of one file may take together."""

    def __init__(self, left: int = MAX_STEPS) -> None:
        self.left = left
        self._pause_at = left - _STEPS_AT_ONCE

    def take(self, count: int = 1) -> None:
        self.left -= count
        if self.left <= self._pause_at:
            self._pause_at = self.left - _STEPS_AT_ONCE
            time.sleep(0)  # lets another thread have the interpreter at once, not when this one's turn is up
        if self.left < 0:
            raise PatternError("its patterns take too many steps; write fewer of them, without repeats of repeats")


@dataclass(slots=True)
class _Walk:
    """One pass over the names. backwards: from where the pattern ends to where it begins."""

    names: ModuleNames
    steps: Steps
    backwards: bool = False

    def move(self, places: int, characters: int, count: int = 1) -> int:
        """Over `count` characters, of which `characters` are known to stand there."""
        return places >> count & characters if self.backwards else (places & characters) << count


#: A part of a pattern: maps the places where it may begin to the places where it may end.
_Part = Callable[[_Walk, int], int]


class NamePattern:
    """One expression. Raises what `refuse` makes of the reason when it is none that is served.

    It is parsed when it is matched, and nothing of that stays: a file's thousand patterns, parsed all at once, are so
    many objects that the garbage collector looks at them for a tenth of a second, while every other thread waits.
    """

    def __init__(self, pattern: str, refuse: Callable[[str], Exception], steps: Steps) -> None:
        self._pattern, self._refuse, self._steps = pattern, refuse, steps
        if len(pattern) > MAX_CHARACTERS:
            raise refuse(f"a pattern has {len(pattern)} characters, at most {MAX_CHARACTERS} are taken")

    @property
    def is_one_of_several(self) -> bool:
        """True if it has a `|` outside of all groups."""
        return len(self._parse()) > 1

    def whole(self, names: ModuleNames) -> int:
        """The ends of the names that `re.fullmatch` finds."""
        return self._run(names, names.starts)

    def tail(self, names: ModuleNames, among: int) -> int:
        r"""The ends, within `among`, of the names that `re.match(rf"(.*\.)?({pattern})$", name)` finds."""
        return self._run(names, names.starts | names.after_dots if among else 0) & among

    def before_number(self, names: ModuleNames, *, anywhere: bool) -> int:
        r"""The ends of the names that `{pattern}\.\d+\.` finds at the beginning, or `anywhere` behind a dot, too."""
        begin = names.starts | names.after_dots if anywhere else names.starts
        return self._run(names, begin, _NUMBER)

    def _run(self, names: ModuleNames, places: int, then: Sequence[_Part] = ()) -> int:
        part = _sequence([_either(self._parse()), *then])
        if not places:
            return 0
        try:
            return part(_Walk(names, self._steps), places) & names.ends
        except PatternError as error:
            raise self._refuse(f"{error}; matching stopped at {shown(self._pattern)}") from None

    def _parse(self) -> list[_Part]:
        """Its alternatives."""
        try:
            return _Parser(self._pattern, self._steps).parse()
        except PatternError as error:
            raise self._refuse(
                f"{shown(self._pattern)} is no regular expression as PEFT's files have them: {error}"
            ) from None


# -- the parts


def _word(text: str) -> _Part:
    """Literals one after another: most of what a pattern is."""

    def run(walk: _Walk, places: int) -> int:
        walk.steps.take(1 + len(text) // 8)
        for character in reversed(text) if walk.backwards else text:
            if not places:
                break
            places = walk.move(places, walk.names.character(character))
        return places

    return run


class _Class:
    r"""One character of a kind: `.`, `\d`, `[a-z]`. The kind is what `re` says that it is."""

    def __init__(self, text: str) -> None:
        try:
            self._is_taken = re.compile(text).match
        except (re.error, OverflowError) as error:
            raise PatternError(f"{shown(text)}: {error}") from None
        self._known: tuple[ModuleNames, int] | None = None

    def characters(self, names: ModuleNames) -> int:
        if self._known is None or self._known[0] is not names:
            self._known = names, names.where(self._is_taken)
        return self._known[1]

    def __call__(self, walk: _Walk, places: int) -> int:
        walk.steps.take()
        return walk.move(places, self.characters(walk.names))

    def repeat(self, walk: _Walk, places: int) -> int:
        """Any number of them, none too, in as many steps as the number has digits."""
        for power, run in enumerate(walk.names.runs(self.characters(walk.names))):
            walk.steps.take()
            places |= walk.move(places, run, 1 << power)
        return places


def _sequence(parts: list[_Part]) -> _Part:
    if len(parts) == 1:
        return parts[0]

    def run(walk: _Walk, places: int) -> int:
        for part in reversed(parts) if walk.backwards else parts:
            if not places:
                return 0
            places = part(walk, places)
        return places

    return run


def _either(parts: list[_Part]) -> _Part:
    if len(parts) == 1:
        return parts[0]

    def run(walk: _Walk, places: int) -> int:
        found = 0
        for part in parts:
            found |= part(walk, places)
        return found

    return run


def _repeat(part: _Part, least: int, most: int | None) -> _Part:
    def run(walk: _Walk, places: int) -> int:
        for _ in range(least):
            if not places:
                return 0
            walk.steps.take()
            places = part(walk, places)
        if most is None and isinstance(part, _Class):
            return part.repeat(walk, places)
        found = new = places
        for _ in range(walk.names.longest + 1 if most is None else most - least):
            if not new:
                break
            walk.steps.take()
            new = part(walk, new) & ~found  # a place that took fewer repeats is worth more than one that took more
            found |= new
        return found

    return run


def _where(find: Callable[[ModuleNames], int]) -> _Part:
    """Nothing, at certain places."""

    def run(walk: _Walk, places: int) -> int:
        walk.steps.take()
        return places & find(walk.names)

    return run


def _ahead(part: _Part, wanted: bool) -> _Part:
    """Nothing, where `part` comes next, or where it doesn't."""

    def run(walk: _Walk, places: int) -> int:
        begins = part(_Walk(walk.names, walk.steps, backwards=True), walk.names.everywhere)
        return places & begins if wanted else places & ~begins

    return run


_ANCHORS: dict[str, _Part] = {
    "^": _where(lambda names: names.starts),
    "$": _where(lambda names: names.ends),
    "\\b": _where(lambda names: names.word_boundaries),
    "\\B": _where(lambda names: names.everywhere & ~names.word_boundaries),
}
_ANY = _Class(".")
_NUMBER = [_word("."), _repeat(_Class("[0-9]"), 1, None), _word("."), _repeat(_ANY, 0, None)]


# -- the parser


class _Parser:
    def __init__(self, pattern: str, steps: Steps) -> None:
        self._text = pattern
        self._steps = steps
        self._at = 0
        self._depth = 0

    def parse(self) -> list[_Part]:
        """The alternatives outside of all groups."""
        parts = self._alternatives()
        if self._at < len(self._text):
            raise PatternError(f"unbalanced parenthesis at position {self._at}")
        return parts

    def _next(self) -> str:
        return self._text[self._at : self._at + 1]

    def _skip(self, text: str) -> bool:
        if found := self._text.startswith(text, self._at):
            self._at += len(text)
        return found

    def _alternatives(self) -> list[_Part]:
        parts = [self._items()]
        while self._skip("|"):
            parts.append(self._items())
        return parts

    def _items(self) -> _Part:
        parts = []
        while self._next() not in ("", "|", ")"):
            parts.append(self._item())
        return _sequence(parts)

    def _item(self) -> _Part:
        self._steps.take()
        if word := _WORD.match(self._text, self._at):
            self._at = word.end()
            return _word(word[0])
        start = self._at
        part, may_repeat = self._atom()
        least, most = 1, 1
        if self._skip("*"):
            least, most = 0, None
        elif self._skip("+"):
            least, most = 1, None
        elif self._skip("?"):
            least, most = 0, 1
        elif self._next() == "{":
            least, most = self._counts()
        else:
            return part
        if not may_repeat:
            raise PatternError(f"nothing to repeat at position {start}")
        self._skip("?")  # as few as possible: which names match does not depend on it
        if self._next() in ("*", "+", "?", "{"):
            raise PatternError(f"a repeat of a repeat, or one that gives nothing back, at position {self._at}")
        return _repeat(part, least, most)

    def _counts(self) -> tuple[int, int | None]:
        found = _REPEAT.match(self._text, self._at)
        if found is None or not (found[1] or found[3]):
            raise PatternError(
                f"'{{' at position {self._at} begins no repeat such as {{2,3}} of at most {MAX_REPEATS}; "
                "write '\\{' for the character"
            )
        self._at = found.end()
        least = int(found[1] or 0)
        most = least if not found[2] else int(found[3]) if found[3] else None
        if max(least, most or 0) > MAX_REPEATS or (most is not None and most < least):
            raise PatternError(f"{found[0]} repeats more than {MAX_REPEATS} times, or from more to less")
        return least, most

    def _atom(self) -> tuple[_Part, bool]:
        """A part, and whether it may be repeated."""
        character = self._next()
        if character == "(":
            return self._group()
        if character == "[":
            self._steps.take(_STEPS_OF_A_CLASS)
            return _Class(self._class()), True
        if character in ("*", "+", "?", "{"):
            raise PatternError(f"'{character}' at position {self._at} has nothing to repeat")
        if character == "\\":
            escape = self._text[self._at : self._at + 2]
            self._at += 2
            if escape in _ANCHORS:
                return _ANCHORS[escape], False
            if escape[1:] in tuple("dDwWsS"):
                return _Class(escape), True
            if len(escape) < 2 or escape[1].isalnum():
                raise PatternError(f"{shown(escape)} at position {self._at - 2} is not served")
            return _word(escape[1]), True
        self._at += 1
        if character in _ANCHORS:
            return _ANCHORS[character], False
        return (_ANY if character == "." else _word(character)), True

    def _group(self) -> tuple[_Part, bool]:
        start = self._at
        self._at += 1
        looks = None
        if self._skip("?="):
            looks = True
        elif self._skip("?!"):
            looks = False
        elif self._next() == "?" and not self._skip("?:"):
            raise PatternError(f"{shown(self._text[start : start + 4])} at position {start} is not served")
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise PatternError(f"groups in groups, more than {MAX_DEPTH} deep")
        part = _either(self._alternatives())
        self._depth -= 1
        if not self._skip(")"):
            raise PatternError(f"missing ), unterminated group at position {start}")
        return (part, True) if looks is None else (_ahead(part, looks), False)

    def _class(self) -> str:
        """The text of a class; what `re` may read otherwise one day is refused."""
        start = self._at
        self._at += 1
        self._skip("^")
        self._skip("]")
        while not self._skip("]"):
            character = self._next()
            if not character:
                raise PatternError(f"unterminated character set at position {start}")
            if character == "[" or self._text[self._at : self._at + 2] in _AMBIGUOUS:
                raise PatternError(f"{shown(character)} at position {self._at} stands in a character set; write it "
                                   "with a backslash")  # fmt: skip
            self._at += 2 if character == "\\" else 1
        return self._text[start : self._at]
