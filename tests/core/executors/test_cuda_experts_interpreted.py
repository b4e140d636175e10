"""Adapters on routers, shared experts and experts on the CUDA executor, on a CPU: Triton's kernels interpreted.

Run in a process that interprets, see `tests/interpreted.py`.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch

from chorus.core.config import EngineConfig
from chorus.core.engine import Engine
from chorus.core.executors import cuda_gemm_backends
from chorus.core.executors.cuda import CudaExecutor
from chorus.core.model.moe.mixture_launches import MixtureState
from chorus.graphs.runner import EagerReason, StepMode
from chorus.memory.host.images import ThreadReads
from chorus.memory.pages.projections import Role
from chorus.perf.inline_reads import InlineReads

from ...graphs.late_device import LateDevice
from ..conftest import Driver, RecordingExecutor, ticking
from ..merging.test_merged import merge
from ..tiny_mixtures import ADAPTERS, make_mixture, one_by_one
from .family_drivers import EVERY

#: With biases, sinks and windows; with a shared expert and states; with weights of experts' inputs.
FAMILIES = ["gpt-oss", "qwen3.5-moe", "llama-4", *(["qwen3-moe-mixed", "granite-moe", "glm-4-moe"] if EVERY else [])]

ROUTER, EXPERTS = {Role.ROUTER}, {Role.EXPERT_GATE_UP, Role.EXPERT_DOWN}


@pytest.fixture(scope="module")
def mixture():
    """`mixture("mixtral")`: the family's model with adapters, made once; one of them is on attention alone."""
    recipes = {**ADAPTERS, "r3-dense": {"r": 3, "lora_alpha": 6, "target_modules": ["q_proj", "o_proj"]}}
    return cache(lambda family: make_mixture(family, recipes))


@pytest.fixture
def drive():
    engines = []

    def make(it, reads=None, adapters=(), **config):
        defaults = {
            "dtype": "float32",
            "device": "cuda",
            "max_num_seqs": 4,
            "max_num_batched_tokens": 24,
            "block_tokens": 8,
            "memory_bytes": 4 << 20,
            "max_lora_rank": 8,
            "threads": 1,
            "mixed_graph_tokens": 0,
            "max_model_len": 64,
            "graph_capture": "lazy",
        }
        settings = EngineConfig(model=it.model, **{**defaults, **config})
        executor = RecordingExecutor(CudaExecutor(settings, LateDevice()))
        engine = Engine(settings, executor, ticking(), reads or InlineReads())
        engines.append(engine)
        for name, path in (dict(it.adapters) | dict(adapters)).items():
            engine.store.register(name, path)
        return Driver(engine, executor)

    yield make
    for engine in engines:
        engine.close()


def check(it, driver, *requests, turn=0):
    """Requests of (adapter, prompt length, tokens) get the answers that transformers and peft give."""
    want = {}
    for index, (adapter, length, count) in enumerate(requests):
        prompt, want[f"{index}"] = it.case(adapter, length, seed=10 * turn + index, count=count)
        driver.add(f"{index}", adapter, prompt, max_tokens=count)
    answers = driver.drain()
    assert {name: answers[name].tokens for name in want} == want
    driver.answers.clear()


def captured_groups(driver, mode=StepMode.LORA):
    """The groups of mixtures that adapters change in captured steps."""
    keys = driver.executor.inner.captured
    return [set(step.form.mixture) for step in keys if step.form.mode is mode]


def test_prompts_and_decode_steps(mixture, drive):
    """Ranks differ between experts' gate and down; a captured step has the launches of what its adapters change."""
    it = mixture("mixtral")
    driver = drive(it)
    check(it, driver, ("r2-experts", 9, 3), (None, 5, 4), ("r4-router", 4, 4), ("r6-down", 3, 4))
    assert ROUTER | EXPERTS in captured_groups(driver)
    assert EagerReason.TILES not in driver.executor.inner.steps.eager


@pytest.mark.parametrize("family", ["gpt-oss", *(["mixtral", "llama-4"] if EVERY else [])])
def test_launches_of_experts_that_are_joined_serve_prompts_and_decode_steps(mixture, drive, family, monkeypatch):
    """In float32, which our kernels serve here, too; adapters on experts keep the activation apart."""
    monkeypatch.setitem(cuda_gemm_backends.TOLERANCE, torch.float32, 1e-4)
    it = mixture(family)
    driver = drive(it, small_gemm="on", mixed_graph_tokens=24)
    steps, joined = driver.executor.inner.steps, family != "llama-4"
    for backends in (steps.mixed.backends.of(24), *steps.decoding.backends.values()):
        assert any(kind.experts for kind in backends) == joined
    check(it, driver, (None, 9, 3), ("r2-experts", 6, 3))


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"mixed_graph_tokens": 24}, {"graph_capture": "off"}], ids=["padded", "eager"])
def test_steps_that_are_not_captured(mixture, drive, changes):
    """Padded steps with prompts are eager where adapters change experts, and say why; others are captured."""
    it = mixture("mixtral")
    driver = drive(it, **changes)
    check(it, driver, ("r6-down", 13, 4), (None, 9, 3), ("r2-experts", 4, 5))
    check(it, driver, ("r3-dense", 7, 3), (None, 5, 2), turn=1)
    reason = EagerReason.EXPERTS if "mixed_graph_tokens" in changes else EagerReason.OFF
    assert reason in driver.executor.inner.steps.eager
    assert (set() in captured_groups(driver)) == (reason is EagerReason.EXPERTS)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_families(mixture, drive, family):
    it = mixture(family)
    driver = drive(it)
    check(it, driver, ("r2-experts", 13, 4), (None, 9, 3), ("r5-shared", 5, 4), ("r4-router", 4, 4))
    assert any(groups >= EXPERTS for groups in captured_groups(driver))


@pytest.mark.slow
def test_files_of_each_expert_give_the_same_tokens(mixture, drive, tmp_path):
    it = mixture("gpt-oss")
    own = one_by_one(it.adapters["r2-experts"], tmp_path / "each", 8, alternate=True)
    driver = drive(it, adapters={"r2-experts": own})
    check(it, driver, ("r2-experts", 12, 4), (None, 4, 3))


@pytest.mark.slow
def test_adapters_that_are_evicted_and_loaded_while_others_run(mixture, drive):
    """There is room for the largest adapter and little more; layers are read while steps run."""
    it = mixture("mixtral")
    probe = drive(it).engine
    largest = max(adapter.num_pages for _, adapter in probe.store.registered())
    pages = largest + probe.executor.layout.pages_for_tokens(24, chunk=24)
    driver = drive(it, ThreadReads(2), num_pages=pages + 1, memory_bytes=None, prefix_cache=False, max_num_seqs=2)
    for turn in range(2):
        check(it, driver, *[(name, 8, 3) for name in ("r2-experts", "r4-router", "r6-down")], turn=turn)
    assert driver.engine.stats().num_adapter_evictions > 0


@pytest.mark.slow
def test_merged_steps_beside_adapters_on_experts(mixture, drive):
    """The difference of a merged adapter is added to their rows."""
    it = mixture("mixtral")
    driver = drive(it)
    merge(driver, "r3-dense")
    check(it, driver, (None, 9, 3), ("r3-dense", 5, 5), ("r2-experts", 7, 4))
    assert StepMode.MERGED in {plan.mode for plan in driver.plans}
    assert EXPERTS in captured_groups(driver, StepMode.MIXTURE)


@pytest.mark.slow
def test_bits_of_base_rows_do_not_change_beside_adapters(mixture, drive):
    it = mixture("mixtral")
    found = []
    for names in (["r2-experts", "r4-router", "r6-down"], [None] * 3):
        driver = drive(it)
        for index, (adapter, length) in enumerate(zip([None, *names], (9, 5, 7, 3), strict=True)):
            prompt, _ = it.case(None, length, seed=index, count=1)
            driver.add(f"{index}", adapter, prompt, max_tokens=4, ignore_eos=True, logprobs=4)
        answers = driver.drain()
        found.append([answers[f"{index}"].logprobs for index in range(4)])
    assert found[0][0] == found[1][0]
    assert all(with_adapter != base for with_adapter, base in zip(found[0][1:], found[1][1:], strict=True))


def test_the_largest_step_takes_the_memory_of_adapters(mixture, monkeypatch):
    """Of its prompts in runs, and of its decoding sequences."""
    seen = []
    for name in ("add_runs", "add_singles"):
        plain = getattr(MixtureState, name)

        def noted(self, group, y, *rest, _name=name, _plain=plain, **how):
            if not how.get("compile_only"):
                seen.append((_name, group, len(y[how.get("rows", slice(None))])))
            return _plain(self, group, y, *rest, **how)

        monkeypatch.setattr(MixtureState, name, noted)
    it = mixture("mixtral")
    config = EngineConfig(
        model=it.model,
        dtype="float32",
        device="cuda",
        max_num_seqs=2,
        max_num_batched_tokens=5,
        max_model_len=16,
        max_lora_rank=8,
        memory_bytes=1 << 20,
        threads=1,
        graph_capture="off",
    )
    CudaExecutor(config, LateDevice()).close()
    each = [("add_singles", Role.ROUTER, 5)]
    for group in (Role.EXPERT_GATE_UP, Role.EXPERT_DOWN):
        each += [("add_runs", group, 10), ("add_singles", group, 2)]
    assert seen[-2 * len(each) :] == 2 * each, "of two layers"
