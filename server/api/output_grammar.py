"""Grammars for output with reasoning or tool calls, in llguidance's dialect of Lark."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ...core.requests.speller import Speller
from ..text.argument_syntax import Rules
from ..text.output_syntax import ChannelFormat, OutputSyntax, ToolCallFormat


def output_grammar(
    syntax: OutputSyntax,
    tools: Mapping[str, dict[str, Any]],
    specials: Mapping[str, int],
    *,
    forced: bool,
    parallel: bool,
    content: bool = False,
) -> str:
    """The grammar of output that calls these tools, has content that matches another grammar, or has bounded reasoning.

    tools: the JSON schema of each function's arguments; empty: no calls. specials: ids of the special tokens among the
    syntax's marks. forced: only calls, optionally after reasoning; otherwise free text with or without calls. parallel:
    allow several calls. content: instead of free text, and instead of calls, the output may match `@content`. If
    reasoning has a bound, its closing mark must be a special token.
    """
    rules = Rules(Speller(specials))
    if syntax.channels is not None:
        return rules.text(_channels(syntax.channels, tools, rules, forced=forced, parallel=parallel, content=content))
    start = _reasoning(syntax, rules, always=forced or content)
    if syntax.calls is None or not tools:
        start += "@content" if content else "TEXT"
    else:
        called = _calls(syntax.calls, tools, rules, parallel=parallel)
        if content:
            start += f"({called} | @content)"
        elif forced:
            start += called
        elif syntax.calls.bare:
            rules.add(f"NO_CALL: /([^{_in_class(syntax.calls.bare)} \\t\\r\\n](.|\\n)*)?/")
            start += "(calls | NO_CALL)"
        else:
            rules.add(rules.spelt.text_up_to("lead", syntax.calls.frame.open))
            start += f"(lead calls){'*' if parallel else '?'} TEXT"
    return rules.text(start)


def _in_class(letter: str) -> str:
    """A letter as a class of a regular expression has it."""
    return f"\\{letter}" if letter in "[]^-\\" else letter


def _channels(
    syntax: ChannelFormat,
    tools: Mapping[str, dict[str, Any]],
    rules: Rules,
    *,
    forced: bool,
    parallel: bool,
    content: bool,
) -> str:
    """The start rule of output as messages: reasoning, and then calls, maybe announced, or an answer."""
    spelt = rules.spelt
    end = spelt.first_of(syntax.continues) or syntax.continues
    rules.add(spelt.text_up_to("said", end))
    more = spelt(syntax.continues[len(end) :])
    if syntax.most is None:
        thoughts = f"({spelt(syntax.thinks)} said {more})*"
    else:  # in one message: each would have the bound
        rules.add(_bounded(syntax.most))
        thoughts = f"({spelt(syntax.thinks)} thought {spelt(syntax.continues)})?"
    answer = f"{spelt(syntax.answers)} {'@content' if content else 'TEXT'}"
    if not tools:
        return f"{thoughts} {answer}"
    if not syntax.framed or syntax.calls.bare:
        called = _calls(syntax.calls, tools, rules, parallel=False)
    else:
        _calls(syntax.calls, tools, rules, parallel=parallel)
        names = " | ".join(map(json.dumps, tools))  # messages to others are thoughts
        called = f'" to=" ({names}) {spelt(syntax.message)} {spelt(syntax.calls.frame.open)} calls'
    if forced:
        return f"{thoughts} {called}"
    announced = f"({spelt(syntax.announces)} said {more})? " if syntax.announces else ""
    return f"{thoughts} ({announced}{called} | {answer})"


def _calls(form: ToolCallFormat, tools: Mapping[str, dict[str, Any]], rules: Rules, *, parallel: bool) -> str:
    """The grammar of output that consists of calls. Adds rules; `calls` is the part after a frame's `open`."""
    spelt, style, frame = rules.spelt, form.style, form.frame
    for index, (name, schema) in enumerate(tools.items()):
        begin = style.begin.format(name=name, index=_INDEX).split(_INDEX)
        if len(begin) > 1:
            rules.add_unless_there("INDEX: /0|[1-9][0-9]{0,3}/")
        arguments = style.arguments.grammar(schema, rules)
        rules.add(f"call_{index}: {' INDEX '.join(map(spelt, begin))} {arguments} {spelt(style.end)}")
    rules.add("call: " + " | ".join(f"call_{index}" for index in range(len(tools))))
    more = f"({spelt(frame.between)} call)*" if frame.separator and parallel else ""
    rules.add(f"calls: {spelt(frame.first)} call {more} {spelt(frame.last + frame.close)}")
    opening = "" if form.bare else spelt(frame.open)
    several = parallel and not frame.separator and not form.is_single
    return f"{opening} calls" + (f" ({spelt(frame.between)} {opening} calls)*" if several else "")


_INDEX = "\0"


def _bounded(most: int) -> str:
    """The rule of thoughts of so many tokens at most."""
    return f"thought[max_tokens={most}]: TEXT" if most else 'thought: ""'


def _reasoning(syntax: OutputSyntax, rules: Rules, *, always: bool) -> str:
    """The beginning of the start rule if the output may reason, or continues reasoning.

    always: reasoning is always allowed, because no free text, which could be reasoning, follows.
    """
    reasoning, spelt = syntax.reasoning, rules.spelt
    if reasoning is None or not (always or spelt.specials.keys() & {reasoning.open, reasoning.close}):
        return ""  # free text allows it, too
    if reasoning.most is None:
        rules.add(spelt.text_up_to("reasoned", reasoning.close))
    else:
        rules.add(_bounded(reasoning.most))
        rules.add(f"reasoned: thought {spelt(reasoning.close)}")
    rules.add("BLANKS: /\\n{0,2}/")
    return "reasoned BLANKS " if syntax.reasons_already else f"({spelt(reasoning.open)} reasoned BLANKS)? "
