"""litellm's SDK by four of its providers: each reads the same calls, texts and counts."""

import json

import pytest

from .recorded import ANSWER, ARGUMENTS, FLAT, SAYS_ANSWER, SAYS_CALL, SAYS_CITY, THOUGHT, TOOL, USER, num_tokens

litellm = pytest.importorskip("litellm")
pytestmark = pytest.mark.integration

PROVIDERS = {"openai": "/v1", "hosted_vllm": "/v1", "anthropic": ""}


@pytest.fixture(params=PROVIDERS)
def ask(request, told):
    litellm.suppress_debug_info = True

    def complete(**asked):
        base = f"{told.url}{PROVIDERS[request.param]}"
        named = {"model": f"{request.param}/base", "api_base": base, "api_key": "none", "num_retries": 0}
        return litellm.completion(**named, max_tokens=999, timeout=60, **asked)

    return complete


def test_a_round_of_a_call(ask, told):
    told.engine.texts = [SAYS_CALL, SAYS_ANSWER]
    message = ask(messages=USER, tools=[TOOL]).choices[0].message
    (call,) = message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", ARGUMENTS)
    assert message.reasoning_content == THOUGHT
    result = {"role": "tool", "tool_call_id": call.id, "content": "12 degrees"}
    last = ask(messages=[*USER, message.model_dump(exclude_none=True), result], tools=[TOOL])
    assert last.choices[0].message.content == ANSWER
    assert last.usage.completion_tokens == num_tokens(SAYS_ANSWER)
    assert "<tool>12 degrees" in told.engine.prompt and '"name": "weather"' in told.engine.prompt


def test_a_stream_adds_up(ask, told):
    told.engine.texts = [SAYS_CALL, SAYS_ANSWER]
    made = litellm.stream_chunk_builder(list(ask(messages=USER, tools=[TOOL], stream=True)))
    (call,) = made.choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", ARGUMENTS)
    assert made.choices[0].finish_reason == "tool_calls"
    made = litellm.stream_chunk_builder(list(ask(messages=USER, stream=True)))
    assert made.choices[0].message.content == ANSWER and made.choices[0].message.reasoning_content == THOUGHT


def test_a_schema_text_and_responses(told):
    told.engine.texts = [SAYS_CITY, ANSWER, SAYS_CALL]
    asked = {"api_base": f"{told.url}/v1", "api_key": "none"}
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema}}
    made = litellm.completion(model="hosted_vllm/base", messages=USER, response_format=form, **asked)
    assert json.loads(made.choices[0].message.content)["city"] == "Paris"
    text = litellm.text_completion(model="text-completion-openai/base", prompt="Once", max_tokens=99, **asked)
    assert text.choices[0].text == ANSWER and text.usage.completion_tokens == num_tokens(ANSWER)
    response = litellm.responses(model="openai/base", input="hi", tools=[FLAT], **asked)
    (call,) = (item for item in response.output if item.type == "function_call")
    assert json.loads(call.arguments) == ARGUMENTS
