"""Prompts whose adapter is on its way: offload workers compute its products, and give the same tokens."""

from __future__ import annotations

import itertools
import os
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from chorus.core.cold_start import ColdStart
from chorus.core.config import EngineConfig
from chorus.core.executors.choice import open_executor
from chorus.core.executors.lora_offload import OffloadProfile, offload_worker_cpus, shares
from chorus.core.model.specs.config import UnsupportedModel
from chorus.graphs.device import DeviceError
from chorus.ops.library import native_library

from ..adapters.adapter_zoo import BIASED_FORMS, save_zoo
from ..test_parity import add_all, check, make_cases
from .slow_link import slow_down

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(not native_library.available(torch.float32), reason="offload workers run the native library"),
    pytest.mark.wide,
]


@pytest.fixture
def kernels():
    return "native"


class Link:
    """Lets layers through as many as have been let; all once it is open."""

    def __init__(self):
        self._changed = threading.Condition()
        self.most = 0

    def let(self, most):
        with self._changed:
            self.most = most
            self._changed.notify_all()

    def __call__(self, layer, layout):
        with self._changed:
            self._changed.wait_for(lambda: layer < self.most, 120)


@pytest.fixture
def with_offload(drive):
    """`with_offload(subject, workers)`: a driver with offload workers always chosen, and the link of its adapters."""
    links = []

    def make(it, workers=2, cold_start=ColdStart.OFFLOAD, **config):
        driver = drive(it, offload_workers=workers, memory_bytes=16 << 20, **config)
        driver.has_stalled_link = True
        executor = driver.executor.inner
        links.append(Link())
        slow_down(executor.adapters, executor.arena.pages, links[-1])
        executor._offload.cold_start = cold_start  # noqa: SLF001
        return driver, links[-1], executor._offload  # noqa: SLF001

    yield make
    for link in links:
        link.let(1000)


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("model", ["gqa", "tied", "mha"])
def test_no_layer_arrives_and_the_tokens_are_the_reference_s(subject, with_offload, model, workers):
    """Prompts and answers of all adapters, with none of them in the arena to the end."""
    it = subject(model)
    driver, link, offload = with_offload(it, workers, max_num_batched_tokens=200)
    cases = make_cases(it, 10, seed=3, longest=90, tokens=(4, 8))
    add_all(driver, cases)
    check(driver, cases)
    assert link.most == 0
    assert offload.starts.num_offloaded >= 4
    assert offload.starts.num_streamed == 0
    assert offload.offloaded is not None
    assert max(plan.num_tokens for plan in driver.plans) > 100


@pytest.mark.wide
def test_layers_of_two_kinds(tiny, with_offload):
    """An adapter's parts have layers of their own; none is waited for in the layers of others."""
    it = tiny("qwen3.5")
    driver, link, offload = with_offload(it, max_num_batched_tokens=200, max_model_len=128)
    want = {}
    for index, adapter in enumerate([None, "r3-all", "r17-o-mlp", "r3-all"]):
        prompt, want[str(index)] = it.case(adapter, 20 + 10 * index, seed=index)
        driver.add(str(index), adapter, prompt, max_tokens=8)
    answers = driver.drain()
    assert {name: answers[name].tokens for name in want} == want
    assert link.most == 0 and offload.starts.num_offloaded == 2 and offload.starts.num_streamed == 0


@pytest.mark.wide
def test_adapters_with_vectors_are_waited_for(tmp_path, with_offload):
    """Vectors come after all that LoRA adds; beside them, others are offloaded."""
    it = save_zoo(tmp_path, biased=True, forms={name: BIASED_FORMS[name] for name in ("plain", "dora", "bias-all")})
    driver, link, offload = with_offload(it, max_load_stall_seconds=60.0, max_num_batched_tokens=200)
    want = {}
    for name in (None, *it.adapters):
        prompt, want[str(name)] = it.case(name, 30, 6, seed=3)
        driver.add(str(name), name, prompt, max_tokens=6)
    threading.Timer(0.3, link.let, [1000]).start()
    answers = driver.drain()
    assert {name: answers[name].tokens for name in want} == want
    assert offload.starts.num_offloaded == 1 and offload.starts.num_streamed == 2


@pytest.mark.wide
def test_adapters_on_keys_and_values_of_latents_are_waited_for(tiny, with_offload):
    """Workers do not compute what they add; beside them, others are offloaded."""
    it = tiny("youtu")
    limits = {"max_load_stall_seconds": 60.0, "max_num_batched_tokens": 200, "max_model_len": 128}
    driver, link, offload = with_offload(it, **limits)
    want = {}
    for name in ("r8-qv", "r17-o-mlp"):
        prompt, want[name] = it.case(name, 30, seed=3)
        driver.add(name, name, prompt, max_tokens=8)
    threading.Timer(0.3, link.let, [1000]).start()
    answers = driver.drain()
    assert {name: answers[name].tokens for name in want} == want
    assert offload.starts.num_offloaded == 1 and offload.starts.num_streamed == 1


def test_bfloat16_differs_by_rounding_alone(subject, with_offload, drive):
    it = subject("gqa")
    driver, *_ = with_offload(it, dtype="bfloat16")
    plain = drive(it, dtype="bfloat16", memory_bytes=16 << 20)
    cases = make_cases(it, 10, seed=4, longest=60, tokens=(1, 1))
    for each in (driver, plain):
        add_all(each, cases)
        each.drain()
    same = [driver.answers[case.id].tokens == plain.answers[case.id].tokens for case in cases]
    assert sum(same) >= len(cases) - 1


def wait_for(transfer, layers):
    while transfer.arrived.num_ready < layers:
        time.sleep(0.001)


@pytest.mark.parametrize("arrived", [0, 1, 2])
def test_sgmv_takes_over_in_mid_prefill(subject, with_offload, arrived):
    it = subject("gqa")
    driver, link, offload = with_offload(it)
    link.let(arrived)
    case = make_cases(it, 1, adapters=["r33-all"], seed=5, longest=60, tokens=(1, 2))
    add_all(driver, case)
    layers = (
        it.config.num_layers
        if hasattr(it, "config")
        else len(driver.engine.store.get("r33-all").manifest.parts[0].layers)
    )
    engine = driver.engine
    plan = engine.begin_step()
    wait_for(plan.adapters[0].transfer, arrived)
    engine.end_step(plan)
    assert set(offload.offloaded.layers) == {layers - arrived}


@pytest.mark.parametrize(("exchange", "cold_start"), [(0.0, "offload"), (10.0, "stream")])
def test_the_cost_model_chooses(subject, with_offload, exchange, cold_start):
    """A link that brings nothing is not waited for, unless the offload workers would take still longer."""
    it = subject("gqa")
    driver, link, offload = with_offload(it, cold_start=None)
    offload.profile, offload._per_elem = OffloadProfile(exchange, 0.0), 1e-6  # noqa: SLF001
    case = make_cases(it, 2, adapters=["r33-all"], seed=5, longest=40, tokens=(2, 3))
    add_all(driver, case)
    driver.step()
    stats = driver.engine.stats()
    assert (stats.num_offloaded_starts, stats.num_streamed_starts) == ((1, 0) if cold_start == "offload" else (0, 1))
    assert stats.cold_start_regret >= 0
    link.let(1000)
    check(driver, case)


@pytest.mark.parametrize(("cold_start", "exchange"), [(ColdStart.STREAM, 1e-7), (ColdStart.OFFLOAD, 10.0)])
def test_what_a_worse_choice_has_cost_is_counted(subject, with_offload, cold_start, exchange):
    """A stream over a link of which the first layer comes late, and offload workers that take longer than the
    stream.
    """
    it = subject("gqa")
    driver, link, offload = with_offload(it, cold_start=cold_start, max_load_stall_seconds=60.0)
    offload.profile = OffloadProfile(exchange, 0.0)
    add_all(driver, make_cases(it, 1, adapters=["r33-all"], seed=5, longest=40, tokens=(1, 1)))
    plan = driver.engine.begin_step()
    coming = offload.adapters.coming[plan.adapters[0].transfer]
    coming.began -= 3.0
    if cold_start is ColdStart.OFFLOAD:
        link.let(1)
        wait_for(plan.adapters[0].transfer, 1)
    else:
        threading.Timer(0.2, link.let, [1000]).start()
    driver.engine.end_step(plan)
    regret = driver.engine.stats().cold_start_regret
    assert regret == offload.starts.regret_seconds
    # a layer was offloaded for 40 s, and all layers had come after 9 s; or they came 3 s late, and exchanges take no
    # time
    assert 20.0 < regret < 40.0 if cold_start is ColdStart.OFFLOAD else 0.5 < regret < 60.0


def test_a_prompt_is_split_by_the_machines_profile(subject, with_offload):
    """Over ⌈L/c⌉ offload workers, where c tokens take eight times as long as an exchange."""
    it = subject("gqa")
    found = {}
    for each in (10, 60):
        driver, *_, offload = with_offload(it, workers=3)
        case = make_cases(it, 1, adapters=["r33-all"], seed=5, longest=40, tokens=(1, 1))
        add_all(driver, case)
        plan = driver.engine.begin_step()
        layout = plan.adapters[0].layout
        # of a token: all elements; of exchanges: four a layer
        offload.profile = OffloadProfile(each * layout.num_elems * 1e-9 / (8 * 4 * layout.num_layers), 1e-9)
        driver.engine.end_step(plan)
        tokens = plan.num_tokens
        assert 20 < tokens < 60
        found[each] = [end - begin for begin, end in itertools.pairwise(offload.offloaded.share)]
        assert found[each] == [tokens, 0, 0] if each == 60 else max(found[each]) <= tokens // 2


def workers_cpus() -> list[set[int]]:
    """The processors of each offload worker of this process."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that ends meanwhile
            if (task / "comm").read_text() == "chorus-offload\n":
                found.append(os.sched_getaffinity(int(task.name)))
    return found


def has_workers(count: int) -> bool:
    """True if so many offload workers are left; the kernel lists a thread a little longer than a join takes."""
    until = time.monotonic() + 10
    while (found := len(workers_cpus())) != count and time.monotonic() < until:
        time.sleep(0.001)
    return found == count


def test_each_offload_worker_stays_on_its_processor_and_ends_with_the_executor(subject):
    """The last processors; where there is one alone, on any."""
    settings = EngineConfig(
        model=subject("gqa").model, dtype="float32", memory_bytes=8 << 20, device="cpu", offload_workers=2, threads=1
    )
    before = workers_cpus()
    executor = open_executor(settings)
    found = workers_cpus()
    executor.close()
    want = [{cpu} if cpu is not None else os.sched_getaffinity(0) for cpu in offload_worker_cpus(2)]
    assert sorted(map(sorted, found)) == sorted(map(sorted, before + want))
    assert has_workers(len(before))


def test_a_loaded_adapter_is_no_cold_start(subject, with_offload):
    driver, link, offload = with_offload(subject("gqa"), cold_start=None)
    link.let(1000)
    driver.run("load", "r33-all", [3, 4], max_tokens=2)
    before = offload.starts.num_offloaded + offload.starts.num_streamed
    driver.run("again", "r33-all", [3, 4], max_tokens=2)
    assert offload.starts.num_offloaded + offload.starts.num_streamed == before <= 1


def test_a_step_that_fails_ends_for_the_offload_workers_too(subject, with_offload, monkeypatch):
    it = subject("gqa")
    driver, _, offload = with_offload(it)
    cases = make_cases(it, 3, seed=9, longest=60, tokens=(4, 6))
    add_all(driver, cases)
    begin, errors = offload.begin, [RuntimeError("for once")]

    def fail_once(segments):
        found = begin(segments)
        if errors:
            raise errors.pop()
        return found

    monkeypatch.setattr(offload, "begin", fail_once)
    check(driver, cases)
    assert not errors


def test_offload_workers_end_in_the_middle_of_a_step(subject, monkeypatch):
    """A step that the device never completes is never ended, and must not keep the executor from closing."""
    settings = EngineConfig(
        model=subject("gqa").model, dtype="float32", memory_bytes=8 << 20, device="cpu", offload_workers=2, threads=1
    )
    before = len(workers_cpus())
    executor = open_executor(settings)
    offload = executor._offload  # noqa: SLF001

    def fail(x, share):
        raise RuntimeError("for once")

    monkeypatch.setattr(offload, "_exchange_once", fail)
    with pytest.raises(RuntimeError, match="for once"):
        offload.measure()
    closing = threading.Thread(target=executor.close, daemon=True)
    closing.start()
    closing.join(20)
    assert not closing.is_alive()
    assert has_workers(before)


def test_rows_are_split_by_what_is_worth_a_handover():
    assert shares(10, 100, 3) == [0, 10, 10, 10]
    assert shares(100, 50, 3) == [0, 50, 100, 100]
    assert shares(100, 1, 3) == [0, 33, 66, 100]
    assert shares(1, 1, 2) == [0, 1, 1]


def test_offload_workers_leave_the_first_processor(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {2, 5, 7, 9}, raising=False)
    assert offload_worker_cpus(2) == [7, 9]
    assert offload_worker_cpus(4) == [5, 7, 9, 5]
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {4}, raising=False)
    assert offload_worker_cpus(2) == [None, None]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"cpu_kernels": "torch"}, "offload_workers is 1, but steps run on torch's operators"),
        ({"tensor_parallel_size": 2}, "offload_workers is 1 and tensor_parallel_size is 2"),
    ],
)
def test_what_can_not_be_offloaded_is_refused(subject, options, why):
    config = {"model": subject("gqa").model, "dtype": "float32", "memory_bytes": 8 << 20, "device": "cpu", **options}
    with pytest.raises((UnsupportedModel, DeviceError), match=why):
        open_executor(EngineConfig(offload_workers=1, **config))


def test_without_offload_workers_nothing_is_counted(subject, drive):
    stats = drive(subject("gqa")).engine.stats()
    assert stats.num_offloaded_starts == stats.num_streamed_starts == stats.cold_start_regret == 0
