"""langchain's models for OpenAI's and Anthropic's API: calls, structured answers, streams, embeddings."""

import openai
import pytest
from pydantic import BaseModel

from .recorded import ANSWER, ARGUMENTS, SAYS_ANSWER, SAYS_CALL, SAYS_CITY, THOUGHT, num_tokens

pytest.importorskip("langchain_openai")
pytest.importorskip("langchain_anthropic")
import tiktoken
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings

pytestmark = pytest.mark.integration


class City(BaseModel):
    """A city."""

    city: str
    rank: int


@tool
def weather(city: str, days: int) -> str:
    """The weather of a city."""
    return f"{days} days of rain in {city}"


SHARED = {"model": "base", "api_key": "none", "max_retries": 0, "timeout": 60, "max_tokens": 999}
MODELS = {
    "openai": lambda url: ChatOpenAI(base_url=f"{url}/v1", stream_usage=True, **SHARED),
    "responses": lambda url: ChatOpenAI(base_url=f"{url}/v1", use_responses_api=True, **SHARED),
    "anthropic": lambda url: ChatAnthropic(base_url=url, **SHARED),
}


@pytest.fixture(params=MODELS)
def model(request, told):
    return MODELS[request.param](told.url)


@pytest.mark.parametrize("stream", [False, True])
def test_a_round_of_a_call(model, told, stream):
    told.engine.texts = [SAYS_CALL, SAYS_ANSWER]

    def ask(messages):
        bound = model.bind_tools([weather])
        if not stream:
            return bound.invoke(messages)
        first, *rest = bound.stream(messages)
        for chunk in rest:
            first += chunk
        return first

    human = HumanMessage("Weather in Paris?")
    first = ask([human])
    (call,) = first.tool_calls
    assert (call["name"], call["args"]) == ("weather", ARGUMENTS) and not first.invalid_tool_calls
    last = ask([human, first, ToolMessage("12 degrees", tool_call_id=call["id"])])
    assert last.text == ANSWER and last.usage_metadata["output_tokens"] == num_tokens(SAYS_ANSWER)
    assert "<tool>12 degrees" in told.engine.prompt


def test_structured_answers(told):
    told.engine.text = SAYS_CITY
    chat = MODELS["openai"](told.url)
    for method in ("json_schema", "json_mode"):
        assert chat.with_structured_output(City, method=method).invoke("A city, as JSON?") == City(city="Paris", rank=1)
    told.engine.text = '<tool_call>{"name": "City", "arguments": {"city": "Paris", "rank": 1}}</tool_call>'
    for name in ("openai", "anthropic"):
        by_call = MODELS[name](told.url).with_structured_output(City, method="function_calling")
        assert by_call.invoke("A city?") == City(city="Paris", rank=1)


def test_thoughts_and_log_probabilities(told):
    told.engine.text = SAYS_ANSWER
    blocks = MODELS["anthropic"](told.url).invoke("hi").content
    assert [block.get("thinking", block.get("text")) for block in blocks] == [THOUGHT, ANSWER]
    answer = MODELS["openai"](told.url).bind(logprobs=True).invoke("hi")
    scores = answer.response_metadata["logprobs"]["content"]
    assert bytes(byte for one in scores for byte in one["bytes"]).decode().removesuffix("<eos>") == ANSWER


def test_completions(told):
    told.engine.text = ANSWER
    assert OpenAI(base_url=f"{told.url}/v1", **SHARED).invoke("Once upon") == ANSWER


def byte_encoding(ids):
    """An encoding of tiktoken's, which langchain asks for by the model's name: a token for each byte, by these ids."""
    ranks = {bytes([byte]): token for byte, token in enumerate(ids)}
    return tiktoken.Encoding("bytes", pat_str=r"[\s\S]", mergeable_ranks=ranks, special_tokens={})


@pytest.mark.parametrize("ids", [range(100_000, 100_256), range(255, -1, -1)])
def test_embeddings_of_another_tokenizers_ids_are_refused_with_the_way_out(builtin, monkeypatch, ids):
    """Ids beyond the vocabulary, and ids within it that this model's tokenizer writes for no text."""
    monkeypatch.setattr(tiktoken, "encoding_for_model", lambda _: byte_encoding(ids))
    how = {"base_url": f"{builtin.url}/v1", "api_key": "none", "max_retries": 0, "model": "chorus-builtin"}
    with pytest.raises(openai.BadRequestError) as error:
        OpenAIEmbeddings(**how).embed_documents(["A text of some length.", "b"])
    assert error.value.param == "input[0]" and "check_embedding_ctx_length=False" in error.value.message
    vectors = OpenAIEmbeddings(**how, check_embedding_ctx_length=False).embed_documents(["A text.", "b"])
    plain = openai.OpenAI(base_url=f"{builtin.url}/v1", api_key="none").embeddings
    assert vectors[0] == plain.create(model="chorus-builtin", input="A text.").data[0].embedding
