"""Sampling parameters of a request that names none."""

import json
import re
from dataclasses import replace

import pytest

from chorus.server.api.sampling_defaults import OVERRIDABLE, UNUSED, SamplingDefaults
from chorus.server.settings import Settings

from ...processes import ROOT

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
        ({"stop_strings": ["END"], "min_new_tokens": 2}, SamplingDefaults(stop=("END",), min_tokens=2)),
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


RULES = {
    "min_new_tokens": 3,
    "stop_strings": ["END", "\n\n"],
    "suppress_tokens": [5, 7],
    "bad_words_ids": [[8, 9], [10]],
}


def test_rules_of_the_model_are_read(tmp_path):
    found = SamplingDefaults.read(write(tmp_path, **RULES))
    assert found == SamplingDefaults(min_tokens=3, stop=("END", "\n\n"), bad_words=((8, 9), (10,), (5,), (7,)))
    assert SamplingDefaults.read(write(tmp_path, stop_strings="END")).stop == ("END",)
    assert SamplingDefaults.read(write(tmp_path, **dict.fromkeys(RULES))) == SamplingDefaults()
    assert found.bad_words_of(9) == ((5,), (7,)), "no token beyond the vocabulary can be written"


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_requests_have_the_model_s_rules_unless_they_have_their_own(start, fake_engine, path):
    defaults = SamplingDefaults(min_tokens=3, stop=("END",), bad_words=((8, 9), (5,)))
    live = start(fake_engine, defaults=defaults)
    body = {"prompt": "hi"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "hi"}]}
    for more in ({}, {"min_tokens": None, "max_tokens": 2}, {"min_tokens": 0, "bad_words": [], "stop": []}):
        assert live.post(path, **body, **more).status_code == 200
    plain, short, own = (asked.params for asked in fake_engine.asked)
    assert (plain.min_tokens, plain.bad_words) == (3, ((8, 9), (5,)))
    assert (short.min_tokens, short.max_tokens) == (2, 2), "a default can't be more than the request's limit"
    assert (own.min_tokens, own.bad_words) == (0, ())


def test_the_model_s_stop_strings_end_answers(start, fake_engine):
    """The fake engine repeats the prompt."""
    live = start(fake_engine, defaults=SamplingDefaults(stop=("END",)))
    asked = {"prompt": "one END two", "max_tokens": 64}
    choice = live.post(COMPLETIONS, **asked).json()["choices"][0]
    assert (choice["text"].strip(), choice["finish_reason"], choice["stop_reason"]) == ("one", "stop", "END")
    assert "two" in live.post(COMPLETIONS, **asked, stop=[]).json()["choices"][0]["text"]


def test_fields_without_an_effect_are_named_in_one_line(tmp_path, caplog):
    unused = {"no_repeat_ngram_size": 3, "forced_eos_token_id": 2, "sequence_bias": [[[1], -2.0]], "num_beams": 4}
    harmless = {"num_beams": 1, "typical_p": 1.0, "do_sample": False, "begin_suppress_tokens": None, "use_cache": True}
    SamplingDefaults.read(write(tmp_path, **RULES, **harmless))
    assert not caplog.records
    SamplingDefaults.read(write(tmp_path, **{**harmless, **unused, "begin_suppress_tokens": [3]}))
    (line,) = (record.getMessage() for record in caplog.records)
    assert set(line.rpartition(": ")[2].split(", ")) == {*unused, "begin_suppress_tokens"}


def test_no_field_of_transformers_is_overlooked():
    """Each that may change an answer is a default or among those that are named."""
    transformers = pytest.importorskip("transformers")
    known = {name for name in vars(transformers.GenerationConfig()) if not name.startswith("_")}
    assert known - {*OVERRIDABLE, *UNUSED} == HARMLESS


def test_the_manual_lists_all_fields():
    manual = (ROOT / "docs/reference/http-api.md").read_text()
    assert not [name for name in (*OVERRIDABLE, *UNUSED, "do_sample") if f"`{name}`" not in manual]


#: Fields about memory, results and assistants, which change no answer, or are read elsewhere.
HARMLESS = {
    *"""assistant_confidence_threshold assistant_early_exit assistant_ensemble_weight assistant_lookbehind bos_token_id
    cache_config cache_implementation compile_config continuous_batching_config decoder_start_token_id disable_compile
    do_sample early_stopping encoder_no_repeat_ngram_size eos_token_id is_assistant length_penalty low_memory
    max_cache_len max_matching_ngram_size max_time num_assistant_tokens num_assistant_tokens_schedule
    num_return_sequences output_attentions output_hidden_states output_logits output_scores pad_token_id
    prefill_chunk_size prompt_lookup_num_tokens remove_invalid_values renormalize_logits return_dict_in_generate
    speculation_type target_lookbehind transformers_version use_cache use_mtp""".split()  # noqa: SIM905 - a list of words
}


@pytest.mark.parametrize(
    "config",
    [
        {"stop_strings": [""]},
        {"stop_strings": 3},
        {"suppress_tokens": "all"},
        {"suppress_tokens": [-1]},
        {"bad_words_ids": [[]]},
        {"bad_words_ids": [3]},
        {"min_new_tokens": -1},
    ],
)
def test_rules_that_no_request_could_have_are_refused(tmp_path, config):
    (name,) = config
    with pytest.raises(ValueError, match=f"generation_config.*{name}"):
        SamplingDefaults.read(write(tmp_path, **config))
    with pytest.raises(ValueError, match=f"override_generation_config.*{name}"):
        SamplingDefaults.of(Settings(generation_config="vllm", override_generation_config=config))
