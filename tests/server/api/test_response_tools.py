"""A session of Codex's command line over a fake engine: requests of the shape that it sends, and what it reads back."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai.types.responses import Response

from chorus.server.api.response_tools import ResponseTools

from ..conftest import telling_server

TEMPLATE = (
    "{%- for tool in tools or [] -%}[{{ tool.function.name }}: {{ tool.function.description }}]{%- endfor -%}"
    "{%- for m in messages -%}{{ m.role }}={{ m.content }}"
    "{%- for call in m.tool_calls or [] -%}<tool_call>{{ call.function | tojson }}</tool_call>{%- endfor -%};"
    "{%- endfor -%}"
)

EXEC = {
    "type": "function",
    "name": "exec_command",
    "description": "Runs a command in a PTY.",
    "strict": False,
    "parameters": {
        "type": "object",
        "properties": {"cmd": {"type": "string", "description": "Shell command."}, "tty": {"type": "boolean"}},
        "required": ["cmd"],
        "additionalProperties": False,
    },
}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files. This is a FREEFORM tool, so do not wrap the patch in JSON.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch" LF hunk+'},
}
CALENDAR = {
    "type": "namespace",
    "name": "mcp__calendar__",
    "description": "Tools in the mcp__calendar__ namespace.",
    "tools": [
        {
            "type": "function",
            "name": "create_event",
            "description": "Creates an event.",
            "strict": False,
            "defer_loading": True,
            "parameters": {"type": "object", "properties": {"title": {"type": "string"}}},
        }
    ],
}
SEARCH = {"type": "web_search", "external_web_access": True, "search_context_size": "medium"}
TOOLS = [CALENDAR, EXEC, SEARCH, PATCH, {"type": "local_shell"}]

FIRST: list[dict[str, Any]] = [
    {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "<permissions>"}]},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "<environment_context>"}]},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "fix it"}]},
]


def asked(items: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """The body of a request as Codex sends it."""
    return {
        "model": "base",
        "instructions": "You are Codex.",
        "input": items,
        "tools": TOOLS,
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": None,
        "store": False,
        "text": {"verbosity": "low"},
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0199a213-81c0-7800-8aa1-bbab2a035a53",
        "client_metadata": {"x-codex-installation-id": "b6f5"},
        **more,
    }


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    with telling_server(tmp_path_factory.mktemp("model"), TEMPLATE, max_model_len=16384) as live:
        yield live


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def events_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]


@pytest.fixture
def say(live):
    """`say(text, body)`: the items of an answer with this text, the events about them, and the response's headers."""

    def ask(text: str, body: dict[str, Any]):
        live.engine.text = text
        response = live.post("/v1/responses", **body)
        assert response.status_code == 200, response.text
        events = events_of(response.text)
        items = [each["item"] for each in events if each["type"] == "response.output_item.done"]
        assert events[-1]["type"] == "response.completed" and events[-1]["response"]["output"] == items
        Response.model_validate(events[-1]["response"])
        return items, events, response.headers

    return ask


def test_a_session(live, say):
    patch = '*** Begin Patch\n*** Add File: a.txt\n+"é"\n*** End Patch'
    items, events, headers = say(
        call("exec_command", '{"cmd": "ls"}') + call("apply_patch", json.dumps({"input": patch})), asked(FIRST)
    )
    assert headers["x-ignored-fields"] == "verbosity, tools.web_search"
    prompt = live.engine.prompt
    assert "[mcp__calendar__create_event: Creates an event.]" in prompt and "[local_shell: " in prompt
    assert "[apply_patch: Edits files." in prompt and 'lark grammar:\nstart: "*** Begin Patch" LF hunk+]' in prompt
    assert "web_search" not in prompt and prompt.endswith(
        "system=You are Codex.\n\n<permissions>;user=<environment_context>;user=fix it;"
    )
    first, second = items
    assert (first["type"], first["name"], first["arguments"]) == ("function_call", "exec_command", '{"cmd": "ls"}')
    assert (second["type"], second["name"], second["input"]) == ("custom_tool_call", "apply_patch", patch)
    assert second["id"].startswith("ctc_") and "arguments" not in second
    deltas = [each["delta"] for each in events if each["type"] == "response.custom_tool_call_input.delta"]
    assert "".join(deltas) == patch

    done = [
        {"type": "reasoning", "summary": [], "encrypted_content": None},
        {"type": "web_search_call", "status": "completed", "action": {"type": "search", "query": "x"}},
        first,
        {"type": "function_call_output", "call_id": first["call_id"], "output": "a.txt"},
        second,
        {"type": "custom_tool_call_output", "call_id": second["call_id"], "output": "Success."},
    ]
    items, _, headers = say(
        call("mcp__calendar__create_event", '{"title": "t"}') + call("local_shell", '{"command": ["ls", "-l"]}'),
        asked([*FIRST, *done]),
    )
    assert headers["x-ignored-fields"] == "verbosity, tools.web_search, input.web_search_call"
    prompt = live.engine.prompt
    assert prompt.endswith("tool=Success.;") and "tool=a.txt;" in prompt
    assert json.dumps({"name": "apply_patch", "arguments": {"input": patch}}, ensure_ascii=False) in prompt
    event, shell = items
    assert (event["type"], event["namespace"], event["name"]) == ("function_call", "mcp__calendar__", "create_event")
    assert shell["type"] == "local_shell_call" and shell["action"] == {
        "type": "exec",
        "env": {},
        "command": ["ls", "-l"],
    }

    done += [
        event,
        {
            "type": "function_call_output",
            "call_id": event["call_id"],
            "output": [{"type": "input_text", "text": "made"}],
        },
        shell,
        {"type": "local_shell_call_output", "id": shell["call_id"], "output": "total 0"},
    ]
    items, _, _ = say("Done.", asked([*FIRST, *done]))
    prompt = live.engine.prompt
    assert '{"name": "mcp__calendar__create_event", "arguments": {"title": "t"}}' in prompt and "tool=made;" in prompt
    assert '{"name": "local_shell", "arguments": {"command": ["ls", "-l"]}}' in prompt
    assert prompt.endswith("tool=total 0;") and items[0]["content"][0]["text"] == "Done."


def test_openais_client_reads_the_calls(live):
    text = call("apply_patch", '{"input": "p"}') + call("local_shell", '{"command": ["ls"]}')
    live.engine.text = text
    body = {name: value for name, value in asked(FIRST).items() if name not in ("stream", "client_metadata")}
    with (
        openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client,
        client.responses.stream(**body) as stream,
    ):
        for _ in stream:
            pass
        patch, shell = stream.get_final_response().output
    assert patch.type == "custom_tool_call" and patch.input == "p"
    assert shell.type == "local_shell_call" and shell.action.command == ["ls"]


def test_a_call_that_is_cut_off_has_the_text_so_far(live):
    live.engine.text = call("apply_patch", '{"input": "*** Begin')[: -len("}\n</tool_call>")]
    (item,) = live.post("/v1/responses", **asked(FIRST, stream=False)).json()["output"]
    assert item["type"] == "custom_tool_call" and item["input"] == "*** Begin"


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ({"type": "custom", "name": "apply_patch"}, ["apply_patch"]),
        ({"type": "local_shell"}, ["local_shell"]),
        ({"type": "function", "name": "create_event", "namespace": "mcp__calendar__"}, ["mcp__calendar__create_event"]),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}, {"type": "local_shell"}]},
            ["local_shell"],
        ),
    ],
)
def test_a_tool_is_chosen_by_its_own_type(live, choice, names):
    live.engine.text = call(names[0], '{"input": "x", "command": ["x"]}') + call("exec_command", '{"cmd": "x"}')
    answer = live.post("/v1/responses", **asked(FIRST, stream=False, tool_choice=choice)).json()
    assert len([each for each in answer["output"] if "call" in each["type"]]) == len(names), answer


@pytest.mark.parametrize(
    ("tools", "param", "said"),
    [
        ([{"type": "file_search"}], "tools[0].type", "custom, local_shell and namespace"),
        ([SEARCH, {"type": "custom"}], "tools[1].name", "a string"),
        ([SEARCH, {"type": "custom", "name": "a b"}], "tools[1].name", "tools[1].name must have 1 to 64"),
        ([{"type": "custom", "name": "a", "format": 1}], "tools[0].format", "an object"),
        ([{"type": "namespace", "name": "n"}], "tools[0].tools", "a list of objects"),
        ([{**CALENDAR, "tools": [CALENDAR]}], "tools[0].tools[0].type", "a namespace in another"),
        ([CALENDAR, SEARCH, EXEC, EXEC], "tools[3].name", "two tools have the name exec_command"),
        (
            [SEARCH, {**EXEC, "parameters": {"type": "array"}}],
            "tools[1].parameters",
            "tools[1].parameters must be the JSON",
        ),
        (
            [{**CALENDAR, "tools": [SEARCH, {**EXEC, "strict": True, "parameters": {"type": "object"}}]}],
            "tools[0].tools[1].parameters",
            "with strict, tools[0].tools[1].parameters must have additionalProperties",
        ),
        ([{**CALENDAR, "tools": [{**EXEC, "strict": 1}]}], "tools[0].tools[0].strict", "tools[0].tools[0].strict must"),
    ],
)
def test_wrong_tools_are_named_as_the_client_has_them(live, tools, param, said):
    response = live.post("/v1/responses", **asked(FIRST, tools=tools))
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"] == param and said in error["message"], error


def test_an_input_of_items_that_are_not_shown_is_refused_as_such(live):
    call = {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "x"}}
    error = live.post("/v1/responses", **asked([call], instructions="")).json()["error"]
    assert error["param"] == "input" and "is not shown (web_search_call)" in error["message"]


def test_names_of_a_namespace_fit():
    long = "a" * 60
    assert ResponseTools.name_of("f", "mcp__x__") == ResponseTools.name_of("f", "mcp__x") == "mcp__x__f"
    assert ResponseTools.name_of(long, "mcp__calendar") == long and ResponseTools.name_of("f") == "f"


def test_a_prompt_that_is_too_long_is_cut_under_truncation_auto(live):
    items = [{"role": "user", "content": "x" * 20000}, {"role": "user", "content": "last"}]
    body = asked(items, stream=False, max_output_tokens=4)
    assert live.post("/v1/responses", **body).json()["error"]["param"] == "input"
    live.engine.text = "Yes."
    answer = live.post("/v1/responses", **{**body, "truncation": "auto"}).json()
    assert answer["status"] != "failed" and answer["truncation"] == "auto"
    assert live.engine.prompt.endswith("user=last;") and not live.engine.prompt.startswith("[")
