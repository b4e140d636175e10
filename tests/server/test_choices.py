"""Several choices of a prompt, echoed prompts, and counts of the usage."""

import httpx
import pytest

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]
EOS = 257


def test_choices_come_in_the_order_of_the_prompts(shared, read_events):
    body = {"model": "alice", "prompt": ["ab", "cd"], "n": 2, "best_of": 2, "seed": 7}
    shared.engine.asked.clear()
    answer = shared.post(**body).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in answer["choices"]] == ["ba", "ba", "dc", "dc"]
    assert [asked.params.seed for asked in shared.engine.asked] == [7, 8, 7, 8]
    assert answer["usage"]["prompt_tokens"] == 6 and answer["usage"]["completion_tokens"] == 12
    texts = [""] * 4
    for chunk in read_events(shared.post(**body, stream=True)):
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == ["ba", "ba", "dc", "dc"]


def test_without_a_seed_one_is_drawn_for_each(shared):
    shared.engine.asked.clear()
    assert len(shared.post(model="base", prompt="a", n=3).json()["choices"]) == 3
    drawn = [asked.params.seed for asked in shared.engine.asked]
    assert None not in drawn
    assert len(set(drawn)) == 3


def test_the_largest_seed_has_neighbours(shared):
    assert len(shared.post(model="base", prompt="a", n=2, seed=2**63 - 1).json()["choices"]) == 2


def test_chat_choices(shared, read_events):
    body = {"model": "base", "messages": USER, "n": 2, "max_tokens": 3, "seed": -1}
    shared.engine.asked.clear()
    answer = shared.post(CHAT, **body).json()
    assert [choice["message"]["content"] for choice in answer["choices"]] == ["use", "use"]
    assert answer["usage"]["prompt_tokens"] == len("user: hi\nassistant: ")
    assert [asked.params.seed for asked in shared.engine.asked] == [-1, 0]
    chunks = [chunk["choices"][0] for chunk in read_events(shared.post(CHAT, **body, stream=True))]
    for index in (0, 1):
        own = [choice for choice in chunks if choice["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": "", "refusal": None, "reasoning_content": None}
        assert "".join(choice["delta"].get("content", "") for choice in own) == "use"
        assert own[-1]["finish_reason"] == "length"


def test_cached_tokens_are_told(start, fake_engine, read_events):
    live = start(fake_engine)
    fake_engine.num_cached_tokens = 3
    usage = live.post(model="base", prompt=["abcd", "efgh"], n=2).json()["usage"]
    assert usage["prompt_tokens"] == 10 and usage["prompt_tokens_details"] == {"cached_tokens": 6}
    options = {"stream": True, "stream_options": {"include_usage": True}}
    last = read_events(live.post(CHAT, model="base", messages=USER, **options))[-1]
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}


@pytest.mark.parametrize("stream", [False, True])
def test_leaving_takes_all_choices_along(start, fake_engine, stream):
    fake_engine.step_seconds = 0.02
    live = start(fake_engine)
    body = {"model": "base", "prompt": "x" * 100, "max_tokens": 400, "n": 4, "stream": stream}
    if stream:
        with live.client.stream("POST", COMPLETIONS, json=body) as response:
            next(response.iter_bytes())
            live.wait_until(lambda: live.worker.stats.num_running == 4)
    else:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(live.url + COMPLETIONS, json=body, timeout=1)
    live.wait_until(lambda: len(fake_engine.aborted) == 4)
    live.wait_until(lambda: live.worker.stats.num_running == 0)
    assert live.worker.stats.num_generated_tokens < 800


def test_one_refused_choice_takes_the_others_along(start, fake_engine):
    live = start(fake_engine)
    assert live.post(model="base", prompt=[[97] * 300, [97] * 600], n=2).status_code == 400
    live.wait_until(lambda: not fake_engine.running)


@pytest.mark.parametrize(("prompt", "text"), [("a€b", "a€b"), ([97, 256, 98], "ab")])
def test_echo(shared, read_events, prompt, text):
    body = {"model": "alice", "prompt": prompt, "echo": True, "n": 2}
    reverse = text[::-1] if isinstance(prompt, list) else None
    choices = shared.post(**body).json()["choices"]
    assert all(choice["text"].startswith(text) for choice in choices)
    if reverse:
        assert choices[1]["text"] == text + reverse
    chunks = [chunk["choices"][0] for chunk in read_events(shared.post(**body, stream=True))]
    for index in (0, 1):
        assert "".join(c["text"] for c in chunks if c["index"] == index) == choices[index]["text"]
        assert next(c["text"] for c in chunks if c["index"] == index).startswith(text)


def test_echo_alone_generates_nothing(shared, read_events):
    body = {"model": "base", "prompt": ["ab", "cd"], "echo": True, "max_tokens": 0, "return_token_ids": True}
    answer = shared.post(**body).json()
    assert [choice["text"] for choice in answer["choices"]] == ["ab", "cd"]
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["length"] * 2
    assert [choice["token_ids"] for choice in answer["choices"]] == [[], []]
    assert answer["usage"]["completion_tokens"] == 0 and answer["usage"]["total_tokens"] == 6
    chunks = [chunk["choices"][0] for chunk in read_events(shared.post(**body, stream=True))]
    assert sorted((c["index"], c["text"], c["finish_reason"]) for c in chunks) == [
        (0, "ab", "length"),
        (1, "cd", "length"),
    ]


def test_an_echoed_prompt_that_is_refused(shared):
    assert shared.post(model="base", prompt="a" * 600, echo=True).json()["error"]["param"] == "prompt"
    assert shared.post(model="nobody", prompt="a", echo=True).status_code == 404
