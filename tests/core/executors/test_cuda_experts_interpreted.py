"""Adapters on routers, shared experts and experts on the CUDA executor, on a CPU: Triton's kernels interpreted.

Run in a process that interprets, see `tests/interpreted.py`.
"""

from __future__ import annotations

import random
from functools import cache

import pytest

from chorus.core.config import EngineConfig
from chorus.core.engine import Engine
from chorus.core.executors.cuda import CudaExecutor
from chorus.graphs.runner import EagerReason, StepMode
from chorus.memory.pages.projections import Group
from chorus.perf.inline_reads import InlineReads

from ...graphs.late_device import LateDevice
from ..conftest import Driver, RecordingExecutor, ticking
from ..test_family_paths import EVERY
from ..tiny_mixtures import ADAPTERS, make_mixture

#: A plain mixture; with biases, sinks and windows; with a shared expert and states.
FAMILIES = ["mixtral", "gpt-oss", "qwen3.5-moe", *(["qwen3-moe-mixed", "granite-moe", "glm-4-moe"] if EVERY else [])]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """`mixture("mixtral")`: the family's model with adapters, made once."""
    return cache(lambda family: make_mixture(family, tmp_path_factory.mktemp(family)))


@pytest.fixture
def drive():
    engines = []

    def make(it, adapters=tuple(ADAPTERS), reads=None, **config):
        defaults = {
            "dtype": "float32", "device": "cuda", "max_num_seqs": 4, "max_num_batched_tokens": 24, "block_tokens": 8,
            "memory_bytes": 8 << 20, "max_lora_rank": 8, "threads": 1, "mixed_graph_tokens": 0, "max_model_len": 64,
            "graph_capture": "lazy",
        }  # fmt: skip
        settings = EngineConfig(model=it.model, **{**defaults, **config})
        executor = RecordingExecutor(CudaExecutor(settings, LateDevice()))
        engine = Engine(settings, executor, ticking(), reads or InlineReads())
        engines.append(engine)
        for name in adapters:
            engine.store.register(name, it.adapters[name])
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


def test_prompts_and_decode_steps(mixture, drive):
    """Ranks differ between experts' gate and down; a captured step has the launches of what its adapters change."""
    it = mixture("mixtral")
    driver = drive(it)
    check(it, driver, ("r2-experts", 20, 4), (None, 5, 5), ("r4-router", 7, 5), ("r6-down", 3, 5))
    forms = {form.mixture for _, form in driver.executor.inner.steps.graphs.keys if form.mode is StepMode.LORA}
    assert any({Group.ROUTER, Group.EXPERT_GATE_UP, Group.EXPERT_DOWN} <= set(groups) for groups in forms)
    assert EagerReason.TILES not in driver.executor.inner.steps.eager


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("changes", [{}, {"mixed_graph_tokens": 24}, {"graph_capture": "off"}])
def test_families(mixture, drive, family, changes):
    """By ragged steps, by padded ones and by eager ones; chunks of prompts, and decoding sequences next to them."""
    it = mixture(family)
    driver = drive(it, **changes)
    names = [name for name in ADAPTERS if name != "r5-shared" or family not in ("mixtral", "gpt-oss")]
    requests = [(names[at % len(names)], 5 + 9 * at % 40, 4 + at % 3) for at in range(6)]
    check(it, driver, requests[0], (None, 30, 4), *requests[1:])
    eager = set(driver.executor.inner.steps.eager)
    assert (EagerReason.EXPERTS in eager) == ("mixed_graph_tokens" in changes)
