"""TGI's and LoRAX's routes: the same answers as completions, in their clients' shapes."""

import json

import pytest

from chorus.server.errors import GENERATES

BOS, EOS = 256, 257


def ask(live, path="/generate", /, inputs="abc", *, stream=None, **parameters):
    more = {} if stream is None else {"stream": stream}
    return live.post(path, inputs=inputs, parameters=parameters, **more)


def events_of(response):
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream")
    frames = response.text.split("\n\n")
    assert frames.pop() == "" and all(frame.startswith("data: {") for frame in frames)
    return [json.loads(frame.removeprefix("data: ")) for frame in frames]


def test_an_answer_and_its_details(shared):
    assert ask(shared).json() == {"generated_text": "abc", "details": None}
    body = ask(shared, adapter_id="alice", adapter_source="local", details=True, decoder_input_details=True).json()
    details = body["details"]
    assert body["generated_text"] == "cba"
    assert [details[key] for key in ("finish_reason", "prompt_tokens", "generated_tokens", "seed")] == [
        "eos_token",
        4,
        4,
        None,
    ]
    assert [(one["id"], one["text"], one["special"]) for one in details["tokens"]] == [
        (99, "c", False),
        (98, "b", False),
        (97, "a", False),
        (EOS, "<eos>", True),
    ]
    assert {one["logprob"] for one in details["tokens"]} == {-0.5}
    assert [(one["id"], one["logprob"]) for one in details["prefill"]] == [
        (BOS, None),
        *((97 + i, -0.5) for i in range(3)),
    ]
    assert shared.post("/generate", inputs="abc").json()["generated_text"] == "abc"


def test_the_root_answers_with_a_list_or_a_stream(shared):
    assert ask(shared, "/").json() == [{"generated_text": "abc", "details": None}]
    assert (
        ask(shared, "/", stream=False, return_full_text=True, max_new_tokens=2).json()[0]["generated_text"] == "abcab"
    )
    for events in (events_of(ask(shared, "/", stream=True)), events_of(ask(shared, "/generate_stream"))):
        assert "".join(one["token"]["text"] for one in events if not one["token"]["special"]) == "abc"
        assert [one["generated_text"] for one in events] == [None] * 3 + ["abc"]
        assert [one["details"] for one in events[:-1]] == [None] * 3
        assert events[-1]["details"]["finish_reason"] == "eos_token" and events[-1]["token"]["special"]


def test_what_parameters_ask_for(shared):
    ask(shared, do_sample=True, seed=7, top_k=3)
    params = shared.engine.asked[-1].params
    assert (params.temperature, params.top_k, params.top_p, params.seed) == (1.0, 3, 1.0, 7)
    ask(shared, repetition_penalty=1.5, frequency_penalty=0.5, truncate=2, ignore_eos_token=True, max_new_tokens=4)
    request = shared.engine.asked[-1]
    assert (request.params.temperature, request.params.repetition_penalty, request.params.max_tokens) == (0.0, 1.5, 4)
    assert request.params.ignore_eos and request.num_prompt_tokens == 2
    stopped = ask(shared, inputs="hello you", stop=["o"], details=True).json()
    assert (stopped["generated_text"], stopped["details"]["finish_reason"]) == ("hello", "stop_sequence")
    assert ask(shared, temperature=0.5, details=True, seed=3).json()["details"]["seed"] == 3
    assert ask(shared, max_new_tokens=1, details=True).json()["details"]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("parameters", "param"),
    [
        ({"typical_p": 0.5}, "typical_p"),
        ({"watermark": True}, "watermark"),
        ({"best_of": 2}, "best_of"),
        ({"merged_adapters": {"ids": []}}, "merged_adapters"),
        ({"adapter_source": "s3"}, "adapter_source"),
        ({"grammar": {"type": "lark", "value": "x"}}, "grammar"),
        ({"max_new_tokens": "many"}, "max_new_tokens"),
        ({"n": 2}, "n"),
        ({"details": 1}, "details"),
        ({"top_p": 7}, "top_p"),
        ({"max_new_tokens": -1}, "max_new_tokens"),
    ],
)
def test_what_cannot_be_obeyed_is_refused_by_name(shared, parameters, param):
    response = ask(shared, **parameters)
    body = response.json()
    assert (response.status_code, body["error_type"], body["param"]) == (422, "validation", param), body
    assert isinstance(body["error"], str)


def test_errors_have_their_clients_shape(shared):
    response = ask(shared, adapter_id="absent")
    assert response.status_code == 404 and "error_type" not in response.json() and "absent" in response.json()["error"]
    assert shared.post("/generate", parameters={}).json()["param"] == "inputs"
    assert shared.post("/", inputs="a", other=1).status_code == 422
    assert (
        shared.client.post("/generate", content=b"{", headers={"content-type": "application/json"}).status_code == 422
    )
    events = events_of(ask(shared, "/generate_stream", inputs="a\0"))
    assert events[-1]["error_type"] == "generation"


def test_info_and_rights(shared, start, fake_engine, tmp_path):
    assert shared.client.get("/info").json()["max_total_tokens"] == 512
    keys = tmp_path / "keys"
    keys.write_text("alices-key alice adapters=alice base=no\n")
    live = start(fake_engine, settings={"api_key_file": keys})
    assert live.client.get("/info").status_code == 401
    headers = {"authorization": "Bearer alices-key"}
    for path in GENERATES:
        assert live.client.post(path, json={"inputs": "a"}).status_code == 401
        for adapter, status in (("alice", 200), ("bob", 404), (None, 404)):
            body = {"inputs": "a", "parameters": {"adapter_id": adapter}}
            assert live.client.post(path, json=body, headers=headers).status_code == status
