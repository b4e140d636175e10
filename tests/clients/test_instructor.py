"""instructor: objects by each of its modes; a wrong answer is asked for again, with what was wrong with it."""

import openai
import pytest
from pydantic import BaseModel, field_validator

from .recorded import SAYS_CITY, num_tokens

anthropic = pytest.importorskip("anthropic")
instructor = pytest.importorskip("instructor")
pytestmark = pytest.mark.integration


class City(BaseModel):
    city: str
    rank: int

    @field_validator("rank")
    @classmethod
    def _is_high(cls, rank):
        if rank > 5:
            raise ValueError("no city of rank beyond 5")
        return rank


PARIS = {"city": "Paris", "rank": 1}
BY_CALL = '<tool_call>{"name": "City", "arguments": {"city": "Paris", "rank": 1}}</tool_call>'
ASKED = {"model": "base", "messages": [{"role": "user", "content": "Paris is of rank 1."}], "response_model": City}
MODES = {
    "TOOLS": BY_CALL,
    "TOOLS_STRICT": BY_CALL,
    "RESPONSES_TOOLS": BY_CALL,
    "JSON": SAYS_CITY,
    "JSON_SCHEMA": SAYS_CITY,
    "MD_JSON": f"```json\n{SAYS_CITY}\n```",
}


def client_of(live, mode="TOOLS"):
    plain = openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0, timeout=60)
    return instructor.from_openai(plain, mode=instructor.Mode[mode])


@pytest.mark.parametrize("mode", MODES)
def test_objects(told, mode):
    told.engine.text = MODES[mode]
    limit = "max_output_tokens" if "RESPONSES" in mode else "max_tokens"
    assert client_of(told, mode).chat.completions.create(**ASKED, **{limit: 200}).model_dump() == PARIS


def test_wrong_objects_are_asked_for_again(told):
    told.engine.texts = [BY_CALL.replace("1}", "9}"), BY_CALL]
    made, answer = client_of(told).chat.completions.create_with_completion(**ASKED, max_retries=2)
    assert made.model_dump() == PARIS and "no city of rank beyond 5" in told.engine.prompt
    assert answer.usage.completion_tokens == num_tokens(BY_CALL.replace("1}", "9}")) + num_tokens(BY_CALL)


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA"])
def test_partial_objects_grow_to_the_whole(told, mode):
    told.engine.text = MODES[mode].replace('"City"', '"PartialCity"')
    made = list(client_of(told, mode).chat.completions.create_partial(**ASKED))
    assert made[-1].model_dump() == PARIS and len(made) > 2


def test_by_anthropics_api(told):
    told.engine.text = BY_CALL
    client = instructor.from_anthropic(anthropic.Anthropic(base_url=told.url, api_key="none", max_retries=0))
    assert client.messages.create(**ASKED, max_tokens=200).model_dump() == PARIS
