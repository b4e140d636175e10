"""POST /v1/completions over a fake engine: answers, streams and counts."""

import asyncio
import time
from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.wide

BOS, EOS = 256, 257


def test_completion_of_the_base_and_of_an_adapter(shared):
    body = shared.post(model="base", prompt="hello").json()
    assert body["object"] == "text_completion" and body["model"] == "base" and body["id"].startswith("cmpl-")
    unasked = dict.fromkeys(("logprobs", "stop_reason", "token_ids", "prompt_token_ids", "prompt_logprobs"))
    assert body["choices"] == [{"index": 0, "text": "hello", "finish_reason": "stop", **unasked}]
    assert body["usage"] == {
        "prompt_tokens": 6,
        "completion_tokens": 6,
        "total_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0},
    }
    assert shared.post(model="alice", prompt="hello").json()["choices"][0]["text"] == "olleh"


def test_max_tokens_defaults_to_16(shared):
    choice = shared.post(model="base", prompt="x" * 40).json()["choices"][0]
    assert choice["text"] == "x" * 16 and choice["finish_reason"] == "length"


def test_nulls_are_defaults_and_harmless_fields_are_taken(shared):
    body = {"max_tokens": None, "stop": None, "logprobs": None, "n": 1, "user": "me", "frequency_penalty": 0.0}
    response = shared.post(model="base", prompt="hi", metadata={"a": 1}, surprise=None, tools=[], logit_bias={}, **body)
    assert response.json()["choices"][0]["text"] == "hi"


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("ab", ["ab"]),
        (["ab", "cd", "é"], ["ab", "cd", "é"]),
        ([97, 98], ["ab"]),
        ([[97, 98], [99]], ["ab", "c"]),
        (["ab", [99]], ["ab", "c"]),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_every_kind_of_prompt(shared, prompt, texts, stream, read_events):
    response = shared.post(model="base", prompt=prompt, stream=stream)
    if not stream:
        choices = response.json()["choices"]
        assert [choice["index"] for choice in choices] == list(range(len(texts)))
        assert [choice["text"] for choice in choices] == texts
        return
    got = [""] * len(texts)
    ends = []
    for event in read_events(response):
        (choice,) = event["choices"]
        got[choice["index"]] += choice["text"]
        if choice["finish_reason"]:
            ends.append((choice["index"], choice["finish_reason"]))
    assert got == texts
    assert sorted(ends) == [(index, "stop") for index in range(len(texts))]


def test_streamed_completion_ends_with_usage_when_asked(shared, read_events):
    chunks = read_events(shared.post(model="base", prompt="abc", stream=True, stream_options={"include_usage": True}))
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == {
        "prompt_tokens": 4,
        "completion_tokens": 4,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0},
    }
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert "usage" not in read_events(shared.post(model="base", prompt="abc", stream=True))[-1]


def test_stop_strings_end_the_request(shared, read_events):
    body = shared.post(model="base", prompt="one, two, three", stop=["two", "zzz"]).json()
    assert body["choices"][0]["text"] == "one, " and body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens"] == len("one, two")
    chunks = read_events(shared.post(model="base", prompt="one, two, three", stop=", t", stream=True))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "one"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == "stop"
    shared.wait_until(lambda: shared.worker.stats.num_running == 0)


def test_characters_are_never_split(shared, read_events):
    chunks = read_events(shared.post(model="base", prompt="a€😀", stream=True))
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["a", "€", "😀", ""]


def test_stop_token_ids_and_ignore_eos(shared):
    choice = shared.post(model="base", prompt="abc", stop_token_ids=[98], return_token_ids=True).json()["choices"][0]
    assert choice["text"] == "a" and choice["token_ids"] == [97, 98] and choice["finish_reason"] == "stop"
    choice = shared.post(model="base", prompt="ab", ignore_eos=True, max_tokens=4).json()["choices"][0]
    assert choice["text"] == "ab" and choice["finish_reason"] == "length"
    shown = shared.post(model="base", prompt="ab", ignore_eos=True, max_tokens=3, skip_special_tokens=False).json()
    assert shown["choices"][0]["text"] == "ab<eos>"


def test_add_special_tokens(shared):
    usage = shared.post(model="base", prompt="ab", add_special_tokens=False).json()["usage"]
    assert usage["prompt_tokens"] == 2


def test_token_ids_on_request(shared, read_events):
    body = shared.post(model="base", prompt=["ab", "c"], return_token_ids=True).json()
    assert [choice["token_ids"] for choice in body["choices"]] == [[97, 98, EOS], [99, EOS]]
    assert [choice["prompt_token_ids"] for choice in body["choices"]] == [[BOS, 97, 98], [BOS, 99]]
    chunks = read_events(shared.post(model="base", prompt="a€", return_token_ids=True, stream=True))
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice["token_ids"] for choice in choices] == [[97], [0xE2], [0x82], [0xAC], [EOS]]
    assert [choice["text"] for choice in choices] == ["a", "", "", "€", ""]
    assert choices[0]["prompt_token_ids"] == [BOS, *"a€".encode()]
    assert all("prompt_token_ids" not in choice for choice in choices[1:])


def test_step_info_on_request(shared, read_events):
    chunks = read_events(shared.post(model="alice", prompt=["abc", "abc"], return_step_info=True, stream=True))
    assert all(set(chunk["step"]) == {"id", "requests", "adapters", "tokens"} for chunk in chunks)
    assert {chunk["step"]["adapters"] for chunk in chunks} == {1}
    step = shared.post(model="base", prompt="abc", return_step_info=True).json()["step"]
    assert step["requests"] == 1 and step["adapters"] == 0
    assert "step" not in shared.post(model="base", prompt="abc").json()


def test_a_prompt_beyond_the_threshold_is_encoded_on_a_thread(start, fake_engine, make_engine):
    live = start(make_engine([], max_model_len=40_000))
    body = live.post(model="base", prompt="y" * 20_000).json()
    assert body["usage"]["prompt_tokens"] == 20_001


def is_on_event_loop():
    return asyncio._get_running_loop() is not None  # noqa: SLF001 - its public sister raises where there is none


@pytest.mark.parametrize("logprobs", [None, 1])
def test_the_event_loop_writes_no_answer_with_pauses(start, make_engine, monkeypatch, logprobs):
    """Only a thread outside of it pauses for others while it writes."""
    live = start(make_engine([], max_model_len=8192))
    paused = []
    pause = SimpleNamespace(sleep=lambda _: paused.append(is_on_event_loop()), perf_counter=time.perf_counter)
    monkeypatch.setattr("chorus.server.api.json_text.time", pause)
    body = live.post(model="base", prompt="x" * 3000, max_tokens=3000, logprobs=logprobs).json()
    assert body["choices"][0]["text"] == "x" * 3000
    assert not any(paused), "on the event loop"
    assert bool(paused) == (logprobs is not None)


def test_prompts_are_cut_where_asked(shared):
    def text(**body):
        answer = shared.post(model="base", prompt="abcdef", add_special_tokens=False, echo=True, **body).json()
        return answer["choices"][0]["text"], answer["usage"]["prompt_tokens"]

    assert text(truncate_prompt_tokens=4) == ("cdefcdef", 4)
    assert text(truncate_prompt_tokens=4, truncation_side="right") == ("abcdabcd", 4)
    assert text(truncate_prompt_tokens=6) == text(truncate_prompt_tokens=-1) == ("abcdefabcdef", 6)
    long = shared.post(model="base", prompt="x" * 3000, truncate_prompt_tokens=-1, max_tokens=12)
    assert long.json()["usage"] == {**long.json()["usage"], "prompt_tokens": 500, "completion_tokens": 12}
    chat = shared.post(
        "/v1/chat/completions",
        model="base",
        truncate_prompt_tokens=4,
        messages=[{"role": "user", "content": "x" * 3000}],
    )
    assert chat.json()["choices"][0]["message"]["content"] == "nt: "


def test_cut_prompts_have_limits(shared):
    for body in ({"truncate_prompt_tokens": -2}, {"truncate_prompt_tokens": "a"}, {"truncate_prompt_tokens": 0}):
        assert shared.post(model="base", prompt="a", **body).status_code == 400
    assert shared.post(model="base", prompt="a", truncation_side="middle").status_code == 400
    far = shared.post(model="base", prompt="x" * 600, truncate_prompt_tokens=550)
    assert far.json()["error"]["code"] == "context_length_exceeded"
