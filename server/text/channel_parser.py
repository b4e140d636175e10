"""Parts of output that consists of messages, each with a channel or a recipient (harmony, Muse Glimmer).

Tests: tests/server/text/test_channel_parser.py
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .argument_syntax import SPACE, ArgumentReader
from .output_parser import OutputParser
from .output_parts import OutputKind, PartKind, PartReader
from .output_syntax import ChannelFormat, OutputSyntax

MOST_HEADER = 256
"""Characters within which a message's header must end."""


class ChannelParser(PartReader):
    """Parses one choice's output of messages. Any split of a text into pieces gives the same parts.

    A message to a function that may be called is a call; one to another function is reasoning, as are messages in the
    channel for it. Text outside of messages is content.
    """

    def __init__(
        self,
        syntax: ChannelFormat,
        tools: Mapping[str, Mapping[str, Any]] | None = None,
        *,
        shows_reasoning: bool = True,
        parallel: bool = True,
        first_call: int = 0,
    ) -> None:
        """See `OutputParser`."""
        super().__init__(tools or {}, syntax.calls.ids, first_call, shows_reasoning=shows_reasoning)
        self._syntax = syntax
        self._marks = (*syntax.ends, syntax.start)
        self._parallel = parallel
        self._kind = PartKind.CONTENT  # of the message that is being read
        self._begun = False  # its first letter has come
        self._name = ""  # of the function that a message is for
        self._arguments: ArgumentReader
        self._inner: OutputParser | None = None  # reads calls in a message
        self._inner_at = 0  # where the text that it reads begins
        self._step = self._header

    @property
    def reasons(self) -> bool:
        return self._step == self._body and self._kind is PartKind.REASONING

    def _header(self) -> bool:
        """Before a message."""
        syntax, text = self._syntax, self._held
        found = syntax.split(text, MOST_HEADER)
        is_header = syntax.may_be_header(text) if found is None else syntax.is_header(found[0])
        if found is None and is_header and len(text) < MOST_HEADER:
            self._held = "" if self._final else text  # cut off
            return False
        if found is None or not is_header:
            self._step, self._kind = self._body, PartKind.CONTENT
            return True
        header, self._held = found
        self._begun = False
        self._begin(syntax.recipient_of(header), header)
        return True

    def _begin(self, recipient: str, header: str) -> None:
        """Begin the message with this header."""
        syntax = self._syntax
        name = recipient.removeprefix(syntax.functions)
        self._step, self._kind = self._body, PartKind.CONTENT
        if self._num_calls and not self._parallel:
            self._step = self._ignored
        elif name in self._tools:
            if syntax.framed:
                self._inner = OutputParser(OutputSyntax(syntax.calls), self._tools, parallel=self._parallel)
                self._inner_at = self._num_characters - len(self._held)
                self._step = self._in_calls
            else:
                self._name = name
                self._step = self._before_arguments
        elif recipient not in syntax.readers or syntax.reasoning.search(header):
            self._kind = PartKind.REASONING
            self.kinds |= {OutputKind.UNPARSED} if name != recipient else set()

    def _body(self) -> bool:
        """Within a message that is no call."""
        if not self._begun:
            self._held = self._held.lstrip(SPACE)
        at = self._num_characters - len(self._held)
        text, mark = self._until(self._marks, drops_blanks=True)
        self._begun = self._begun or bool(text)
        self._give(self._kind, text, at)
        if mark:
            self._step = self._header
        return bool(mark)

    def _before_arguments(self) -> bool:
        """At the beginning of a message whose body is a call's arguments: nothing is a call without any, and what is no
        JSON is no call.
        """
        text = self._held.lstrip(SPACE)
        is_empty = not text or text.startswith(self._marks)
        if not self._final and (not text or any(mark.startswith(text) and mark != text for mark in self._marks)):
            return False
        if not is_empty and text[0] != "{":
            self._step, self._kind = self._body, PartKind.REASONING
            self.kinds.add(OutputKind.UNPARSED)
            return True
        self._held = text
        self._begin_call(self._name)
        self._arguments = self._syntax.calls.style.arguments.reader(self._tools[self._name])
        if is_empty:
            self._give(PartKind.ARGUMENTS, "{}")
            self._in_call = False
        self._step = self._behind if is_empty else self._in_arguments
        return True

    def _in_arguments(self) -> bool:
        """Within a message whose body is a call's arguments."""
        text, rest = self._arguments.read(self._held, final=self._final)
        self._begun = self._begun or bool(text)
        self._give(PartKind.ARGUMENTS, text)
        self._held = self._arguments.held if rest is None else rest
        if rest is None:
            return False
        self._in_call = False
        self._step = self._behind
        return True

    def _in_calls(self) -> bool:
        """Within a message whose body is calls in a format of their own."""
        assert self._inner is not None
        text, mark = self._until(self._marks, drops_blanks=True)
        for part in self._inner.read(text, final=bool(mark) or self._final):
            if part.kind is PartKind.CALL:
                self._begin_call(part.text)
            elif part.kind is PartKind.ARGUMENTS:
                self._give(PartKind.ARGUMENTS, part.text)
            else:
                self._give(PartKind.CONTENT, part.text, self._inner_at + part.at)
        self._in_call = self._num_calls > 0 and not self._inner.calls
        self.kinds |= self._inner.kinds & {OutputKind.UNPARSED}
        if mark:
            self._step = self._header
        return bool(mark)

    def _ignored(self) -> bool:
        self._held = ""
        return False

    def _behind(self) -> bool:
        """Behind a call's arguments, up to the end of the message."""
        _, mark = self._until(self._marks, drops_blanks=True)
        if mark:
            self._step = self._header
        return bool(mark)
