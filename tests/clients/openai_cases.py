"""openai: chat, parsed answers, tools, responses, completions, streams, errors."""

import json
from typing import Literal

import openai
from pydantic import BaseModel

PACKAGES = ("openai",)
USER = [{"role": "user", "content": "Name a city and its country."}]


class City(BaseModel):
    city: str
    country: Literal["France", "Japan", "Peru"]
    rank: int


PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS, "strict": True}}
FLAT = {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": True}


def cases(url, model):
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300)
    chat, limits = client.chat.completions, {"model": model, "max_tokens": 120}

    def models():
        assert model in [one.id for one in client.models.list()]

    def whole():
        answer = chat.create(messages=USER, **limits)
        assert answer.choices[0].message.content and answer.usage.total_tokens > 0

    def streamed():
        chunks = list(chat.create(messages=USER, stream=True, stream_options={"include_usage": True}, **limits))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) and chunks[-1].usage

    def parsed():
        assert isinstance(chat.parse(messages=USER, response_format=City, **limits).choices[0].message.parsed, City)

    def parsed_stream():
        with chat.stream(messages=USER, response_format=City, **limits) as stream:
            for _ in stream:
                pass
            assert isinstance(stream.get_final_completion().choices[0].message.parsed, City)

    def json_object():
        text = chat.create(messages=USER, response_format={"type": "json_object"}, temperature=0, **limits)
        choice = text.choices[0]
        assert choice.finish_reason == "length" or isinstance(json.loads(choice.message.content), dict)

    def forced_tool():
        choice = chat.create(messages=USER, tools=[TOOL], tool_choice="required", **limits).choices[0]
        assert json.loads(choice.message.tool_calls[0].function.arguments)["unit"] in ("C", "F")

    def named_tool():
        named = {"type": "function", "function": {"name": "weather"}}
        (call,) = chat.create(messages=USER, tools=[TOOL], tool_choice=named, **limits).choices[0].message.tool_calls
        assert call.function.name == "weather" and json.loads(call.function.arguments)["city"] is not None

    def tool_round():
        first = chat.create(messages=USER, tools=[TOOL], tool_choice="required", parallel_tool_calls=False, **limits)
        message = first.choices[0].message
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "21"}
        assert chat.create(messages=[*USER, message, result], tools=[TOOL], **limits).choices[0].finish_reason

    def streamed_tool():
        with chat.stream(
            messages=USER, tools=[TOOL], tool_choice="required", parallel_tool_calls=False, **limits
        ) as stream:
            kinds = {event.type for event in stream}
            (call,) = stream.get_final_completion().choices[0].message.tool_calls
        assert "tool_calls.function.arguments.done" in kinds and call.function.parsed_arguments["unit"] in ("C", "F")

    def logprobs():
        answer = chat.create(messages=USER, logprobs=True, top_logprobs=3, model=model, max_tokens=5)
        assert all(len(one.top_logprobs) == 3 for one in answer.choices[0].logprobs.content)

    def several():
        answer = chat.create(messages=USER, n=3, model=model, max_tokens=5)
        assert [one.index for one in answer.choices] == [0, 1, 2]

    def completion():
        assert client.completions.create(model=model, prompt=["a", "b"], max_tokens=4, echo=True).choices[1].text

    def response():
        answer = client.responses.create(model=model, input="hi", max_output_tokens=20)
        assert answer.output_text and answer.usage.output_tokens

    def parsed_response():
        answer = client.responses.parse(model=model, input="Name a city.", text_format=City, max_output_tokens=120)
        assert isinstance(answer.output_parsed, City)

    def streamed_response():
        asked = {"model": model, "input": "Name a city.", "max_output_tokens": 120}
        with client.responses.stream(text_format=City, **asked) as stream:
            for _ in stream:
                pass
            assert isinstance(stream.get_final_response().output_parsed, City)

    def response_with_tool():
        asked = {"model": model, "tools": [FLAT], "max_output_tokens": 120}
        first = client.responses.create(input="Weather?", tool_choice="required", parallel_tool_calls=False, **asked)
        (call,) = (item for item in first.output if item.type == "function_call")
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "21"}
        assert client.responses.create(input=[*USER, *first.output, result], **asked).status

    def errors():
        wrong_ones = ({"model": "nobody"}, openai.NotFoundError), ({"temperature": -1}, openai.BadRequestError)
        for wrong, kind in wrong_ones:
            try:
                chat.create(**{"messages": USER, **limits, **wrong})
            except kind:
                continue
            raise AssertionError(wrong)

    def cancelled():
        stream = chat.create(messages=USER, stream=True, **limits)
        next(iter(stream))
        stream.close()

    return [
        models,
        whole,
        streamed,
        parsed,
        parsed_stream,
        json_object,
        forced_tool,
        named_tool,
        tool_round,
        streamed_tool,
        logprobs,
        several,
        completion,
        response,
        parsed_response,
        streamed_response,
        response_with_tool,
        errors,
        cancelled,
    ]
