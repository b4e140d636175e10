"""openai's client: what its objects mean, of recorded text; chat, responses, completions, embeddings' errors."""

import json
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from .recorded import (
    ANSWER,
    ARGUMENTS,
    FLAT,
    SAYS_ANSWER,
    SAYS_CALL,
    SAYS_CITY,
    SAYS_TWO,
    THOUGHT,
    TOOL,
    USER,
    num_tokens,
)

pytestmark = pytest.mark.integration


class City(BaseModel):
    city: str
    rank: int


def client_of(live) -> Any:
    return openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0, timeout=60)


def spelt(scores):
    return bytes(byte for one in scores for byte in one.bytes or ()).decode()


def test_a_call_and_what_came_of_it(told):
    """A whole round: the call, its result in the prompt, the answer, what both cost."""
    told.engine.texts = [SAYS_CALL, SAYS_ANSWER]
    chat = client_of(told).chat.completions
    first = chat.create(model="base", messages=USER, tools=[TOOL])
    (choice,) = first.choices
    (call,) = choice.message.tool_calls
    assert (choice.finish_reason, choice.message.content, call.function.name) == ("tool_calls", None, "weather")
    assert json.loads(call.function.arguments) == ARGUMENTS
    assert choice.message.reasoning_content == THOUGHT
    assert first.usage.completion_tokens == num_tokens(SAYS_CALL)
    result = {"role": "tool", "tool_call_id": call.id, "content": "12 degrees"}
    last = chat.create(model="base", messages=[*USER, choice.message, result], tools=[TOOL])
    assert (last.choices[0].message.content, last.choices[0].finish_reason) == (ANSWER, "stop")
    assert "<tool>12 degrees" in told.engine.prompt and '"name": "weather"' in told.engine.prompt
    assert last.usage.total_tokens == last.usage.prompt_tokens + num_tokens(SAYS_ANSWER)


def test_streamed_calls_are_what_whole_ones_are(told):
    told.engine.text = SAYS_TWO
    chat = client_of(told).chat.completions
    with chat.stream(model="base", messages=USER, tools=[TOOL], stream_options={"include_usage": True}) as stream:
        events = [event.type for event in stream]
        final = stream.get_final_completion()
    calls = final.choices[0].message.tool_calls
    assert [json.loads(call.function.arguments) for call in calls] == [ARGUMENTS, {**ARGUMENTS, "days": 4}]
    assert [call.function.name for call in calls] == ["weather"] * 2 and len({call.id for call in calls}) == 2
    assert events.count("tool_calls.function.arguments.done") == 2
    assert final.usage.completion_tokens == num_tokens(SAYS_TWO)


def test_a_parsed_answer_and_its_log_probabilities(told):
    told.engine.text = SAYS_CITY
    chat = client_of(told).chat.completions
    asked = {"model": "base", "messages": USER, "logprobs": True, "top_logprobs": 3}
    (choice,) = chat.parse(**asked, response_format=City).choices
    assert choice.message.parsed == City(city="Paris", rank=1)
    assert spelt(choice.logprobs.content) == SAYS_CITY
    assert all(one.logprob == -0.5 and len(one.top_logprobs) == 3 for one in choice.logprobs.content)
    with chat.stream(**asked, response_format=City) as stream:
        kinds = {event.type for event in stream}
        (choice,) = stream.get_final_completion().choices
    assert choice.message.parsed == City(city="Paris", rank=1)
    assert spelt(choice.logprobs.content) == SAYS_CITY and "logprobs.content.delta" in kinds


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_with_reasoning_a_call_and_an_answer(told, stream):
    told.engine.texts = [SAYS_CALL, SAYS_ANSWER]
    responses = client_of(told).responses

    def ask(input):
        if not stream:
            return responses.create(model="base", input=input, tools=[FLAT], store=False)
        with responses.stream(model="base", input=input, tools=[FLAT], store=False) as events:
            for _ in events:
                pass
            return events.get_final_response()

    first = ask(USER)
    reasoning, call = first.output
    assert reasoning.content[0].text == THOUGHT
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "weather", ARGUMENTS)
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "12 degrees"}
    items = [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in first.output]
    last = ask([*USER, *items, output])
    assert last.output_text == ANSWER and last.status == "completed"
    assert last.usage.output_tokens == num_tokens(SAYS_ANSWER)
    assert 0 < last.usage.output_tokens_details.reasoning_tokens < num_tokens(SAYS_ANSWER)
    assert f"<think>{THOUGHT}</think>" in told.engine.prompt and "<tool>12 degrees" in told.engine.prompt


def test_a_parsed_response(told):
    told.engine.text = SAYS_CITY
    parsed = client_of(told).responses.parse(model="base", input="Name a city.", text_format=City)
    assert parsed.output_parsed == City(city="Paris", rank=1)


def test_input_tokens_are_those_that_a_response_has(told):
    told.engine.text = ANSWER
    responses = client_of(told).responses
    asked = {"model": "base", "input": USER, "instructions": "Be brief.", "tools": [FLAT]}
    counted = responses.input_tokens.count(**asked).input_tokens
    assert counted == responses.create(**asked).usage.input_tokens


def test_completions_score_text(builtin, scores_of):
    """The log-probabilities of an echoed prompt are transformers'; there is none of the first token."""
    client = client_of(builtin)
    (choice,) = client.completions.create(
        model=client.models.list().data[0].id, prompt="abc\nabc", max_tokens=1, echo=True, logprobs=2, temperature=0
    ).choices
    scores = choice.logprobs
    assert scores.tokens[1:8] == [*"abc\nabc"] and choice.text == "abc\nabc"
    assert scores.token_logprobs[0] is None
    assert scores.token_logprobs[1:8] == pytest.approx(scores_of("abc\nabc"), abs=0.02)
    assert all(
        top[token] == score
        for token, score, top in zip(
            scores.tokens[5:8], scores.token_logprobs[5:8], scores.top_logprobs[5:8], strict=True
        )
    ), "what it repeats is likely"


def test_errors_are_of_their_kinds(told):
    client = client_of(told)
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="nobody", messages=USER)
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model="base", messages=USER, tools=[{"type": "function"}])
    assert error.value.param == "tools[0]"
