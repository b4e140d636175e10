"""Regular expressions from untrusted files, matched with module names like `re`, but in a bounded number of steps.

`re` parses them. There is no backtracking. A step leads from the set of all positions where a prefix of the pattern may
end to the positions where a longer prefix may end, in all module names at once. It supports the syntax of PEFT's files:
literals, `.`, classes, groups, alternatives, repeats, and look-ahead, which ms-swift uses anywhere in a pattern and
google-re2 lacks. Everything else is refused by name.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from ..error import shown
from .module_names import ModuleNames

MAX_CHARACTERS = 2000
MAX_REPEATS = 255
MAX_DEPTH = 20

#: The most steps of all patterns of one file together: half a second at most. A thousand plain names take 25,000.
MAX_STEPS = 50_000

_STEPS_AT_ONCE = 64
_STEPS_OF_A_CLASS = 10  # every character of the names is examined
_CHARACTERS_PER_STEP = 16  # of a pattern being parsed

#: An escaped character, or a class, which may be unterminated.
_OPAQUE = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]?", re.DOTALL)

#: Characters in a class that a future `re` may interpret differently.
_AMBIGUOUS = re.compile(r"(?<!\\)(?:\\\\)*(\[|--|&&|~~|\|\|)")

_parser: Any = import_module("re._parser")
_ops: Any = import_module("re._constants")


class PatternError(ValueError):
    """Why a pattern is not supported."""


class Steps:
    """Budget of steps for all patterns of one file together."""

    def __init__(self, left: int = MAX_STEPS) -> None:
        self.left = left
        self._pause_at = left - _STEPS_AT_ONCE

    def take(self, count: int = 1) -> None:
        self.left -= count
        if self.left <= self._pause_at:
            self._pause_at = self.left - _STEPS_AT_ONCE
            time.sleep(0)  # lets another thread run at once, not at the end of this one's time slice
        if self.left < 0:
            raise PatternError("its patterns take too many steps; write fewer of them, without repeats of repeats")


@dataclass(slots=True)
class _Walk:
    """One pass over the names. backwards: from the pattern's end to its beginning."""

    names: ModuleNames
    steps: Steps
    backwards: bool = False

    def move(self, positions: int, characters: int, count: int = 1) -> int:
        """Move over `count` characters that are among `characters`."""
        return positions >> count & characters if self.backwards else (positions & characters) << count


#: A part of a pattern: maps the positions where it may begin to the positions where it may end.
_Part = Callable[[_Walk, int], int]


class NamePattern:
    """One expression. If it is not supported, raises the error that `refuse` makes from the reason.

    It is parsed when it is matched, and the result is not kept. A file's thousand patterns, parsed all at once, are so
    many objects that the garbage collector takes a tenth of a second, while every other thread waits.
    """

    def __init__(self, pattern: str, refuse: Callable[[str], Exception], steps: Steps) -> None:
        self._pattern, self._refuse, self._steps = pattern, refuse, steps
        if len(pattern) > MAX_CHARACTERS:
            raise refuse(f"a pattern has {len(pattern)} characters, at most {MAX_CHARACTERS} are taken")

    @property
    def is_one_of_several(self) -> bool:
        """True if it has a `|` outside of all groups."""
        depth = 0
        for character in _OPAQUE.sub("", self._pattern):
            depth += (character == "(") - (character == ")")
            if character == "|" and not depth:
                return True
        return False

    def whole(self, names: ModuleNames) -> int:
        """The ends of the names that `re.fullmatch` finds."""
        return self._run(names, names.starts)

    def tail(self, names: ModuleNames, among: int) -> int:
        r"""The ends, within `among`, of the names that `re.match(rf"(.*\.)?({pattern})$", name)` finds."""
        return self._run(names, names.starts | names.after_dots if among else 0) & among

    def before_number(self, names: ModuleNames, *, anywhere: bool) -> int:
        r"""The ends of the names in which `{pattern}\.\d+\.` matches at the beginning, or with `anywhere` also after a
        dot.
        """
        begin = names.starts | names.after_dots if anywhere else names.starts
        return self._run(names, begin, _NUMBER)

    def _run(self, names: ModuleNames, positions: int, then: Sequence[_Part] = ()) -> int:
        part = _sequence([self._parse(), *then])
        if not positions:
            return 0
        try:
            return part(_Walk(names, self._steps), positions) & names.ends
        except PatternError as error:
            raise self._refuse(f"{error}; matching stopped at {shown(self._pattern)}") from None

    def _parse(self) -> _Part:
        try:
            return _parsed(self._pattern, self._steps)
        except (PatternError, re.error, OverflowError) as error:
            raise self._refuse(f"{shown(self._pattern)} is not a supported regular expression: {error}") from None


# -- the parts


def _word(text: str) -> _Part:
    """Literals one after another, the largest part of most patterns."""

    def run(walk: _Walk, positions: int) -> int:
        walk.steps.take(1 + len(text) // 8)
        for character in reversed(text) if walk.backwards else text:
            if not positions:
                break
            positions = walk.move(positions, walk.names.character(character))
        return positions

    return run


class _Class:
    r"""One character of a kind: `.`, `\d`, `[a-z]`."""

    def __init__(self, is_taken: Callable[[str], bool]) -> None:
        self._is_taken = is_taken
        self._known: tuple[ModuleNames, int] | None = None

    def characters(self, names: ModuleNames) -> int:
        if self._known is None or self._known[0] is not names:
            self._known = names, names.where(self._is_taken)
        return self._known[1]

    def __call__(self, walk: _Walk, positions: int) -> int:
        walk.steps.take()
        return walk.move(positions, self.characters(walk.names))

    def repeat(self, walk: _Walk, positions: int) -> int:
        """Any number of them, including none, in logarithmically many steps."""
        for power, run in enumerate(walk.names.runs(self.characters(walk.names))):
            walk.steps.take()
            positions |= walk.move(positions, run, 1 << power)
        return positions


def _sequence(parts: list[_Part]) -> _Part:
    if len(parts) == 1:
        return parts[0]

    def run(walk: _Walk, positions: int) -> int:
        for part in reversed(parts) if walk.backwards else parts:
            if not positions:
                return 0
            positions = part(walk, positions)
        return positions

    return run


def _either(parts: list[_Part]) -> _Part:
    if len(parts) == 1:
        return parts[0]

    def run(walk: _Walk, positions: int) -> int:
        found = 0
        for part in parts:
            found |= part(walk, positions)
        return found

    return run


def _repeat(part: _Part, least: int, most: int | None) -> _Part:
    def run(walk: _Walk, positions: int) -> int:
        for _ in range(least):
            if not positions:
                return 0
            walk.steps.take()
            positions = part(walk, positions)
        if most is None and isinstance(part, _Class):
            return part.repeat(walk, positions)
        found = new = positions
        for _ in range(walk.names.longest + 1 if most is None else most - least):
            if not new:
                break
            walk.steps.take()
            new = part(walk, new) & ~found  # a position reached with fewer repeats is better than with more
            found |= new
        return found

    return run


def _where(find: Callable[[ModuleNames], int]) -> _Part:
    """Match nothing, at certain positions."""

    def run(walk: _Walk, positions: int) -> int:
        walk.steps.take()
        return positions & find(walk.names)

    return run


def _ahead(part: _Part, wanted: bool) -> _Part:
    """Match nothing, where `part` follows, or where it does not."""

    def run(walk: _Walk, positions: int) -> int:
        begins = part(_Walk(walk.names, walk.steps, backwards=True), walk.names.everywhere)
        return positions & begins if wanted else positions & ~begins

    return run


_ANY = _Class(lambda character: True)
_NUMBER = [_word("."), _repeat(_Class(str.isdecimal), 1, None), _word("."), _repeat(_ANY, 0, None)]
_STARTS, _ENDS = _where(lambda names: names.starts), _where(lambda names: names.ends)
_ANCHORS: dict[Any, _Part] = {
    _ops.AT_BEGINNING: _STARTS,
    _ops.AT_BEGINNING_STRING: _STARTS,
    _ops.AT_END: _ENDS,
    _ops.AT_END_STRING: _ENDS,
    _ops.AT_BOUNDARY: _where(lambda names: names.word_boundaries),
    _ops.AT_NON_BOUNDARY: _where(lambda names: names.everywhere & ~names.word_boundaries),
}
_CATEGORIES: dict[Any, Callable[[str], bool]] = {
    _ops.CATEGORY_DIGIT: str.isdecimal,
    _ops.CATEGORY_SPACE: str.isspace,
    _ops.CATEGORY_WORD: lambda character: character.isalnum() or character == "_",
    _ops.CATEGORY_NOT_DIGIT: lambda character: not character.isdecimal(),
    _ops.CATEGORY_NOT_SPACE: lambda character: not character.isspace(),
    _ops.CATEGORY_NOT_WORD: lambda character: not (character.isalnum() or character == "_"),
}


# -- from the result of `re`'s parser


def _parsed(pattern: str, steps: Steps) -> _Part:
    steps.take(len(pattern) // _CHARACTERS_PER_STEP)
    for each in _OPAQUE.finditer(pattern):
        if each[0].startswith("[") and (found := _AMBIGUOUS.search(each[0], 1)):
            raise PatternError(
                f"{shown(found[1])} at position {each.start() + found.start(1)} stands in a character "
                "set; write it with a backslash"
            )
    try:
        tree = _parser.parse(pattern)
    except RecursionError:
        raise PatternError(f"groups in groups, more than {MAX_DEPTH} deep") from None
    if tree.state.flags != re.UNICODE or tree.state.groupdict:
        raise PatternError("flags such as (?i), and groups with names, are not served")
    return _part_of(tree, steps)


def _part_of(items: Iterable[tuple[Any, Any]], steps: Steps, depth: int = 0) -> _Part:
    if depth > MAX_DEPTH:
        raise PatternError(f"groups in groups, more than {MAX_DEPTH} deep")
    parts, word = [], ""
    for op, value in items:
        if op is _ops.LITERAL:
            word += chr(value)
            continue
        if word:
            parts.append(_word(word))
            word = ""
        steps.take()
        parts.append(_item(op, value, steps, depth))
    return _sequence([*parts, _word(word)] if word else parts)


def _item(op: Any, value: Any, steps: Steps, depth: int) -> _Part:
    match op:
        case _ops.ANY:
            return _ANY
        case _ops.NOT_LITERAL:
            return _class([(_ops.NEGATE, None), (_ops.LITERAL, value)], steps)
        case _ops.IN:
            return _class(value, steps)
        case _ops.AT:
            return _ANCHORS[value]
        case _ops.BRANCH:
            return _either([_part_of(each, steps, depth) for each in value[1]])
        case _ops.SUBPATTERN if not (value[1] or value[2]):
            return _part_of(value[3], steps, depth + 1)
        case _ops.MAX_REPEAT | _ops.MIN_REPEAT:  # which names match does not depend on how many repeats are tried first
            least, most, items = value
            if max(least, 0 if most is _ops.MAXREPEAT else most) > MAX_REPEATS:
                raise PatternError(f"a repeat of more than {MAX_REPEATS} times")
            return _repeat(_part_of(items, steps, depth), least, None if most is _ops.MAXREPEAT else most)
        case _ops.ASSERT | _ops.ASSERT_NOT if value[0] > 0:
            return _ahead(_part_of(value[1], steps, depth + 1), op is _ops.ASSERT)
    raise PatternError(f"{str(op).lower().replace('_', ' ')} is not served")


def _class(items: Sequence[tuple[Any, Any]], steps: Steps) -> _Class:
    steps.take(_STEPS_OF_A_CLASS + len(items))
    wanted = items[0][0] is not _ops.NEGATE
    literals = {chr(value) for op, value in items if op is _ops.LITERAL}
    ranges = [value for op, value in items if op is _ops.RANGE]
    kinds = [_CATEGORIES[value] for op, value in items if op is _ops.CATEGORY]

    def is_taken(character: str) -> bool:
        code = ord(character)
        found = (
            character in literals
            or any(first <= code <= last for first, last in ranges)
            or any(is_kind(character) for is_kind in kinds)
        )
        return found is wanted

    return _Class(is_taken)
