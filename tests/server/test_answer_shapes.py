"""Answers have the keys of OpenAI's types, null where there is nothing, and vLLM's `stop_reason`."""

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]
NEVER_SENT = {"metadata", "moderation", "obfuscation", "service_tier"}


def test_completion(shared, read_events):
    body = shared.post(prompt="ab").json()
    assert Completion.model_fields.keys() <= body.keys()
    assert {"finish_reason", "index", "logprobs", "text", "stop_reason"} <= body["choices"][0].keys()
    Completion.model_validate(body, strict=True)
    for chunk in read_events(shared.post(prompt="ab", stream=True)):
        assert chunk["system_fingerprint"] is None and "stop_reason" in chunk["choices"][0]


def test_chat(shared, read_events):
    body = shared.post(CHAT, messages=USER).json()
    assert ChatCompletion.model_fields.keys() - NEVER_SENT <= body.keys()
    message = ChatCompletion.model_fields["choices"].annotation.__args__[0].model_fields["message"].annotation
    assert message.model_fields.keys() <= body["choices"][0]["message"].keys()
    ChatCompletion.model_validate(body, strict=True)
    first, *rest = read_events(shared.post(CHAT, messages=USER, stream=True))
    assert first["choices"][0]["delta"] == {
        "role": "assistant",
        "content": "",
        "refusal": None,
        "reasoning_content": None,
    }
    for chunk in (first, *rest):
        ChatCompletionChunk.model_validate(chunk, strict=True)
        assert chunk["choices"][0].keys() >= {"delta", "finish_reason", "index", "logprobs", "stop_reason"}
        assert isinstance(chunk["choices"][0]["delta"]["content"], str), "SGLang's clients add it up unseen"


def test_what_was_not_asked_for_is_null(shared):
    """vLLM's clients read these without asking whether they are there."""
    choice = shared.post(prompt="ab").json()["choices"][0]
    assert [choice[name] for name in ("token_ids", "prompt_token_ids", "prompt_logprobs")] == [None] * 3
    body = shared.post(CHAT, messages=USER).json()
    assert body["choices"][0]["token_ids"] is body["prompt_token_ids"] is body["prompt_logprobs"] is None
    body = shared.post(CHAT, messages=USER, return_token_ids=True, prompt_logprobs=0).json()
    assert body["choices"][0]["token_ids"] and body["prompt_token_ids"] and body["prompt_logprobs"]


@pytest.mark.parametrize(
    ("body", "finish", "reason"),
    [
        ({}, "stop", None),
        ({"stop": ["zz", "b"]}, "stop", "b"),
        ({"stop_token_ids": [98]}, "stop", 98),
        ({"max_tokens": 1}, "length", None),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", CHAT])
def test_stop_reason(shared, read_events, path, body, finish, reason):
    prompt = {"prompt": "ab"}
    if path == CHAT:  # its template begins with the role, and the engine repeats its input
        prompt = {"messages": USER}
        body = (
            {"stop": ["zz", "s"]} if "stop" in body else {"stop_token_ids": [115]} if "stop_token_ids" in body else body
        )
        reason = {"b": "s", 98: 115}.get(reason)
    choice = shared.post(path, **prompt, **body).json()["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == (finish, reason)
    last = read_events(shared.post(path, **prompt, **body, stream=True))[-1]["choices"][0]
    assert (last["finish_reason"], last["stop_reason"]) == (finish, reason)


def test_tokens_by_their_ids(shared):
    (choice,) = shared.post(prompt="ab", logprobs=1, return_tokens_as_token_ids=True, max_tokens=1).json()["choices"]
    assert choice["logprobs"]["tokens"] == ["token_id:97"]
    assert choice["logprobs"]["top_logprobs"] == [{"token_id:97": -0.5}]
    body = {"messages": USER, "logprobs": True, "top_logprobs": 2, "return_tokens_as_token_ids": True, "max_tokens": 1}
    (entry,) = shared.post(CHAT, **body).json()["choices"][0]["logprobs"]["content"]
    assert entry["token"] == "token_id:117" and entry["top_logprobs"][1]["token"] == "token_id:118"
    assert entry["bytes"] == [117]


def test_the_template_is_used_as_asked(shared):
    def prompt(**body):
        return bytes(shared.post(CHAT, **body, return_token_ids=True).json()["prompt_token_ids"][-60:])

    assert prompt(messages=USER, add_generation_prompt=False) == b"user: hi\n"
    opened = [*USER, {"role": "assistant", "content": "Well"}]
    assert prompt(messages=opened, continue_final_message=True) == b"user: hi\nassistant: Well"
    assert prompt(messages=opened, continue_final_message=True, add_generation_prompt=False).endswith(b": Well")
    both = shared.post(CHAT, messages=opened, continue_final_message=True, add_generation_prompt=True)
    assert both.status_code == 400 and both.json()["error"]["param"] == "add_generation_prompt"
    assert shared.post(CHAT, messages=USER, add_special_tokens=True, return_token_ids=True).json()["prompt_token_ids"][
        :2
    ] == [256, ord("u")]
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert shared.post(CHAT, messages=USER, tools=tools, tool_choice="none").status_code == 200


def test_variables_reach_the_template(start, fake_engine, pretrained, monkeypatch):
    template = "{{ messages[0]['content'] }}{% if shout %}!{% endif %}{% if tools %}{{ tools[0]['name'] }}{% endif %}"
    monkeypatch.setattr(pretrained, "chat_template", template)
    live = start(fake_engine)
    body = {"messages": USER, "return_token_ids": True}
    asked = live.post(CHAT, **body, chat_template_kwargs={"shout": True}).json()
    assert bytes(asked["prompt_token_ids"]) == b"hi!"
    asked = live.post(CHAT, **body, tools=[{"name": "f"}], tool_choice="none").json()
    assert bytes(asked["prompt_token_ids"]) == b"hif"
