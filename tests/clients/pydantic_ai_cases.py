"""pydantic-ai: output by a tool and by a schema, tools, streams, responses."""

import asyncio

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings

PACKAGES = ("pydantic-ai-slim",)


class City(BaseModel):
    city: str
    rank: int


def cases(url, model):
    provider = OpenAIProvider(base_url=f"{url}/v1", api_key="none")
    settings = ModelSettings(max_tokens=120, timeout=300)
    chat = OpenAIChatModel(model, provider=provider, settings=settings)

    def text():
        assert Agent(chat).run_sync("hi").output

    def by_tool():
        assert isinstance(Agent(chat, output_type=ToolOutput(City)).run_sync("A city?").output, City)

    def by_schema():
        assert isinstance(Agent(chat, output_type=NativeOutput(City)).run_sync("A city?").output, City)

    def streamed():
        async def read():
            async with Agent(chat, output_type=NativeOutput(City)).run_stream("A city?") as result:
                return [each async for each in result.stream_output()][-1]

        assert isinstance(asyncio.run(read()), City)

    def responses():
        asked = OpenAIResponsesModel(model, provider=provider, settings=settings)
        assert isinstance(Agent(asked, output_type=NativeOutput(City)).run_sync("A city?").output, City)

    return [text, by_tool, by_schema, streamed, responses]
