"""Grammars for output with reasoning or tool calls, in llguidance's dialect of Lark."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ...core.requests.grammars import JSON_OPTIONS
from ...core.requests.speller import ANY_TEXT, Speller
from ..text.tool_call_formats import ArgumentTags, OutputSyntax, ToolCallFormat


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
    spelt = Speller(specials)
    rules = [ANY_TEXT]
    start = _reasoning(syntax, rules, spelt, always=forced or content)
    if syntax.calls is None or not tools:
        start += "@content" if content else "TEXT"
    else:
        called = _calls(syntax.calls, tools, rules, spelt, parallel=parallel)
        if content:
            start += f"({called} | @content)"
        elif forced:
            start += called
        elif syntax.calls.bare:
            rules.append("NO_OBJECT: /([^{ \\t\\r\\n](.|\\n)*)?/")
            start += "(calls | NO_OBJECT)"
        else:
            rules.append(spelt.text_up_to("lead", syntax.calls.open))
            start += f"(lead calls){'*' if parallel else '?'} TEXT"
    return "\n".join(("%llguidance {}", f"start: {start}", *rules))


def _calls(
    form: ToolCallFormat, tools: Mapping[str, dict[str, Any]], rules: list[str], spelt: Speller, *, parallel: bool
) -> str:
    """The grammar of output that consists of calls. Adds rules; `calls` is the part after a form's `open`."""
    for index, (name, schema) in enumerate(tools.items()):
        arguments = _json(schema) if form.tags is None else _tagged(form.tags, schema, spelt)
        rules.append(f"call_{index}: {spelt(form.begin.format(name=name))} {arguments} {spelt(form.end)}")
    rules.append("call: " + " | ".join(f"call_{index}" for index in range(len(tools))))
    if form.tags is not None:
        rules.append(spelt.text_up_to("text_value", form.tags.close))
    more = f"({spelt(form.between)} call)*" if form.separator and parallel else ""
    rules.append(f"calls: {spelt(form.first)} call {more} {spelt(form.close)}")
    opening = "" if form.bare else spelt(form.open)
    several = parallel and not form.separator
    return f"{opening} calls" + (f" ({spelt(form.between)} {opening} calls)*" if several else "")


def _reasoning(syntax: OutputSyntax, rules: list[str], spelt: Speller, *, always: bool) -> str:
    """The beginning of the start rule if the output may reason, or continues reasoning.

    always: reasoning is always allowed, because no free text, which could be reasoning, follows.
    """
    reasoning = syntax.reasoning
    if reasoning is None or not (always or spelt.specials.keys() & {reasoning.open, reasoning.close}):
        return ""  # free text allows it, too
    if reasoning.most is None:
        rules.append(spelt.text_up_to("reasoned", reasoning.close))
    else:
        thought = f"thought[max_tokens={reasoning.most}]: TEXT" if reasoning.most else 'thought: ""'
        rules += [thought, f"reasoned: thought {spelt(reasoning.close)}"]
    rules.append("BLANKS: /\\n{0,2}/")
    return "reasoned BLANKS " if syntax.reasons_already else f"({spelt(reasoning.open)} reasoned BLANKS)? "


def _json(schema: Mapping[str, Any]) -> str:
    return "%json " + json.dumps({**schema, "x-guidance": JSON_OPTIONS})


def _tagged(tags: ArgumentTags, schema: Mapping[str, Any], spelt: Speller) -> str:
    """Arguments between tags, in the order of the schema's properties. Of strings, enum and const are enforced."""
    properties, required = schema.get("properties") or {}, schema.get("required") or ()
    shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    parts = []
    for name, each in properties.items():
        value = _tagged_value(tags, each if isinstance(each, Mapping) else {}, shared, spelt)
        part = f"{spelt(f'{tags.open}{name}{tags.named}{tags.around}')} {value} {spelt(tags.around)}"
        parts.append(part if name in required else f"({part})?")
    return " ".join(parts)


def _tagged_value(tags: ArgumentTags, schema: Mapping[str, Any], shared: Mapping[str, Any], spelt: Speller) -> str:
    """The value of one property, and its closing tag. shared: definitions that the schema may refer to."""
    end = spelt(tags.around + tags.close)
    if not tags.is_text(schema):
        return f"{_json({**shared, **schema})} {end}"
    texts = allowed_texts(schema)
    return "text_value" if texts is None else f"({' | '.join(json.dumps(text) for text in texts)}) {end}"


def allowed_texts(schema: Mapping[str, Any]) -> list[str] | None:
    """The strings that a schema's const or enum allows; None: any."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return [each for each in values if isinstance(each, str)] if isinstance(values, list) else None


def unwritable(tags: ArgumentTags, schema: Mapping[str, Any]) -> str | None:
    """Say which of a function's arguments can't be written between tags; None: all can."""
    for name, each in (schema.get("properties") or {}).items():
        where, texts = f"properties.{name}", allowed_texts(each) if tags.is_text(each) else None
        if not tags.can_name(name):
            return (
                f"{where}: this model's format of tool calls can't write a name with {tags.named} or blanks around it"
            )
        if texts is not None and not texts:
            return f"{where}: none of the values of const or enum is a string, which its type asks for"
        if any(not tags.can_write(text) for text in texts or ()):
            return f"{where}: this model's format of tool calls can't write a value with {tags.close}"
    return None
