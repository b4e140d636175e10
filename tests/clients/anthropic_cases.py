"""anthropic: messages, tools, parsed answers, streams."""

import anthropic
from pydantic import BaseModel

PACKAGES = ("anthropic",)
USER = [{"role": "user", "content": "Name a city."}]
TOOL = {
    "name": "weather",
    "input_schema": {"type": "object", "properties": {"unit": {"enum": ["C", "F"]}}, "required": ["unit"]},
}


class City(BaseModel):
    city: str
    rank: int


def cases(url, model):
    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=300)
    limits = {"model": model, "max_tokens": 120}

    def whole():
        answer = client.messages.create(messages=USER, system="Be brief.", **limits)
        assert answer.content[0].text and answer.usage.output_tokens

    def streamed():
        with client.messages.stream(messages=USER, **limits) as stream:
            assert "".join(stream.text_stream) == stream.get_final_text()

    def counted():
        assert client.messages.count_tokens(model=model, messages=USER).input_tokens > 3

    def tool():
        answer = client.messages.create(messages=USER, tools=[TOOL], tool_choice={"type": "any"}, **limits)
        (*_, call) = answer.content
        assert answer.stop_reason == "tool_use" and call.input["unit"] in ("C", "F")

    def streamed_tool():
        choice = {"type": "tool", "name": "weather"}
        with client.messages.stream(messages=USER, tools=[TOOL], tool_choice=choice, **limits) as stream:
            assert stream.get_final_message().content[-1].input["unit"] in ("C", "F")

    def tool_round():
        first = client.messages.create(
            messages=USER, tools=[TOOL], tool_choice={"type": "tool", "name": "weather"}, **limits
        )
        result = {"type": "tool_result", "tool_use_id": first.content[-1].id, "content": "21"}
        turns = [*USER, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
        assert client.messages.create(messages=turns, tools=[TOOL], **limits).stop_reason

    def parsed():
        answer = client.messages.parse(messages=USER, output_format=City, **limits)
        assert isinstance(answer.parsed_output, City)

    def errors():
        try:
            client.messages.create(messages=USER, model="nobody", max_tokens=5)
        except anthropic.NotFoundError:
            return
        raise AssertionError("a model that there is not")

    return [whole, streamed, counted, tool, streamed_tool, tool_round, parsed, errors]
