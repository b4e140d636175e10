"""anthropic's client: what its objects mean, of recorded text; rounds of tools, thinking, parsed answers, counts."""

import pytest
from pydantic import BaseModel

from .recorded import ANSWER, ARGUMENTS, INPUT_TOOL, SAYS_ANSWER, SAYS_CALL, SAYS_CITY, THOUGHT, USER, num_tokens

anthropic = pytest.importorskip("anthropic")
pytestmark = pytest.mark.integration

THINKING = {"type": "enabled", "budget_tokens": 1024}


class City(BaseModel):
    city: str
    rank: int


def client_of(live):
    return anthropic.Anthropic(base_url=live.url, api_key="none", max_retries=0, timeout=60)


@pytest.mark.parametrize("stream", [False, True])
def test_a_round_with_thinking_and_a_tool(told, stream):
    told.engine.texts = [SAYS_CALL, SAYS_ANSWER]
    messages = client_of(told).messages

    def ask(turns):
        asked = {"model": "base", "max_tokens": 4096, "tools": [INPUT_TOOL], "thinking": THINKING, "messages": turns}
        if not stream:
            return messages.create(**asked)
        with messages.stream(**asked) as events:
            return events.get_final_message()

    first = ask(USER)
    thinking, call = first.content
    assert (thinking.thinking, first.stop_reason) == (THOUGHT, "tool_use")
    assert (call.type, call.name, call.input) == ("tool_use", "weather", ARGUMENTS)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "12 degrees"}
    last = ask([*USER, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}])
    assert (last.content[-1].text, last.stop_reason) == (ANSWER, "end_turn")
    assert last.usage.output_tokens == num_tokens(SAYS_ANSWER)
    assert f"<think>{THOUGHT}</think>" in told.engine.prompt and "<tool>12 degrees" in told.engine.prompt


def test_tokens_counted_are_those_of_a_message(told):
    told.engine.text = ANSWER
    asked = {"model": "base", "messages": USER, "system": "Be brief.", "tools": [INPUT_TOOL]}
    counted = client_of(told).messages.count_tokens(**asked).input_tokens
    assert counted == client_of(told).messages.create(**asked, max_tokens=99).usage.input_tokens


def test_a_parsed_answer(told):
    told.engine.text = SAYS_CITY
    answer = client_of(told).messages.parse(model="base", max_tokens=99, messages=USER, output_format=City)
    assert answer.parsed_output == City(city="Paris", rank=1)


def test_its_runner_of_tools(told):
    """It calls the function by itself, and asks again with what that gave."""
    told.engine.texts = [SAYS_CALL, SAYS_ANSWER]

    @anthropic.beta_tool
    def weather(city: str, days: int) -> str:
        """The weather of a city."""
        return f"{days} days of rain in {city}"

    last = (
        client_of(told)
        .beta.messages.tool_runner(model="base", max_tokens=999, tools=[weather], messages=USER)
        .until_done()
    )
    assert last.content[-1].text == ANSWER
    assert f"3 days of rain in {ARGUMENTS['city']}" in told.engine.prompt


def test_errors_are_of_their_kinds(told):
    with pytest.raises(anthropic.NotFoundError):
        client_of(told).messages.create(model="nobody", max_tokens=5, messages=USER)
    with pytest.raises(anthropic.BadRequestError):
        client_of(told).messages.create(model="base", max_tokens=-1, messages=USER)
