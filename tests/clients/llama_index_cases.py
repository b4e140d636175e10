"""LlamaIndex: chat, streams, structured output by a tool."""

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

PACKAGES = ("llama-index-llms-openai-like",)


class City(BaseModel):
    """A city."""

    city: str
    rank: int


def cases(url, model):
    llm = OpenAILike(
        model=model,
        api_base=f"{url}/v1",
        api_key="none",
        is_chat_model=True,
        is_function_calling_model=True,
        max_tokens=120,
        max_retries=0,
        timeout=300,
        context_window=2048,
        should_use_structured_outputs=True,
    )
    asked = [ChatMessage(role="user", content="Name a city.")]

    def whole():
        assert llm.chat(asked).message.content

    def streamed():
        assert "".join(chunk.delta or "" for chunk in llm.stream_chat(asked))

    def structured():
        assert isinstance(llm.as_structured_llm(City).chat(asked).raw, City)

    return [whole, streamed, structured]
