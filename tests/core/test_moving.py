"""Objects that leave the process: a step's plan, and a request that goes on elsewhere."""

from __future__ import annotations

import itertools
import json

import pytest

from chorus.core.executors.cpu import CpuExecutor
from chorus.core.requests.plan_wire import plan_from_wire, plan_to_wire
from chorus.graphs.runner import StepMode
from chorus.memory.files.identity import with_content

PROMPT = [11, 12, 13, 14, 15, 16, 17, 18, 19, 20] * 3


@pytest.fixture
def gqa(subject):
    return subject("gqa")


def test_a_plan_that_went_over_the_wire_gives_the_same_tokens(gqa, drive):
    def run(driver):
        driver.add("base", None, PROMPT, max_tokens=6, logprobs=2)
        driver.add("sampled", "r1-all", PROMPT, max_tokens=6, temperature=1.0, seed=5, logit_bias={7: 3.0})
        driver.add("other", "r2-qv", PROMPT[:5], max_tokens=6, bad_words=((9, 9),), repetition_penalty=1.2)
        return driver.drain()

    want = run(drive(gqa))
    driver = drive(gqa)
    inner, modes = driver.executor.inner, set()
    assert isinstance(inner, CpuExecutor)

    def find(entry):
        adapter = driver.engine.store.get(entry["name"])
        assert (adapter.version, adapter.pages) == (entry["version"], entry["pages"])
        return adapter

    class Remote:
        def execute(self, plan):
            modes.add(plan.mode)
            sent = json.loads(json.dumps(plan_to_wire(plan)))
            received = plan_from_wire(sent, find)
            assert received == plan
            assert plan_to_wire(received) == sent
            return inner.execute(received)

        def close(self):
            inner.close()

    driver.executor.inner = Remote()
    assert run(driver) == want
    assert StepMode.LORA in modes


def test_adapters_of_a_plan_are_told_by_what_they_hold_once_that_is_known(gqa, drive):
    """Another replica may have given them other versions and pages, or another name."""
    driver = drive(gqa)
    driver.add("one", "r1-all", PROMPT, max_tokens=2)
    driver.add("other", "r2-qv", PROMPT, max_tokens=2)
    adapters = [driver.engine.store.get(name) for name in ("r1-all", "r2-qv")]
    adapters[0].manifest = with_content(adapters[0].manifest)
    driver.drain()
    sent = json.loads(json.dumps(plan_to_wire(driver.plans[0])))
    hashes = {entry["name"]: entry["content_hash"] for entry in sent["adapters"]}
    assert len(hashes["r1-all"]) == 64
    assert hashes["r2-qv"] is None
    known = {adapter.manifest.content_hash: adapter for adapter in adapters}
    received = plan_from_wire(sent, lambda entry: known[entry["content_hash"]])
    assert received.adapters == driver.plans[0].adapters


def test_a_plan_of_another_wire_version_is_refused(gqa, drive):
    driver = drive(gqa)
    driver.run("a", None, [5], max_tokens=1)
    data = plan_to_wire(driver.plans[0])
    assert data["mode"] == "base"
    with pytest.raises(ValueError, match="wire version 99"):
        plan_from_wire({**data, "v": 99}, lambda entry: None)


CASES = list(
    itertools.product(
        [None, "r1-all"],
        [
            {"temperature": 0.0},
            {"temperature": 1.0, "seed": 3, "top_p": 0.9},
            {"temperature": 1.0},
            {"temperature": 0.8, "presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.3},
            {"temperature": 0.0, "min_tokens": 9, "ignore_eos": False, "stop_token_ids": tuple(range(40, 160))},
            {"temperature": 1.0, "seed": 8, "logit_bias": {5: 4.0, 6: -50.0}, "bad_words": ((5, 5), (7,))},
        ],
        [1, 5],
    )
)


def test_there_are_24_cases():
    assert len(CASES) == 24


@pytest.mark.parametrize("kernels", ["torch"])
@pytest.mark.parametrize(("adapter", "params", "steps"), CASES)
def test_a_request_goes_on_elsewhere_token_for_token(gqa, drive, adapter, params, steps):
    """In another engine, beside others, with another block size; its client gets each token once."""
    here, there = (drive(gqa, seed=1), drive(gqa, seed=2, block_tokens=32))
    request = here.add("moved", adapter, PROMPT, max_tokens=14, **params)
    for _ in range(steps):
        here.step()
    if here.answers["moved"].finish_reason is not None:
        pytest.fail("it had ended before it was moved")
    told = list(here.answers["moved"].tokens)
    record = json.loads(json.dumps(here.engine.export_request("moved")))
    assert (record["tokens"], record["num_prompt_tokens"]) == (PROMPT + told, len(PROMPT))
    want = here.drain()["moved"]

    there.add("neighbour", "r2-qv", PROMPT[:7], max_tokens=20)
    there.step()
    moved = there.engine.import_request(record)
    there.answers["moved"] = type(want)()
    got = there.drain()["moved"]
    assert moved.seed == request.seed
    assert told + got.tokens == want.tokens
    assert (got.finish_reason, got.stop_token_id) == (want.finish_reason, want.stop_token_id)


def test_only_requests_in_progress_can_be_exported(gqa, drive):
    driver = drive(gqa)
    driver.run("a", None, [5], max_tokens=1)
    with pytest.raises(KeyError):
        driver.engine.export_request("a")
    driver.add("b", None, [5], max_tokens=2)
    record = driver.engine.export_request("b")
    with pytest.raises(ValueError, match="version 99"):
        driver.engine.import_request({**record, "v": 99})
