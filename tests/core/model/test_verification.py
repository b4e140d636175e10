"""Verification: which drafts of a step are accepted, and what becomes of the results after the others."""

from __future__ import annotations

from dataclasses import fields

import pytest

from chorus.core.model.verification import accept_drafts
from chorus.core.requests.request_params import RequestParams
from chorus.core.requests.types import NOT_FINITE, ScheduledSequence, StepPlan, StepResult, TokenLogprobs, positions_of


def sequence(name, tokens, drafts=0, start=10):
    known = [*range(100, 100 + start), *tokens[: len(tokens) - drafts]]
    return ScheduledSequence(
        name,
        -1,
        tokens,
        start,
        [1, 2, 3],
        RequestParams(),
        3,
        samples=True,
        token_ids=known,
        num_prompt_tokens=4,
        drafts=drafts,
    )


def test_each_position_is_a_sequence_with_the_draw_of_its_own():
    """It samples at its own position, from its own tokens; penalties and the like see the known tokens alone."""
    drafted, plain = sequence("a", [7, 1, 2], 2), sequence("b", [8])
    rows = positions_of(StepPlan(1, [drafted, plain], []))
    assert [row.tokens for row in rows] == [[7], [7, 1], [7, 1, 2], [8]]
    assert [row.kv_len for row in rows] == [11, 12, 13, 11]
    assert all(row.token_ids is drafted.token_ids and row.state is drafted.state for row in rows[:3])
    assert rows[3] is plain and rows[0].request_id == "a"
    assert not any(row.drafts for row in rows)


def test_a_position_has_every_other_field_of_its_sequence():
    changed = {field.name: object() for field in fields(ScheduledSequence)} | {"tokens": [7, 1], "drafts": 1}
    drafted = ScheduledSequence(**changed)
    drafted.request_id = "a"
    for row in positions_of(StepPlan(1, [drafted], [])):
        kept = {field.name for field in fields(row) if getattr(row, field.name) is getattr(drafted, field.name)}
        assert kept >= changed.keys() - {"request_id", "tokens", "drafts"}
        assert row.drafts == 0


def test_ids_of_positions_are_no_request_s():
    names = ["a", "a after 1 drafts", "a after 1 drafts'"]
    rows = positions_of(StepPlan(1, [sequence(name, [7, 1], 1) for name in names], []))
    assert len({row.request_id for row in rows}) == 6 == len(rows)


@pytest.mark.parametrize(
    ("sampled", "following"),
    [
        ([1, 2, 3, 4], [2, 3, 4]),  # all, and one more
        ([1, 2, 9, 4], [2, 9]),
        ([1, 9, 3, 4], [9]),
        ([9, 2, 3, 4], []),
        ([1, None, 3, 4], []),  # the next step finds what failed there
        ([1, 2, 3, None], [2, 3]),
    ],
)
def test_the_longest_beginning_that_was_sampled_is_accepted(sampled, following):
    plan = StepPlan(1, [sequence("a", [7, 1, 2, 3], 3), sequence("b", [8])], [])
    rows, result = positions_of(plan), StepResult()
    for row, token in zip(rows, [*sampled, 5], strict=True):
        if token is None:
            result.errors[row.request_id] = NOT_FINITE
        else:
            result.tokens[row.request_id] = token
            result.logprobs[row.request_id] = TokenLogprobs(token, -1.0)
    accept_drafts(plan, rows, result)
    assert result.tokens == {"a": sampled[0], "b": 5} and result.errors == {}
    assert [after.tokens for after in result.after_drafts] == [{"a": token} for token in following]
    assert [after.logprobs["a"].token_id for after in result.after_drafts] == following
    assert result.logprobs.keys() == {"a", "b"}


def test_an_error_at_the_first_position_is_the_request_s():
    plan = StepPlan(1, [sequence("a", [7, 1], 1)], [])
    rows = positions_of(plan)
    result = StepResult({rows[1].request_id: 4}, errors={"a": NOT_FINITE})
    accept_drafts(plan, rows, result)
    assert (result.tokens, result.errors, result.after_drafts) == ({}, {"a": NOT_FINITE}, [])


def test_results_of_several_sequences_are_together_by_position():
    plan = StepPlan(1, [sequence("a", [7, 1], 1), sequence("b", [8, 2, 3], 2)], [])
    rows = positions_of(plan)
    result = StepResult(dict(zip([row.request_id for row in rows], [1, 5, 2, 3, 6], strict=True)))
    accept_drafts(plan, rows, result)
    assert [after.tokens for after in result.after_drafts] == [{"a": 5, "b": 3}, {"b": 6}]
    joined = StepResult({"c": 1}, after_drafts=[StepResult({"c": 2})])
    joined.merge(result)
    assert [after.tokens for after in joined.after_drafts] == [{"c": 2, "a": 5, "b": 3}, {"b": 6}]
    joined.retract("b")
    assert [after.tokens for after in joined.after_drafts] == [{"c": 2, "a": 5}, {}]
