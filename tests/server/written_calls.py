"""Tool calls as the chat templates of the families write them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from chorus.server.text.allowed_values import AllowedValues
from chorus.server.text.argument_syntax import ArgumentSyntax
from chorus.server.text.literal_syntax import LiteralSyntax
from chorus.server.text.nested_syntax import NestedSyntax
from chorus.server.text.output_syntax import ToolCallFormat
from chorus.server.text.tagged_syntax import TaggedSyntax


def literal(value: Any, quote: str = "", between: str = ", ") -> str:
    """A value as a Python literal, or as Gemma writes it."""
    if isinstance(value, str):
        return quote + value + quote if quote else json.dumps(value, ensure_ascii=False)
    if isinstance(value, list):
        return f"[{between.join(literal(each, quote, between) for each in value)}]"
    if isinstance(value, dict):
        names = (f"{name}:" if quote else f"{json.dumps(name, ensure_ascii=False)}: " for name in value)
        pairs = zip(names, value.values(), strict=True)
        return f"{{{between.join(name + literal(each, quote, between) for name, each in pairs)}}}"
    words = ("true", "false", "null") if quote else ("True", "False", "None")
    return words[[True, False, None].index(value)] if value is None or isinstance(value, bool) else str(value)


def elements(syntax: NestedSyntax, values: AllowedValues, schema: Any, arguments: Mapping[str, Any]) -> str:
    """Members of an object as elements in one another."""
    kinds = values.properties(schema)
    return "".join(element(syntax, values, name, kinds.get(name, {}), value) for name, value in arguments.items())


def element(syntax: NestedSyntax, values: AllowedValues, name: str, schema: Any, value: Any) -> str:
    """A value between tags: as it is, in elements of its own, or as JSON."""
    if values.of(schema).is_text and isinstance(value, str):
        inner = value
    elif isinstance(value, dict) and syntax.is_object(schema):
        inner = elements(syntax, values, schema, value)
    elif isinstance(value, list) and syntax.is_list(schema):
        inner = "".join(element(syntax, values, syntax.item, schema["items"], each) for each in value)
    else:
        inner = json.dumps(value, ensure_ascii=False)
    return f"{syntax.mark}<{name}>{inner}{syntax.mark}</{name}>"


def written_arguments(syntax: ArgumentSyntax, schema: Mapping[str, Any], arguments: Mapping[str, Any]) -> str:
    if isinstance(syntax, TaggedSyntax):
        text, values = "", AllowedValues(schema)
        for name, value in arguments.items():
            is_text = values.of(values.inner(schema, name)).is_text and isinstance(value, str)
            named = syntax.named_text if syntax.named_text and is_text else syntax.named
            written = value if is_text else json.dumps(value, ensure_ascii=False)
            text += f"{syntax.open}{name}{named}{syntax.around}{written}{syntax.around}{syntax.close}{syntax.after}"
        return text
    if isinstance(syntax, NestedSyntax):
        return elements(syntax, AllowedValues(schema), schema, arguments)
    if isinstance(syntax, LiteralSyntax):
        pairs = (f"{name}{syntax.named}{literal(v, syntax.quote, syntax.between)}" for name, v in arguments.items())
        return syntax.between.join(pairs) + syntax.close
    return json.dumps(arguments, ensure_ascii=False)


def written_calls(
    form: ToolCallFormat, tools: Mapping[str, Mapping[str, Any]], calls: Iterable[tuple[str, Mapping[str, Any]]]
) -> str:
    style, frame = form.style, form.frame
    each = [
        style.begin.format(name=name, index=index)
        + written_arguments(style.arguments, tools.get(name, {}), arguments)
        + style.end
        for index, (name, arguments) in enumerate(calls)
    ]
    opening = "" if form.bare else frame.open
    if frame.separator:
        return opening + frame.first + frame.between.join(each) + frame.last + frame.close
    return frame.between.join(opening + frame.first + call + frame.last + frame.close for call in each)
