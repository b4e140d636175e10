"""POST /v1/responses over a fake engine, read by OpenAI's client."""

import json

import openai
import pytest
from openai.types.responses import Response

from chorus.server.access.limits import RequestLimits
from chorus.server.api.responses_request import ResponsesRequest

USER = [{"role": "user", "content": "hi"}]
ECHO = "user: hi\nassistant: "


@pytest.fixture(scope="module")
def client(shared):
    with openai.OpenAI(base_url=f"{shared.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_a_whole_response(client):
    response = client.responses.create(model="base", input="hi", store=False, metadata={"a": "b"})
    assert response.output_text == ECHO and response.status == "completed" and response.error is None
    assert response.id.startswith("resp_") and response.model == "base" and response.store is False
    assert response.usage.input_tokens == len(ECHO) and response.usage.output_tokens == len(ECHO) + 1
    assert response.usage.total_tokens == 2 * len(ECHO) + 1 and response.metadata == {"a": "b"}
    assert response.incomplete_details is None and response.previous_response_id is None


def test_the_answer_has_the_types_of_openai(shared):
    body = shared.post("/v1/responses", model="base", input="hi", tools=[]).json()
    Response.model_validate(body, strict=True)


def test_a_cut_response_is_incomplete(client):
    response = client.responses.create(model="alice", input="hi", max_output_tokens=3)
    assert response.status == "incomplete" and response.incomplete_details.reason == "max_output_tokens"
    assert response.output[0].status == "incomplete" and response.usage.output_tokens == 3


def test_an_empty_answer_is_an_empty_message(client):
    response = client.responses.create(model="base", input="hi", extra_body={"stop": "user"})
    assert response.output_text == "" and response.output[0].content[0].text == ""


def test_a_stream_of_numbered_events(client):
    events = list(client.responses.create(model="base", input="hi", stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    deltas = kinds.count("output_text.delta")
    assert kinds == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        *["output_text.delta"] * deltas,
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == ECHO
    assert events[0].response.status == "in_progress" and not events[0].response.output
    final = events[-1].response
    assert final.output_text == ECHO and final.usage.output_tokens == len(ECHO) + 1
    assert {event.item_id for event in events if hasattr(event, "item_id")} == {final.output[0].id}


def test_the_clients_own_accumulation(client):
    with client.responses.stream(model="base", input="hi") as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_text == ECHO


def test_a_stream_that_fails_says_so(client):
    events = list(client.responses.create(model="base", input="a\0", stream=True))
    assert events[-1].type == "response.failed" and events[-1].response.status == "failed"
    assert events[-1].response.error.code == "server_error" and events[-1].response.error.message


def test_log_probabilities(client):
    include = ["message.output_text.logprobs"]
    response = client.responses.create(model="base", input="hi", include=include, top_logprobs=2)
    scores = response.output[0].content[0].logprobs
    assert [score.token for score in scores[:2]] == ["u", "s"] and len(scores[0].top_logprobs) == 2
    assert len(scores) == response.usage.output_tokens - 1, "all but the end token"
    events = list(client.responses.create(model="base", input="hi", include=include, stream=True))
    told = [score for event in events if event.type == "response.output_text.delta" for score in event.logprobs]
    (done,) = (event for event in events if event.type == "response.output_text.done")
    assert len(told) >= len(ECHO) and len(done.logprobs) == len(scores)


def prompt_of(shared, **body):
    return shared.post("/v1/responses", model="base", **body).json()["output"][0]["content"][0]["text"]


def test_items_become_a_conversation(shared):
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "text", "text": "hm"}], "encrypted_content": ""},
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "c", "annotations": []}],
        },
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "4"},
    ]
    assert prompt_of(shared, input=items) == "user: a\nb\nassistant: c\ntool: 4\nassistant: "


def test_an_earlier_answer_can_be_sent_back(client):
    first = client.responses.create(model="base", input="hi")
    again = client.responses.create(model="base", input=[*USER, *first.output, {"role": "user", "content": "b"}])
    assert again.output_text == f"{ECHO.removesuffix('assistant: ')}assistant: {ECHO}\nuser: b\nassistant: "


def test_instructions_and_developers_are_the_system(start, fake_engine, pretrained, monkeypatch):
    monkeypatch.setattr(
        pretrained, "chat_template", "{%- for m in messages -%}{{ m.role ~ '=' ~ m.content ~ ';' }}{%- endfor -%}"
    )
    live = start(fake_engine)
    items = [{"role": "developer", "content": "b"}, {"role": "user", "content": "c"}]
    assert prompt_of(live, instructions="a", input=items) == "system=a\n\nb;user=c;"


def test_text_format_is_a_grammar():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    schema["additionalProperties"] = False
    text = {"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}}

    asked = ResponsesRequest.parse(json.dumps({"input": "hi", "text": text}).encode(), RequestLimits())
    field, grammar = asked.chat.asked_grammar(RequestLimits())
    assert field == "response_format" and json.loads(grammar.text) == schema


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": None}, "input"),
        ({"input": 5}, "input"),
        ({"input": []}, "input"),
        ({"input": [5]}, "input[0]"),
        ({"input": [[]]}, "input[0]"),
        ({"input": [{}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input"),
        ({"input": [{"role": 5, "content": "a"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": 5}]}, "input[0].content"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0]",
        ),
        ({"input": [{"role": "user", "content": [{"type": []}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "text", "text": 4}]}]}, "input[0].content[0].text"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input[0].type"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type"),
        ({"input": [{"type": {}}]}, "input[0].type"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "call_id": "1", "output": [1]}]}, "input[0].output[0]"),
        ({"input": [{"type": "reasoning", "summary": 7}]}, "input[0].content"),
        ({"input": "a", "store": True}, "store"),
        ({"input": "a", "store": 0}, "store"),
        ({"input": "a", "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": "a", "conversation": {}}, "conversation"),
        ({"input": "a", "background": True}, "background"),
        ({"input": "a", "truncation": "left"}, "truncation"),
        ({"input": "a", "prompt": {"id": "p"}}, "prompt"),
        ({"input": "a", "n": 2}, "n"),
        ({"input": "a", "messages": []}, "messages"),
        ({"input": "a", "max_tokens": 2}, "max_tokens"),
        ({"input": "a", "surprise": 2}, "surprise"),
        ({"input": "a", "include": ["x"]}, "include"),
        ({"input": "a", "include": [{}]}, "include"),
        ({"input": "a", "include": "x"}, "include"),
        ({"input": "a", "instructions": []}, "instructions"),
        ({"input": "a", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "a", "max_output_tokens": True}, "max_output_tokens"),
        ({"input": "a", "max_output_tokens": "x"}, "max_output_tokens"),
        ({"input": "a", "max_output_tokens": 2**80}, "max_output_tokens"),
        ({"input": "a", "metadata": {"a": [2**80]}}, "metadata"),
        ({"input": "a", "metadata": []}, "metadata"),
        ({"input": "a", "reasoning": 1}, "reasoning"),
        ({"input": "a", "text": 1}, "text"),
        ({"input": "a", "text": {"format": 1}}, "text.format"),
        ({"input": "a", "text": {"format": {"type": "json_schema"}}}, "text"),
        ({"input": "a", "text": {"surprise": 1}}, "text.surprise"),
        ({"input": "a", "text": {"verbosity": "loud"}}, "text"),
        ({"input": "a", "tools": 1}, "tools"),
        ({"input": "a", "tools": [1]}, "tools[0]"),
        ({"input": "a", "tools": [{"type": "file_search"}]}, "tools[0].type"),
        ({"input": "a", "tools": [{"type": "function"}]}, "tools[0].name"),
        ({"input": "a", "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"input": "a", "top_logprobs": 21}, "top_logprobs"),
        ({"input": "a", "top_logprobs": "a"}, "top_logprobs"),
        ({"input": "a", "temperature": -1}, "temperature"),
        ({"input": "a", "stream": []}, "stream"),
        ({"input": "x" * 100_000}, "input"),
    ],
)
def test_wrong_fields_are_named(shared, body, param):
    response = shared.post("/v1/responses", model="base", **body)
    assert response.status_code == 400 and response.json()["error"]["param"] == param, response.text


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{", b'{"input":' + b"[" * 90 + b"]" * 90 + b"}", b"\xff", b'"a"', b"null"]
)
@pytest.mark.parametrize(
    "path",
    [
        "/v1/responses",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/responses/input_tokens",
        "/v1/chat/completions/batch",
    ],
)
def test_what_is_no_object_is_refused(shared, path, body):
    response = shared.client.post(path, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400 and response.json()["error"]["message"], response.text


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
def test_a_model_that_is_not_there(shared, path):
    body = {"input": "a"} if path == "/v1/responses" else {"messages": USER, "max_tokens": 4}
    response = shared.post(path, model="nobody", **body)
    assert response.status_code == 404 and response.json()["error"]["code"] == "model_not_found"


def test_tokens_of_an_input_are_counted(client, shared):
    """As many as a response's usage says."""
    asked = {"model": "base", "input": [{"role": "user", "content": "hi"}]}
    counted = client.responses.input_tokens.count(**asked)
    assert counted.object == "response.input_tokens"
    assert counted.input_tokens == client.responses.create(**asked, max_output_tokens=1).usage.input_tokens
    refused = shared.post("/v1/responses/input_tokens", model="base", input="hi", previous_response_id="resp_1")
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "previous_response_id"


def test_responses_are_not_kept(shared, client):
    with pytest.raises(openai.APIStatusError, match="stores no responses"):
        client.responses.retrieve("resp_1")
    assert shared.client.head("/v1/responses/a").status_code == 501
