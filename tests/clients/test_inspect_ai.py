"""inspect_ai: an evaluation whose model calls a tool, by OpenAI's and by Anthropic's API."""

import asyncio
from importlib.metadata import version

import pytest

from .recorded import ANSWER, SAYS_ANSWER, SAYS_CALL, SAYS_CITY, THOUGHT, num_tokens

pytest.importorskip("anthropic")
pytest.importorskip("inspect_ai")
from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig, ResponseSchema, get_model
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import tool
from inspect_ai.util import json_schema
from pydantic import BaseModel

pytestmark = pytest.mark.integration

PROVIDERS = {"openai-api/chorus/base": "/v1", "vllm/base": "/v1", "anthropic/base": ""}
if version("anthropic").startswith("1."):  # which it refuses
    PROVIDERS.pop("anthropic/base")


@pytest.fixture(params=PROVIDERS)
def model(request, told):
    how = {"base_url": f"{told.url}{PROVIDERS[request.param]}", "api_key": "none"}
    return get_model(request.param, config=GenerateConfig(max_tokens=999, max_retries=0), memoize=False, **how)


@tool
def weather():
    async def execute(city: str, days: int) -> str:
        """The weather of a city.

        Args:
            city: its name
            days: how many
        """
        return f"{days} days of rain in {city}"

    return execute


def test_an_evaluation(model, told, tmp_path):
    told.engine.texts = [SAYS_CALL, SAYS_ANSWER]
    task = Task(
        dataset=[Sample("Weather in Paris?", target="It rains")],
        solver=[use_tools(weather()), generate()],
        scorer=includes(),
    )
    (log,) = eval(task, model=model, log_dir=str(tmp_path), display="none")
    assert log.status == "success", log.error
    assert log.results.scores[0].metrics["accuracy"].value == 1
    (sample,) = log.samples
    assert sample.output.completion == ANSWER and sample.output.usage.output_tokens == num_tokens(SAYS_ANSWER)
    (result,) = (message for message in sample.messages if message.role == "tool")
    assert result.text == "3 days of rain in Pa\"r'is" and "<tool>3 days" in told.engine.prompt
    last = sample.output.message.content
    assert [part.summary or part.reasoning for part in last if part.type == "reasoning"] == [THOUGHT]


class City(BaseModel):
    city: str
    rank: int


def test_answers_by_a_schema_with_log_probabilities(told):
    told.engine.text = SAYS_CITY
    how = {"base_url": f"{told.url}/v1", "api_key": "none", "memoize": False}
    asked = GenerateConfig(
        response_schema=ResponseSchema(name="city", json_schema=json_schema(City)), logprobs=True, top_logprobs=2
    )
    output = asyncio.run(get_model("openai-api/chorus/base", **how).generate("A city?", config=asked))
    assert City.model_validate_json(output.completion) == City(city="Paris", rank=1)
    scores = output.choices[0].logprobs.content
    assert len(scores) == num_tokens(SAYS_CITY) - 1 and {one.logprob for one in scores} == {-0.5}  # without its end
