"""vLLM's route from tokens to tokens: the same answers as completions of the same tokens."""

from __future__ import annotations

import pytest

BOS, EOS = 256, 257
PATH = "/inference/v1/generate"
PROMPT = [BOS, *b"abc"]


def ask(live, model="base", token_ids=PROMPT, /, *, sampling=(), **more):
    return live.post(PATH, model=model, token_ids=token_ids, sampling_params=dict(sampling), **more)


def test_tokens_come_for_tokens(shared):
    body = ask(shared, sampling={"max_tokens": 8, "detokenize": False, "output_kind": 2}).json()
    (choice,) = body["choices"]
    assert choice == {"index": 0, "token_ids": [*b"abc", EOS], "logprobs": None, "finish_reason": "stop"}
    assert body["prompt_logprobs"] is None and body["request_id"].startswith("generate-")
    assert body["usage"]["prompt_tokens"] == len(PROMPT)
    assert ask(shared, "alice", sampling={"max_tokens": 2}).json()["choices"][0]["token_ids"] == [*b"cb"]
    assert shared.engine.asked[-1].adapter_name == "alice"


def test_scores_are_those_of_completions(shared):
    sampling = {"max_tokens": 3, "n": 2, "logprobs": 1, "prompt_logprobs": 1, "temperature": 0.5, "seed": 3}
    body = ask(shared, sampling=sampling).json()
    same = shared.post(model="base", prompt=PROMPT, return_token_ids=True, **sampling).json()
    assert [one["token_ids"] for one in body["choices"]] == [one["token_ids"] for one in same["choices"]]
    for ours, theirs in zip(body["choices"], same["choices"], strict=True):
        assert [one["logprob"] for one in ours["logprobs"]["content"]] == theirs["logprobs"]["token_logprobs"]
        assert all(len(one["top_logprobs"]) == 1 for one in ours["logprobs"]["content"])
    assert body["prompt_logprobs"] == same["choices"][0]["prompt_logprobs"]


def test_the_defaults_are_vllm_s(shared):
    shared.engine.asked.clear()
    assert ask(shared).status_code == 200
    params = shared.engine.asked[0].params
    assert (params.temperature, params.top_p, params.max_tokens) == (1.0, 1.0, 16)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": ["a"]}, "token_ids[0]"),
        ({"token_ids": [True]}, "token_ids[0]"),
        ({"token_ids": [1 << 40]}, "token_ids"),
        ({"stream": True}, "stream"),
        ({"features": {"mm_hashes": {}}}, "features"),
        ({"sampling_params": {"temperature": -1}}, "temperature"),
        ({"sampling_params": {"tempreature": 1}}, "tempreature"),
        ({"prompt": "abc"}, "prompt"),
        ({"model": "nobody"}, "model"),
    ],
)
def test_what_is_wrong_is_named(shared, body, param):
    response = shared.client.post(PATH, json={"model": "base", "token_ids": PROMPT, **body})
    assert response.status_code in (400, 404) and response.json()["error"]["param"] == param, response.text
