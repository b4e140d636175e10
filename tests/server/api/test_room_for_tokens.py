"""A limit on tokens that the context has no room for is refused by its own name, or the response says what ended it."""

from __future__ import annotations

import pytest

from chorus import LLM, SamplingParams
from chorus.core.requests.request_params import InvalidRequest

USER = [{"role": "user", "content": "hi"}]
CONTEXT = 512


@pytest.fixture(scope="module")
def live(start_one, make_engine):
    return start_one(make_engine([], max_model_len=CONTEXT))


LIMITS = [
    ("/v1/completions", {"prompt": [5] * 10}, "max_tokens"),
    ("/v1/completions", {"prompt": [5] * 10}, "max_completion_tokens"),
    ("/v1/completions", {"prompt": [[5] * 10, [5] * 3]}, "max_tokens"),
    ("/v1/chat/completions", {"messages": USER}, "max_tokens"),
    ("/v1/chat/completions", {"messages": USER}, "max_completion_tokens"),
    ("/v1/chat/completions/batch", {"messages": [USER, USER]}, "max_tokens"),
    ("/v1/responses", {"input": "hi"}, "max_output_tokens"),
]


@pytest.mark.parametrize(("path", "body", "field"), LIMITS)
def test_a_limit_beyond_the_context_is_refused_and_one_within_it_is_not(live, path, body, field):
    error = live.post(path, **body, **{field: CONTEXT}).json()["error"]
    assert (error["param"], error["code"]) == (field, "context_length_exceeded")
    assert error["message"].startswith(f"{field} is too large: {CONTEXT}. This model's maximum context length is 512")
    room = int(error["message"].partition(f"lower {field} to ")[2].partition(",")[0])
    assert live.post(path, **body, **{field: room}).status_code == 200
    assert live.post(path, **body, **{field: room + 1}).status_code == 400
    assert live.post(path, **body, **{field: room + 1}, stream=True).status_code == 400 or path.endswith("batch")


def test_a_truncated_prompt_leaves_room(live):
    body = {"prompt": [5] * 600, "max_tokens": 100}
    assert live.post("/v1/completions", **body, truncate_prompt_tokens=-1).json()["usage"]["prompt_tokens"] == 412


def test_a_prompt_may_leave_less_than_the_default(live):
    assert live.post("/v1/completions", prompt=[5] * (CONTEXT - 2)).status_code == 200


def test_tgis_limit_is_refused_and_its_default_is_not(live):
    text = "a" * 480
    assert live.post("/generate", inputs=text).status_code == 200
    refused = live.post("/generate", inputs=text, parameters={"max_new_tokens": 100})
    assert refused.status_code == 422 and refused.json()["param"] == "max_new_tokens", refused.text


@pytest.mark.parametrize("limit", [CONTEXT, 32_000])
def test_anthropics_limit_is_cut_and_told(live, limit):
    """Its clients always send a limit, often one for models with a larger context; its API has a reason to end so."""
    body = {"messages": USER, "max_tokens": limit, "ignore_eos": True}
    answer = live.post("/v1/messages", **body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["stop_reason"] == "model_context_window_exceeded"
    told = live.post("/v1/messages", **body, stream=True).text
    assert '"stop_reason":"model_context_window_exceeded"' in told
    assert live.post("/v1/messages", **body | {"max_tokens": 3}).json()["stop_reason"] == "max_tokens"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": [5] * 10}),
        ("/v1/completions", {"prompt": [[5] * 10, [5] * 3]}),
        ("/v1/chat/completions", {"messages": USER}),
    ],
)
def test_llama_cpp_s_minus_one_asks_for_all_that_fit(live, path, body):
    live.engine.asked.clear()
    answer = live.post(path, **body, n_predict=-1)
    assert answer.status_code == 200, answer.text
    for asked in live.engine.asked:
        assert asked.params.max_tokens == CONTEXT - asked.num_prompt_tokens
    assert live.post(path, **body, n_predict=-1, max_tokens=5).json()["error"]["param"] == "n_predict"
    refused = live.post(path, **body, n_predict=-2)
    assert refused.status_code == 400 and "-2" in refused.json()["error"]["message"]
    assert live.post(path, **body, max_tokens=-1).status_code == 400, "OpenAI's field has no such value"


def test_all_that_fit_leaves_a_truncated_prompt_whole(live):
    body = {"prompt": [5] * 100, "truncate_prompt_tokens": -1, "n_predict": -1}
    assert live.post("/v1/completions", **body).json()["usage"]["prompt_tokens"] == 100


def test_the_model_s_default_does_not_limit_a_request_for_all_that_fit(start_one, make_engine):
    live = start_one(
        make_engine([], max_model_len=CONTEXT), settings={"override_generation_config": {"max_new_tokens": 7}}
    )
    for path, body in (("/v1/completions", {"prompt": [5] * 10}), ("/v1/chat/completions", {"messages": USER})):
        live.post(path, **body, n_predict=-1)
        asked = live.engine.asked[-1]
        assert asked.params.max_tokens == CONTEXT - asked.num_prompt_tokens


def test_the_library_refuses_it_too_and_none_asks_for_all_that_fit():
    with LLM(adapters={}, memory_bytes=8 << 20, threads=1, max_model_len=64) as llm:
        with pytest.raises(InvalidRequest, match=r"max_tokens is too large: 64.*lower max_tokens to 61"):
            llm.generate([[5, 6, 7]], SamplingParams(max_tokens=64))
        everything = SamplingParams(max_tokens=None, ignore_eos=True)
        (answer,) = llm.generate([[5, 6, 7]], everything)
        assert len(answer.token_ids) == 61 and answer.finish_reason == "length"
        (same,) = llm.generate([[5, 6, 7]], SamplingParams(n_predict=-1, ignore_eos=True))
        assert len(same.token_ids) == 61
        with pytest.raises(InvalidRequest, match="max_tokens is too large"):
            llm.chat(USER, SamplingParams(max_tokens=64))
