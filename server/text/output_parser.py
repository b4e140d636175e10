"""Splits generated text into parts as it arrives: reasoning, content, and tool calls.

`OutputParser` is the only parser for all model families; their differences are data, see `tool_call_formats`.
transformers' `ResponseParser` (5.23) was tried instead. It loses text when a call is not JSON, ends a call at a
delimiter inside a string, gives arguments only at a call's end, and keeps and copies the whole text.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from ...core.requests.types import TokenLogprobs
from .detokenizer import overlap
from .tool_call_arguments import SPACE, JsonArguments, JsonEnd, TaggedArguments, refuse_constant
from .tool_call_formats import ReasoningFormat, ToolCallFormat

MAX_HEAD = 256
"""Characters within which a call that is a JSON object must have named its function."""

ID_LETTERS = string.ascii_letters + string.digits


class PartKind(StrEnum):
    """The kind of a part."""

    REASONING = "reasoning"
    CONTENT = "content"
    CALL = "call"  # a call begins
    ARGUMENTS = "arguments"


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


class OutputParser:
    """Parses one choice's output. Any split of a text into pieces gives the same parts, apart from where they are
    divided.

    Text that only looks like a call (no function of that name, not JSON) is content. Blanks around reasoning and calls
    belong to neither.
    """

    def __init__(
        self,
        calls: ToolCallFormat | None = None,
        reasoning: ReasoningFormat | None = None,
        tools: Mapping[str, Mapping[str, Any]] | None = None,
        *,
        reasons_already: bool = False,
        shows_reasoning: bool = True,
        parallel: bool = True,
    ) -> None:
        """calls: format of tool calls; None if there can't be any. tools: the JSON schema of each function's arguments.
        reasons_already: the prompt ended within reasoning. shows_reasoning: otherwise it is left out. parallel: parse
        calls after the first.
        """
        self._format = calls if tools else None
        self._reasoning = reasoning
        self._tools = tools or {}
        self._shows_reasoning = shows_reasoning
        self._parallel = parallel
        self._num_characters = 0  # calls that were parsed
        self._held = ""  # text whose meaning depends on the following text
        self._lead = ""  # text before the head of a possible call: content if it is not one
        self._ends = JsonEnd()
        self._arguments: JsonArguments | TaggedArguments
        self._parts: list[Part] = []
        self._num_calls = 0
        self._final = False
        self._in_call = False
        self._in_reasoning = False  # its first letter has come
        self._step: Callable[[], bool] = self._content
        if reasoning is not None:
            self._step = self._reason if reasons_already else self._start
        elif self._format is not None and self._format.bare:
            self._step = self._bare
        self._is_plain = reasoning is None and self._format is None

    @property
    def calls(self) -> bool:
        """True if the output calls tools, and the last of the calls is complete."""
        return self._num_calls > 0 and not self._in_call

    @property
    def reasons(self) -> bool:
        """True if the next text is reasoning, or the end of it."""
        return self._step == self._reason

    def read(self, text: str, *, final: bool = False) -> list[Part]:
        """Take the next piece of the text and return the parts that are now certain. final: no text follows."""
        self._num_characters += len(text)
        if self._is_plain:
            return [Part(PartKind.CONTENT, text, at=self._num_characters - len(text))] if text else []
        self._held += text
        self._final = final
        while self._step():
            pass
        parts, self._parts = self._parts, []
        return parts

    # Each of these takes as much as it can from the held text; False: it waits for more.

    def _start(self) -> bool:
        """At the beginning of an output that may begin with reasoning."""
        assert self._reasoning is not None
        text = self._held.lstrip(SPACE)
        if text.startswith(self._reasoning.open):
            self._held = text[len(self._reasoning.open) :]
            self._step = self._reason
            return True
        if self._reasoning.open.startswith(text) and not self._final:
            return False
        self._step = self._bare
        return True

    def _reason(self) -> bool:
        assert self._reasoning is not None
        if not self._in_reasoning:
            self._held = self._held.lstrip(SPACE)
        text, found = self._until(self._reasoning.close, drops_blanks=True)
        if self._shows_reasoning:
            self._give(PartKind.REASONING, text)
        self._in_reasoning = self._in_reasoning or bool(text)
        if not found:
            return False
        self._step = self._answer
        return True

    def _answer(self) -> bool:
        """After reasoning or a call."""
        self._held = self._held.lstrip(SPACE)
        if not self._held:
            return False
        self._step = self._bare if self._num_calls == 0 else self._content
        return True

    def _bare(self) -> bool:
        """At the beginning of a possible call without delimiters."""
        text = self._held.lstrip(SPACE)
        if self._format is not None and self._format.bare:
            if not text and not self._final:
                return False
            if text.startswith("{"):
                self._lead, self._held = self._held[: len(self._held) - len(text)], text
                self._begin_head()
                return True
        self._step = self._content
        return True

    def _content(self) -> bool:
        at = self._num_characters - len(self._held)
        text, found = self._until("" if self._format is None else self._format.open, drops_blanks=False)
        self._give(PartKind.CONTENT, text, at)
        if not found:
            return False
        self._begin_head()
        return True

    def _until(self, delimiter: str, *, drops_blanks: bool) -> tuple[str, bool]:
        """Take the held text up to a delimiter, if any, without the blanks before it; also return whether it was found.

        The blanks and the delimiter become the new lead. drops_blanks: drop blanks at the end of the whole text, too.
        """
        text = self._held
        if delimiter and (place := text.find(delimiter)) >= 0:
            shown, behind = text[:place].rstrip(SPACE), place + len(delimiter)
            self._lead, self._held = text[len(shown) : behind], text[behind:]
            return shown, True
        if self._final or not delimiter:
            self._held = ""
            return text.rstrip(SPACE) if drops_blanks else text, False
        shown = text[: len(text) - overlap(text, delimiter)].rstrip(SPACE)
        self._held = text[len(shown) :]
        return shown, False

    def _begin_head(self) -> None:
        self._ends = JsonEnd()
        self._step = self._head

    def _head(self) -> bool:
        """Before a call's arguments: the text here names the function."""
        assert self._format is not None
        held, wrapped = self._held, self._format.wrapped
        found = self._format.head.match(held) if wrapped else self._format.head.match(held, 0, MAX_HEAD)
        if found is not None:
            name = found["name"].strip()
            if name not in self._tools:
                return self._no_call()
            self._held = held[found.end() :]
            self._begin_call(name)
            tags = self._format.tags
            self._arguments = JsonArguments() if tags is None else TaggedArguments(tags, self._tools[name])
            self._step = self._in_arguments
            return True
        if not wrapped:
            return (self._final or len(held) >= MAX_HEAD) and self._no_call()
        blanks = re.match(r"\s*(?:\[\s*)?", held) if self._format.listed else re.match(r"\s*", held)
        begin = blanks.end() if blanks else 0
        if begin < len(held) and held[begin] != "{":
            return self._no_call()
        end = self._ends.find(held, begin)
        if end >= 0:
            return self._whole_call(held[begin:end], held[end:])
        return self._final and self._no_call()

    def _whole_call(self, text: str, rest: str) -> bool:
        """A JSON object that names its function after the arguments, or not at all, or writes them as a string."""
        name, arguments, known = "", None, False
        try:
            call = json.loads(text, parse_constant=refuse_constant)
            name, arguments = call.get("name"), call.get("arguments", call.get("parameters"))
            if isinstance(arguments, str):
                arguments = json.loads(arguments, parse_constant=refuse_constant)
            arguments = {} if arguments is None else arguments
            known = name in self._tools and isinstance(arguments, dict)
        except (ValueError, TypeError, RecursionError):
            known = False  # the name may not be a string
        if not known:
            return self._no_call()
        self._held = rest
        self._begin_call(name)
        self._give(PartKind.ARGUMENTS, json.dumps(arguments))  # escapes, because it may spell incomplete characters
        self._step = self._close
        return True

    def _no_call(self) -> bool:
        self._give(PartKind.CONTENT, self._lead, self._num_characters - len(self._held) - len(self._lead))
        self._lead = ""
        self._step = self._content
        return True

    def _begin_call(self, name: str) -> None:
        assert self._format is not None
        self._num_calls += 1
        self._in_call = True
        self._lead = ""
        letters = "".join(secrets.choice(ID_LETTERS) for _ in range(self._format.id_characters))
        self._parts.append(Part(PartKind.CALL, name, self._num_calls - 1, self._format.id_begins + letters))

    def _in_arguments(self) -> bool:
        assert self._format is not None
        text, rest = self._arguments.read(self._held, final=self._final)
        self._give(PartKind.ARGUMENTS, text)
        self._held = self._arguments.held if rest is None else rest
        if rest is None:
            return False
        self._ends = JsonEnd(1)
        self._step = self._wrapping if self._format.wrapped else self._end
        return True

    def _wrapping(self) -> bool:
        """After the arguments, up to the end of the object that contains them."""
        end = self._ends.find(self._held, 0)
        self._ends.at -= len(self._held)
        self._held = self._held[end:] if end >= 0 else ""
        self._step = self._close if end >= 0 else self._wrapping
        return end >= 0

    def _end(self) -> bool:
        """After arguments that are not part of a JSON object, before the text that ends the call, if any."""
        assert self._format is not None
        text, mark = self._held.lstrip(SPACE), self._format.end.strip(SPACE)
        cut = len(text) < len(mark) and mark.startswith(text)
        if cut and not self._final:
            return False
        self._held = "" if cut else text.removeprefix(mark)
        self._step = self._close
        return True

    def _close(self) -> bool:
        """After a call, before the text that closes it or separates it from the next."""
        assert self._format is not None
        self._in_call = False
        if not self._parallel:
            self._step = self._ignored
            return True
        text = self._held.lstrip(SPACE)
        for mark, step in ((self._format.separator, self._head), (self._format.close, self._answer)):
            if mark and text.startswith(mark):
                self._lead, self._held = mark, text[len(mark) :]
                self._begin_head()
                self._step = step
                return True
            if mark.startswith(text) and mark:
                self._held = "" if self._final else self._held
                return False
        self._step = self._answer
        return True

    def _ignored(self) -> bool:
        self._held = ""
        return False

    def _give(self, kind: PartKind, text: str, at: int = 0) -> None:
        if not text:
            return
        call = self._num_calls - 1 if kind is PartKind.ARGUMENTS else -1
        if self._parts and self._parts[-1].kind is kind:
            last = self._parts.pop()
            text, at = last.text + text, last.at
        self._parts.append(Part(kind, text, call, at=at))
