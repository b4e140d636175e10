"""Page-seconds: what each request is told of the pages that it held, and the adapters' own pages."""

from __future__ import annotations

from itertools import pairwise

import pytest

from chorus.core.requests.types import FinishReason

pytestmark = pytest.mark.wide


class Ticks:
    """A clock that is moved by hand."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def outputs_of(driver, clock, requests):
    """Steps of a second each: the outputs by request, and the sum over steps of the pages that requests held."""
    found, sums = {name: [] for name in requests}, 0
    while driver.engine.has_work():
        outputs = driver.step()
        clock.now += 1
        for output in outputs:
            found[output.request_id].append(output)
        sums += sum(len(one.block_table.held) for one in driver.engine.scheduler.running if one.is_running)
    return found, sums


def test_a_request_pays_for_the_pages_that_it_holds_and_for_each_second(subject, drive):
    clock = Ticks()
    driver = drive(subject("gqa"), clock=clock, block_tokens=8)
    tokens = driver.engine.block_tokens
    driver.add("short", None, [5, 9, 30], max_tokens=2)
    driver.add("long", None, list(range(5, 5 + 3 * tokens)), max_tokens=5 * tokens)
    found, held = outputs_of(driver, clock, ["short", "long"])
    total = sum(outputs[-1].page_seconds for outputs in found.values())
    assert total == held > 0
    told = [one.page_seconds for one in found["long"] if one.page_seconds]
    assert len(told) >= 3 and all(one <= other for one, other in pairwise(told)), "it is told as it goes on"
    assert found["short"][-1].page_seconds < found["long"][-1].page_seconds / tokens
    assert found["long"][-1].finish_reason is FinishReason.LENGTH


def test_each_report_has_the_seconds_until_then(subject, drive):
    """Also the first one, after the steps of a long prompt, whose pages have not changed since."""
    clock = Ticks()
    driver = drive(subject("gqa"), clock=clock, block_tokens=8, max_num_batched_tokens=8, max_num_seqs=8)
    tokens = driver.engine.block_tokens
    driver.add("one", None, list(range(5, 5 + 6 * tokens)), max_tokens=3 * tokens)
    (request,) = driver.engine.scheduler.waiting
    held, told = 0, []
    while driver.engine.has_work():
        (*_, output) = driver.step() or [None]
        if output is not None and output.page_seconds:
            assert output.page_seconds == held
            told.append(output)
        held += len(request.block_table.held) if request.is_running else 0
        clock.now += 1
    assert len(told[0].token_ids) == 1 and told[0].page_seconds >= 6 * 5 / 2 and len(told) >= 4


def test_an_aborted_request_has_paid_for_its_pages_until_then(subject, drive):
    clock = Ticks()
    driver = drive(subject("gqa"), clock=clock, block_tokens=8, max_num_batched_tokens=8, max_num_seqs=8)
    driver.add("one", None, list(range(5, 5 + 6 * driver.engine.block_tokens)), max_tokens=2)
    (request,) = driver.engine.scheduler.waiting
    assert driver.step() == []
    pages = len(request.block_table.held)
    clock.now += 7
    assert request.page_seconds_until(clock.now) == 7 * pages > 0
    driver.engine.abort("one")
    clock.now += 7
    assert request.page_seconds_until(clock.now) == 7 * pages


def test_adapters_page_seconds_and_loads_are_added_up(subject, drive):
    driver = drive(subject("gqa"))
    driver.run("a", "r8-attention", [5, 9, 30], max_tokens=4)
    driver.run("b", "r8-attention", [5, 9, 31], max_tokens=4)
    store = driver.engine.store
    (cost,) = [one for one in store.spent.so_far() if one.name == "r8-attention"]
    assert sum(cost.loads) == store.num_loads == 1 and cost.load_seconds > 0 and cost.page_seconds > 0
    store.unregister("r8-attention")
    (rest,) = store.spent.so_far()
    assert sum(rest.loads) == 1 and rest.page_seconds >= cost.page_seconds
