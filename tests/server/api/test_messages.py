"""POST /v1/messages over a fake engine, as Anthropic's clients ask and read."""

import json

import pytest

USER = [{"role": "user", "content": "hi"}]
ECHO = "user: hi\nassistant: "


def ask(live, **body):
    return live.post("/v1/messages", **{"model": "base", "max_tokens": 100, "messages": USER, **body})


def said(response):
    assert response.status_code == 200, response.text
    (block,) = response.json()["content"]
    return block["text"]


def read(response):
    """The events of a stream, each with its name."""
    frames = response.text.split("\n\n")
    assert frames.pop() == ""
    pairs = [frame.split("\n") for frame in frames]
    events = [json.loads(data.removeprefix("data: ")) for _, data in pairs]
    assert [name for name, _ in pairs] == [f"event: {event['type']}" for event in events]
    return events


def test_a_whole_message(shared):
    body = ask(shared).json()
    assert body.pop("id").startswith("msg_")
    assert body == {
        "type": "message",
        "role": "assistant",
        "model": "base",
        "content": [{"type": "text", "text": ECHO}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": len(ECHO),
            "output_tokens": len(ECHO) + 1,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
        },
    }


def test_cached_tokens_are_counted_apart(start, fake_engine):
    fake_engine.num_cached_tokens = 16
    usage = ask(start(fake_engine)).json()["usage"]
    assert usage["cache_read_input_tokens"] == 16 and usage["input_tokens"] == len(ECHO) - 16


def test_reasons_to_stop(shared):
    assert ask(shared, max_tokens=3).json()["stop_reason"] == "max_tokens"
    body = ask(shared, stop_sequences=["hi", "x"]).json()
    assert (body["stop_reason"], body["stop_sequence"]) == ("stop_sequence", "hi")
    assert body["content"] == [{"type": "text", "text": "user: "}]


def test_chats_own_names_are_obeyed_too(shared):
    """A field with two names may come by either; by both only if they agree."""
    assert ask(shared, stop=["hi"]).json()["stop_sequence"] == "hi"
    assert ask(shared, stop=["hi"], stop_sequences=["hi"]).json()["stop_sequence"] == "hi"
    for more in ({"stop": "a", "stop_sequences": ["b"]}, {"reasoning_effort": "low", "thinking": {"type": "disabled"}}):
        error = ask(shared, **more).json()["error"]
        assert error["param"] == next(iter(more)) and "differ" in error["message"]


def test_a_stream(shared):
    events = read(ask(shared, stream=True, model="alice"))
    kinds = [event["type"] for event in events]
    deltas = kinds.count("content_block_delta")
    assert kinds == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * deltas,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert events[0]["message"]["content"] == [] and events[0]["message"]["usage"]["input_tokens"] == len(ECHO)
    assert "".join(event["delta"]["text"] for event in events[2:-3]) == ECHO[::-1]
    assert events[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] == len(ECHO) + 1


def test_a_stream_that_fails_ends_with_an_error(shared):
    *_, last = read(ask(shared, stream=True, messages=[{"role": "user", "content": "\0"}]))
    assert last["type"] == "error" and last["error"]["type"] == "api_error" and last["error"]["message"]


def test_conversations_with_tools(shared):
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "x"},
                {"type": "text", "text": "b"},
                {"type": "tool_use", "id": "1", "name": "f", "input": {"c": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "4"}]},
                {"type": "text", "text": "d"},
            ],
        },
    ]
    assert said(ask(shared, messages=messages)) == "user: a\nassistant: b\ntool: 4\nuser: d\nassistant: "


def test_a_begun_answer_is_continued(shared):
    assert said(ask(shared, messages=[*USER, {"role": "assistant", "content": "so"}])) == "user: hi\nassistant: so"


def test_a_thread_is_not_held(shared):
    """A client of threads is told so when it goes on with one, in the words by which it sends all messages instead."""
    assert said(ask(shared, thread={"type": "create"})) == ECHO
    response = ask(shared, thread={"type": "continue", "previous_message_id": "msg_1"})
    assert response.status_code == 404
    assert response.json()["error"]["details"] == {"error_code": "thread_not_found"}


def test_tokens_are_counted(shared):
    response = shared.post("/v1/messages/count_tokens", model="base", messages=USER)
    assert response.json() == {"input_tokens": len(ECHO)}


def test_the_key_may_come_as_anthropics_clients_send_it(start, fake_engine):
    live = start(fake_engine, settings={"api_key": ["secret-key"]})
    body = {"model": "base", "max_tokens": 4, "messages": USER}

    def status(headers):
        return live.client.post("/v1/messages", json=body, headers=headers).status_code

    assert status({"x-api-key": "secret-key"}) == 200
    assert status({"x-api-key": "another-key"}) == status({}) == 401
    assert status({"x-api-key": "secret-key", "authorization": "Bearer another-key"}) == 401


def test_errors_have_anthropics_shape_and_types(start, fake_engine):
    live = start(fake_engine, settings={"api_key": ["secret-key"], "max_body_bytes": 2048})
    body = {"model": "base", "max_tokens": 4, "messages": USER}

    def error(path="/v1/messages", key="secret-key", method="POST", **more):
        headers = {"x-api-key": key}
        answer = live.client.request(method, path, json={**body, **more}, headers=headers)
        assert answer.json()["type"] == "error" and answer.json()["error"]["message"]
        return answer.status_code, answer.json()["error"]["type"]

    assert error(max_tokens=0) == (400, "invalid_request_error")
    assert error(key="other") == (401, "authentication_error")
    assert error(model="absent") == (404, "not_found_error")
    assert error(method="PUT") == (405, "invalid_request_error")
    assert error(system="x" * 4096) == (413, "request_too_large")
    assert error("/v1/messages/count_tokens", max_tokens=None, messages=5) == (400, "invalid_request_error")
    assert "type" not in live.client.post("/v1/responses", json={}).json()


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "4"}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": {}}, "messages"),
        ({"messages": [5]}, "messages[0]"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": {}, "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [5]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": []}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]}, "messages[0].content[0].name"),
        (
            {
                "messages": [
                    {"role": "assistant", "content": [{"type": "tool_use", "name": "f", "id": "1", "input": 5}]}
                ]
            },
            "messages[0].content[0].input",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages[0].content[0].tool_use_id"),
        ({"messages": [*USER, {"role": "assistant", "content": ""}]}, "continue_final_message"),
        ({"system": 5}, "system"),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"stop_sequences": "a"}, "stop_sequences"),
        ({"stop_sequences": [5]}, "stop_sequences"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop_sequences": ["a"] * 99}, "stop_sequences"),
        ({"thinking": {"type": "x"}}, "thinking.type"),
        ({"thread": "create"}, "thread"),
        ({"output_config": 5}, "output_config"),
        ({"output_config": {"format": {}}}, "output_config.format"),
        ({"tools": {}}, "tools"),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "tools[0].type"),
        ({"tools": [{"name": 5}]}, "tools[0].name"),
        ({"tools": [{"name": "f", "input_schema": 5}]}, "tools[0].input_schema"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": {"type": []}}, "tool_choice.type"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"container": "a"}, "container"),
        ({"n": 2}, "n"),
        ({"surprise": 1}, "surprise"),
        ({"temperature": -1}, "temperature"),
        ({"messages": [{"role": "user", "content": "x" * 100_000}]}, "messages"),
    ],
)
def test_wrong_fields_are_named(shared, body, param):
    response = ask(shared, **body)
    assert response.status_code == 400 and response.json()["error"]["param"] == param, response.text
