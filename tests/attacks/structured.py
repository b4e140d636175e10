"""Attacks by output formats, by tools, by other servers' routes, and by URLs that something might fetch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .attack import Attack, attack
from .grammars import hostile
from .mutants import CHAT, COMPLETIONS


def structured_shapes() -> Iterator[Attack]:
    """Grammars, tools and conversations made to cost much, by every route that takes them."""
    user = [{"role": "user", "content": "hi"}]
    for name, body in hostile().items():
        yield attack(f"grammar: {name}", CHAT, messages=user, max_tokens=40, **body)
        schema = body.get("json_schema")
        if not isinstance(schema, dict):
            continue
        asked = {"max_output_tokens": 40, "input": "hi"}
        kept = {"type": "json_schema", "name": "x", "schema": schema}
        yield attack(f"responses, schema: {name}", "/v1/responses", **asked, text={"format": kept})
        tool = {
            "name": "f",
            "parameters": {"type": "object", "properties": {"a": schema}, "additionalProperties": False},
        }
        yield attack(
            f"responses, tool: {name}",
            "/v1/responses",
            **asked,
            tool_choice="required",
            tools=[{"type": "function", **tool}],
        )
        yield attack(
            f"messages, tool: {name}",
            "/v1/messages",
            max_tokens=40,
            messages=user,
            tool_choice={"type": "any"},
            tools=[{"name": "f", "input_schema": tool["parameters"]}],
        )
        tag = {"begin": "<f>", "schema": schema, "end": "</f>"}
        yield attack(
            f"tag: {name}", CHAT, messages=user, max_tokens=40, structural_tag={"structures": [tag], "triggers": ["<"]}
        )
    tags = [{"begin": f"<{i}", "schema": {}, "end": ""} for i in range(700)]
    yield attack("700 tags", CHAT, messages=user, structural_tag={"structures": tags, "triggers": ["<"]}, max_tokens=40)
    large = [{"type": "function", "function": {"name": f"f{i}", "description": "d" * 1500}} for i in range(128)]
    for mode in ("auto", "required"):
        yield attack(f"128 tools of 1.5 KB, {mode}", CHAT, messages=user, tools=large, tool_choice=mode, max_tokens=9)
    small: list[dict[str, Any]] = [{"type": "function", "function": {"name": f"f{i}"}} for i in range(128)]
    properties = {f"p{i}": {"type": "string"} for i in range(6)}
    parameters = {"type": "object", "properties": properties, "additionalProperties": False}
    strict = [{**tool, "function": {**tool["function"], "strict": True, "parameters": parameters}} for tool in small]
    yield attack("128 strict tools", CHAT, messages=user, max_tokens=9, tool_choice="required", tools=strict)
    allowed = {"mode": "auto", "tools": [{"function": {"name": "f1"}}] * 30_000}
    yield attack(
        "30,000 tools allowed",
        CHAT,
        messages=user,
        tools=small,
        max_tokens=9,
        tool_choice={"type": "allowed_tools", "allowed_tools": allowed},
    )
    yield attack("20,000 conversations", f"{CHAT}/batch", messages=[user] * 20_000, tools=large)
    yield attack("128 conversations with tools", f"{CHAT}/batch", messages=[user] * 128, tools=large, max_tokens=1)
    system, call = {"role": "system", "content": "x" * 250}, {"type": "function_call", "call_id": "1", "name": "f"}
    yield attack("25,000 instructions", "/v1/responses", input=[system] * 25_000)
    yield attack("25,000 calls", "/v1/responses", input=[call] * 25_000)
    yield attack(
        "25,000 blocks",
        "/v1/messages",
        max_tokens=9,
        messages=[{"role": "user", "content": [{"type": "text", "text": "x"}] * 25_000}],
    )
    yield attack("30,000 tokens to decode", "/detokenize", tokens=[97] * 30_000)
    yield attack("a conversation to tokenize", "/tokenize", messages=user * 1024, tools=large)
    yield attack("messages to count", "/v1/messages/count_tokens", messages=user * 1024, system="x" * 60_000)
    for name in ("messages", "tools", "chat_template", "self", "add_generation_prompt"):
        yield attack(f"template variable {name}", CHAT, messages=user, chat_template_kwargs={name: user}, max_tokens=9)
    yield attack(
        "1 MB template variable", CHAT, messages=user, chat_template_kwargs={"x": "{{ x }}" * 150_000}, max_tokens=9
    )


def outward_shapes(url: str) -> Iterator[Attack]:
    """Requests that name a URL wherever one may be taken for something to fetch."""
    text = {"type": "text", "text": "hi"}
    for index, part in enumerate(
        (
            {"type": "image_url", "image_url": {"url": url}},
            {"type": "video_url", "video_url": {"url": url}},
            {"type": "audio_url", "audio_url": {"url": url}},
            {"type": "file", "file": {"file_url": url, "file_id": url}},
            {"type": "image", "source": {"type": "url", "url": url}},
            {"type": "document", "source": {"url": url}},
            {"type": "input_image", "image_url": url},
            {"type": "input_file", "file_url": url},
        )
    ):
        turn = [{"role": "user", "content": [text, part]}]
        yield attack(f"URL in part {index} of a chat", CHAT, messages=turn, max_tokens=2)
        yield attack(f"URL in part {index} of a message", "/v1/messages", messages=turn, max_tokens=2)
        yield attack(f"URL in part {index} of a response", "/v1/responses", input=turn, max_output_tokens=2)
        yield attack(f"URL in part {index} to tokenize", "/tokenize", messages=turn)
    user = [{"role": "user", "content": url}]
    schemas = (
        {"$ref": url},
        {"$schema": url, "type": "integer"},
        {"$id": url, "$ref": "#"},
        {"$id": url, "$defs": {"a": {"$id": "/a"}}, "$ref": "a"},
        {"$dynamicRef": url},
        {"type": "string", "format": url},
        {"type": "string", "contentSchema": {"$ref": url}},
    )
    for index, schema in enumerate(schemas):
        yield attack(f"URL in schema {index}", CHAT, messages=user, json_schema=schema, max_tokens=2)
        function = {"name": "f", "strict": True, "parameters": {"type": "object", "properties": {"a": schema}}}
        yield attack(
            f"URL in tool {index}",
            CHAT,
            messages=user,
            max_tokens=2,
            tool_choice="required",
            tools=[{"type": "function", "function": function}],
        )
    for kind in ("mcp", "web_search", "url", "web_fetch_20250910", "file_search"):
        tool = {"type": kind, "server_label": "x", "server_url": url, "name": "f", "url": url}
        yield attack(f"URL in a tool {kind}", "/v1/responses", input="hi", tools=[tool])
        yield attack(f"URL in a message's tool {kind}", "/v1/messages", messages=user, tools=[tool], max_tokens=2)
    yield attack(
        "URL in MCP servers",
        "/v1/messages",
        messages=user,
        max_tokens=2,
        mcp_servers=[{"type": "url", "url": url, "name": "x"}],
    )
    for path in (url, f"{url}/a.tar.gz", f"hf://{url}", url.replace("http", "s3"), "//" + url.partition("//")[2]):
        shown = path.replace(url, "URL")[:24]
        yield attack(f"adapter at {shown}", COMPLETIONS, prompt="x", model=path, max_tokens=2)
        yield attack(f"lora_path {shown}", COMPLETIONS, prompt="x", lora_path=path, max_tokens=2)
        yield attack(f"load {shown}", "/v1/load_lora_adapter", lora_name="x", lora_path=path)
        yield attack(f"add {shown}", "/v1/adapters", name="x", path=path)
