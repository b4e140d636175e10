"""`SamplingParams`: the fields of the HTTP surface, obeyed or refused."""

import pickle

import numpy as np
import pytest
from pydantic import BaseModel

from chorus import Grammar, InvalidRequest, SamplingParams
from chorus.server.access.limits import RequestLimits
from chorus.server.api.chat_request import ChatCompletionRequest
from chorus.server.api.completion_request import CompletionRequest
from chorus.server.api.fields import ALIASES
from chorus.server.api.sampling_defaults import SamplingDefaults
from chorus.server.library.params import ALWAYS, ELSEWHERE, FIELDS, SamplingFields
from chorus.server.library.table import PAGE, PURPOSES, page

OWN_NAMES = {"json", "choice"}
"""Names that the arguments' types have in addition to the fields': other names of fields."""


def test_every_field_of_http_exists_in_python_or_says_what_there_is_instead():
    over_http = CompletionRequest.model_fields.keys() | ChatCompletionRequest.model_fields.keys()
    assert over_http == FIELDS | ELSEWHERE.keys()
    assert SamplingFields.__annotations__.keys() == FIELDS | OWN_NAMES
    assert ALIASES.keys() >= OWN_NAMES and ALWAYS.keys() <= FIELDS
    for name, instead in ELSEWHERE.items():
        with pytest.raises(InvalidRequest) as refused:
            SamplingParams(**{name: "x"})
        assert refused.value.field == name and instead in str(refused.value)


def test_the_page_of_parameters_is_what_the_code_reads():
    assert PAGE.read_text(encoding="utf-8") == page(), "run python -m chorus.server.library.table"
    by_purpose = [name for names in PURPOSES.values() for name in names.split()]
    fields = CompletionRequest.model_fields.keys() | ChatCompletionRequest.model_fields.keys()
    assert sorted(by_purpose) == sorted(fields), "give each a purpose in server/library/table.py"


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ({"temprature": 1}, "temprature", "did you mean temperature?"),
        ({"temperature": "hot"}, "temperature", "temperature is 'hot'; it must be a number"),
        ({"temperature": -1}, "temperature", "between 0 and 100"),
        ({"n": 0}, "n", "n is 0; it must be at least 1"),
        ({"logprobs": 500}, "logprobs", "at most 100"),
        ({"prompt_logprobs": "all"}, "prompt_logprobs", "a whole number"),
        ({"bad_words": [(1, 2)]}, "bad_words[0]", "it must be a string"),
        ({"stop": 5}, "stop", "a list"),
        ({"json": "{}", "regex": "a"}, "regex", "both define the output"),
        ({"grammar": Grammar("regex", "a"), "structured_outputs": {"regex": "b"}}, "grammar", "both define"),
        ({"structured_outputs": {"rgex": "a"}}, "structured_outputs.rgex", "it may have json"),
        ({"tools": [{"type": "search"}]}, "tools[0]", "must be a function"),
        ({"tool_choice": "any", "tools": []}, "tool_choice", "auto"),
        ({"use_beam_search": True}, "use_beam_search", "beams"),
        ({"max_tokens": 3, "max_new_tokens": 4}, "max_new_tokens", "they differ"),
    ],
)
def test_what_is_wrong_is_told_in_one_line_when_it_is_made(fields, field, words):
    with pytest.raises(InvalidRequest) as refused:
        SamplingParams(**fields)
    text = str(refused.value)
    assert refused.value.field == field and words in text
    assert "\n" not in text and "Input should" not in text and "pydantic" not in text


def test_fields_are_given_by_name():
    with pytest.raises(InvalidRequest, match="by name"):
        SamplingParams(0.5)


def test_values_may_be_what_programs_have():
    class Place(BaseModel):
        town: str

    given = SamplingParams(
        stop=("a", "b"), logit_bias={5: 1.5}, stop_token_ids=np.array([1, 2]), seed=np.int64(7), json=Place
    )
    asked = CompletionRequest.of(given.for_text("x"), RequestLimits())
    assert asked.stop == ["a", "b"] and asked.logit_bias == {"5": 1.5}
    assert asked.stop_token_ids == [1, 2] and asked.seed == 7
    assert isinstance(asked.guided_json, dict)
    assert asked.guided_json["properties"]["town"] == {"title": "Town", "type": "string"}


@pytest.mark.parametrize(
    ("grammar", "field"),
    [
        (Grammar("regex", "a+"), {"regex": "a+"}),
        (Grammar("json_object"), {"json_object": True}),
        (Grammar("json_schema", "{}"), {"json": "{}"}),
        (Grammar("choice", '["a", "b"]'), {"choice": ["a", "b"]}),
        (Grammar("grammar", 'start: "a"'), {"grammar": 'start: "a"'}),
    ],
)
def test_a_grammar_is_structured_output(grammar, field):
    assert SamplingParams(grammar=grammar).structured_outputs == field


def test_unasked_and_endless_lengths():
    assert CompletionRequest.of(SamplingParams().for_text("x"), RequestLimits()).asked_tokens == 16
    endless = CompletionRequest.of(SamplingParams(max_tokens=None).for_text("x"), RequestLimits())
    (params,) = endless.sampling_params(100, SamplingDefaults())
    assert params.max_tokens == 100


def test_log_probabilities_are_a_number_for_conversations_too():
    messages = [{"role": "user", "content": "x"}]
    asked = ChatCompletionRequest.of(SamplingParams(logprobs=3).for_chat(messages), RequestLimits())
    assert asked.asked_logprobs == 3
    assert ChatCompletionRequest.of(SamplingParams().for_chat(messages), RequestLimits()).asked_logprobs is None


def test_they_are_values():
    one = SamplingParams(temperature=0, max_tokens=5)
    assert one == SamplingParams(temperature=0, max_tokens=5) != SamplingParams(temperature=0)
    assert pickle.loads(pickle.dumps(one)) == one
    assert one.replace(max_tokens=6).max_tokens == 6 and one.max_tokens == 5
    assert (one.top_p, one.n, one.min_tokens) == (None, 1, 0), "HTTP's defaults"
    assert repr(one) == "SamplingParams(temperature=0, max_tokens=5)"
    with pytest.raises(AttributeError, match="no field 'nothing'"):
        _ = one.nothing
