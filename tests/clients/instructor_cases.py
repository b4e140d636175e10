"""instructor: its modes; in JSON and MD_JSON the schema is in the prompt alone."""

import anthropic
import instructor
import openai
from pydantic import BaseModel

PACKAGES = ("instructor",)
USER = [{"role": "user", "content": "Paris is a city of rank 1."}]


class City(BaseModel):
    city: str
    rank: int


def cases(url, model):
    plain = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300)
    asked = {"model": model, "messages": USER, "response_model": City, "max_retries": 1}

    def by(mode):
        def case():
            client = instructor.from_openai(plain, mode=mode)
            limit = "max_output_tokens" if "RESPONSES" in mode.name else "max_tokens"
            assert isinstance(client.chat.completions.create(**asked, **{limit: 120}), City)

        case.__name__ = mode.name
        return case

    def partial():
        client = instructor.from_openai(plain, mode=instructor.Mode.JSON_SCHEMA)
        *_, last = client.chat.completions.create_partial(**asked, max_tokens=120)
        assert last.city is not None

    def anthropics():
        client = instructor.from_anthropic(anthropic.Anthropic(base_url=url, api_key="none", max_retries=0))
        assert isinstance(client.messages.create(**asked, max_tokens=120), City)

    modes = ("TOOLS", "TOOLS_STRICT", "JSON_SCHEMA", "RESPONSES_TOOLS", "JSON", "MD_JSON")
    return [*(by(instructor.Mode[name]) for name in modes), partial, anthropics]
