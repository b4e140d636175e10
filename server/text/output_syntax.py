"""What there is to know of a model family's output: how calls, reasoning and answers are written.

Tests: tests/server/text/test_output_parser.py, tests/server/text/test_channel_parser.py
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache

from .argument_syntax import SPACE, ArgumentSyntax, JsonSyntax


@dataclass(frozen=True, slots=True)
class CallStyle:
    """How one call is written: `begin`, the arguments, `end`."""

    head: re.Pattern[str]
    """Pattern of the text before the arguments; its group `name` is the function's."""
    begin: str
    end: str = ""
    """What a grammar writes around the arguments, `{name}` for the function's name."""
    arguments: ArgumentSyntax = field(default_factory=JsonSyntax)
    wrapped: bool = False
    """The call is a JSON object with the name and the arguments."""


@cache
def _ends(*marks: str) -> tuple[str, ...]:
    return tuple(mark for mark in dict.fromkeys(marks) if len(mark) > 1 and not set(mark) & set('"\\[]{}'))


@dataclass(frozen=True, slots=True)
class Frame:
    """What stands around calls: `open`, `first`, calls with `separator` between them, `last`, `close`."""

    open: str
    close: str = ""
    first: str = ""
    separator: str = ""
    """Between two calls in one frame; "": each call has a frame of its own. A line break stands for any blanks."""
    last: str = ""
    between: str = ""
    """What a grammar writes between two calls."""

    @property
    def ends(self) -> tuple[str, ...]:
        """Marks that end a call, whether or not it is complete: they stand in no JSON but in strings. One with brackets
        could be JSON as far as it has come.
        """
        return _ends(self.close, self.open)

    @property
    def listed(self) -> bool:
        """True if calls may be in brackets."""
        return self.first.startswith("[")


@dataclass(frozen=True, slots=True)
class ToolCallFormat:
    """A format of tool calls. A grammar writes the first of its styles and frames; the parser reads all."""

    name: str
    signs: tuple[str, ...]
    """Texts that a chat template of the family contains, all of them."""
    styles: tuple[CallStyle, ...]
    frames: tuple[Frame, ...]
    bare: str = ""
    """A call may begin an output without `open`, by this character."""
    ids: str = "call_{letters:24}"
    """Ids of calls: `{letters:N}` for N random letters and digits, `{name}` for the function's name, `{index}` for the
    number of the call in the conversation.
    """
    is_single: bool = False
    """An output has one call at most."""
    other_signs: tuple[str, ...] = ()
    """Texts any of which tells of the family, too."""
    fit: Callable[[str], ToolCallFormat] | None = None
    """Makes the format of a chat template that has marks of its own; None: all have the same."""

    def fitted(self, template: str) -> ToolCallFormat:
        """The format with the marks of a chat template of the family."""
        return self if self.fit is None else self.fit(template)

    def is_of(self, template: str) -> bool:
        """True if a chat template is one of the family."""
        return all(sign in template for sign in self.signs) or any(sign in template for sign in self.other_signs)

    @property
    def style(self) -> CallStyle:
        """The style that a grammar writes."""
        return self.styles[0]

    @property
    def frame(self) -> Frame:
        """The frame that a grammar writes."""
        return self.frames[0]

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts of the format that may be special tokens."""
        frames = [text for each in self.frames for text in (each.open, each.first, each.separator, each.close)]
        styles = [text for each in self.styles for text in (each.begin, each.end, *each.arguments.marks)]
        return *frames, *styles


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Reasoning is the text between `open` and `close` at the beginning of an output."""

    open: str
    close: str
    most: int | None = None
    """Most tokens of it; None: unlimited."""


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """Marks that may stand around an answer, and belong to no content."""

    open: str
    close: str


@dataclass(frozen=True, slots=True)
class ChannelFormat:
    """Output as messages: a header with a channel or a recipient, `message`, the text, and one of `ends`."""

    start: str
    """Begins a message; the chat template writes the first one."""
    message: str
    """Ends a header."""
    ends: tuple[str, ...]
    calls: ToolCallFormat
    """How a message to a function is written."""
    begins: tuple[str, ...]
    """Texts that a header may begin with."""
    thinks: str
    """Header of reasoning that a grammar writes."""
    answers: str
    """Header of an answer that a grammar writes."""
    continues: str
    """What a grammar writes between two messages."""
    announces: str = ""
    """Header of content before a call that a grammar writes; "": there is none."""
    readers: tuple[str, ...] = ("",)
    """Recipients of content; messages to others than these and to functions are reasoning."""
    reasoning: re.Pattern[str] = re.compile("<none>")
    """Pattern of headers of reasoning that has no recipient."""
    functions: str = ""
    """Text before the names of functions in recipients."""
    kinds: tuple[str, ...] = ()
    """Marks that end a header in place of `message`, and tell what the message is; they are part of the header."""
    recipient: re.Pattern[str] = re.compile(r"\bto=([^\s<]+)")
    """Pattern of a header; its group is the recipient."""
    framed: bool = False
    """A message to functions is calls in the frames of `calls`; otherwise it is the arguments of one call."""
    most: int | None = None
    """Most tokens of reasoning; None: unlimited."""

    @property
    def closes(self) -> str:
        """The mark that ends a message which another one follows."""
        return next(end for end in self.ends if self.continues.startswith(end))

    @property
    def marks(self) -> tuple[str, ...]:
        return self.start, self.message, *self.kinds, self.thinks, *self.ends, *self.calls.marks

    def may_be_header(self, text: str) -> bool:
        """True if a text may be the beginning of a header."""
        text = text.lstrip(SPACE)
        return self.is_header(text) or any(each.startswith(text) for each in self._beginnings)

    def is_header(self, text: str) -> bool:
        """True if a text is a header as far as its beginning tells."""
        text = text.lstrip(SPACE)
        return not text or text.startswith(self._beginnings)

    @property
    def _beginnings(self) -> tuple[str, ...]:
        return self.start, self.message, *self.kinds, *self.begins

    def split(self, text: str, most: int) -> tuple[str, str] | None:
        """A header that ends within `most` characters, and the text of the message; None: there is none."""
        found = [(at, mark) for mark in (self.message, *self.kinds) if (at := text.find(mark, 0, most)) >= 0]
        if not found:
            return None
        at, mark = min(found)
        return text[: at + len(mark) * (mark in self.kinds)], text[at + len(mark) :]

    def recipient_of(self, header: str) -> str:
        """To whom a message with this header goes; "": nobody is named."""
        found = self.recipient.search(header)
        return "" if found is None else found[1]


@dataclass(frozen=True, slots=True)
class OutputSyntax:
    """What to parse an output for; a part that is None is not parsed."""

    calls: ToolCallFormat | None = None
    reasoning: ReasoningFormat | None = None
    reasons_already: bool = False
    """The prompt ended within reasoning."""
    answer: AnswerFormat | None = None
    channels: ChannelFormat | None = None
    """Output is messages; then the others but `calls` are None."""

    @property
    def closes_reasoning(self) -> str | None:
        """The mark that ends reasoning; None: there is none."""
        if self.channels is not None:
            return self.channels.closes
        return None if self.reasoning is None else self.reasoning.close

    def bounded(self, most: int | None) -> OutputSyntax:
        """The same with at most so many tokens of reasoning."""
        channels = None if self.channels is None else replace(self.channels, most=most)
        return replace(self, channels=channels, reasoning=self.reasoning and replace(self.reasoning, most=most))

    @property
    def marks(self) -> str:
        """All marks around calls, reasoning and answers."""
        if self.channels is not None:
            return " ".join(self.channels.marks)
        pairs = [(each.open, each.close) for each in (self.reasoning, self.answer) if each is not None]
        return " ".join((*(() if self.calls is None else self.calls.marks), *(mark for pair in pairs for mark in pair)))
