"""Splits generated text into parts as it arrives: reasoning, content, and tool calls.

`OutputParser` is the only parser for all model families; their differences are data, see `tool_call_formats`.
transformers' `ResponseParser` (5.23) was tried instead. It loses text when a call is not JSON, ends a call at a
delimiter inside a string, gives arguments only at a call's end, and keeps and copies the whole text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from .argument_syntax import SPACE, ArgumentReader, JsonEnd, refuse_constant
from .detokenizer import overlap
from .output_parts import OutputKind, Part, PartKind, PartReader
from .output_syntax import CallStyle, Frame, OutputSyntax

PLAIN = OutputSyntax()
"""All is content."""

MAX_HEAD = 256
"""Characters within which a call that is a JSON object must have named its function."""

_AT_ONCE = 256
"""Characters of possible calls that are read at once: what is no call is soon known to be none."""

_BLANKS, _BRACKET = re.compile(r"\s*"), re.compile(r"\s*\[?\s*")


class OutputParser(PartReader):
    """Parses one choice's output. Any split of a text into pieces gives the same parts, apart from where they are
    divided.

    Text that only looks like a call (no function of that name, not JSON) is content. Blanks around reasoning and calls
    belong to neither. Calls at the end of reasoning are calls, whether or not its closing mark follows: models call
    from within it.
    """

    def __init__(
        self,
        syntax: OutputSyntax = PLAIN,
        tools: Mapping[str, Mapping[str, Any]] | None = None,
        *,
        shows_reasoning: bool = True,
        parallel: bool = True,
        first_call: int = 0,
    ) -> None:
        """tools: the JSON schema of each function's arguments; without any there are no calls. shows_reasoning:
        otherwise it is left out. parallel: parse calls after the first. first_call: number of calls that the
        conversation has already.
        """
        reasoning, form = syntax.reasoning, syntax.calls if tools else None
        super().__init__(tools or {}, "" if form is None else form.ids, first_call, shows_reasoning=shows_reasoning)
        self._format = form
        self._frames = {} if form is None else {frame.open: frame for frame in form.frames}
        self._reasoning = reasoning
        self._answer_marks = () if syntax.answer is None else (syntax.answer.open, syntax.answer.close)
        self._parallel = parallel
        self._ends = JsonEnd()
        self._frame: Frame
        self._style: CallStyle
        self._head_at = -1  # where a call's head begins in the held text; -1: only blanks came so far
        self._is_further = False  # a mark of its own announces the call, behind another one
        self._closers: list[str] = []  # marks that may still come behind the last call
        self._arguments: ArgumentReader
        self._possible: _PossibleCalls | None = None
        self._in_reasoning = False  # its first letter has come
        self._step = self._content
        if reasoning is not None:
            self._step = self._reason if syntax.reasons_already else self._start
        elif form is not None and form.bare:
            self._step = self._bare
        self._is_plain = reasoning is None and form is None and syntax.answer is None

    @property
    def _is_at_head(self) -> bool:
        if self._step == self._call_or_reason and self._possible is not None:
            return self._possible.is_at_head
        return self._step == self._head

    @property
    def reasons(self) -> bool:
        return self._step in (self._reason, self._call_or_reason)

    def read(self, text: str, *, final: bool = False) -> list[Part]:
        if self._is_plain:
            self._num_characters += len(text)
            self.kinds |= {OutputKind.TEXT} if text else set()
            return [Part(PartKind.CONTENT, text, at=self._num_characters - len(text))] if text else []
        return super().read(text, final=final)

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
        close = self._reasoning.close
        text, mark = self._until((close, *self._frames), drops_blanks=True)
        self._give_reasoning(text)
        if mark in self._frames:
            assert self._format is not None
            self._held, self._lead = self._lead + self._held, ""
            syntax = OutputSyntax(self._format)
            parser = OutputParser(syntax, self._tools, parallel=self._parallel, first_call=self._first_call)
            self._possible = _PossibleCalls(parser, close, len(self._held) - len(self._held.lstrip(SPACE)) + len(mark))
            self._step = self._call_or_reason
            return True
        if not mark:
            return False
        self._step = self._answer
        return True

    def _call_or_reason(self) -> bool:
        """Within reasoning, at the mark of a call."""
        assert self._possible is not None
        calls, text = self._possible, self._held
        if not calls.read(text, final=self._final):
            return False
        if calls.is_text or not calls.parts:
            self._give_reasoning(text[: calls.end])
            self._held = text[calls.end :]
            self._step = self._reason
            return True
        self._parts += calls.parts
        self.kinds |= {OutputKind.CALL, OutputKind.CALL_IN_REASONING}
        self._num_calls, self._in_call = calls.num_calls, not calls.is_complete
        self._held = text[calls.end :].removeprefix(calls.close)
        self._step = self._answer
        return True

    def _give_reasoning(self, text: str) -> None:
        self._give(PartKind.REASONING, text)
        self._in_reasoning = self._in_reasoning or bool(text)

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
            if text.startswith(self._format.bare):
                self._lead, self._held = self._held[: len(self._held) - len(text)], text
                self._begin_head(self._format.frame)
                return True
        self._step = self._content
        return True

    def _content(self) -> bool:
        at = self._num_characters - len(self._held)
        text, mark = self._until((*self._frames, *self._answer_marks), drops_blanks=False)
        self._give(PartKind.CONTENT, text, at)
        if not mark:
            return False
        if mark in self._answer_marks:
            self._step = self._answer
        else:
            self._begin_head(self._frames[mark])
        return True

    def _begin_head(self, frame: Frame) -> None:
        self._frame = frame
        self._ends = JsonEnd(ends=frame.ends)
        self._head_at = -1
        self._is_further = False
        self._step = self._head

    def _head(self) -> bool:
        """Before a call's arguments: the text here names the function."""
        assert self._format is not None
        held, styles = self._held, self._format.styles
        if self._head_at < 0:
            lead = (_BRACKET if self._frame.listed else _BLANKS).match(held)
            self._head_at = -1 if lead is None or lead.end() == len(held) else lead.end()
        if self._head_at < 0:
            return self._cut()
        begin = self._head_at
        for style in styles:
            if (found := style.head.match(held, begin, begin + MAX_HEAD)) is not None:
                return self._named(found["name"].strip(), style, held[found.end() :])
        is_short = len(held) < begin + MAX_HEAD
        return self._object(begin, may_be_other=is_short and not all(style.wrapped for style in styles))

    def _object(self, begin: int, *, may_be_other: bool) -> bool:
        """Where a call may be a JSON object that names its function elsewhere than at the beginning. may_be_other: what
        follows may also make it a call that is not an object.
        """
        assert self._format is not None
        held, is_object = self._held, any(style.wrapped for style in self._format.styles)
        if not is_object or held[begin] != "{":
            return self._cut() if may_be_other else self._no_call()
        end = self._ends.find(held, begin)
        if end >= 0:
            return self._whole_call(held[begin:end], held[end:])
        return self._cut()

    def _cut(self) -> bool:
        """Where a call may begin, at the end of the text so far. At the end of all, a call behind another one's mark is
        left out, as it has no name; other text is content.
        """
        if not (self._final and self._is_further):
            return self._final and self._no_call()
        self._held = self._lead = ""
        self._step = self._ignored
        return True

    def _named(self, name: str, style: CallStyle, rest: str) -> bool:
        """After the text that names the function. rest: what follows it."""
        if name not in self._tools:
            return self._no_call()
        self._held, self._style = rest, style
        self._begin_call(name)
        self._arguments = style.arguments.reader(self._tools[name], self._frame.ends)
        self._step = self._in_arguments
        return True

    def _whole_call(self, text: str, rest: str) -> bool:
        """A JSON object that names its function after the arguments, or not at all, or writes them as a string."""
        name, arguments, known = "", None, False
        try:
            call = json.loads(text, parse_constant=refuse_constant)
            call = call["function"] if isinstance(call.get("function"), dict) else call
            name = call.get("name", call.get("tool_name"))
            arguments = call.get("arguments", call.get("parameters"))
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
        self.kinds |= {OutputKind.UNPARSED} if self._lead.strip(SPACE) else set()
        self._give(PartKind.CONTENT, self._lead, self._num_characters - len(self._held) - len(self._lead))
        self._lead = ""
        self._step = self._content
        return True

    def _in_arguments(self) -> bool:
        text, rest = self._arguments.read(self._held, final=self._final)
        self._give(PartKind.ARGUMENTS, text)
        self._held = self._arguments.held if rest is None else rest
        if rest is None:
            return False
        self._ends = JsonEnd(1, self._frame.ends)
        self._step = self._wrapping if self._style.wrapped else self._end
        return True

    def _wrapping(self) -> bool:
        """After the arguments, up to the end of the object that contains them, or of the call if that is cut short."""
        end = self._ends.find(self._held, 0)
        if end >= 0:
            self._held, self._step = self._held[end:], self._close
            return True
        kept = 0 if self._ends.in_string else max((overlap(self._held, mark) for mark in self._frame.ends), default=0)
        self._ends.at -= len(self._held)
        self._held = self._held[len(self._held) - kept :]
        return False

    def _end(self) -> bool:
        """After arguments that are not part of a JSON object, before the text that ends the call, if any."""
        text, mark = self._held.lstrip(SPACE), self._style.end.strip(SPACE)
        cut = len(text) < len(mark) and mark.startswith(text)
        if cut and not self._final:
            return False
        self._held = "" if cut else text.removeprefix(mark)
        self._step = self._close
        return True

    def _close(self) -> bool:
        """After a call, before the text that separates it from the next, or ends all."""
        self._in_call = False
        if not self._parallel:
            self._step = self._ignored
            return True
        frame, text = self._frame, self._held.lstrip(SPACE)
        self._closers = [mark for mark in (frame.last.strip(SPACE), frame.close) if mark]
        separator = frame.separator.strip(SPACE)
        if (separator and separator.startswith(text) and separator != text) or (frame.separator and not text):
            self._held = "" if self._final else self._held
            return False
        if separator and text.startswith(separator):
            return self._next(separator, text[len(separator) :])
        if frame.separator and not separator and not text.startswith(tuple(self._closers)):
            may_close = any(mark.startswith(text) for mark in self._closers) and not self._final
            return not may_close and self._next("", text)
        self._step = self._closing
        return True

    def _next(self, lead: str, rest: str) -> bool:
        """Begin the next call of a frame. lead: the text before it, rest: the text from it on."""
        self._lead, self._held = lead, rest
        self._begin_head(self._frame)
        self._is_further = len(lead) > 1
        return True

    def _closing(self) -> bool:
        """After the last call of a frame."""
        while self._closers:
            text, mark = self._held.lstrip(SPACE), self._closers[0]
            if text.startswith(mark):
                self._held = text[len(mark) :]
            elif mark.startswith(text):
                self._held = "" if self._final else self._held
                return False
            self._closers.pop(0)
        self._step = self._answer
        return True

    def _ignored(self) -> bool:
        self._held = ""
        return False


class _PossibleCalls:
    """Text within reasoning: calls, if nothing else comes before the end of reasoning, or of all."""

    def __init__(self, parser: OutputParser, close: str, lead: int) -> None:
        """lead: how far the first mark goes."""
        self._parser = parser
        self._lead = lead
        self._read = 0  # how much of the text the parser has
        self.close = close
        self.parts: list[Part] = []
        self.end = 0
        """How far the text goes that this is about: up to something else, if there is any."""
        self.is_text = False
        """True if there is something else."""

    @property
    def num_calls(self) -> int:
        return max((part.call + 1 for part in self.parts), default=0)

    @property
    def is_complete(self) -> bool:
        return self._parser.calls

    @property
    def is_at_head(self) -> bool:
        return self._parser._is_at_head  # noqa: SLF001 - of the same class

    def read(self, text: str, *, final: bool) -> bool:
        """Read the text from its beginning; True once it is decided what it is."""
        at = text.find(self.close, max(0, self._read - len(self.close)))
        self.end = at if at >= 0 else len(text) if final else len(text) - overlap(text, self.close)
        ends = at >= 0 or final
        while not self.is_text and (self._read < self.end or ends):
            until = min(self._read + _AT_ONCE, self.end)
            self._add(self._parser.read(text[self._read : until], final=ends and until == self.end))
            self._read = until
            if until == self.end:
                break
        return self.is_text or ends

    def _add(self, parts: Iterable[Part]) -> None:
        for part in parts:
            shown = part.text.lstrip(SPACE)
            if part.kind is not PartKind.CONTENT:
                self.parts.append(part)
            elif shown:
                self.is_text = True
                self.end = max(self._lead, part.at + len(part.text.rstrip(SPACE)))
                return
