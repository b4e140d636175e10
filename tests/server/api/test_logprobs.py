"""Log-probabilities in OpenAI's and vLLM's shapes, over a fake engine that scores the token and the ids after it."""

import pytest

from chorus.server.api.logprobs import LOWEST, LogprobFormat

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "€"}]
EURO = ["bytes:\\xe2", "bytes:\\x82", "bytes:\\xac"]


def test_completion(shared):
    (choice,) = shared.post(model="base", prompt="ab", logprobs=2).json()["choices"]
    assert choice["logprobs"] == {
        "tokens": ["a", "b", "<eos>"],
        "token_logprobs": [-0.5, -0.5, -0.5],
        "top_logprobs": [
            {"a": -0.5, "b": -1.5},
            {"b": -0.5, "c": -1.5},
            {"<eos>": -0.5, "bytes:\\x20\\xe2": -1.5},
        ],
        "text_offset": [0, 1, 2],
    }


def test_the_token_itself_is_always_there(shared):
    (choice,) = shared.post(model="base", prompt="ab", logprobs=0, max_tokens=2).json()["choices"]
    assert choice["logprobs"]["top_logprobs"] == [{"a": -0.5}, {"b": -0.5}]
    for nothing in (None, False):
        assert shared.post(model="base", prompt="ab", logprobs=nothing).json()["choices"][0]["logprobs"] is None


def test_parts_of_characters(shared):
    (choice,) = shared.post(model="base", prompt="a€b", logprobs=0, max_tokens=5).json()["choices"]
    assert choice["logprobs"]["tokens"] == ["a", *EURO, "b"]
    assert choice["logprobs"]["text_offset"] == [0, 1, 1, 1, 2]


def test_streamed_parts_add_up(shared, read_events):
    body = {"model": "base", "prompt": ["a€b", "cd"], "logprobs": 1, "stop": "bX"}
    choices = shared.post(**body).json()["choices"]
    parts = [{"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []} for _ in choices]
    for chunk in read_events(shared.post(**body, stream=True)):
        (choice,) = chunk["choices"]
        for name, values in choice["logprobs"].items():
            parts[choice["index"]][name] += values
    assert parts == [choice["logprobs"] for choice in choices]


def test_tokens_behind_a_stop_string_are_not_told(shared):
    (choice,) = shared.post(model="base", prompt="abcd", logprobs=0, stop="b").json()["choices"]
    assert choice["logprobs"]["tokens"] == ["a", "b"] and choice["text"] == "a"


@pytest.mark.parametrize("stream", [False, True])
def test_echo_has_the_prompts_scores(shared, read_events, stream):
    body = {"model": "base", "prompt": "a€", "echo": True, "logprobs": 1, "max_tokens": 1, "stream": stream}
    response = shared.post(**body)
    (choice,) = read_events(response)[0]["choices"] if stream else response.json()["choices"]
    assert choice["text"] == "a€a"
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["<bos>", "a", *EURO, "a"]
    assert logprobs["token_logprobs"] == [None, *[-0.5] * 5]
    assert logprobs["top_logprobs"][:2] == [None, {"a": -0.5}]
    assert logprobs["text_offset"] == [0, 0, 1, 1, 1, 2]


def test_echo_alone_has_the_prompts_scores(shared):
    (choice,) = shared.post(model="base", prompt="ab", echo=True, logprobs=1, max_tokens=0).json()["choices"]
    assert choice["text"] == "ab" and choice["logprobs"]["tokens"] == ["<bos>", "a", "b"]
    assert choice["logprobs"]["token_logprobs"] == [None, -0.5, -0.5]
    (choice,) = shared.post(model="base", prompt="ab", echo=True, max_tokens=1).json()["choices"]
    assert choice["logprobs"] is None


def test_chat(shared, read_events):
    body = {"model": "bob", "messages": USER, "logprobs": True, "top_logprobs": 2, "max_tokens": 16}
    (choice,) = shared.post(CHAT, **body).json()["choices"]
    content = choice["logprobs"]["content"]
    assert len(content) == 16 and choice["logprobs"]["refusal"] is None
    assert content[0] == {
        "token": " ",
        "logprob": -0.5,
        "bytes": [32],
        "top_logprobs": [
            {"token": " ", "logprob": -0.5, "bytes": [32]},
            {"token": "!", "logprob": -1.5, "bytes": [33]},
        ],
    }
    assert [entry["token"] for entry in content[11:15]] == ["\n", EURO[2], EURO[1], EURO[0]]
    assert content[12]["bytes"] == [0xAC]
    streamed = []
    for chunk in read_events(shared.post(CHAT, **body, stream=True)):
        logprobs = chunk["choices"][0]["logprobs"]
        streamed += logprobs["content"] if logprobs else []
    assert streamed == content
    (choice,) = shared.post(CHAT, **{**body, "top_logprobs": 0}).json()["choices"]
    assert choice["logprobs"]["content"][0]["top_logprobs"] == []
    assert shared.post(CHAT, model="bob", messages=USER).json()["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_by_their_ids(shared, read_events, stream):
    body = {"model": "bob", "messages": USER, "logprobs": True, "max_tokens": 1, "stream": stream}
    body |= {"return_tokens_as_token_ids": True, "logprob_token_ids": [98, 99]}
    for top in (None, 5):
        answer = shared.post(CHAT, **body, top_logprobs=top)
        chunks = read_events(answer) if stream else [answer.json()]
        content = [one for chunk in chunks for one in (chunk["choices"][0]["logprobs"] or {"content": ()})["content"]]
        assert [one["token"] for one in content[0]["top_logprobs"]] == ["token_id:32", "token_id:98", "token_id:99"]
    answer = shared.post(model="base", prompt="a", logprobs=5, logprob_token_ids=[98], max_tokens=1).json()
    assert answer["choices"][0]["logprobs"]["top_logprobs"] == [{"a": -0.5, "b": -7.0}]


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"logprobs": 1, "echo": True, "max_tokens": 0},
        {"logprobs": 1, "logprob_token_ids": [5] * 21},
    ],
)
def test_tokens_that_can_t_be_scored(shared, body):
    refused = shared.post(model="base", prompt="a", **{"logprob_token_ids": [98], **body})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "logprob_token_ids"


def test_prompt_logprobs(shared, read_events):
    body = {"model": "base", "prompt": ["ab", "c"], "prompt_logprobs": 2, "echo": True, "logprobs": 5}
    for choice in shared.post(**body).json()["choices"]:
        ids = [97, 98] if choice["index"] == 0 else [99]
        assert choice["prompt_logprobs"] == [
            None,
            *(
                {
                    str(i): {"logprob": -0.5, "rank": 1, "decoded_token": chr(i)},
                    str(i + 1): {"logprob": -1.5, "rank": 2, "decoded_token": chr(i + 1)},
                }
                for i in ids
            ),
        ]
    body = {"model": "base", "messages": USER, "prompt_logprobs": 0, "max_tokens": 2}
    answer = shared.post(CHAT, **body).json()
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    assert answer["prompt_logprobs"][1] == {"115": {"logprob": -0.5, "rank": None, "decoded_token": "s"}}
    chunks = read_events(shared.post(CHAT, **body, stream=True))
    assert chunks[0]["prompt_logprobs"] == answer["prompt_logprobs"]
    assert all("prompt_logprobs" not in chunk for chunk in chunks[1:])


def test_scores_json_has_no_words_for(tokenizer, make_engine):
    scores = LogprobFormat(tokenizer.vocabulary)
    entry = type(make_engine.score(97, 1))(97, float("-inf"), ((98, float("nan")),))
    body = scores.completion([97], [entry], [0], 1)
    assert body["token_logprobs"] == [LOWEST] and body["top_logprobs"] == [{"a": LOWEST, "b": LOWEST}]


@pytest.mark.parametrize("stream", [False, True])
def test_a_contents_scores_are_of_its_text_without_the_end_token(shared, read_events, stream):
    body = {"model": "base", "messages": USER, "logprobs": True, "stream": stream}
    answers = read_events(shared.post(CHAT, **body)) if stream else [shared.post(CHAT, **body).json()]
    content = [one for each in answers for one in (each["choices"][0]["logprobs"] or {"content": ()})["content"]]
    text = bytes(byte for one in content for byte in one["bytes"]).decode()
    assert text == "user: €\nassistant: " and content[-1]["token"] == " "
