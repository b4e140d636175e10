"""pydantic-ai: agents that call tools and answer with objects, by chat, responses and messages."""

import pytest
from pydantic import BaseModel

from .recorded import ANSWER, SAYS_ANSWER, SAYS_CALL, SAYS_CITY, THOUGHT, num_tokens

pytest.importorskip("anthropic")
pytest.importorskip("pydantic_ai")
from anthropic.types.beta import BetaMessageParam
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.messages import ThinkingPart
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

pytestmark = pytest.mark.integration


class City(BaseModel):
    """A city."""

    city: str
    rank: int


def by_openai(url):
    return OpenAIProvider(base_url=f"{url}/v1", api_key="none")


MODELS = {
    "chat": lambda url: OpenAIChatModel("base", provider=by_openai(url)),
    "responses": lambda url: OpenAIResponsesModel("base", provider=by_openai(url)),
    "messages": lambda url: AnthropicModel("base", provider=AnthropicProvider(base_url=url, api_key="none")),
}
if not isinstance(BetaMessageParam, type):  # pydantic-ai 2.38 makes one, and anthropic 2 has a union in its place
    MODELS.pop("messages")
FINAL = '<tool_call>{"name": "final_result", "arguments": {"city": "Paris", "rank": 1}}</tool_call>'


@pytest.fixture(params=MODELS)
def model(request, told):
    return MODELS[request.param](told.url)


def test_an_agent_that_calls_a_tool(model, told):
    told.engine.texts = [SAYS_CALL, SAYS_ANSWER]
    agent = Agent(model)
    asked = []

    @agent.tool_plain
    def weather(city: str, days: int) -> str:
        """The weather of a city."""
        asked.append((city, days))
        return "12 degrees"

    result = agent.run_sync("Weather in Paris?")
    assert result.output == ANSWER and asked == [("Pa\"r'is", 3)]
    assert result.usage.output_tokens == num_tokens(SAYS_CALL) + num_tokens(SAYS_ANSWER)
    thoughts = [part for message in result.all_messages() for part in message.parts if isinstance(part, ThinkingPart)]
    said = [part.content or (part.provider_details or {})["raw_content"] for part in thoughts]
    assert said in ([THOUGHT, THOUGHT], [[THOUGHT], [THOUGHT]])
    assert "<tool>12 degrees" in told.engine.prompt and f"<think>{THOUGHT}</think>" in told.engine.prompt


def test_objects(model, told):
    told.engine.text = FINAL
    assert Agent(model, output_type=City).run_sync("A city?").output == City(city="Paris", rank=1)


@pytest.mark.parametrize("name", ["chat", "responses"])
def test_objects_by_a_schema(told, name):
    told.engine.text = SAYS_CITY
    agent = Agent(MODELS[name](told.url), output_type=NativeOutput(City))
    assert agent.run_sync("A city?").output == City(city="Paris", rank=1)


def test_streams(model, told):
    told.engine.text = SAYS_ANSWER
    result = Agent(model).run_stream_sync("Weather?")
    assert result.get_output() == ANSWER
