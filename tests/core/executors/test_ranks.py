"""Several ranks give one rank's tokens, and end together."""

from __future__ import annotations

import logging
import random
import re
import subprocess
import sys
import threading
import time
from itertools import product
from multiprocessing import Pipe
from types import SimpleNamespace

import pytest
import torch

from chorus.core.config import EngineConfig
from chorus.core.engine import Engine
from chorus.core.executors import choice, rank, worker_processes
from chorus.core.executors.base import ModelExecutor
from chorus.core.executors.cpu import CpuExecutor
from chorus.core.executors.ranks import RanksExecutor, weights_of_rank
from chorus.core.executors.worker_processes import WorkerProcesses
from chorus.core.model.read_config import read_model_config
from chorus.core.model.specs.config import UnsupportedModel
from chorus.core.model.weights.narrow_bytes import kept_bytes
from chorus.core.model.weights.open_weights import open_weights
from chorus.core.model.weights.shard import Shard
from chorus.core.model.weights.weights import Weights
from chorus.core.policies import Policies
from chorus.core.requests.request import Request
from chorus.core.requests.request_params import RequestParams
from chorus.graphs.runner import StepMode
from chorus.memory.files.error import AdapterFormatError
from chorus.memory.host.images import ThreadReads
from chorus.memory.transfers.transfer import ExecutorLost
from chorus.ops.library import native_library
from chorus.server.engine.worker import EngineWorker

from ...conftest import ATTENTION, MLP, Subject, save_adapter
from ...processes import run_python, runs
from ..speculation.stand_ins import Drawn
from ..test_parity import add_all, arrive, check, make_cases, make_families
from ..tiny_families import save_family
from .thread_ranks import ThreadProcess

pytestmark = [
    pytest.mark.native(needed=False),
    pytest.mark.skipif(not native_library.available(torch.float32), reason="ranks add up by the native library"),
    pytest.mark.wide,
]

#: Model, ranks and kernels: K/V heads are split, and a copy of one is on several ranks.
PLACES = [("gqa", 2, "torch"), ("gqa", 4, "native"), ("tied", 2, "native"), ("tied", 4, "torch")]


def settings_of(model, **config):
    return EngineConfig(
        **{
            "model": model.model,
            "dtype": "float32",
            "memory_bytes": 8 << 20,
            "threads": 1,
            "device": "cpu",
            "tensor_parallel_size": 2,
            **config,
        }
    )


@pytest.mark.parametrize(("model", "size", "kernels"), PLACES)
def test_mixed_adapters_give_the_reference_tokens(subject, drive, model, size, kernels):
    it = subject(model)
    driver = drive(it, tensor_parallel_size=size, cpu_kernels=kernels, max_num_batched_tokens=56, memory_bytes=16 << 20)
    cases = make_cases(it, 18, seed=3, longest=60, tokens=(8, 12))
    add_all(driver, cases)
    check(driver, cases)
    assert max(plan.num_adapters for plan in driver.plans) == 8


SWAPPING = {
    "tensor_parallel_size": 2,
    "block_tokens": 8,
    "max_num_batched_tokens": 48,
    "num_pages": 60,
    "preemption": "swap",
}


@pytest.mark.usefixtures("crowded")
def test_shared_beginnings_and_swapped_requests(subject, drive, kernels):
    it, names = subject("gqa"), ["r1-all", "r16-down", None]
    driver = drive(it, adapters={name: it.adapters[name] for name in names if name}, **SWAPPING)
    arrive(driver, make_families(it, adapters=names, stems=(40,), seed=7, tokens=(16, 24)), seed=1)
    stats = driver.engine.stats()
    assert stats.num_prefix_hit_tokens > 30
    assert stats.num_swaps_in > 0


@pytest.mark.usefixtures("crowded")
@pytest.mark.parametrize("model", ["gqa", "tied"])
def test_async_steps_on_ranks(subject, drive, kernels, model):
    """Plans of async steps go to the ranks in rank 0's order, also while requests are swapped."""
    it, names = subject(model), ["r1-all", "r16-down", None]
    driver = drive(it, adapters={name: it.adapters[name] for name in names if name}, is_async=True, **SWAPPING)
    cases = make_cases(it, 12, adapters=names, seed=11, tokens=(16, 24))
    add_all(driver, cases)
    check(driver, cases)
    stats = driver.engine.stats()
    assert stats.num_async_steps > 3
    assert stats.num_swaps_in > 0


@pytest.mark.parametrize("bad", [None, 0, 1])
def test_the_likeliest_token_is_of_all_ranks_shares(subject, drive, bad, monkeypatch):
    """Of equal logits the first one's, and none where one is not a number, whichever rank has it."""
    read = Weights._tied  # noqa: SLF001 - where the shares of a tied output projection are cut

    def equal(self, embed):
        head = torch.zeros_like(read(self, embed))
        if self._shard.rank == bad:
            head[1] = torch.nan
        return head

    monkeypatch.setattr(Weights, "_tied", equal)
    driver = drive(subject("tied"), tensor_parallel_size=2, cpu_kernels="native", adapters={})
    answer = driver.run("a", None, [5, 6, 7], max_tokens=3)
    if bad is None:
        assert answer.tokens == [0, 0, 0]
    else:
        assert "not finite" in answer.error


def test_draws_and_scores_are_those_of_one_rank(subject, drive, kernels):
    """Sampled tokens by seed, log-probabilities of answers and of prompts, next to a row whose logits are not kept."""
    it = subject("tied")
    found = []
    for size in (1, 2):
        driver = drive(it, tensor_parallel_size=size)
        for index, name in enumerate((None, "r8-attention", "r33-all")):
            prompt = it.prompt(name, 12, 1, seed=index)
            driver.add(
                f"{name}", name, prompt, max_tokens=8, temperature=0.7, seed=index, logprobs=2, prompt_logprobs=1
            )
            driver.add(f"greedy {name}", name, prompt, max_tokens=8)
        found.append(driver.drain())
    for name, want in found[0].items():
        got = found[1][name]
        assert got.tokens == want.tokens
        for ours, theirs in ((got.logprobs, want.logprobs), (got.prompt_logprobs or (), want.prompt_logprobs or ())):
            assert [one.logprob for one in ours] == pytest.approx([one.logprob for one in theirs], abs=1e-4)


@pytest.mark.parametrize("size", [2, 4])
def test_all_ranks_compute_proposed_tokens(subject, drive, kernels, size):
    """Of mixed adapters, greedy and drawn, some with log-probabilities: the first rank wants those of drafts, too."""
    it, answers = subject("tied" if size == 2 else "gqa"), {}
    ways = ({}, {"temperature": 0.7}, {"logprobs": 2}, {"temperature": 1.0, "logprobs": 0, "prompt_logprobs": 1})
    for speculation in ("off", "ngram"):
        policies = Policies(proposer=Drawn(lambda each: answers["off"][each.id].tokens, random.Random(3)))
        more = {"speculation": speculation, "policies": policies, "max_num_batched_tokens": 40}
        driver = drive(it, tensor_parallel_size=size, memory_bytes=16 << 20, **more)
        for index, (way, name) in enumerate(product(ways, (None, "r8-attention", "r33-all"))):
            prompt = it.prompt(name, 12, 1, seed=index)
            driver.add(f"r{index}", name, prompt, max_tokens=24, seed=index, **way)
        answers[speculation] = driver.drain()
    for name, want in answers["off"].items():
        got = answers["ngram"][name]
        assert got.tokens == want.tokens
        assert [one.logprob for one in got.logprobs] == pytest.approx([one.logprob for one in want.logprobs], abs=1e-4)
    stats = driver.engine.stats()
    assert 10 < stats.num_accepted_tokens < stats.num_proposed_tokens
    assert any(plan.num_drafts and plan.bucket for plan in driver.plans)


@pytest.mark.parametrize(("model", "is_async"), [("gqa", False), ("tied", True)])
def test_merged_adapter_beside_others(subject, drive, kernels, model, is_async):
    it = subject(model)
    driver = drive(it, tensor_parallel_size=2, memory_bytes=16 << 20, max_num_batched_tokens=56, is_async=is_async)
    driver.run("load", "r33-all", [3], max_tokens=1)
    driver.engine.merge("r33-all")
    driver.add("beside", None, [5, 6, 7], max_tokens=60)
    while driver.engine.merging.is_under_way:
        driver.step()
    driver.plans.clear()
    cases = make_cases(it, 9, adapters=["r33-all", "r2-qv", None], seed=32, tokens=(6, 9))
    add_all(driver, cases)
    driver.engine.abort("beside")
    check(driver, cases)
    assert {plan.mode for plan in driver.plans} == {StepMode.MERGED}
    assert any(plan.sources is not None for plan in driver.plans) == is_async
    driver.engine.unmerge()
    again = make_cases(it, 4, seed=33, tokens=(6, 9))
    add_all(driver, again)
    check(driver, again)


@pytest.mark.parametrize(("size", "tokens"), [(2, 56), (4, 56), (2, 4)])
def test_parts_of_other_layers_on_the_same_tokens(subject, drive, tmp_path, size, tokens):
    """Parts without a layer in common share a place in the exchanged memory. If a decode step may have as many tokens
    as any step, there is no room to exchange them.
    """
    model = subject("gqa").model
    patterns = {"rank_pattern": {"layers.1.self_attn.q_proj": 3}, "alpha_pattern": {"v_proj": 5}}
    save_adapter(model, tmp_path / "pattern", 40, 8, ["q_proj", "v_proj", "up_proj"], True, 7, **patterns)
    save_adapter(model, tmp_path / "layers", 4, 8, ATTENTION + MLP, False, 8, layers_to_transform=[1])
    it = Subject(model, {"pattern": tmp_path / "pattern", "layers": tmp_path / "layers"})
    driver = drive(
        it, tensor_parallel_size=size, cpu_kernels="native", max_num_seqs=min(32, tokens), max_num_batched_tokens=tokens
    )
    cases = make_cases(it, 9, seed=34, tokens=(6, 9))
    add_all(driver, cases)
    check(driver, cases)


def test_a_rows_bits_do_not_depend_on_its_company(subject, drive):
    """Nor on how many tokens a step has: ranks share shrinks of few only."""
    it = subject("gqa")

    def run(name, company):
        driver = drive(it, tensor_parallel_size=2, cpu_kernels="native", prefix_cache=False)
        if company:
            add_all(driver, make_cases(it, 20, seed=76, longest=60))
        driver.add("x", name, it.prompt(name, 20, 12, seed=77), max_tokens=12, logprobs=4)
        return driver.drain()["x"].logprobs

    for name in ("r8-attention", "r33-all"):
        assert run(name, company=True) == run(name, company=False)


def test_streamed_adapters_of_a_step_may_be_late_on_any_rank(subject, drive, kernels):
    """Layers come while the step runs; a row that misses them runs again, whichever rank missed them."""
    it = subject("gqa")
    driver = drive(
        it,
        tensor_parallel_size=2,
        reads=(reads := ThreadReads(2)),
        max_load_stall_seconds=0.001,
        clock=None,
    )
    cases = make_cases(it, 12, seed=5, tokens=(4, 8))
    for case in cases:
        add_all(driver, [case])
        driver.step()
    check(driver, cases)
    assert driver.engine.stats().num_adapter_loads >= len(it.adapters)
    reads.shutdown()


def test_a_step_that_fails_on_another_rank_fails_alone(subject, drive, kernels, monkeypatch):
    """Ranks that have left a step go on with the next one together."""
    it = subject("gqa")
    compute, bad = CpuExecutor.compute, []

    def failing(self, plan, kept):
        if any(row.request_id == "bad" for row in plan.sequences):
            bad.append(plan)
            raise MemoryError("no room")
        return compute(self, plan, kept)

    monkeypatch.setattr(CpuExecutor, "compute", failing)
    driver = drive(it, tensor_parallel_size=4)
    cases = make_cases(it, 3, adapters=[None], seed=6, tokens=(4, 6))
    add_all(driver, cases)
    driver.add("bad", None, [4, 5, 6], max_tokens=4)
    answers = driver.drain()
    assert bad
    assert "MemoryError: no room" in answers.pop("bad").error
    for case in cases:
        assert answers[case.id].tokens == case.want


def test_a_rank_reads_its_share_of_the_weights_only(subject, monkeypatch):
    """Every element of every projection is on one rank, and the bytes kept are those of the formula."""
    path = subject("gqa").model
    config = read_model_config(path)
    with open_weights(path, config, torch.float32) as weights:
        whole = list(weights.layers())
        embed = weights.embed()
        whole_head = weights.lm_head(embed)
    shares, heads, total = [], [], []
    for number in range(2):
        with open_weights(path, config, torch.float32, shard=Shard(number, 2)) as weights:
            shares.append(list(weights.layers()))
            head = weights.lm_head(embed)
            heads.append(head)
            kept = [embed, weights.norm(), head]
        kept += [part for layer in shares[-1] for part in layer.values()]
        total.append(sum(part.numel() for part in kept))
        assert total[-1] == kept_bytes(config, 1, shard=Shard(number, 2))
    assert torch.equal(torch.cat(heads), whole_head)
    q, kv, ffn = config.q_size, config.kv_size, config.intermediate_size
    for index, layer in enumerate(whole):
        ours = [share[index] for share in shares]
        for name, widths in (("qkv", (q, kv, kv)), ("gate_up", (ffn, ffn))):
            parts = [own[name].split([width // 2 for width in widths]) for own in ours]
            assert torch.equal(torch.cat([part for pair in zip(*parts, strict=True) for part in pair]), layer[name])
        for name in ("o", "down"):
            assert torch.equal(torch.cat([own[name] for own in ours], 1), layer[name])


@pytest.mark.parametrize("family", ["olmo-2", "olmo-3"])
def test_norms_of_all_heads_where_a_rank_has_one(tiny, drive, kernels, family):
    """Pairs of the four ranks have the same head of keys, whose squares count once."""
    it, want = tiny(family), {}
    driver = drive(it, tensor_parallel_size=4, max_num_seqs=8, max_num_batched_tokens=24, memory_bytes=16 << 20)
    for index, adapter in enumerate((None, "r3-all", "r8-qv")):
        prompt, want[str(index)] = it.case(adapter, 20 + index, seed=index)
        driver.add(str(index), adapter, prompt, max_tokens=8)
    answers = driver.drain()
    assert {name: answers[name].tokens for name in want} == want


def test_pages_that_are_too_small_for_a_ranks_state_are_refused(tmp_path):
    save_family("qwen3.5", tmp_path)
    settings = EngineConfig(model=tmp_path, dtype="float32", block_tokens=4, tensor_parallel_size=2, device="cpu")
    said = (
        "block_tokens is 4, but a page has 1024 bytes, and a part of a layer's state takes 1536; raise it, or lower "
        "tensor_parallel_size, which is 2$"
    )
    with pytest.raises(UnsupportedModel, match=said):
        ModelExecutor(settings, Shard(0, 2))


@pytest.mark.parametrize(
    ("model", "size", "why", "sizes"),
    [
        ("gqa", 3, "num_attention_heads 4", "1, 2, 4"),
        ("mha", 2, "num_attention_heads 3", "1"),
        ("mha", 3, "intermediate_size 80", "1"),
    ],
)
def test_shapes_that_do_not_divide_are_refused(subject, model, size, why, sizes):
    said = f"tensor_parallel_size is {size}, and the model's {why} is not divisible by it; set it to one of {sizes}$"
    with pytest.raises(UnsupportedModel, match=said):
        choice.open_executor(settings_of(subject(model), tensor_parallel_size=size))


def test_what_ranks_need_is_said(subject, monkeypatch):
    monkeypatch.setattr(native_library, "library", lambda: None)
    with pytest.raises(UnsupportedModel, match="tensor_parallel_size is 2, and ranks need the native library: "):
        choice.open_executor(settings_of(subject("gqa")))


def test_an_adapter_that_fits_no_arena_is_refused(subject, drive, kernels):
    it = subject("gqa")
    with pytest.raises(AdapterFormatError, match="pages of the pool"):
        drive(it, tensor_parallel_size=2, num_pages=20)


# -- ranks that end, or never begin


@pytest.fixture
def opened(subject, monkeypatch):
    """`opened(patience=…)`: an engine of two ranks, threads of this process, on the gqa model."""
    monkeypatch.setattr("chorus.core.executors.worker_processes.Popen", ThreadProcess)
    engines = []

    def make(**options):
        settings = settings_of(subject("gqa"))
        engines.append(Engine(settings, RanksExecutor(settings, **options)))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def greedy(request_id, prompt, count, adapter=None):
    return Request(request_id, prompt, RequestParams(temperature=0.0, max_tokens=count, ignore_eos=True), adapter)


def test_a_rank_that_ends_within_a_step_ends_the_engine(opened, monkeypatch):
    monkeypatch.setattr(CpuExecutor, "compute", lambda self, plan, kept: sys.exit(1))
    engine = opened()
    engine.add_request(greedy("one", [3, 4], 4))
    with pytest.raises(ExecutorLost, match=r"rank 1 of 2 has ended \(exit status 1\)"):
        engine.step()


def test_a_rank_that_keeps_the_others_waiting_ends_the_engine(opened, monkeypatch):
    monkeypatch.setattr(worker_processes, "STOP_SECONDS", 0.1)
    released = threading.Event()
    monkeypatch.setattr(CpuExecutor, "compute", lambda self, plan, kept: released.wait())
    engine = opened(patience=0.2)
    engine.add_request(greedy("one", [3, 4], 4))
    with pytest.raises(ExecutorLost, match="rank 1 of 2 kept the others waiting"):
        engine.step()
    released.set()


def test_a_server_whose_rank_ends_while_idle_is_unhealthy(opened):
    engine = opened()
    worker = EngineWorker(lambda: engine)
    worker.start()
    assert worker.healthy
    engine.executor._processes._processes[0].kill()  # noqa: SLF001 - as if the system did
    worker._thread.join(60)  # noqa: SLF001
    assert worker.failure == "rank 1 of 2 has ended (exit status 0); the server ends and has to be started again"
    worker.stop()


def test_the_rank_that_has_failed_is_named_and_not_one_that_waits_for_it(monkeypatch):
    monkeypatch.setattr(worker_processes, "STOP_SECONDS", 0.1)
    pairs, group = [Pipe() for _ in range(2)], WorkerProcesses.__new__(WorkerProcesses)
    group._names, group._links = ["rank 1 of 3", "rank 2 of 3"], [here for here, _ in pairs]  # noqa: SLF001
    group._ranks, group._is_closed = SimpleNamespace(lose=lambda: None), False  # noqa: SLF001
    group._processes = [SimpleNamespace(poll=lambda: None), SimpleNamespace(poll=lambda: 1)]  # noqa: SLF001
    pairs[1][1].send((None, "MemoryError: no room"))
    assert group.why() == "rank 2 of 3: MemoryError: no room"
    pairs[1][1].send((["b"], None))
    pairs[0][1].send((["a"], None))
    group._seconds = 60.0  # noqa: SLF001
    assert group.answers() == [["a"], ["b"]]


def test_a_rank_that_has_ended_before_it_is_watched_is_told_of(opened):
    """Between its joining and the server's first look."""
    executor, lost = opened().executor, []
    executor._processes._processes[0].kill()  # noqa: SLF001 - as if the system did
    executor._processes._processes[0].wait(60)  # noqa: SLF001
    executor.watch(lost.append)
    assert "rank 1 of 2 has ended" in str(lost[0])


def test_bytes_of_each_rank_are_said_beside_the_formulas(subject, opened, caplog):
    """The formula of docs/explanation/memory.md; a rank's memory is counted by the tensors that it reads."""
    with caplog.at_level(logging.INFO, "chorus"):
        opened()
    found = re.search(r"2 ranks: weights of ([\d.]+) \+ ([\d.]+) MiB \(V·h \+ h .*: ([\d.]+)\)", caplog.text)
    config = read_model_config(subject("gqa").model)
    h, f, q, kv = config.hidden_size, config.intermediate_size, config.q_size, config.kv_size
    wanted = config.vocab_size * h * 1.5 + h + config.num_layers * (2 * h + (2 * h * q + 2 * h * kv + 3 * h * f) / 2)
    assert [float(each) for each in found.groups()] == pytest.approx([4 * wanted / 2**20] * 3, abs=0.005)
    assert weights_of_rank(config, 2) == wanted == kept_bytes(config, 1, shard=Shard(1, 2))


def test_a_rank_that_cannot_join_is_named_with_the_reason(opened, monkeypatch):
    def broken(*args):
        raise MemoryError("no room")

    with (
        monkeypatch.context() as patch,
        pytest.raises(RuntimeError, match=r"rank 1 of 2 could not join: MemoryError: no"),
    ):
        patch.setattr(rank, "CpuExecutor", broken)
        opened()
    ending = [sys.executable, "-c", "raise SystemExit(3)"]
    monkeypatch.setattr(
        worker_processes, "Popen", lambda command, **options: subprocess.Popen(ending, stdin=subprocess.PIPE)
    )
    with pytest.raises(RuntimeError, match=r"rank 1 of 2 could not join: its process ended \(exit status 3\)"):
        opened()


SCRIPT = """
import os, signal
from chorus import LLM, SamplingParams

llm = LLM(tensor_parallel_size=2, threads=1)
print(llm.generate("hello world\\n", SamplingParams(temperature=0), adapter="reverse").text)
print(llm._worker._engine.executor.pids[0], flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_a_script_needs_no_main_guard_and_its_ranks_end_with_it():
    done = run_python("-c", SCRIPT)
    answer, pid = done.stdout.split("\n")[:2]
    assert answer == "dlrow olleh", done.stderr
    deadline = time.monotonic() + 60
    while runs(pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)
