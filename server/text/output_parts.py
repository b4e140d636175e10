"""Parts of generated text: reasoning, content and tool calls, as parsers give them.

Tests: tests/server/text/test_output_parser.py
"""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from ...core.requests.types import TokenLogprobs
from .argument_syntax import SPACE
from .detokenizer import overlap

ID_LETTERS = string.ascii_letters + string.digits


_BLANK = re.compile(rf"[{SPACE}]*\Z")


class _Letters:
    """Random letters and digits; `format` tells how many."""

    def __format__(self, count: str) -> str:
        return "".join(secrets.choice(ID_LETTERS) for _ in range(int(count)))


class PartKind(StrEnum):
    """The kind of a part."""

    REASONING = "reasoning"
    CONTENT = "content"
    CALL = "call"  # a call begins
    ARGUMENTS = "arguments"


class OutputKind(StrEnum):
    """What a parsed output had; it may have several of these."""

    TEXT = "text"
    REASONING = "reasoning"
    OPEN_REASONING = "open_reasoning"  # that the output's end cut off
    CALL = "call"
    CALL_IN_REASONING = "call_in_reasoning"  # before the mark that closes reasoning
    OPEN_CALL = "open_call"  # that the output's end cut off
    UNPARSED = "unparsed"  # the mark of a call before what is none: no JSON, or no function of that name


class Part(NamedTuple):
    """A part of the generated text, in order."""

    kind: PartKind
    text: str
    """Reasoning, content, the name of the function of a call that begins, or a piece of its arguments' JSON."""
    call: int = -1
    """Index of the call, from 0."""
    id: str = ""
    """Id of the call, at its beginning."""
    at: int = 0
    """Position of content in the generated text."""
    scores: tuple[TokenLogprobs, ...] = ()
    """Log-probabilities of content's tokens, see `ContentLogprobs`."""


@dataclass(slots=True)
class ToolCall:
    """A tool call."""

    id: str
    name: str
    arguments: str = ""
    """JSON, incomplete if the output was cut off."""


@dataclass(slots=True)
class ParsedMessage:
    """A parsed whole output."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    def add(self, parts: Iterable[Part]) -> None:
        for part in parts:
            if part.kind is PartKind.CONTENT:
                self.content += part.text
            elif part.kind is PartKind.REASONING:
                self.reasoning += part.text
            elif part.kind is PartKind.CALL:
                self.calls.append(ToolCall(part.id, part.text))
            else:
                self.calls[part.call].arguments += part.text


class PartReader:
    """Takes the pieces of a generated text, and gives its parts as soon as they are certain.

    A subclass has steps, each of which takes as much as it can from the held text; False: it waits for more.
    """

    def __init__(
        self, tools: Mapping[str, Mapping[str, Any]], ids: str, first_call: int, *, shows_reasoning: bool
    ) -> None:
        """tools: the JSON schema of each function's arguments. ids: see `ToolCallFormat.ids`. first_call: number of
        calls that the conversation has already. shows_reasoning: otherwise it is left out.
        """
        self._tools = tools
        self._ids = ids
        self._first_call = first_call
        self._shows_reasoning = shows_reasoning
        self._num_characters = 0
        self._held = ""  # text whose meaning depends on the following text
        self._waits_past_blanks = False  # blanks decide nothing about what is held
        self._blanks: list[str] = []  # that came behind it
        self._lead = ""  # blanks and the mark that was found last
        self._parts: list[Part] = []
        self._num_calls = 0
        self._in_call = False
        self._final = False
        self.kinds: set[OutputKind] = set()
        """What the output has so far; once all of it is read, with what was cut off."""
        self._step: Callable[[], bool]

    @property
    def calls(self) -> bool:
        """True if the output calls tools, and the last of the calls is complete."""
        return self._num_calls > 0 and not self._in_call

    @property
    def reasons(self) -> bool:
        """True if the next text is reasoning, or the end of it."""
        return False

    @property
    def _is_at_head(self) -> bool:
        """True if what is held begins a call whose function is not known yet."""
        return False

    def read(self, text: str, *, final: bool = False) -> list[Part]:
        """Take the next piece of the text and return the parts that are now certain. final: no text follows."""
        self._num_characters += len(text)
        if self._waits_past_blanks and not final and not text.strip(SPACE):
            self._blanks.append(text)  # there may be very many of them
            return []
        self._held = "".join((self._held, *self._blanks, text))
        self._blanks.clear()
        self._final = final
        while self._step():
            pass
        if final:
            self.kinds |= {OutputKind.OPEN_CALL} if self._in_call else set()
            self.kinds |= {OutputKind.OPEN_REASONING} if self.reasons else set()
        self._waits_past_blanks = bool(self._held) and (self._is_at_head or _BLANK.match(self._held) is not None)
        parts, self._parts = self._parts, []
        return parts

    def _until(self, marks: Sequence[str], *, drops_blanks: bool) -> tuple[str, str]:
        """Take the held text up to the first mark, without the blanks before it; also return the mark, "" for none.

        The blanks and the mark become the new lead. drops_blanks: drop blanks at the end of the whole text, too.
        """
        text = self._held
        found = [(place, -len(mark), mark) for mark in marks if (place := text.find(mark)) >= 0]
        if found:
            place, _, mark = min(found)
            shown, behind = text[:place].rstrip(SPACE), place + len(mark)
            self._lead, self._held = text[len(shown) : behind], text[behind:]
            return shown, mark
        if self._final or not marks:
            self._held = ""
            return text.rstrip(SPACE) if drops_blanks else text, ""
        shown = text[: len(text) - max(overlap(text, mark) for mark in marks)].rstrip(SPACE)
        self._held = text[len(shown) :]
        return shown, ""

    def _begin_call(self, name: str) -> None:
        number, self._num_calls, self._in_call, self._lead = self._num_calls, self._num_calls + 1, True, ""
        id = self._ids.format(letters=_Letters(), name=name, index=self._first_call + number)
        self._parts.append(Part(PartKind.CALL, name, number, id))
        self.kinds.add(OutputKind.CALL)

    def _give(self, kind: PartKind, text: str, at: int = 0) -> None:
        if not text:
            return
        if kind is not PartKind.ARGUMENTS:
            self.kinds.add(OutputKind.TEXT if kind is PartKind.CONTENT else OutputKind.REASONING)
        if kind is PartKind.REASONING and not self._shows_reasoning:
            return
        call = self._num_calls - 1 if kind is PartKind.ARGUMENTS else -1
        last = self._parts[-1] if self._parts else None
        if last is not None and last.kind is kind and (kind is not PartKind.CONTENT or last.at + len(last.text) == at):
            self._parts.pop()
            text, at = last.text + text, last.at
        self._parts.append(Part(kind, text, call, at=at))
