"""Sampling parameters of a request that names none."""

import json
import re
from dataclasses import replace

import pytest

from chorus.server.api.sampling_defaults import SamplingDefaults
from chorus.server.settings import Settings

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
QWEN = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05, "eos_token_id": 1}


def write(directory, **config):
    (directory / "generation_config.json").write_text(json.dumps(config))
    return directory


def test_the_models_recommendation_is_read(tmp_path):
    assert SamplingDefaults.read(tmp_path) == SamplingDefaults()
    assert SamplingDefaults.read(write(tmp_path, eos_token_id=1)) == SamplingDefaults()
    assert SamplingDefaults.read(write(tmp_path, **QWEN, max_new_tokens=2048)) == SamplingDefaults(
        temperature=0.7, top_p=0.8, top_k=20, repetition_penalty=1.05, max_tokens=2048
    )
    assert SamplingDefaults.read(write(tmp_path, temperature=None, top_k=-1)) == SamplingDefaults()


@pytest.mark.parametrize("config", [{"top_p": 3}, {"temperature": "warm"}, {"max_new_tokens": 0}, {"top_k": 1.5}])
def test_what_no_request_could_have_is_refused(tmp_path, config):
    with pytest.raises(ValueError, match="generation_config"):
        SamplingDefaults.read(write(tmp_path, **config))


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_requests_override_it_field_by_field(start, fake_engine, path):
    defaults = SamplingDefaults(temperature=0.7, top_p=0.8, top_k=20, min_p=0.1, repetition_penalty=1.05, max_tokens=7)
    live = start(fake_engine, defaults=defaults)
    body = {"prompt": "hi"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "hi"}]}
    for more in ({}, {"temperature": None}, {"temperature": 0, "top_p": 1, "top_k": -1, "min_p": 0, "max_tokens": 3}):
        assert live.post(path, **body, **more).status_code == 200
    plain, null, own = (asked.params for asked in fake_engine.asked)
    assert (plain.temperature, plain.top_p, plain.top_k, plain.min_p, plain.repetition_penalty) == (
        0.7,
        0.8,
        20,
        0.1,
        1.05,
    )
    assert plain.max_tokens == (7 if path == CHAT else 16), "completions have OpenAI's default"
    assert replace(null, seed=plain.seed) == plain
    assert (own.temperature, own.top_p, own.top_k, own.min_p, own.max_tokens) == (0.0, 1.0, 0, 0.0, 3)
    assert own.repetition_penalty == 1.05


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({"temperature": 0.5, "top_k": -1}, SamplingDefaults(temperature=0.5)),
        ({"max_new_tokens": 7, "min_p": 0}, SamplingDefaults(max_tokens=7)),
        ({}, SamplingDefaults()),
    ],
)
def test_overrides_win_over_the_model_s(overrides, expected):
    assert SamplingDefaults.of(Settings(generation_config="vllm", override_generation_config=overrides)) == expected


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"temprature": 1}, "did you mean temperature?"),
        ({"eos_token_id": 1}, "it may set temperature"),
        ({"temperature": "hot"}, "temperature is 'hot'; it must be a number"),
        ({"top_p": 2}, "top_p is 2"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
    ],
)
def test_overrides_that_no_request_could_have_are_refused(overrides, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        SamplingDefaults.of(Settings(override_generation_config=overrides))
