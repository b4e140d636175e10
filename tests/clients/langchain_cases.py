"""langchain: structured output, tools and streams, by OpenAI's and by Anthropic's API."""

from langchain_anthropic import ChatAnthropic
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel

PACKAGES = ("langchain-openai", "langchain-anthropic")


class City(BaseModel):
    """A city."""

    city: str
    rank: int


@tool
def weather(unit: str) -> str:
    """The weather."""
    return f"21 {unit}"


def cases(url, model):
    shared = {"model": model, "api_key": "none", "max_retries": 0, "timeout": 300}
    chat = ChatOpenAI(base_url=f"{url}/v1", max_tokens=120, **shared)
    claude = ChatAnthropic(base_url=url, max_tokens=120, **shared)
    forced = chat.bind_tools([weather], tool_choice="required", parallel_tool_calls=False)

    def whole():
        answer = chat.invoke("hi")
        assert answer.content and answer.usage_metadata["output_tokens"]

    def streamed():
        assert "".join(chunk.content for chunk in chat.stream("hi"))

    def batched():
        assert len(chat.batch(["a", "b"])) == 2

    def by_schema():
        assert isinstance(chat.with_structured_output(City, method="json_schema").invoke("A city?"), City)

    def by_tool():
        assert isinstance(chat.with_structured_output(City, method="function_calling").invoke("A city?"), City)

    def tools():
        (call,) = forced.invoke("Weather?").tool_calls
        assert call["name"] == "weather" and isinstance(call["args"]["unit"], str)

    def streamed_tools():
        pieces = [piece for chunk in forced.stream("Weather?") for piece in chunk.tool_call_chunks]
        assert pieces[0]["name"] == "weather" and "".join(piece["args"] or "" for piece in pieces)

    def responses():
        answer = ChatOpenAI(base_url=f"{url}/v1", max_tokens=20, use_responses_api=True, **shared).invoke("hi")
        assert answer.text

    def completions():
        assert OpenAI(base_url=f"{url}/v1", max_tokens=9, **shared).invoke("Once upon")

    def anthropics():
        assert claude.invoke("hi").content

    def anthropics_stream():
        assert list(claude.stream("hi"))

    def anthropics_tools():
        assert claude.bind_tools([weather], tool_choice="any").invoke("Weather?").tool_calls

    return [
        whole,
        streamed,
        batched,
        by_schema,
        by_tool,
        tools,
        streamed_tools,
        responses,
        completions,
        anthropics,
        anthropics_stream,
        anthropics_tools,
    ]
