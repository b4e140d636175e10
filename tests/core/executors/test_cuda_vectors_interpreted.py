"""DoRA and biases on a GPU: Triton's kernels interpreted, see `test_cuda_interpreted`."""

from __future__ import annotations

import random

import pytest

from chorus.core.engine import Engine
from chorus.core.executors import cuda_decode
from chorus.core.executors.cuda import CudaExecutor
from chorus.graphs.runner import StepMode
from chorus.ops.lora import vectors_triton
from chorus.perf.inline_reads import InlineReads

from ...conftest import ATTENTION, MLP, ModelSpec
from ...graphs.late_device import LateDevice
from ..adapters.adapter_zoo import save_zoo
from ..conftest import Driver, RecordingExecutor, ticking
from .test_cuda_interpreted import make_config, merge

SPEC = ModelSpec(seed=7, hidden=32, ffn=48, layers=2, heads=2, kv_heads=1, vocab=96, positions=64)

FORMS = {
    "plain": {"r": 3, "lora_alpha": 6, "target_modules": ["q_proj", "down_proj"]},
    "dora": {"r": 2, "lora_alpha": 4, "target_modules": ATTENTION + MLP, "use_dora": True},
    "dora-qo": {"r": 5, "lora_alpha": 4, "target_modules": ["q_proj", "o_proj"], "use_dora": True, "bias": "all"},
    "biases": {"r": 2, "lora_alpha": 6, "target_modules": ["v_proj", "up_proj"], "bias": "all", "lora_bias": True},
}


@pytest.fixture(scope="module")
def zoo(tmp_path_factory):
    return save_zoo(tmp_path_factory.mktemp("zoo"), biased=True, spec=SPEC, forms=FORMS)


@pytest.fixture
def drive(zoo):
    engines = []

    def make(adapters=tuple(FORMS), device=None, **config) -> Driver:
        settings = make_config(zoo, **config)
        executor = RecordingExecutor(CudaExecutor(settings, device or LateDevice()))
        engine = Engine(settings, executor, ticking(), InlineReads())
        engines.append(engine)
        for name in adapters:
            engine.store.register(name, zoo.adapters[name])
        return Driver(engine, executor)

    yield make
    for engine in engines:
        engine.close()


def check(driver, zoo, names, seed=1, lengths=(1, 14), tokens=3):
    rng, want = random.Random(seed), {}
    for index, name in enumerate(names):
        request_id = f"{seed}.{index}.{name}"
        prompt, want[request_id] = zoo.case(name, rng.randint(*lengths), tokens, seed=seed)
        driver.add(request_id, name, prompt, max_tokens=tokens)
    answers = driver.drain()
    assert {name: answers[name].tokens for name in want} == want


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["off", "lazy", "pieces"])
def test_mixed_with_others(drive, zoo, setting):
    """Chunked prompts and decode steps, captured and eager, of vectors and of none; then without any."""
    config = {"graph_capture": "off" if setting == "off" else "lazy"}
    driver = drive(mixed_graph_tokens=12 if setting == "pieces" else 0, **config)
    check(driver, zoo, [None, *FORMS])
    check(driver, zoo, ["biases", "dora", "plain", None], seed=2)
    captured = {step.form.scales for step in driver.executor.inner.captured}
    assert ((False,) in captured) == (setting != "off")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vectors_triton.ScaleRows, "__call__", None)
        check(driver, zoo, [None, "plain"], seed=3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dora", "dora-qo"])
def test_merged(drive, zoo, name):
    """Merged DoRA is undone for the rows of others; biases can't be merged beside captured steps."""
    driver = drive(graph_capture="off", adapters=[name, "biases", "plain"])
    if FORMS[name].get("bias"):
        driver.run("load", name, [3], max_tokens=1)
        driver.engine.merge(name)
        driver.add("beside", None, [5, 6], max_tokens=12)
        driver.drain()
        assert driver.engine.stats().merged_adapter is None
    else:
        merge(driver, name)
        driver.plans.clear()
    check(driver, zoo, [name, None, "biases", "plain"])
    assert ({plan.mode for plan in driver.plans} == {StepMode.MERGED}) == (not FORMS[name].get("bias"))


@pytest.mark.slow
def test_small_products_with_vectors(drive, zoo, monkeypatch):
    """A product that would expand adapters in its own launch doesn't where a row has vectors."""
    from chorus.core.model.batch import GemmBackend

    def expanded(setting, decoder, *args, **kwargs):
        kinds = (kind for kind in decoder.gemms() if not kind.is_head)
        return dict.fromkeys(range(9), dict.fromkeys(kinds, GemmBackend.EXPANDED))

    monkeypatch.setattr(cuda_decode, "choose_gemm_backends", expanded)
    driver = drive(graph_capture="off", adapters=["dora", "plain"])
    check(driver, zoo, ["dora", "plain", None], lengths=(1, 4))
