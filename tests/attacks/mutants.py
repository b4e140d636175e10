"""Requests to every route: valid ones, and their mutants with damaged JSON, bytes or framing."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from chorus.server.api.adapters.adapter_api import AddAdapter, LoadLoraAdapter, UnloadLoraAdapter
from chorus.server.api.chat_request import ChatCompletionRequest
from chorus.server.api.completion_request import CompletionRequest
from chorus.server.api.fields import ALIASES, HARMLESS, NEUTRAL
from chorus.server.api.messages_request import MessagesBody
from chorus.server.api.responses_request import ResponsesBody
from chorus.server.api.text_api import ChatToTokens, TextToTokens, TokensToText

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MAX_TOKENS = 12


def _nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


_NUMBERS = 0, 1, -1, 2, 3, 17, 0.5, -0.0, 1e308, -1e-308, 2**31, 2**63, -(2**63) - 1, 10**30, 10**400
_TEXTS = "", "a", "0", "\0", "\ud800", "\udfff x", "€😀", "{{ x }}", "../../etc", "a" * 3000, "\\" * 50
_LISTS = [], [[]], [None], [0], [-1], [97] * 600, ["a"] * 300, ["", ""], [{}], [True, 1, "x"], ["a", ["b", ["c"]]]
_OBJECTS = {}, {"": None}, {"0": 1e400}, {"type": "text"}, {"a": _nested(70)}
_FURTHER = None, True, False, float("nan"), float("inf"), "chorus-builtin", _nested(20), _nested(80)
ODD: Sequence[Any] = (*_FURTHER, *_NUMBERS, *_TEXTS, *_LISTS, *_OBJECTS)
"""Values that a field may not expect."""

_PART = {"type": "text", "text": "abc"}
_SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 9}, "b": {"enum": ["x", "y"]}},
    "required": ["a"],
    "additionalProperties": False,
}
_FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": _SCHEMA}}
_FUNCTION = {"name": "f", "description": "abc", "parameters": _SCHEMA, "strict": True}
_TOOLS = [{"type": "function", "function": _FUNCTION}, {"type": "function", "function": {"name": "g"}}]
_FLAT = [{"type": "function", **_FUNCTION}]
_ANTHROPICS = [{"name": "f", "description": "abc", "input_schema": _SCHEMA}]
_NAMED = {"type": "function", "function": {"name": "f"}}
_CHOICES = (
    "none",
    "auto",
    "required",
    _NAMED,
    {"type": "function", "name": "f"},
    {"type": "any"},
    {"type": "tool", "name": "f"},
    {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [_NAMED]}},
    {"type": "allowed_tools", "mode": "required", "tools": _FLAT},
)

LIKELY: dict[str, Sequence[Any]] = {
    "n": (1, 2, 3),
    "max_tokens": (0, 1, 5, None),
    "max_completion_tokens": (1, 7),
    "logprobs": (0, 1, 5, True),
    "top_logprobs": (0, 2),
    "prompt_logprobs": (0, 2),
    "echo": (True, False),
    "stream": (True,),
    "best_of": (1,),
    "stop": ("e", ["a", "xyz"], "\n"),
    "bad_words": (["a"], ["the", "o"]),
    "logit_bias": ({"101": -100}, {"97": 5.5}),
    "stop_token_ids": ([97], [101, 105]),
    "allowed_token_ids": ([97, 98, 99, 100, 101],),
    "temperature": (0, 1, 0.0),
    "top_p": (1, 0.9),
    "top_k": (-1, 0, 5),
    "min_p": (0, 0.1),
    "seed": (0, 7, -1),
    "ignore_eos": (True, False),
    "min_tokens": (0, 1),
    "presence_penalty": (0.5, -2),
    "frequency_penalty": (0.5, 2),
    "repetition_penalty": (1.3,),
    "stream_options": ({"include_usage": True}, {"continuous_usage_stats": True}),
    "cache_salt": ("s", ""),
    "lora_path": ("upper", "reverse"),
    "model": ("upper", "chorus-builtin", "chorus-builtin:sort", "nobody"),
    "return_token_ids": (True,),
    "return_tokens_as_token_ids": (True,),
    "return_step_info": (True,),
    "skip_special_tokens": (False, True),
    "include_stop_str_in_output": (True,),
    "add_special_tokens": (True, False),
    "user": ("me",),
    "metadata": ({"a": "b"},),
    "chat_template_kwargs": ({"x": 1},),
    "tools": ([], _TOOLS, _FLAT, _ANTHROPICS),
    "parallel_tool_calls": (True, False),
    "reasoning_effort": ("none", "low"),
    "include_reasoning": (False,),
    "separate_reasoning": (False,),
    "truncate_prompt_tokens": (-1, 1, 5),
    "truncation_side": ("right", "left"),
    "instructions": ("abc",),
    "max_output_tokens": (1, 9),
    "text": ({"format": {"type": "json_schema", "name": "a", "schema": _SCHEMA}}, {"format": {"type": "text"}}),
    "include": (["message.output_text.logprobs"],),
    "stop_sequences": (["e"],),
    "system": ("abc", [_PART]),
    "thinking": ({"type": "enabled", "budget_tokens": 9}, {"type": "disabled"}),
    "reasoning": ({"effort": "low"},),
    "output_config": ({"format": {"type": "json_schema", "schema": _SCHEMA}}, {"effort": "low"}),
    "structural_tag": ({"structures": [{"begin": "<f>", "schema": _SCHEMA, "end": "</f>"}], "triggers": ["<f"]},),
    "guided_grammar": ('start: "a" | /[b-d]+/', 'root ::= "a" [b-d]'),
    "add_generation_prompt": (True, False),
    "continue_final_message": (True, False),
    "tool_choice": _CHOICES,
    "response_format": ({"type": "text"}, {"type": "json_object"}, _FORMAT),
    "guided_choice": (["a", "bc"],),
    "structured_outputs": ({"regex": "[a-z]+"}, {"choice": ["a"]}),
    "guided_json": ({"type": "integer"}, _SCHEMA),
    "prompt": ("a", [104, 101], ["a", "b"], [[104], [101, 102]], "é\U0001f600"),
    "messages": ([{"role": "user", "content": [{"type": "text", "text": "abc"}]}],),
    "request_id": ("one", "two"),
}
"""Values that a field expects."""

_BODIES = (
    CompletionRequest,
    ChatCompletionRequest,
    TextToTokens,
    ChatToTokens,
    TokensToText,
    AddAdapter,
    LoadLoraAdapter,
    UnloadLoraAdapter,
)
_OF_OTHERS = (each for body in (ResponsesBody, MessagesBody) for each in (*body.model_fields, *body.refused))
_OF_BODIES = (field.alias or name for body in _BODIES for name, field in body.model_fields.items())
FIELDS = sorted({*ALIASES, *HARMLESS, *NEUTRAL, *_OF_BODIES, *_OF_OTHERS})
"""Every field that a body may have, in any call."""

HEADERS = (
    b"content-type: text/plain",
    b"content-type: application/json; charset=x",
    b"content-type:",
    b"host: evil.org",
    b"host:",
    b"origin: http://evil.org",
    b"origin: null",
    b"expect: 100-continue",
    b"expect: nothing",
    b"transfer-encoding: gzip",
    b"transfer-encoding: chunked, chunked",
    b"content-encoding: gzip",
    b"upgrade: websocket",
    b"connection: upgrade",
    b"authorization: Bearer \xff\xfe",
    b"x-request-id: " + b"r" * 5000,
    b"x-request-id: \x7f",
    b"cookie: " + b"c" * 20000,
    b"x: " + b"y" * 70000,
    b"content-length: 5",
    b"content-length: -1",
    b"content-length: 99999999999999999999",
    b"content-length: 1e3",
    b"accept: text/event-stream",
    b": x",
    b"no colon",
    b" folded: x",
    b"x\0y: z",
    b"range: bytes=0-1",
    b"traceparent: 00-x",
    b"forwarded: for=1.2.3.4",
)


@dataclass(frozen=True, slots=True)
class Call:
    """A valid request."""

    method: str
    path: str
    body: dict[str, Any] | None = None

    def raw(self) -> bytes:
        return framed(self.method, self.path, b"" if self.body is None else json.dumps(self.body).encode())


@dataclass(frozen=True, slots=True)
class Mutant:
    """A damaged request. may_wait: the server may rightly go on waiting for more of it, and close without an answer."""

    number: int
    path: str
    raw: bytes
    may_wait: bool = False
    body: bytes = b""

    @property
    def is_greedy(self) -> bool:
        """True if an answer that it gets is always the same."""
        try:
            body = json.loads(self.body)
            return self.path in (COMPLETIONS, CHAT) and body.get("temperature", 1) == 0
        except (ValueError, AttributeError, RecursionError):
            return False


def framed(method: str, path: str, body: bytes, headers: Sequence[bytes] = (), length: int | None = None) -> bytes:
    lines = [f"{method} {path} HTTP/1.1".encode(errors="surrogateescape"), b"host: localhost", b"connection: close"]
    if method != "GET" or body:
        lines += [b"content-type: application/json", b"content-length: %d" % (len(body) if length is None else length)]
    return b"\r\n".join([*lines, *headers, b"", body])


def questions(prompts: dict[str | None, list[str]], seed: int, count: int) -> Iterator[Call]:
    """Valid greedy requests of either kind. prompts: by adapter, None being the base model."""
    draw = random.Random(seed)
    for _ in range(count):
        name = draw.choice(list(prompts))
        body: dict[str, Any] = {"temperature": 0, "max_tokens": draw.randint(1, 2 * MAX_TOKENS)}
        if name is not None:
            body["model"] = name
        if draw.random() < 0.3:
            body["stream"] = True
        if draw.random() < 0.2:
            body["n"] = draw.choice([2, 3])
        if draw.random() < 0.2:
            body["stop"] = draw.choice(["e", ["a", "o"]])
        if draw.random() < 0.1:
            body["repetition_penalty"] = 1.2
        if draw.random() < 0.2:
            body["cache_salt"] = draw.choice("xyz")
        if draw.random() < 0.3:
            body["messages"] = [{"role": "user", "content": draw.choice(prompts[name])}]
            yield Call("POST", CHAT, body)
            continue
        body["prompt"] = draw.choice(prompts[name])
        if draw.random() < 0.2:
            body["prompt"] = draw.sample(prompts[name], 2)
        if draw.random() < 0.1:
            body["echo"] = True
        yield Call("POST", COMPLETIONS, body)


def structured_calls() -> list[Call]:
    """Valid requests with tools, with grammars, and of the other APIs."""
    user = [{"role": "user", "content": "abc"}]
    used = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    turns = [*user, {"role": "assistant", "tool_calls": [used]}, {"role": "tool", "tool_call_id": "1", "content": "5"}]
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "abc"}]},
        {"type": "reasoning", "summary": []},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "1", "output": "5"},
    ]
    blocks = [
        {"role": "user", "content": [_PART]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": [_PART]}, _PART]},
    ]
    chat = {"messages": turns, "tools": _TOOLS, "max_tokens": MAX_TOKENS}
    responses = {"input": items, "tools": _FLAT, "max_output_tokens": MAX_TOKENS, "instructions": "abc"}
    messages = {"messages": blocks, "tools": _ANTHROPICS, "max_tokens": MAX_TOKENS, "system": [_PART]}
    return [
        *(
            Call("POST", CHAT, {**chat, "tool_choice": choice, "stream": stream})
            for choice in ("auto", "required", _NAMED)
            for stream in (False, True)
        ),
        Call("POST", CHAT, {**chat, "response_format": _FORMAT}),
        Call("POST", f"{CHAT}/batch", {**chat, "messages": [turns, turns]}),
        Call("POST", COMPLETIONS, {"prompt": "abc", "guided_json": _SCHEMA, "max_tokens": MAX_TOKENS}),
        *(
            Call("POST", "/v1/responses", {**responses, "stream": stream, **more})
            for stream in (False, True)
            for more in ({}, {"tool_choice": "required"}, {"text": {"format": {"type": "json_object"}}})
        ),
        *(
            Call("POST", "/v1/messages", {**messages, "stream": stream, "tool_choice": {"type": kind}})
            for stream in (False, True)
            for kind in ("auto", "any")
        ),
        Call("POST", "/v1/messages/count_tokens", messages),
        Call("POST", "/v1/responses/input_tokens", {"model": "base", "input": "hi"}),
    ]


def other_calls(adapter: str, path: str) -> list[Call]:
    """The routes that don't generate. adapter, path: a name that is free to be loaded, and a directory."""
    user = [{"role": "user", "content": "abc"}]
    gets = (
        "/health",
        "/version",
        "/metrics",
        "/v1/models",
        "/v1/models/upper",
        "/ping",
        "/load",
        "/v1/adapters",
        "/v1/adapters/upper",
        "/openapi.json",
    )
    return [
        *(Call("GET", path) for path in gets),
        Call("POST", "/tokenize", {"prompt": "hello world", "add_special_tokens": False, "return_token_strs": True}),
        Call("POST", "/tokenize", {"messages": user}),
        Call("POST", "/detokenize", {"tokens": [104, 101, 108]}),
        Call("POST", "/v1/adapters", {"name": adapter, "path": path}),
        Call("POST", "/v1/load_lora_adapter", {"lora_name": adapter, "lora_path": path, "load_inplace": True}),
        Call("POST", "/v1/unload_lora_adapter", {"lora_name": adapter}),
        Call("DELETE", f"/v1/adapters/{adapter}"),
    ]


def mutant(number: int, calls: Sequence[Call]) -> Mutant:
    """The mutant of that number, always the same."""
    draw = random.Random(number)
    call = draw.choice(calls)
    kind = draw.choice(["json", "json", "json", "json", "text", "bytes", "framing", "head"])
    body = b"" if call.body is None else json.dumps(call.body).encode()
    method, path = call.method, call.path
    if kind == "json" and call.body is not None:
        body = rendered(draw, with_odd_values(draw, call.body))
    elif kind == "text":
        body = _damaged_text(draw, body)
    elif kind == "bytes":
        body = damaged(draw, body)
    elif kind == "framing":
        raw, waits = _badly_framed(draw, method, path, body)
        return Mutant(number, path, raw, waits, body)
    elif kind == "head":
        head, rest = framed(method, path, body).split(b"\r\n\r\n", 1)
        return Mutant(number, path, damaged(draw, head) + b"\r\n\r\n" + rest, True)
    else:
        method = draw.choice(["GET", "POST", "PUT", "HEAD", "DELETE", "OPTIONS", "PATCH", "BREW"])
        tails = ["", "/", "?x=1", "/%00", "/..", "/%ff", "#a", "/" + "p" * 3000, "%2e%2e", "//x", "?" + "q=1&" * 500]
        path += draw.choice(tails)
        return Mutant(number, path, framed(method, path, body), method == "HEAD", body)
    headers = [draw.choice(HEADERS)] if draw.random() < 0.05 else []
    return Mutant(number, path, framed(method, path, body, headers), bool(headers), body)


def _odd(draw: random.Random) -> Any:
    return copy.deepcopy(draw.choice(ODD))  # it may be changed further


def with_odd_values(draw: random.Random, body: dict[str, Any], likely: Mapping[str, Sequence[Any]] = LIKELY) -> Any:
    """Some fields put in, taken out or changed. likely: values that fields expect, which are put in most often."""
    body = copy.deepcopy(body)
    for _ in range(draw.choice([1, 1, 1, 2, 3, 5])):
        what = draw.random()
        if what < 0.08:
            body.pop(draw.choice(list(body)), None) if body else None
        elif what < 0.55:
            name = draw.choice(list(likely))
            body[name] = copy.deepcopy(draw.choice(likely[name]))
        elif what < 0.64:
            body[draw.choice(FIELDS)] = _odd(draw)
        elif what < 0.68:
            body["".join(draw.choices("abc_é\0\ud800", k=draw.choice([1, 9, 400])))] = _odd(draw)
        elif what < 0.7:
            return draw.choice([_odd(draw), [body], {"body": body}])
        else:
            _replace_somewhere(draw, body)
    return body


def _replace_somewhere(draw: random.Random, node: Any) -> None:
    """Put an odd value in the place of any value, however deep."""
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        if not keys:
            return
        key = draw.choice(keys)
        if not isinstance(node[key], dict | list) or not node[key] or draw.random() < 0.5:
            node[key] = _odd(draw)
            return
        node = node[key]


def rendered(draw: random.Random, value: Any) -> bytes:
    text = json.dumps(value, ensure_ascii=draw.random() < 0.7)
    return text.encode("utf-8", "surrogatepass")  # of which a lone surrogate is no UTF-8


def _damaged_text(draw: random.Random, body: bytes) -> bytes:
    """JSON that no library would write."""
    odd = draw.choice(
        [
            b"1e400",
            b"-0",
            b"01",
            b"NaN",
            b"Infinity",
            b'"\\ud800"',
            b'"\\u0000"',
            b"9" * 5000,
            b"1e-999",
            b"[" * 5000,
            b'{"a":' * 100,
            b"'x'",
            b"undefined",
            b"/**/1",
            b"\xff",
            b"0x10",
            b"1_0",
        ]
    )
    field = draw.choice(FIELDS).encode()
    return draw.choice(
        [
            body.replace(b"{", b'{"' + field + b'": ' + odd + b", ", 1),  # twice the same key, maybe
            body[:-1] + b', "' + field + b'": ' + odd + b"}",
            body.replace(b": ", b": " + odd + b" ", 1),
            b"\xef\xbb\xbf" + body,
            body.decode().encode("utf-16"),
            body.decode().encode("utf-32-be"),
            body + body,
            body + b"\0",
            b" " * 5000 + body,
            body.replace(b",", b",,", 1),
            body.replace(b'"', b"'"),
            odd,
            b"",
        ]
    )


def damaged(draw: random.Random, data: bytes) -> bytes:
    """Some bytes changed, taken out, put in or cut off."""
    for _ in range(draw.choice([1, 1, 2, 5])):
        at = draw.randrange(len(data) + 1)
        data = draw.choice(
            [
                data[:at] + bytes([draw.randrange(256)]) + data[at + 1 :],
                data[:at] + bytes([data[at] ^ 1 << draw.randrange(8)]) + data[at + 1 :] if at < len(data) else data,
                data[:at] + data[at + draw.randint(1, 8) :],
                data[:at] + draw.randbytes(draw.randint(1, 8)) + data[at:],
                data[:at] + data[max(0, at - 9) :],
                data[:at],
            ]
        )
    return data


def _badly_framed(draw: random.Random, method: str, path: str, body: bytes) -> tuple[bytes, bool]:
    """A request with a body framed wrongly or unusually, and whether the server may go on waiting for more of it."""
    head = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n"
    chunked = head.encode() + b"transfer-encoding: chunked\r\n\r\n"
    sizes, parts, rest = [1, 3, 50, 5000], [], body
    while rest:
        size = draw.choice(sizes)
        parts.append(b"%x\r\n%s\r\n" % (len(rest[:size]), rest[:size]))
        rest = rest[size:]
    whole = framed(method, path, body)
    return draw.choice(
        [
            (chunked + b"".join(parts) + b"0\r\n\r\n", False),
            (chunked + b"".join(parts) + b"0\r\ntrailer: x\r\n\r\n", False),
            (chunked + b"".join(parts), True),
            (chunked + b"zz\r\n" + body, True),
            (chunked + b"ffffffffffffffffff\r\n" + body, True),
            (chunked + b"5;" + b"e" * 3000 + b"\r\nhello\r\n0\r\n\r\n", True),
            (framed(method, path, body, length=len(body) + 7), True),
            (framed(method, path, body, length=max(0, len(body) - 3)), True),
            (framed(method, path, body, [draw.choice(HEADERS)]), True),
            (framed(method, path, body, [b"transfer-encoding: chunked"]), True),
            (whole[: draw.randrange(len(whole))], True),
            (whole + whole, False),
            (whole.replace(b"HTTP/1.1", draw.choice([b"HTTP/1.0", b"HTTP/2.0", b"HTTP/9", b"", b"HTTP/1.1 x"])), True),
            (whole.replace(b"\r\n", b"\n"), True),
            (b"\r\n\r\n" + whole, True),
            (draw.randbytes(draw.choice([1, 20, 3000])), True),
            (framed(method, path, body, [b"x-%d: y" % index for index in range(draw.choice([50, 3000]))]), True),
        ]
    )
