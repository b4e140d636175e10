"""Async scheduling launches steps before the last one's tokens are read: same answers, harmless discarded steps."""

from __future__ import annotations

import pytest

from chorus.core.config import EngineConfig
from chorus.core.requests.types import NOT_FINITE, PENDING, FinishReason
from chorus.memory.transfers.transfer import ExecutorLost

from .conftest import exported

pytestmark = pytest.mark.wide

PROMPT = [5, 9, 11, 40, 9, 7]


@pytest.fixture
def gqa(subject):
    return subject("gqa")


@pytest.fixture
def ahead():
    return True


@pytest.fixture
def both(gqa, drive):
    """`both(ask, **config)`: results of `ask(driver)` with and without async scheduling, and the former's driver."""

    def run(ask, **config):
        driver = drive(gqa, **config)
        mine = ask(driver)
        return mine, ask(drive(gqa, async_scheduling=False, **config)), driver

    return run


def of_async_steps(driver):
    return [plan for plan in driver.plans if plan.sources is not None]


def last_rows(driver, name):
    """Numbers of the steps, of all that were launched, in which a request has a row."""
    return [i for i, plan in enumerate(driver.plans) if any(row.request_id == name for row in plan.sequences)]


def test_all_steps_behind_the_first_are_ahead(gqa, drive):
    driver = drive(gqa)
    answer = driver.run("one", "r1-all", PROMPT, max_tokens=8)
    assert answer.tokens == gqa.greedy("r1-all", PROMPT, 8)
    assert [plan.sources is not None for plan in driver.plans] == [False] + 7 * [True]
    assert all(row.tokens is PENDING for plan in of_async_steps(driver) for row in plan.sequences)
    assert [plan.step_id for plan in driver.plans] == list(range(1, 9))


def test_without_the_setting_no_step_is_async(gqa, drive):
    driver = drive(gqa, async_scheduling=False)
    assert driver.run("one", None, PROMPT, max_tokens=8).tokens == gqa.greedy(None, PROMPT, 8)
    assert not of_async_steps(driver)


def test_a_row_whose_request_ends_by_its_length_has_none_in_the_next_step(gqa, drive):
    driver = drive(gqa)
    for count, name in enumerate(("short", "middle", "long"), 4):
        driver.add(name, None, PROMPT[count:] + PROMPT, max_tokens=count)
    answers = driver.drain()
    assert {name: len(last_rows(driver, name)) for name in answers} == {"short": 4, "middle": 5, "long": 6}
    for count, name in enumerate(answers, 4):
        assert answers[name].tokens == gqa.greedy(None, PROMPT[count:] + PROMPT, count)
        assert answers[name].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("block_tokens", [1, 4, 16])
def test_a_row_whose_request_has_ended_by_a_stop_token_is_dropped(gqa, drive, block_tokens):
    """Its step runs all the same; nothing of it is told, counted, known to the prefix cache or left in a page."""
    want = gqa.greedy(None, PROMPT, 12)
    stop = next(token for token in want[4:] if token not in want[:4])
    count = want.index(stop) + 1
    other = PROMPT[::-1]
    driver = drive(gqa, block_tokens=block_tokens)
    driver.add("stops", None, PROMPT, max_tokens=12, stop_token_ids=(stop,))
    driver.add("goes on", "r2-qv", other, max_tokens=14)
    answers = driver.drain()
    assert (answers["stops"].tokens, answers["stops"].stop_token_id) == (want[:count], stop)
    assert answers["goes on"].tokens == gqa.greedy("r2-qv", other, 14)
    assert len(last_rows(driver, "stops")) == count + 1, "no row was dropped"
    assert driver.engine.stats().num_generated_tokens == count + 14
    known = PROMPT + want[:count]
    assert all(len(block.tokens) == block_tokens for block in driver.engine.prefix.by_page.values())
    continued = driver.run("continues", None, [*known, 3], max_tokens=5)
    assert continued.tokens == gqa.greedy(None, [*known, 3], 5)
    assert continued.num_cached_tokens == (len(known) - 1) // block_tokens * block_tokens


def test_a_request_aborted_while_its_step_is_under_way_leaves_no_trace(gqa, drive):
    """As the server ends one at a stop string. Another may come by the same name before the step is read."""
    small = {name: gqa.adapters[name] for name in ("r1-all", "r2-qv")}
    driver = drive(gqa, adapters=small, num_pages=24, block_tokens=4)
    driver.add("goes on", None, PROMPT, max_tokens=16)
    driver.add("ends", "r1-all", PROMPT, max_tokens=16)
    for _ in range(5):
        driver.step()
    under_way = driver.plans[-1]
    assert under_way.sources is not None
    assert "ends" in {row.request_id for row in under_way.sequences}
    assert driver.engine.abort("ends")
    driver.engine.reclaimer.reclaim_all()
    driver.add("ends", "r2-qv", PROMPT[::-1], max_tokens=6)
    answers = driver.drain()
    assert answers["ends"].tokens == gqa.greedy("r2-qv", PROMPT[::-1], 6)
    assert answers["goes on"].tokens == gqa.greedy(None, PROMPT, 16)


@pytest.mark.parametrize("chunk", [3, 16])
@pytest.mark.parametrize("old", [PROMPT, PROMPT * 4], ids=["decodes", "prefills"])
@pytest.mark.parametrize("at", range(1, 7))
def test_a_new_request_waits_for_one_step_more_at_most(gqa, drive, at, chunk, old):
    """The one that was launched when it came."""
    waited = []
    for is_async in (True, False):
        driver = drive(gqa, is_async=is_async, max_num_batched_tokens=chunk, max_num_seqs=3, prefix_cache=False)
        driver.add("old", None, old, max_tokens=16)
        for _ in range(at):
            driver.step()
        assert not is_async or driver.plans[-1].sources is not None
        driver.add("new", "r1-all", PROMPT[::-1], max_tokens=4)
        steps = 0
        while not driver.answers["new"].tokens:
            driver.step()
            steps += 1
        waited.append(steps)
        answers = driver.drain()
        assert answers["new"].tokens == gqa.greedy("r1-all", PROMPT[::-1], 4)
        assert answers["old"].tokens == gqa.greedy(None, old, 16)
    ahead, in_turn = waited
    assert ahead <= in_turn + 1


def test_steps_of_prompts_are_ahead_up_to_their_first_tokens(gqa, drive):
    """Chunk by chunk, while a request decodes, and on to the answers: only the first step is not ahead."""
    driver = drive(gqa, max_num_batched_tokens=4, max_num_seqs=3, prefix_cache=False)
    driver.add("decodes", "r1-all", PROMPT[:2], max_tokens=20)
    long = {"one": PROMPT * 3, "two": PROMPT[::-1] * 2}
    for name, prompt in long.items():
        driver.add(name, "r2-qv", prompt, max_tokens=6)
    answers = driver.drain()
    assert answers["decodes"].tokens == gqa.greedy("r1-all", PROMPT[:2], 20)
    for name, prompt in long.items():
        assert answers[name].tokens == gqa.greedy("r2-qv", prompt, 6)
    assert [plan.sources is None for plan in driver.plans] == [True] + (len(driver.plans) - 1) * [False]
    mixed = [plan for plan in of_async_steps(driver) if plan.bucket is None]
    assert any(-1 in plan.sources and max(plan.sources) >= 0 for plan in mixed), "no chunk beside a drawn token"


def test_every_step_returns_the_tokens_of_one(gqa, drive):
    """One token a step, as without steps ahead: launching the next one first delays none of them."""
    driver = drive(gqa)
    driver.add("one", None, PROMPT, max_tokens=9)
    assert [len(driver.step()) for _ in range(9)] == [1] * 9
    assert not driver.engine.has_work()


def test_steps_stay_ahead_while_nobody_who_waits_could_begin(gqa, drive):
    driver = drive(gqa, max_num_seqs=2)
    for index in range(4):
        driver.add(str(index), None, PROMPT[index:], max_tokens=10)
    for _ in range(6):
        driver.step()
    assert driver.engine.stats().num_waiting == 2
    assert len(of_async_steps(driver)) == len(driver.plans) - 1 == 6
    answers = driver.drain()
    assert all(answers[str(index)].tokens == gqa.greedy(None, PROMPT[index:], 10) for index in range(4))


def test_where_pages_run_short_the_step_under_way_is_read_first(gqa, drive, crowded):
    driver = drive(gqa, adapters={}, num_pages=9, block_tokens=4, prefix_cache=False)
    for index in range(3):
        driver.add(str(index), None, PROMPT[index:], max_tokens=14)
    answers = driver.drain()
    assert driver.engine.stats().num_preemptions
    assert of_async_steps(driver)
    assert all(answers[str(index)].tokens == gqa.greedy(None, PROMPT[index:], 14) for index in range(3))


def test_log_probabilities_seeds_and_what_does_not_look_back(both):
    ways = [
        {"logprobs": 2},
        {"temperature": 1.0, "seed": 3, "logprobs": 0},
        {"temperature": 0.9, "seed": 4, "top_p": 0.7},
        {"logit_bias": {7: 2.0}, "temperature": 1.0, "seed": 5},
        {"min_tokens": 4, "stop_token_ids": tuple(range(80))},
        {"allowed_token_ids": tuple(range(9, 60)), "temperature": 1.0, "seed": 6},
        {"bad_words": ((9,), (11,))},
        {"prompt_logprobs": 1},
    ]

    def ask(driver):
        for index, way in enumerate(ways):
            driver.add(str(index), (None, "r1-all")[index % 2], PROMPT, **{"max_tokens": 8, **way})
        return driver.drain()

    mine, others, driver = both(ask)
    assert mine == others
    assert len(of_async_steps(driver)) >= 5
    assert len(mine["4"].tokens) >= 5


@pytest.mark.parametrize(
    "way",
    [
        {"presence_penalty": 1.9, "stop_token_ids": (40,)},
        {"frequency_penalty": 0.7, "temperature": 1.0, "seed": 2},
        {"repetition_penalty": 1.4, "logprobs": 1},
        {"bad_words": ((9, 9), (11, 40, 9))},
    ],
)
def test_a_row_that_looks_back_at_its_tokens_is_async_like_the_others(both, way):
    """Its step is launched before its last token is known, and samples after it."""

    def ask(driver):
        driver.add("looks back", None, PROMPT, **{"max_tokens": 6, **way})
        driver.add("looks back, too", "r1-all", PROMPT[::-1], **{"max_tokens": 11, **way})
        driver.add("other", None, PROMPT, max_tokens=12)
        return driver.drain()

    mine, others, driver = both(ask)
    assert mine == others
    assert [plan.sources is None for plan in driver.plans] == [True] + (len(driver.plans) - 1) * [False]
    looking = [plan for plan in of_async_steps(driver) if any("back" in row.request_id for row in plan.sequences)]
    assert driver.executor.inner.num_drawn_later == len(looking) >= 4


@pytest.mark.parametrize("at", range(1, 9))
@pytest.mark.parametrize("lasts", [False, True], ids=["once", "for one request"])
def test_a_step_that_fails_costs_the_one_behind_it_and_no_token(gqa, drive, at, lasts):
    """True if it is launched, or read, by then, and if it was ahead itself."""
    calls = []

    def before(plan):
        calls.append(plan)
        guilty = any(row.request_id == "guilty" for row in plan.sequences)
        if len(calls) == at or (lasts and len(calls) > at and guilty):
            raise RuntimeError("a fault")

    driver = drive(gqa)
    execute = driver.executor.inner._inner.execute  # noqa: SLF001 - so that the fault is told when the step is read

    def failing(plan):
        before(plan)
        return execute(plan)

    driver.executor.inner._inner.execute = failing  # noqa: SLF001
    driver.add("guilty", "r1-all", PROMPT, max_tokens=9)
    driver.add("other", None, PROMPT[::-1], max_tokens=9)
    answers = driver.drain()
    assert answers["other"].tokens == gqa.greedy(None, PROMPT[::-1], 9)
    want = gqa.greedy("r1-all", PROMPT, 9)
    if lasts:
        assert "a fault" in answers["guilty"].error
        assert answers["guilty"].tokens == want[: len(answers["guilty"].tokens)]
    else:
        assert answers["guilty"].tokens == want


@pytest.mark.parametrize("at", range(2, 6))
def test_a_step_that_cannot_be_launched_ahead_is_launched_in_its_turn(gqa, drive, at):
    def before(plan):
        if len(driver.plans) == at:
            raise RuntimeError("a fault")

    driver = drive(gqa, before=before)
    driver.add("one", "r1-all", PROMPT, max_tokens=9)
    driver.add("other", None, PROMPT[::-1], max_tokens=9)
    answers = driver.drain()
    assert answers["one"].tokens == gqa.greedy("r1-all", PROMPT, 9)
    assert answers["other"].tokens == gqa.greedy(None, PROMPT[::-1], 9)


def fail_when_read(driver):
    """Have the next step fail, which shows when it is read."""
    inner = driver.executor.inner._inner  # noqa: SLF001
    execute = inner.execute

    def failing(plan):
        inner.execute = execute
        raise RuntimeError("a fault")

    inner.execute = failing


def test_a_step_that_fails_beside_one_that_cannot_be_launched_is_planned_again(gqa, drive):
    """The step ahead has an adapter less, and gave another slot to a row that both have."""

    def before(plan):
        if len(driver.plans) == 2:
            raise RuntimeError("a fault")

    driver = drive(gqa, before=before)
    fail_when_read(driver)
    driver.add("ends", "r1-all", [5], max_tokens=1)
    driver.add("goes on", "r2-qv", [9], max_tokens=9)
    driver.add("goes on, too", "r3-mlp", [11], max_tokens=9)
    answers = driver.drain()
    assert answers["ends"].tokens == gqa.greedy("r1-all", [5], 1)
    assert answers["goes on"].tokens == gqa.greedy("r2-qv", [9], 9)
    planned = [(plan.sources is None, len(plan.adapters)) for plan in driver.plans[:3]]
    assert planned == [(True, 3), (False, 2), (True, 3)]


def test_a_merged_step_that_fails_is_run_unmerged_where_its_shadow_is_gone(gqa, drive, monkeypatch):
    """Its pages were taken for the step ahead, which could not be planned in the end."""
    driver = drive(gqa)
    driver.run("loads", "r1-all", PROMPT, max_tokens=1)
    engine = driver.engine
    engine.merge("r1-all")
    while engine.merging.is_under_way:
        engine.merging.advance(1.0)
    fail_when_read(driver)
    with monkeypatch.context() as patch:
        patch.setattr(engine.async_steps, "_plan_ahead", lambda plan: engine.reclaimer.shadow.give_up())
        driver.add("one", "r1-all", PROMPT, max_tokens=9)
        driver.step()
    assert driver.plans[-1].merged is not None
    assert engine.merging.merged is None
    count = len(driver.plans)
    assert driver.drain()["one"].tokens == gqa.greedy("r1-all", PROMPT, 9)
    assert not any(plan.merged for plan in driver.plans[count:])


@pytest.mark.parametrize("at", range(1, 6))
def test_a_lost_device_ends_the_engine_whichever_step_tells(gqa, drive, at):
    driver = drive(gqa)
    calls = []

    def lost(plan):
        calls.append(plan)
        if len(calls) >= at:
            raise ExecutorLost("the device failed")
        return execute(plan)

    execute, driver.executor.inner._inner.execute = driver.executor.inner._inner.execute, lost  # noqa: SLF001
    driver.add("one", None, PROMPT, max_tokens=9)
    with pytest.raises(ExecutorLost):
        for _ in range(at):
            driver.step()


def test_several_answers_of_a_call_take_turns_as_before(both):
    def ask(driver):
        for index in range(4):
            driver.add(str(index), None, PROMPT, choice_group="c", max_tokens=6, temperature=1.0, seed=index)
        driver.add("alone", None, PROMPT[::-1], max_tokens=12)
        return driver.drain()

    mine, others, driver = both(ask)
    assert mine == others
    assert [plan.sources is None for plan in driver.plans] == [True] + (len(driver.plans) - 1) * [False]


def test_answers_of_a_call_take_turns_in_async_steps(gqa, drive):
    """Where rows take time: an answer goes on from a token that the host knows, after a step without a row."""
    plans = []

    def now():
        """Time goes by once a step has ended: all but the last that was launched."""
        return 1.0 + sum(len(plan.sequences) for plan in plans[:-1])

    found = []
    for is_async in (True, False):
        plans = []
        driver = drive(gqa, is_async=is_async, clock=now, max_num_batched_tokens=12, max_num_seqs=8)
        plans = driver.plans
        driver.add("neighbour", "r1-all", PROMPT, max_tokens=40)
        for index in range(4):
            driver.add(str(index), None, PROMPT[::-1] * 4, choice_group="c", max_tokens=8, temperature=1.0, seed=index)
        answers = driver.drain()
        assert answers["neighbour"].tokens == gqa.greedy("r1-all", PROMPT, 40)
        found.append({name: answer.tokens for name, answer in answers.items()})
        if is_async:
            ahead = of_async_steps(driver)
            assert len(ahead) > 0.9 * len(driver.plans)
            assert any(-1 in plan.sources and plan.bucket for plan in ahead), "no answer was without a turn"
    assert found[0] == found[1]


def test_a_moved_request_goes_on_from_what_was_returned(gqa, drive):
    driver, there = drive(gqa), drive(gqa)
    driver.add("one", None, PROMPT, max_tokens=12)
    for _ in range(5):
        driver.step()
    record = exported(driver.engine, "one")
    assert record["tokens"] == PROMPT + driver.answers["one"].tokens
    driver.engine.abort("one")
    there.engine.resume(record)
    there.answers["one"] = driver.answers["one"]
    assert there.drain()["one"].tokens == gqa.greedy(None, PROMPT, 12)


def test_a_row_that_is_not_finite_in_the_step_ahead_too_fails_once(gqa, drive, monkeypatch):
    """The step that was launched before the first one's result was read says it of a request that has ended."""
    driver = drive(gqa)
    driver.add("x", "r1-all", PROMPT, max_tokens=8)
    driver.add("y", None, PROMPT, max_tokens=8)
    for _ in range(3):
        driver.step()
    execute, broken = driver.engine._execute, []  # noqa: SLF001

    def breaking(plan):
        result = execute(plan)
        if result is not None and any(row.request_id == "x" for row in plan.sequences):
            result.tokens.pop("x", None)
            result.errors["x"] = NOT_FINITE
            broken.append(plan.step_id)
        return result

    monkeypatch.setattr(driver.engine, "_execute", breaking)
    answers = driver.drain()
    assert len(broken) == 2, "it was in the step ahead, too"
    assert answers["x"].finish_reason is FinishReason.ERROR
    assert answers["y"].tokens == gqa.greedy(None, PROMPT, 8)


def test_speculation_switches_it_off_and_says_so(gqa, drive, caplog):
    with caplog.at_level("INFO", "chorus.core.engine"):
        driver = drive(gqa, speculation="ngram")
        driver.run("one", "r1-all", PROMPT, max_tokens=8)
        assert not of_async_steps(driver)
        assert [record for record in caplog.messages if "async scheduling is off: speculation" in record]
        caplog.clear()
        drive(gqa, speculation="ngram", async_scheduling=False)
        drive(gqa, speculation="off")
        assert "async scheduling" not in caplog.text


@pytest.mark.parametrize("field", ["async_scheduling", "speculation"])
def test_the_help_of_both_names_the_other(field):
    other = {"async_scheduling": "speculation", "speculation": "async_scheduling"}[field]
    assert other in (EngineConfig.model_fields[field].description or "")
