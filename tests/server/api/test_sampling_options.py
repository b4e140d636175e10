"""A sampling option is in all of its places: for each that was forgotten, a test fails by the option's name.

docs/how-to/extend.md lists the places.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from chorus import SamplingParams
from chorus.core.model.sampler import needs_logits, plain_row_params
from chorus.core.requests.grammar import Grammar, GrammarKind
from chorus.core.requests.logit_edits import LogitEdits
from chorus.core.requests.request_params import RequestParams
from chorus.core.requests.types import BASE_LORA_INDEX, ScheduledSequence, forbids_drafts, looks_back
from chorus.ops.sampling.sampling import RowSamplingParams
from chorus.server.api.fields import ALIASES, NEUTRAL

PAGE = Path(__file__).resolve().parents[3] / "docs/reference/parameters.md"
VOCAB, EOS = 12, (0, 1)

INTERNAL = {"pooling", "classify"}
"""Parameters of `/v1/embeddings` and its like, which sample nothing."""


class Example(NamedTuple):
    """Fields of HTTP and Python that set an option, and the option's value in the engine.

    elsewhere: what an option does that changes no choice among tokens.
    """

    body: dict[str, Any]
    value: Any
    elsewhere: str = ""


EXAMPLES = {
    "max_tokens": Example({"max_tokens": 5}, 5, "ends the answer"),
    "temperature": Example({"temperature": 0.5}, 0.5),
    "top_p": Example({"top_p": 0.5}, 0.5),
    "top_k": Example({"top_k": 3}, 3),
    "min_p": Example({"min_p": 0.25}, 0.25),
    "presence_penalty": Example({"presence_penalty": 1.5}, 1.5),
    "frequency_penalty": Example({"frequency_penalty": 1.5}, 1.5),
    "repetition_penalty": Example({"repetition_penalty": 1.5}, 1.5),
    "logit_bias": Example({"logit_bias": {"5": -7.0}}, {5: -7.0}),
    "seed": Example({"seed": 7}, 7, "makes the request's random numbers, where it enters"),
    "stop_token_ids": Example({"stop_token_ids": [4]}, (4,), "ends the answer"),
    "ignore_eos": Example({"ignore_eos": True}, True, "ends the answer"),
    "min_tokens": Example({"min_tokens": 4}, 4),
    "bad_words": Example({"bad_words": ["no"]}, (tuple(b"no"),)),
    "allowed_token_ids": Example({"allowed_token_ids": [3, 4]}, (3, 4)),
    "grammar": Example({"structured_outputs": {"choice": ["a"]}}, Grammar(GrammarKind.CHOICE, '["a"]')),
    "logprobs": Example({"logprobs": 2}, 2, "reports log-probabilities"),
    "prompt_logprobs": Example({"prompt_logprobs": 2}, 2, "reports log-probabilities"),
    "logprob_token_ids": Example({"logprobs": 1, "logprob_token_ids": [5]}, (5,), "reports log-probabilities"),
}

OPTIONS = [each.name for each in dataclasses.fields(RequestParams) if each.name not in INTERNAL]


def test_every_option_has_an_example_here():
    assert {*OPTIONS} - EXAMPLES.keys() == set(), "give it an example"
    assert [*EXAMPLES] == OPTIONS, "their order is that of RequestParams"


@pytest.fixture(params=[name for name in OPTIONS if name in EXAMPLES])
def option(request):
    return request.param


def test_http_brings_it_to_the_engine(option, shared):
    shared.engine.asked.clear()
    example = EXAMPLES[option]
    answer = shared.post(
        "/v1/completions", model="base", prompt="hi", **{"max_tokens": 9, "temperature": 1, **example.body}
    )
    if option == "grammar":  # this server's tokenizer can't be used with one
        assert answer.json()["error"]["param"] == "structured_outputs.choice", answer.text
        return
    assert answer.status_code == 200, f"server/api: {answer.text}"
    (asked,) = shared.engine.asked
    assert getattr(asked.params, option) == example.value, f"{option}: GenerationRequest.sampling_params"


def test_python_takes_the_same_fields(option):
    given = EXAMPLES[option].body
    SamplingParams(**{"max_tokens": 9, **given})
    for name in given:
        assert name not in NEUTRAL and name not in ALIASES, f"{name}: remove it from server/api/fields.py"


def test_a_page_lists_it(option):
    table, _, _ = PAGE.read_text("utf-8").partition("## Refused")
    listed = set(re.findall(r"`(\w+)`", table))
    assert EXAMPLES[option].body.keys() <= listed, "give it a purpose in server/library/table.py"


def sequence(output=(), **params):
    """A row after a prompt and these generated tokens."""
    known = [2, 3, *output]
    return ScheduledSequence(
        request_id="a",
        lora_index=BASE_LORA_INDEX,
        tokens=known[-1:],
        start=len(known) - 1,
        pages=[],
        params=RequestParams(**{"temperature": 0.0, "max_tokens": 50, **params}),
        seed=0,
        samples=True,
        token_ids=known,
        num_prompt_tokens=2,
    )


def edits(output=(), **params):
    """The changes of logits, tokens that are banned, and tokens that are allowed."""
    row = sequence(output, **params)
    made = LogitEdits(row, VOCAB, EOS, None)
    ids, change = made.advance()
    changes = {token: tuple(each) for token, each in zip(ids.tolist(), change.T.tolist(), strict=True)}
    mask = np.full(1, -1, np.int32)
    made.restrict(mask)
    changed = {token: each for token, each in changes.items() if each != (0.0, 1.0, 0.0)}
    return changed, sorted({*made.banned(EOS, len(row.token_ids))}), mask.tolist()


OUTPUTS = [(), (4,), (5,), (4, 4), (110, 5), (5, 110), (4, 5), (110, 110)]


def given(option):
    """The option as an engine has it, with what it needs."""
    needed = {"logprobs": 1} if option == "logprob_token_ids" else {}
    return {option: EXAMPLES[option].value, **needed}


def edits_logits(option):
    return option == "grammar" or any(edits(each, **given(option)) != edits(each) for each in OUTPUTS)


def test_it_changes_the_choice_of_tokens_or_says_what_it_does_instead(option):
    drawn = plain_row_params(sequence(temperature=1.0))
    filters = plain_row_params(sequence(**{"temperature": 1.0, **given(option)})) not in (drawn, None)
    if not EXAMPLES[option].elsewhere:
        assert edits_logits(option) or filters, f"{option} has no effect: LogitEdits, or _row_params of the sampler"
    if filters and not edits_logits(option):
        assert option in RowSamplingParams._fields


def test_greedy_requests_do_not_skip_it(option):
    if edits_logits(option) and not EXAMPLES[option].elsewhere:
        assert needs_logits(sequence(**given(option))), f"{option}: _reshapes_logits of the sampler"
        assert plain_row_params(sequence(**{"temperature": 1.0, **given(option)})) is None


def test_what_depends_on_generated_tokens_waits_for_them(option):
    """A step that is planned before the last token is known, and one with proposed tokens, must not use it."""
    params = RequestParams(**{"max_tokens": 50, **given(option)})
    if option == "grammar":
        assert looks_back(params) and not forbids_drafts(params), "its state is known after proposed tokens"
        return
    pairs = [(one, two) for one in OUTPUTS for two in OUTPUTS if len(one) == len(two)]
    if any(edits(one, **given(option)) != edits(two, **given(option)) for one, two in pairs):
        assert looks_back(params) and forbids_drafts(params), f"{option}: forbids_drafts in core/requests/types.py"
