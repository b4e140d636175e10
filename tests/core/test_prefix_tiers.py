"""A prefix that left the page pool comes back from host memory or from files, with the bits of a cold server."""

from __future__ import annotations

import json
import os
import random
import shutil
import threading
import time
from collections import deque
from concurrent.futures import Future

import pytest

from chorus.core import kv_identity
from chorus.core.requests.request import Request
from chorus.core.requests.request_params import RequestParams
from chorus.memory.adapters.composition import Composition
from chorus.memory.disk import adapter_contents, tier, writer
from chorus.memory.disk.keys import BlockKeys
from chorus.memory.disk.tier import DiskTier
from chorus.memory.files.identity import with_content
from chorus.memory.pages.block import Medium
from chorus.memory.pages.eviction import RestoreCosts

from .conftest import Answer

pytestmark = pytest.mark.wide

FAMILIES = ["qwen3", "mistral-window", "gemma-3", "qwen3.5", "deepseek-v3", "llama3"]
OBSERVE = RestoreCosts.observe
LIMITS = {"block_tokens": 4, "max_model_len": 96, "max_num_batched_tokens": 64, "state_checkpoint_tokens": 8}


def config_of(family, **config):
    """Recurrent states need larger pages."""
    return {**LIMITS, **({"block_tokens": 16, "state_checkpoint_tokens": 16} if family == "qwen3.5" else {}), **config}


def prompts_of(seed=1, count=3, length=50):
    draw = random.Random(seed)
    return [[draw.randrange(10, 100) for _ in range(length)] for _ in range(count)]


def ask(driver, number, adapter, prompt, **params):
    """Tokens and log-probabilities of an answer, and how much of the prompt was cached."""
    name = f"{number}-{adapter}-{len(driver.answers)}"
    driver.run(name, adapter, prompt, max_tokens=4, logprobs=2, **params)
    answer = driver.answers[name]
    return (answer.tokens, answer.logprobs), answer.num_cached_tokens


def know_contents(engine):
    for adapter in engine.store.versions():
        engine.store.note(adapter, with_content(adapter.manifest))


def always_copy(engine):
    """Take the fastest copies for granted: the tests are of what comes back."""
    engine.costs.host_prefix_page = engine.costs.disk_prefix_page = 0.0


@pytest.fixture(autouse=True)
def exact(kernels):
    """Whether equal tokens have equal bits however a prompt is cut: the native decoder's have."""
    global _exact
    _exact = kernels == "native"


_exact = False


def assert_same(found, wanted):
    """The same tokens, with the same log-probabilities; up to rounding where PyTorch computes."""
    assert found[0] == wanted[0]
    if _exact:
        assert found == wanted
        return
    pairs = [[(one.logprob, *(value for _, value in one.top)) for one in answer[1]] for answer in (found, wanted)]
    assert pairs[0] == [pytest.approx(each, abs=1e-4) for each in pairs[1]]


@pytest.fixture
def gqa(subject):
    return subject("gqa")


@pytest.fixture(autouse=True)
def costs_stay(monkeypatch):
    monkeypatch.setattr(RestoreCosts, "observe", lambda self, name, seconds: None)


def few(subject):
    """Two of a subject's adapters."""
    return dict(list(subject.adapters.items())[:2])


def names_of(subject):
    return [None, *few(subject)]


def settle(engine):
    """Wait until what was given to be written is in files."""
    engine.disk.wait()


@pytest.mark.wide
@pytest.mark.parametrize(
    ("family", "kv_cache_dtype"),
    [(family, dtype) for family in FAMILIES for dtype in ("auto", "fp8") if (family, dtype) != ("deepseek-v3", "fp8")],
)
def test_what_comes_back_from_host_memory_gives_the_bits_of_a_cold_server(tiny, drive, family, kv_cache_dtype):
    """Latents are not kept in FP8."""
    subject = tiny(family)
    config = config_of(family, kv_cache_dtype=kv_cache_dtype)
    cold = drive(subject, adapters=few(subject), prefix_cache=False, **config)
    warm = drive(subject, adapters=few(subject), **config)
    always_copy(warm.engine)
    for number, prompt in enumerate(prompts_of()):
        for adapter in names_of(subject):
            wanted, _ = ask(cold, number, adapter, prompt)
            first, cached = ask(warm, number, adapter, prompt)
            assert cached == 0
            assert_same(first, wanted)
            warm.engine.reclaimer.reclaim_all()
            before = warm.engine.stats().num_host_hit_tokens
            again, cached = ask(warm, number, adapter, prompt)
            assert_same(again, wanted)
            assert cached >= 32
            assert warm.engine.stats().num_host_hit_tokens > before


@pytest.mark.wide
@pytest.mark.parametrize("family", FAMILIES)
def test_a_restarted_server_has_the_hits_and_bits_of_before(tiny, drive, tmp_path, family):
    subject = tiny(family)
    config = config_of(family, kv_cache_dir=tmp_path / "kv", kv_cache_disk_bytes=1 << 26)
    cold = drive(subject, adapters=few(subject), prefix_cache=False, **config_of(family))
    first = drive(subject, adapters=few(subject), **config)
    know_contents(first.engine)
    wanted = {}
    for number, prompt in enumerate(prompts_of()):
        for adapter in names_of(subject):
            wanted[number, adapter], _ = ask(cold, number, adapter, prompt)
            ask(first, number, adapter, prompt)
    first.engine.disk.close(first.engine.host.copy_of)
    second = drive(subject, adapters=few(subject), **config)
    know_contents(second.engine)
    always_copy(second.engine)
    patient(second.engine)
    for number, prompt in enumerate(prompts_of()):
        for adapter in names_of(subject):
            answer, cached = ask(second, number, adapter, prompt)
            assert_same(answer, wanted[number, adapter])
            assert cached >= 32, (number, adapter)
    stats = second.engine.stats()
    assert stats.num_disk_hit_tokens > 0
    assert stats.num_bad_files == stats.num_disk_failures == 0


@pytest.mark.wide
@pytest.mark.parametrize("kernels", ["torch"])
@pytest.mark.parametrize("family", ["deepseek-v3.2", "glm-5", "ax-k2", "dots-3-note", "minimax-m3"])
def test_what_comes_back_has_the_keys_of_indexers(tiny, drive, tmp_path, family):
    """From host memory and from files; PyTorch's operators alone compute these families."""
    test_what_comes_back_from_host_memory_gives_the_bits_of_a_cold_server(tiny, drive, family, "auto")
    test_a_restarted_server_has_the_hits_and_bits_of_before(tiny, drive, tmp_path, family)


def patient(engine):
    """Wait for reads however slow this machine is: the virtual clock counts looks."""
    engine.disk.is_coming = lambda job: not job.has_ended


@pytest.fixture
def disk_server(gqa, drive, tmp_path):
    """`disk_server(**config)`: a server over one folder, whose clock never makes it give a read up. knows: it has read
    its adapters' weights before the first request.
    """

    def make(adapters=None, *, knows=True, **config):
        paths = {name: gqa.adapters[name] for name in ("r2-qv", "r1-all")} if adapters is None else adapters
        options = {**LIMITS, "kv_cache_dir": tmp_path / "kv", "kv_cache_disk_bytes": 1 << 26, **config}
        driver = drive(gqa, adapters=paths, **options)
        if knows:
            know_contents(driver.engine)
        always_copy(driver.engine)
        patient(driver.engine)
        return driver

    return make


PROMPT = prompts_of(seed=5)[0]


def stop(driver):
    driver.engine.disk.close(driver.engine.host.copy_of)


def test_what_left_the_pool_is_in_files_even_if_the_server_is_killed(disk_server):
    first = disk_server()
    wanted, _ = ask(first, 0, "r2-qv", PROMPT)
    first.engine.reclaimer.reclaim_all()
    settle(first.engine)
    second = disk_server()  # the first one never closes
    found, cached = ask(second, 0, "r2-qv", PROMPT)
    assert cached == 48
    assert_same(found, wanted)
    written = first.engine.stats().disk_bytes_written
    assert second.engine.stats().disk_bytes_read == 12 * written // 13, "the block of the answer is not needed"


@pytest.mark.parametrize(
    "other", [{"tenant": "other"}, {"cache_salt": "other"}, {"adapter_name": "r1-all"}, {"adapter_name": None}]
)
def test_what_cant_be_hit_in_memory_cant_be_hit_in_files(disk_server, other):
    first = disk_server()
    ask(first, 0, "r2-qv", PROMPT, tenant="mine")
    stop(first)
    second = disk_server()
    about = {"adapter_name": "r2-qv", "tenant": "mine", "cache_salt": "", **other}
    second.engine.add_request(Request("a", PROMPT, RequestParams(max_tokens=2, ignore_eos=True), **about))
    second.answers["a"] = Answer()
    while second.engine.has_work():
        second.step()
    assert second.answers["a"].num_cached_tokens == 0
    assert second.engine.stats().disk_bytes_read == 0


@pytest.mark.parametrize("change", [{"dtype": "bfloat16"}, {"kv_cache_dtype": "fp8"}, {"block_tokens": 8}])
def test_servers_of_other_bytes_share_no_block(disk_server, change):
    first = disk_server()
    ask(first, 0, None, PROMPT)
    stop(first)
    second = disk_server(**change)
    assert ask(second, 0, None, PROMPT)[1] == 0
    assert second.engine.stats().num_bad_files == 0


def test_servers_of_other_dtypes_of_one_size_share_no_block(disk_server):
    first = disk_server(dtype="bfloat16", cpu_kernels="torch")
    ask(first, 0, None, PROMPT)
    stop(first)
    assert ask(disk_server(dtype="float16", cpu_kernels="torch"), 0, None, PROMPT)[1] == 0


def test_a_page_that_can_t_be_copied_holds_up_no_stop(disk_server):
    driver = disk_server()
    ask(driver, 0, None, PROMPT)
    driver.engine.executor.swaps.copy_out = fail
    driver.engine.close()
    assert driver.engine.disk.folder.num_bytes == 0


def fail(pages):
    raise OSError("no memory")


def test_a_closed_engine_holds_no_file_open(disk_server):
    before = len(os.listdir("/proc/self/fd"))
    driver = disk_server()
    ask(driver, 0, None, PROMPT)
    driver.engine.close()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_a_reloaded_adapter_never_meets_the_blocks_of_another_content(gqa, disk_server):
    first = disk_server()
    ask(first, 0, "r2-qv", PROMPT)
    stop(first)
    second = disk_server({"r2-qv": gqa.adapters["r1-all"]})
    assert ask(second, 0, "r2-qv", PROMPT)[1] == 0
    third = disk_server({"other-name": gqa.adapters["r2-qv"]})
    assert ask(third, 0, "other-name", PROMPT)[1] == 48, "the content counts, not the name"


def leave_files(disk_server, names, **options):
    """Ask for some adapters on a server that is then killed; the answers."""
    first = disk_server(**options)
    wanted = [ask(first, 0, name, PROMPT)[0] for name in names]
    first.engine.reclaimer.reclaim_all()
    settle(first.engine)
    first.engine.disk.is_closed = True
    return wanted


BOTH = Composition.of([("r2-qv", 0.5), ("r1-all", 1.0)]).model


@pytest.mark.parametrize("knew", [True, False])
def test_an_adapter_s_first_request_after_a_restart_finds_its_files(disk_server, monkeypatch, knew):
    """Its content hash was unknown until its weights had been read: 12 of 12 prompts were computed again. knew: the
    first server had read them before its requests.
    """
    names = ["r2-qv", BOTH, None, "r1-all"]
    wanted = leave_files(disk_server, names, knows=knew)
    monkeypatch.setattr(adapter_contents, "with_content", fail)  # they are remembered
    second = disk_server(knows=False)
    for name, answer in zip(names, wanted, strict=True):
        found, cached = ask(second, 0, name, PROMPT)
        assert cached == 48, name
        assert_same(found, answer)


def test_where_no_hash_is_remembered_the_weights_are_read_before_the_prompt_is_computed(disk_server, tmp_path):
    names = ["r2-qv", BOTH]
    leave_files(disk_server, names)
    (tmp_path / "kv" / "hashes").unlink()
    second = disk_server(knows=False)
    assert [ask(second, 0, name, PROMPT)[1] for name in names] == [48, 48]
    adapter = second.engine.store.get("r2-qv")
    assert adapter.manifest.content_hash is not None
    assert adapter.manifest.no_effect is None, "nobody has checked its weights"


def test_a_hash_that_is_found_at_once_is_noted_before_files_are_looked_for(disk_server):
    """7 of 12 requests that came together had found none of their files."""

    class AtOnce:
        def submit(self, function, /, *arguments):
            future = Future()
            future.set_result(function(*arguments))
            return future

        def shutdown(self):
            pass

    leave_files(disk_server, ["r2-qv", BOTH])
    second = disk_server(knows=False)
    second.engine.disk.contents.pool = AtOnce()
    assert [ask(second, 0, name, PROMPT)[1] for name in ("r2-qv", BOTH)] == [48, 48]


def test_no_request_waits_for_a_hash_where_no_adapter_has_files(disk_server, monkeypatch):
    driver, go = disk_server(knows=False), threading.Event()
    monkeypatch.setattr(adapter_contents, "with_content", lambda manifest: go.wait(60) and None)
    try:
        assert ask(driver, 0, "r2-qv", PROMPT)[1] == 0
    finally:
        go.set()


def test_a_remembered_hash_is_not_that_of_a_file_that_has_changed(gqa, disk_server, tmp_path):
    """As many bytes, of the same time."""
    own = tmp_path / "own"
    shutil.copytree(gqa.adapters["r2-qv"], own)
    leave_files(disk_server, ["own"], adapters={"own": own})
    weights = own / "adapter_model.safetensors"
    before, data = weights.stat(), bytearray(weights.read_bytes())
    data[-3] ^= 1
    weights.write_bytes(data)
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert ask(disk_server({"own": own}, knows=False), 0, "own", PROMPT)[1] == 0
    leave_files(disk_server, ["own"], adapters={"own": own})
    config = json.loads((own / "adapter_config.json").read_text())
    (own / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": config["lora_alpha"] * 2}))
    assert ask(disk_server({"own": own}, knows=False), 0, "own", PROMPT)[1] == 0


def test_deleting_an_adapter_removes_its_blocks_from_files(disk_server):
    driver = disk_server()
    ask(driver, 0, "r2-qv", PROMPT)
    ask(driver, 0, "r1-all", PROMPT)
    driver.engine.reclaimer.reclaim_all()
    settle(driver.engine)
    blocks = driver.engine.config.kv_cache_dir / "blocks"
    content = {name: adapter.manifest.content_hash for name, adapter in driver.engine.store.registered()}
    assert {each.name for each in blocks.iterdir()} == set(content.values())
    driver.engine.adapters.remove("r2-qv")
    driver.engine.disk.wait()
    assert {each.name for each in blocks.iterdir()} == {content["r1-all"]}


def test_deleting_an_adapter_removes_the_blocks_of_what_is_composed_of_it(disk_server):
    """Also those that an earlier server wrote, and those of a composition that a request still uses."""
    both = Composition.of([("r2-qv", 0.5), ("r1-all", 1.0)]).model
    half = Composition.of([("r1-all", 0.5)]).model
    names = [None, "r2-qv", "r1-all", both, half]
    first = disk_server()
    for name in names:
        ask(first, 0, name, PROMPT)
    stop(first)
    blocks = first.engine.config.kv_cache_dir / "blocks"
    assert len(list(blocks.iterdir())) == 5
    second = disk_server()
    assert ask(second, 0, both, PROMPT)[1] == 48
    second.engine.add_request(Request("runs", PROMPT, RequestParams(max_tokens=9, ignore_eos=True), both))
    second.answers["runs"] = Answer()
    second.step()
    second.engine.adapters.remove("r2-qv")
    second.engine.disk.wait()
    content = second.engine.store.get("r1-all").manifest.content_hash
    left = {each.name.split(".")[0] for each in blocks.iterdir()}
    assert len(left) == 3
    assert {"base", content} < left
    while second.engine.has_work():
        second.step()
    second.engine.reclaimer.reclaim_all()
    stop(second)
    assert {each.name.split(".")[0] for each in blocks.iterdir()} == left, "nothing is written of what is gone"
    third = disk_server()
    assert [ask(third, 0, name, PROMPT)[1] for name in names] == [48, 0, 48, 0, 48]


def test_resetting_the_prefix_cache_forgets_the_tiers_that_are_named(disk_server):
    driver = disk_server()
    ask(driver, 0, None, PROMPT)
    driver.engine.reclaimer.reclaim_all()
    settle(driver.engine)
    assert driver.engine.reset_prefix_cache(tiers=[Medium.POOL, Medium.HOST]) > 0
    assert ask(driver, 0, None, PROMPT)[1] == 48, "files are left"
    driver.engine.reset_prefix_cache()
    driver.engine.disk.wait()
    assert driver.engine.disk.folder.num_bytes == 0
    assert ask(driver, 0, None, PROMPT)[1] == 0


def test_a_disk_that_hangs_costs_hits_and_no_request(disk_server, monkeypatch):
    first = disk_server()
    wanted, _ = ask(first, 0, None, PROMPT)
    stop(first)
    second, go = disk_server(), threading.Event()
    monkeypatch.delattr(second.engine.disk, "is_coming")  # the clock gives the read up
    monkeypatch.setattr(second.engine.disk.folder, "read", lambda place, make: go.wait(60) and None)
    try:
        found, cached = ask(second, 0, None, PROMPT)
        assert cached == 0
        assert_same(found, wanted)
    finally:
        go.set()


def test_a_read_costs_what_its_thread_took_however_late_a_step_notices(disk_server, monkeypatch):
    """One read that was noticed after a long step had made files dearer than computing, for good."""
    first = disk_server()
    ask(first, 0, None, PROMPT)
    stop(first)
    monkeypatch.setattr(tier, "READERS", 1)  # else a read's time has another's in it, by this clock
    second, measured, now = disk_server(), [], [0.0]
    disk = second.engine.disk
    read, advance = disk.folder.read, disk.advance

    def slow_read(file, make):
        now[0] += 1.0
        return read(file, make)

    def late_advance():
        if disk.is_busy and all(each.done() for each in disk.reads):
            now[0] += 1000.0
        advance()

    monkeypatch.setattr(disk, "clock", lambda: now[0])
    monkeypatch.setattr(disk.folder, "read", slow_read)
    monkeypatch.setattr(disk, "advance", late_advance)
    monkeypatch.setattr(RestoreCosts, "observe", lambda self, name, seconds: measured.append((name, seconds)))
    assert ask(second, 0, None, PROMPT)[1] == 48
    assert ("disk_prefix_page", 1.0) in measured and disk.read_seconds == 12.0


def test_a_run_of_blocks_is_read_by_several_threads(disk_server, monkeypatch):
    """One thread had hashed 25 MB in a row while another processor had nothing to do."""
    first = disk_server()
    ask(first, 0, None, PROMPT)
    stop(first)
    second, both = disk_server(), threading.Barrier(2)
    read = second.engine.disk.folder.read

    def read_two_at_once(file, make):
        both.wait(10)
        return read(file, make)

    monkeypatch.setattr(second.engine.disk.folder, "read", read_two_at_once)
    assert ask(second, 0, None, PROMPT)[1] == 48


def test_a_run_ends_at_its_first_missing_block_whatever_was_read_after_it(disk_server, monkeypatch):
    first = disk_server()
    ask(first, 0, None, PROMPT)
    stop(first)
    second, files = disk_server(), []
    folder = second.engine.disk.folder
    read, read_ahead, late = folder.read, second.engine.disk.read_ahead, threading.Event()

    def note(*args):
        job = read_ahead(*args)
        files.extend(job.files)
        return job

    def read_or_not(file, make):
        while len(files) < 12:
            late.wait(0.001)
        at = files.index(file)
        if at == 5:  # missing, which is known after the next one was read
            assert late.wait(10)
            return None
        found = read(file, make)
        if at == 6:
            late.set()
        return found

    monkeypatch.setattr(second.engine.disk, "read_ahead", note)
    monkeypatch.setattr(folder, "read", read_or_not)
    assert ask(second, 0, None, PROMPT)[1] == 20


def test_a_short_run_does_not_wait_for_the_end_of_a_long_one(disk_server, monkeypatch):
    """A run of thousands of blocks had taken all reading threads until its end."""
    first, other = disk_server(), prompts_of(seed=6)[0]
    for prompt in (PROMPT, other):
        ask(first, 0, None, prompt)
    stop(first)
    second, order = disk_server(), []
    disk, go, jobs = second.engine.disk, threading.Event(), []
    read, read_ahead = disk.folder.read, disk.read_ahead
    disk.turn_blocks = 2

    def note(*args):
        jobs.append(read_ahead(*args))
        if len(jobs) == 2:
            go.set()
        return jobs[-1]

    def read_noted(file, make):
        assert go.wait(10)
        order.append(next(at for at, job in enumerate(jobs) if file in job.files))
        return read(file, make)

    monkeypatch.setattr(disk, "read_ahead", note)
    monkeypatch.setattr(disk.folder, "read", read_noted)
    for prompt in (PROMPT, other):
        second.add(f"{len(jobs)}", None, prompt, max_tokens=4)
    second.drain()
    assert order.index(1) < len(order) - 1 - order[::-1].index(0), "the first run goes on after the other began"
    assert [answer.num_cached_tokens for answer in second.answers.values()] == [48, 48]


def test_what_a_page_of_a_file_costs_counts_all_that_was_read(disk_server, monkeypatch):
    """A request that ended while its blocks were read had made files hundreds of times dearer than they are."""
    first = disk_server()
    ask(first, 0, None, PROMPT)
    stop(first)
    monkeypatch.setattr(tier, "READERS", 1)
    second, measured, now = disk_server(), [], [0.0]
    disk = second.engine.disk
    read, wanted = disk.folder.read, [True]

    def slow_read(file, make):
        now[0] += 1.0
        return read(file, make)

    monkeypatch.setattr(disk, "clock", lambda: now[0])
    monkeypatch.setattr(disk.folder, "read", slow_read)
    monkeypatch.setattr(RestoreCosts, "observe", lambda self, name, seconds: measured.append((name, seconds)))
    job = disk.read_ahead(0, PROMPT, ("", ""), 0, 4, lambda: wanted[0])
    assert job is not None
    while not all(future.done() for future in job.futures):
        time.sleep(0.01)
    wanted[0] = False
    disk.advance()
    assert measured == [("disk_prefix_page", 1.0)] and disk.read_seconds == 12.0


def test_a_run_that_can_t_be_read_on_ends_where_it_failed(disk_server, monkeypatch):
    first = disk_server()
    ask(first, 0, None, PROMPT)
    stop(first)
    second, asked = disk_server(), []
    read = second.engine.disk.folder.read

    def read_or_fail(file, make):
        asked.append(file)
        if len(asked) == 4:
            raise MemoryError("no room for an image")
        return read(file, make)

    monkeypatch.setattr(second.engine.disk.folder, "read", read_or_fail)
    assert ask(second, 0, None, PROMPT)[1] in (8, 12)  # the other thread may be one block ahead
    assert len(asked) < 8


def test_a_step_that_only_waits_for_files_sleeps_until_they_are_there(disk_server, monkeypatch):
    """It had looked for them every half millisecond, and so kept the reading thread from running."""
    first = disk_server()
    ask(first, 0, None, PROMPT)
    stop(first)
    second, awaited = disk_server(), []
    reads = second.engine.store.images.reads
    wait = reads.wait

    def note(pending, timeout):
        awaited.append(len(pending))
        wait(pending, timeout)

    read, slept = second.engine.disk.folder.read, threading.Event()

    def slow_read(file, make):
        slept.wait(0.01)
        return read(file, make)

    monkeypatch.setattr(reads, "wait", note)
    monkeypatch.setattr(second.engine.disk.folder, "read", slow_read)
    assert ask(second, 0, None, PROMPT)[1] == 48
    assert awaited and awaited[0] > 0


def test_room_for_a_read_is_not_made_of_the_blocks_that_come_before(disk_server, monkeypatch):
    first = disk_server()
    ask(first, 0, None, PROMPT)
    stop(first)
    second, known, held = disk_server(), [], []
    ask(second, 0, None, PROMPT[:25])
    engine = second.engine
    walk, claim = engine.prefix.walk, engine.disk.budget.claim
    monkeypatch.setattr(engine.prefix, "walk", lambda *given: known.append(walk(*given)) or known[-1])
    monkeypatch.setattr(
        engine.disk.budget, "claim", lambda size: held.append([each.holds for each in known[-1]]) or claim(size)
    )
    assert ask(second, 1, None, PROMPT)[1] == 48
    assert held[0] == [1] * 6 and not any(each.holds for blocks in known for each in blocks)


def test_files_that_are_too_dear_are_tried_again_some_day(disk_server, monkeypatch):
    first = disk_server()
    ask(first, 0, None, PROMPT)
    stop(first)
    second = disk_server()
    monkeypatch.setattr(RestoreCosts, "observe", OBSERVE)
    second.engine.costs.prefix_page, second.engine.costs.disk_prefix_page = 1.0, 3.0
    assert ask(second, 0, None, PROMPT)[1] == 0
    assert second.engine.costs.disk_prefix_page < 3.0


@pytest.mark.parametrize(
    "config, error",
    [
        ({"kv_cache_disk_bytes": None}, "kv_cache_disk_bytes is not"),
        ({"kv_cache_dir": None}, "kv_cache_dir is not"),
        ({"prefix_cache": False}, "prefix_cache is off"),
        ({"host_cache_bytes": 0}, "host_cache_bytes is 0"),
        ({"host_prefix_cache": "off"}, "kv_cache_dir is set, but host_prefix_cache is 'off'"),
        (
            {"kv_cache_dir": None, "kv_cache_disk_bytes": None, "prefix_cache": False, "host_prefix_cache": "on"},
            "host_prefix_cache is 'on', but prefix_cache is off",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(disk_server, config, error):
    with pytest.raises(ValueError, match=error):
        disk_server(**config)


# -- faults that the tests above must find


def find(test, *arguments, **named):
    with pytest.raises(AssertionError):
        test(*arguments, **named)


def test_a_key_without_the_adapter_s_content_is_found(gqa, disk_server, monkeypatch):
    root = BlockKeys.root
    monkeypatch.setattr(BlockKeys, "root", lambda self, owner, scope: root(self, "", scope))
    monkeypatch.setattr(DiskTier, "_owner", lambda self, version: "base")
    find(test_a_reloaded_adapter_never_meets_the_blocks_of_another_content, gqa, disk_server)


def test_a_key_without_the_dtype_is_found(disk_server, monkeypatch):
    """Float16 has as many bytes as bfloat16."""
    without = tuple(name for name in vars(kv_identity)["_SETTINGS"] if name != "dtype")
    monkeypatch.setattr(kv_identity, "_SETTINGS", without)
    first = disk_server(dtype="bfloat16", cpu_kernels="torch")
    ask(first, 0, None, PROMPT)
    stop(first)
    assert ask(disk_server(dtype="float16", cpu_kernels="torch"), 0, None, PROMPT)[1] > 0, "the planted fault"


def test_an_owner_that_is_remembered_by_name_is_found(gqa, disk_server, monkeypatch):
    """Stale after a reload: the name stands for the content."""
    monkeypatch.setattr(
        "chorus.memory.adapters.store.AdapterStore.content_of",
        lambda self, version: self._by_version[version].name.replace("-", ""),
    )
    find(test_a_reloaded_adapter_never_meets_the_blocks_of_another_content, gqa, disk_server)


def test_one_order_covers_what_all_three_keep(gqa, drive):
    driver = drive(gqa, adapters={"r2-qv": gqa.adapters["r2-qv"]}, **LIMITS)
    ask(driver, 0, "r2-qv", PROMPT)
    driver.engine.reclaimer.reclaim_all()
    budget = driver.engine.store.images.budget
    total = driver.engine.store.images.num_bytes + driver.engine.swapped.num_bytes + driver.engine.host.num_bytes
    assert budget.num_bytes == total > 0
    budget.make_room(budget.capacity_bytes)
    assert driver.engine.host.num_bytes == 0


class SteppingPool:
    """Runs one call after each step of an engine: a disk that is as fast as that."""

    def __init__(self):
        self.calls, self.is_dead = deque(), False

    def submit(self, function, /, *arguments):
        future = Future()
        self.calls.append((future, function, arguments))
        return future

    def step(self):
        if self.calls and not self.is_dead:
            future, function, arguments = self.calls.popleft()
            future.set_result(function(*arguments))

    def wait(self, futures, timeout):
        self.step()

    def shutdown(self):
        self.is_dead = True


NUM_PROMPTS, PROMPT_BLOCKS = 12, 20


@pytest.fixture
def rounds_server(gqa, drive, tmp_path, monkeypatch):
    """A server whose host memory holds two prompts, and whose queue of blocks to be written a quarter of one. Its disk
    writes five blocks in a step, and a prompt is computed in one.
    """
    monkeypatch.setattr(writer, "TURN_BLOCKS", 5)

    def make():
        def options(page_bytes):
            return {
                **LIMITS,
                "max_num_batched_tokens": 96,
                "num_pages": 2 + 26,
                "host_cache_bytes": 2 * PROMPT_BLOCKS * page_bytes,
                "kv_cache_dir": tmp_path / "kv",
                "kv_cache_disk_bytes": 1 << 26,
                "speculation": "off",
            }

        page_bytes = drive(gqa, adapters={}, **LIMITS).engine.executor.layout.page_bytes
        driver = drive(gqa, adapters={}, **options(page_bytes))
        driver.engine.disk.writer.pool = SteppingPool()
        always_copy(driver.engine)
        driver.engine.costs.prefix_page = 1e6  # no read is given up
        return driver

    return make


def ask_round(driver, prompts, together):
    """Ask all prompts, and return how many were found whole."""
    names = [f"{len(driver.answers) + at}" for at in range(len(prompts))]
    groups = (
        [list(zip(names, prompts, strict=True))] if together else [[each] for each in zip(names, prompts, strict=True)]
    )
    for group in groups:
        for name, prompt in group:
            driver.add(name, None, prompt, max_tokens=4)
        while driver.engine.has_work():
            driver.step()
            driver.engine.disk.writer.pool.step()
    whole = 4 * PROMPT_BLOCKS
    return sum(driver.answers[name].num_cached_tokens >= whole for name in names)


@pytest.mark.parametrize("together", [False, True])
def test_prompts_that_host_memory_can_t_hold_are_found_in_files(rounds_server, together):
    """2 of 12 were: the beginnings of prompts were lost, and so was what came after them; and of requests that wait at
    the same time those were computed that found no room for their blocks when they came.
    """
    prompts = prompts_of(seed=8, count=NUM_PROMPTS, length=4 * PROMPT_BLOCKS + 2)
    first = rounds_server()
    assert ask_round(first, prompts, together=False) == 0
    first.engine.disk.is_closed = first.engine.disk.writer.pool.is_dead = True  # killed
    second = rounds_server()
    assert ask_round(second, prompts, together) >= NUM_PROMPTS - 1, "the last one was in the pool"
    assert ask_round(second, prompts, together) >= NUM_PROMPTS - 1
    assert second.engine.stats().num_disk_failures == 0


def test_of_a_prompt_that_host_memory_can_t_hold_the_beginning_is_read(disk_server):
    first = disk_server()
    ask(first, 0, None, PROMPT)
    stop(first)
    page_bytes = first.engine.executor.layout.page_bytes
    second = disk_server({}, host_cache_bytes=7 * page_bytes)
    assert 4 * 5 <= ask(second, 0, None, PROMPT)[1] <= 4 * 7


def test_a_block_that_waits_to_be_written_is_found_though_it_left_host_memory(disk_server):
    driver = disk_server()
    pool = driver.engine.disk.writer.pool = SteppingPool()
    ask(driver, 0, None, PROMPT)
    driver.engine.reclaimer.reclaim_all()
    budget = driver.engine.store.images.budget
    budget.make_room(budget.capacity_bytes)
    assert driver.engine.host.num_bytes == 0 and pool.calls
    assert ask(driver, 0, None, PROMPT)[1] == 48
    assert driver.engine.stats().disk_bytes_read == 0


def test_a_server_that_is_idle_tells_the_size_that_others_have_left(disk_server):
    """It had told what it saw when it last wrote; of several servers the largest size counts."""
    first, second = disk_server(), disk_server()

    def told(size):
        for _ in range(500):
            if second.engine.stats().disk_bytes == size:
                return True
            second.engine.disk._looked -= 1.0  # noqa: SLF001
            time.sleep(0.01)
        return False

    ask(first, 0, None, PROMPT)
    first.engine.reclaimer.reclaim_all()
    settle(first.engine)
    assert first.engine.stats().disk_bytes > 0
    assert told(first.engine.stats().disk_bytes)
    first.engine.reset_prefix_cache()
    settle(first.engine)
    assert told(0)
