"""Objects that leave the process: a step's plan, and a request that goes on elsewhere."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chorus.core.policies import Policies
from chorus.core.requests.plan_wire import plan_from_wire, plan_to_wire
from chorus.core.requests.record import NotHere
from chorus.core.requests.request import Request, RequestState
from chorus.core.requests.request_params import InvalidRequest, RequestParams, Seeds
from chorus.core.scheduling.overload import Overloaded
from chorus.core.scheduling.service import TokenCounters
from chorus.graphs.runner import StepMode
from chorus.memory.files.identity import with_content

from .conftest import Answer, exported

pytestmark = pytest.mark.wide

PROMPT = [11, 12, 13, 14, 15, 16, 17, 18, 19, 20] * 3


@pytest.fixture
def gqa(subject):
    return subject("gqa")


def test_a_plan_that_went_over_the_wire_gives_the_same_tokens(gqa, drive):
    def run(driver):
        driver.add("base", None, PROMPT, max_tokens=6, logprobs=2, logprob_token_ids=(7,))
        driver.add("sampled", "r1-all", PROMPT, max_tokens=6, temperature=1.0, seed=5, logit_bias={7: 3.0})
        driver.add("other", "r2-qv", PROMPT[:5], max_tokens=6, bad_words=((9, 9),), repetition_penalty=1.2)
        return driver.drain()

    want = run(drive(gqa))
    driver = drive(gqa)
    inner, modes = driver.executor.inner, set()

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


def test_a_plan_says_which_states_a_step_reads_and_writes(tiny, drive):
    """Another rank has its own share of the same pages."""
    found = []

    def note(plan):
        (own,) = plan.sequences
        slots = own.states.read_by(own.state_step), own.states.written_by(own.state_step)
        (sent,) = plan_from_wire(
            json.loads(json.dumps(plan_to_wire(plan, samples=False))), lambda entry: None
        ).sequences
        assert (sent.states.read_by(sent.state_step), sent.states.written_by(sent.state_step)) == slots
        found.append([pages[:] for pages in slots])

    driver = drive(tiny("qwen3.5"), before=note, adapters={}, max_num_batched_tokens=32)
    driver.run("a", None, PROMPT * 2, max_tokens=3)
    assert len(found) > 3
    assert all(before[1] == after[0] != after[1] for before, after in itertools.pairwise(found))


def test_adapters_of_a_plan_are_told_by_what_they_hold_once_that_is_known(gqa, drive):
    """Another replica may have given them other versions and pages, or another name."""
    driver = drive(gqa)
    driver.add("one", "r1-all", PROMPT, max_tokens=2)
    driver.add("other", "r2-qv", PROMPT, max_tokens=2)
    adapters = [driver.engine.store.get(name) for name in ("r1-all", "r2-qv")]
    driver.engine.store.note(adapters[0], with_content(adapters[0].manifest))
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


@pytest.fixture
def known(drive):
    """`known(subject, …)`: as `drive`, with the hashes of all adapters known, as a server finds them out by itself."""

    def make(*args, **config):
        driver = drive(*args, **config)
        for adapter in driver.engine.store.versions():
            driver.engine.store.note(adapter, with_content(adapter.manifest))
        return driver

    return make


def move(name, here, there):
    """Move a request, which then has told the same on both sides."""
    record = json.loads(json.dumps(exported(here.engine, name)))
    here.engine.abort(name)
    moved = there.engine.resume(record)
    there.answers[name] = here.answers.pop(name)
    return moved


@pytest.mark.parametrize("kernels", ["torch"])
@pytest.mark.parametrize(("adapter", "params", "steps"), CASES)
def test_a_request_goes_on_elsewhere_token_for_token(gqa, known, adapter, params, steps):
    """In another engine, with other requests and another block size; its client gets each token once."""
    here, there = (known(gqa, seed=1), known(gqa, seed=2, block_tokens=32))
    request = here.add("moved", adapter, PROMPT, max_tokens=14, **params)
    for _ in range(steps):
        here.step()
    if here.answers["moved"].finish_reason is not None:
        pytest.fail("it had ended before it was moved")
    told = list(here.answers["moved"].tokens)
    record = json.loads(json.dumps(exported(here.engine, "moved")))
    assert (record["tokens"], record["num_prompt_tokens"]) == (PROMPT + told, len(PROMPT))
    want = here.drain()["moved"]

    there.add("neighbour", "r2-qv", PROMPT[:7], max_tokens=20)
    there.step()
    moved = there.engine.resume(record)
    there.answers["moved"] = type(want)()
    got = there.drain()["moved"]
    assert moved.seed == request.seed
    assert told + got.tokens == want.tokens
    assert (got.finish_reason, got.stop_token_id) == (want.finish_reason, want.stop_token_id)


@pytest.mark.parametrize("kernels", ["torch"])
def test_moves_change_no_token(gqa, known):
    """Several answers of a call, each moved at any of its tokens, there and, some of them, back again."""
    here, there = known(gqa, block_tokens=4), known(gqa, max_num_batched_tokens=33)
    numbers = itertools.count()

    @settings(max_examples=15)
    @given(
        adapter=st.sampled_from([None, "r1-all", "r8-attention"]),
        length=st.integers(1, 30),
        temperature=st.sampled_from([0.0, 0.7, 1.0, 1.5]),
        seeds=st.lists(st.integers(-(2**62), 2**63 - 1) | st.none(), min_size=1, max_size=4),
        moves=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), max_size=6),
    )
    def check(adapter, length, temperature, seeds, moves):
        def ask(driver, call):
            for index, seed in enumerate(seeds):
                params = draw.fill(RequestParams(max_tokens=10, temperature=temperature, seed=seed, ignore_eos=True))
                driver.engine.add_request(
                    Request(f"{call} {index}", PROMPT[:length], params, adapter, choice_group=call)
                )
                driver.answers[f"{call} {index}"] = Answer()

        draw = Seeds(5)
        ask(here, wanted := f"{next(numbers)}")
        want = here.drain()
        draw = Seeds(5)
        ask(here, call := f"{next(numbers)}")
        for index, steps in moves:
            for _ in range(steps):
                here.step()
                there.step()
            name = f"{call} {index}"
            for source, target in ((here, there), (there, here)):
                if name in source.answers and source.answers[name].finish_reason is None:
                    assert isinstance(move(name, source, target), Request)
                    break
        got = {**here.drain(), **there.drain()}
        for index in range(len(seeds)):
            assert got[f"{call} {index}"].tokens == want[f"{wanted} {index}"].tokens
        for driver in (here, there):
            driver.answers.clear()

    check()


WINDOWED = ["gemma-3", "mistral-window"]


@pytest.mark.parametrize("family", [*WINDOWED, "qwen3.5"])
def test_windows_and_states_are_computed_again_elsewhere(tiny, known, family):
    """In the prompt and in the answer, and back again to what was kept of the request there."""
    it, wanted = tiny(family), {}
    here = known(it, max_num_seqs=4, max_num_batched_tokens=24, state_checkpoint_tokens=32)
    there = known(it, max_num_seqs=4, max_num_batched_tokens=40, block_tokens=32, tensor_parallel_size=2)
    if family in WINDOWED:
        assert here.engine.executor.layout.has_windows
    for index, adapter in enumerate((None, "r3-all")):
        name = str(index)
        prompt, wanted[name] = it.case(adapter, 60, seed=index, count=40)
        here.add(name, adapter, prompt, max_tokens=40)
    there.add("neighbour", "r8-qv", PROMPT[:9], max_tokens=30)
    while not here.engine.scheduler.get("1").num_computed_tokens:
        here.step()
    for source, target in ((here, there), (there, here), (here, there)):
        for name in wanted:
            assert isinstance(move(name, source, target), Request)
        told = {name: len(target.answers[name].tokens) for name in wanted}
        while any(len(target.answers[name].tokens) == told[name] for name in wanted):
            target.step()
    here.drain()
    answered = there.drain()
    assert {name: answered[name].tokens for name in wanted} == wanted


@pytest.mark.usefixtures("crowded")
@pytest.mark.parametrize("family", ["gemma-3", "qwen3.5"])
def test_a_swapped_request_goes_on_elsewhere(tiny, known, family):
    """Its pages in host memory, with its window or its states, are freed where it was."""
    it, wanted = tiny(family), {}
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 32, "preemption": "swap", "max_model_len": 128}
    layout = known(it, adapters={}, **limits).engine.executor.layout
    few = layout.pages_for_tokens(66, chunk=30) + layout.pages_for_tokens(40, chunk=30)
    here = known(it, adapters={}, num_pages=few, **limits)
    there = known(it, adapters={}, **limits)
    for index in range(4):
        prompt, wanted[str(index)] = it.case(None, 30, seed=index, count=36)
        here.add(str(index), None, prompt, max_tokens=36)
    scheduler = here.engine.scheduler
    while not (swapped := [name for name in wanted if scheduler.get(name).state is RequestState.SWAPPED]):
        here.step()
    for name in swapped:
        move(name, here, there)
    assert not here.engine.stats().num_swapped
    answered = {**here.drain(), **there.drain()}
    assert {name: answered[name].tokens for name in wanted} == wanted


def test_a_record_means_its_adapters_content_whatever_that_is_called_here(gqa, known):
    """The same name may mean another adapter elsewhere: with its weights the answer would go on as somebody else's."""
    one, other = gqa.adapters["r1-all"], gqa.adapters["r8-attention"]
    here = known(gqa, adapters={"voice": one})
    there = known(gqa, adapters={"voice": other, "copy": one})
    prompt = gqa.prompt("r1-all", 10, 12, seed=1)
    here.add("a", "voice", prompt, max_tokens=12)
    for _ in range(4):
        here.step()
    moved = move("a", here, there)
    assert (moved.adapter_name, moved.adapter.name) == ("voice", "copy")
    assert there.drain()["a"].tokens == gqa.greedy("r1-all", prompt, 12)


def test_content_that_is_not_here_is_said_to_be_so(gqa, known, drive):
    one, other = gqa.adapters["r1-all"], gqa.adapters["r8-attention"]
    here, there = known(gqa, adapters={"voice": one}), known(gqa, adapters={"voice": other})
    here.add("a", "voice", PROMPT, max_tokens=12)
    here.step()
    record = exported(here.engine, "a")
    assert there.engine.resume(record) == NotHere("voice", record["content_hash"])
    assert not there.engine.has_work()
    assert len(record["content_hash"]) == 64
    unhashed = drive(gqa)
    unhashed.add("a", "r1-all", PROMPT, max_tokens=12)
    assert unhashed.engine.resume({**exported(unhashed.engine, "a"), "id": "b"}) == NotHere("r1-all", None)


def test_a_resumed_request_waits_behind_no_limit_and_before_all_that_have_not_begun(gqa, known):
    here, there = known(gqa), known(gqa, max_num_seqs=1, max_waiting=2)
    here.add("moved", None, PROMPT, max_tokens=12)
    for _ in range(3):
        here.step()
    there.add("running", None, PROMPT[:5], max_tokens=8)
    there.step()
    for name in "ab":
        there.add(name, None, PROMPT[:5], max_tokens=2)
    with pytest.raises(Overloaded):
        there.add("c", None, PROMPT[:5], max_tokens=2)
    move("moved", here, there)
    ended = []
    while there.engine.has_work():
        ended += [output.request_id for output in there.step() if output.finish_reason is not None]
    assert ended == ["running", "moved", "a", "b"]


def test_a_resumed_request_keeps_its_age_and_pays_for_no_token_twice(gqa, known):
    """Its tenant has paid where it was computed first; tokens computed again there are the cost of the move."""
    now = [100.0]
    counters = TokenCounters()
    here = known(gqa, clock=lambda: now[0])
    there = known(gqa, clock=lambda: now[0] + 1000.0, policies=Policies(counters))
    here.add("moved", None, PROMPT, max_tokens=10)
    now[0] += 3.0
    for _ in range(4):
        here.step()
    now[0] += 4.0
    moved = move("moved", here, there)
    assert moved.arrival_time == 1100.0
    assert len(there.answers["moved"].tokens) == 4
    there.drain()
    assert counters.counters[""] == 2.0 * 6, "of 10 answer tokens, the last of which computes nothing, 4 had been paid"


def test_only_requests_in_progress_can_be_exported(gqa, drive):
    driver = drive(gqa)
    driver.run("a", None, [5], max_tokens=1)
    with pytest.raises(KeyError):
        exported(driver.engine, "a")
    driver.add("b", None, [5], max_tokens=2, allowed_token_ids=(5, 6))
    record = exported(driver.engine, "b")
    with pytest.raises(ValueError, match="version 99"):
        driver.engine.resume({**record, "v": 99})
    with pytest.raises(InvalidRequest, match="request id 'b' is in use"):
        driver.engine.resume(record)
    driver.engine.abort("b")
    assert driver.engine.resume(json.loads(json.dumps(record))).params == RequestParams(
        max_tokens=2, temperature=0.0, ignore_eos=True, allowed_token_ids=(5, 6)
    )
    driver.engine.abort("b")
