"""litellm's SDK by four of its providers."""

import json

import litellm

PACKAGES = ("litellm",)
USER = [{"role": "user", "content": "Name a city."}]
PARAMETERS = {
    "type": "object",
    "properties": {"unit": {"enum": ["C", "F"]}},
    "required": ["unit"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}


def cases(url, model):
    litellm.suppress_debug_info = True
    asked = {"messages": USER, "api_key": "none", "max_tokens": 60, "timeout": 300, "num_retries": 0}
    providers = {"openai": f"{url}/v1", "hosted_vllm": f"{url}/v1", "anthropic": url}

    def whole():
        for name, base in providers.items():
            answer = litellm.completion(model=f"{name}/{model}", api_base=base, **asked)
            assert answer.choices[0].message.content, name

    def streamed():
        for name, base in providers.items():
            chunks = litellm.completion(model=f"{name}/{model}", api_base=base, stream=True, **asked)
            assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks), name

    def tools():
        for name, base in providers.items():
            answer = litellm.completion(
                model=f"{name}/{model}", api_base=base, tools=[TOOL], tool_choice="required", **asked
            )
            (call, *_) = answer.choices[0].message.tool_calls
            assert json.loads(call.function.arguments)["unit"] in ("C", "F"), name

    def schema():
        form = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": PARAMETERS}}
        answer = litellm.completion(model=f"hosted_vllm/{model}", api_base=f"{url}/v1", response_format=form, **asked)
        assert json.loads(answer.choices[0].message.content)["unit"] in ("C", "F")

    def text():
        answer = litellm.text_completion(
            model=f"text-completion-openai/{model}", prompt="Once", api_base=f"{url}/v1", api_key="none", max_tokens=9
        )
        assert answer.choices[0].text

    def responses():
        answer = litellm.responses(
            model=f"openai/{model}", input="hi", api_base=f"{url}/v1", api_key="none", max_output_tokens=20
        )
        assert answer.output

    return [whole, streamed, tools, schema, text, responses]
