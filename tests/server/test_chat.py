"""POST /v1/chat/completions over a fake engine."""

EOS = 257


def chat(live, **body):
    return live.post("/v1/chat/completions", **{"messages": [{"role": "user", "content": "hi"}], **body})


def test_chat_completion(shared):
    body = chat(shared, model="base").json()
    assert body["object"] == "chat.completion" and body["id"].startswith("chatcmpl-")
    (choice,) = body["choices"]
    message = {name: value for name, value in choice["message"].items() if value is not None}
    assert message == {"role": "assistant", "content": "user: hi\nassistant: "}
    assert choice["finish_reason"] == "stop"
    assert body["usage"]["prompt_tokens"] == len("user: hi\nassistant: ")


def test_chat_content_parts_and_limits(shared):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "user", "content": parts, "name": "x"}, {"role": "assistant", "content": None}]
    body = chat(shared, model="base", messages=messages, max_completion_tokens=9, max_tokens=2).json()
    assert body["choices"][0]["message"]["content"] == "user: a\nb"
    assert body["choices"][0]["finish_reason"] == "length"
    assert chat(shared, model="base", max_tokens=4).json()["choices"][0]["message"]["content"] == "user"


def test_streamed_chat(shared, read_events):
    chunks = read_events(chat(shared, model="base", stream=True, return_token_ids=True, return_step_info=True))
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert chunks[0]["choices"][0]["delta"] == {
        "role": "assistant",
        "content": "",
        "refusal": None,
        "reasoning_content": None,
    }
    assert bytes(chunks[0]["prompt_token_ids"]) == b"user: hi\nassistant: "
    assert all("step" in chunk for chunk in chunks)
    rest = [chunk["choices"][0] for chunk in chunks[1:]]
    assert "".join(choice["delta"].get("content", "") for choice in rest) == "user: hi\nassistant: "
    assert all("role" not in choice["delta"] for choice in rest)
    assert [choice["finish_reason"] for choice in rest] == [None] * (len(rest) - 1) + ["stop"]
    assert rest[-1]["token_ids"] == [EOS]


def test_chat_defaults_to_the_rest_of_the_context(start, make_engine):
    live = start(make_engine([], max_model_len=60))
    choice = chat(live, model="base", ignore_eos=True).json()
    assert choice["usage"]["total_tokens"] == 60


def test_an_echo_is_what_the_assistant_had_begun(shared, read_events):
    begun = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "so far"}]
    body = {"messages": begun, "continue_final_message": True, "echo": True, "n": 2}
    told = "user: hi\nassistant: so far"
    for choice in chat(shared, **body).json()["choices"]:
        assert choice["message"]["content"] == "so far" + told
    events = read_events(chat(shared, **body, stream=True))
    for index in range(2):
        deltas = [e["choices"][0]["delta"] for e in events if e["choices"][0]["index"] == index]
        assert "".join(delta.get("content") or "" for delta in deltas) == "so far" + told
    assert chat(shared, echo=True).json()["choices"][0]["message"]["content"] == ("user: hi\nassistant: "), (
        "nothing was begun"
    )


def test_usage_with_every_chunk_and_tokens_by_ids_as_the_server_is_set(start, fake_engine, read_events):
    live = start(fake_engine, settings={"enable_force_include_usage": True, "return_tokens_as_token_ids": True})
    events = read_events(chat(live, stream=True, logprobs=True))
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts) and counts[-1] > 0 and not events[-1]["choices"]
    entries = [entry for e in events[:-1] for entry in (e["choices"][0]["logprobs"] or {}).get("content", ())]
    assert entries and all(entry["token"].startswith("token_id:") for entry in entries)
