"""Adapters of the token embeddings and the output projection on a CPU's stand-in of a GPU.

Run in a process that interprets, see `tests/interpreted.py`.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from chorus.core.engine import Engine
from chorus.core.executors.cuda import CudaExecutor
from chorus.graphs.runner import EagerReason, StepForm, StepMode, StepPart
from chorus.perf.inline_reads import InlineReads

from ...conftest import ModelSpec, Subject, save_model
from ...graphs.late_device import LateDevice
from ..adapters.model_module_forms import FORMS, save_form
from ..adapters.test_trained_rows import save_rows
from ..conftest import Driver, RecordingExecutor, ticking
from .test_cuda_interpreted import ask, check, make_config, merge

SPEC = ModelSpec(seed=7, hidden=32, ffn=48, layers=2, heads=2, kv_heads=1, vocab=96, positions=64, tied=True)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Subject:
    root = tmp_path_factory.mktemp("modules")
    save_model(SPEC, root / "model")
    for seed, (name, arguments) in enumerate(FORMS.items()):
        save_form(root / "model", root / name, seed, **arguments)
    return Subject(root / "model", {name: root / name for name in FORMS})


@pytest.fixture
def drive(tiny):
    engines = []

    def make(adapters=tuple(FORMS), **config) -> Driver:
        settings = make_config(tiny, **{"max_lora_rank": 33, **config})
        executor = RecordingExecutor(CudaExecutor(settings, LateDevice()))
        engine = Engine(settings, executor, ticking(), InlineReads())
        engines.append(engine)
        for name in adapters:
            engine.store.register(name, tiny.adapters[name])
        return Driver(engine, executor)

    yield make
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("mixed", [0, 12])
def test_all_forms_share_steps_with_the_base_model(drive, tiny, mixed):
    """Chunks, decoding sequences and padding. Layers of steps with these adapters are captured, others whole."""
    driver = drive(mixed_graph_tokens=mixed, max_num_batched_tokens=12)
    steps = driver.executor.inner.steps
    captured = {step.form for step in steps.captured}
    want = ask(driver, tiny, ("all", 15, 3), (None, 5, 5), ("both", 3, 3), ("layers", 6, 2))
    want |= ask(driver, tiny, ("head", 4, 3), ("embed", 13, 2))
    check(driver, want)
    assert {step.form for step in steps.captured} - captured == {StepForm(StepMode.LORA, StepPart.LAYERS)}
    assert set(steps.eager) == (set() if mixed else {EagerReason.TOKENS})


def test_a_sequence_has_the_same_logits_beside_such_an_adapter(drive, tiny):
    """A step whose layers alone are captured gives a row of the base model the bits of a step captured whole."""
    driver = drive(adapters=["both"], async_scheduling=False)
    check(driver, ask(driver, tiny, (None, 4, 3), ("both", 3, 3)))
    executor = driver.executor.inner
    beside = next(plan for plan in driver.plans if plan.bucket == 2 and len(plan.sequences) == 2)
    rows, found = [row for row in beside.sequences if row.lora_index < 0], []
    for plan in (beside, replace(beside, sequences=rows * 2, adapters=[])):
        executor.execute(plan)
        found.append(executor.steps.outputs.logits[plan.sequences.index(rows[0])].clone())
    torch.testing.assert_close(*found, rtol=0, atol=1e-6)  # products of a CPU depend on the other rows


@pytest.mark.parametrize("merged", ["all", "head"])
def test_merged(drive, tiny, merged):
    driver = drive(adapters=["all", "head", "layers"], graph_capture="lazy", max_num_seqs=2)
    merge(driver, merged)
    driver.plans.clear()
    check(driver, ask(driver, tiny, (merged, 5, 3), (None, 3, 2), ("layers", 4, 2)))
    assert {plan.mode for plan in driver.plans} <= {StepMode.MERGED, StepMode.MIXTURE}


def test_rows_of_an_adapters_own(tmp_path):
    """In a tied head too."""
    save_model(SPEC, tmp_path / "model")
    rows = {"target_modules": ["q_proj"], "trainable_token_indices": [3, 95, 40, 41, 42, 7]}
    save_rows(tmp_path / "model", tmp_path / "rows", 9, **rows)
    it = Subject(tmp_path / "model", {"rows": tmp_path / "rows"})
    settings = make_config(it, mixed_graph_tokens=12)
    executor = RecordingExecutor(CudaExecutor(settings, LateDevice()))
    engine = Engine(settings, executor, ticking(), InlineReads())
    engine.store.register("rows", it.adapters["rows"])
    driver = Driver(engine, executor)
    check(driver, ask(driver, it, ("rows", 14, 3), (None, 5, 3), ("rows", 2, 4)))
    engine.close()


def test_log_probabilities_of_prompts(drive, tiny):
    driver = drive(adapters=["both"])
    prompt = tiny.prompt("both", 14, 2, seed=1)
    answer = driver.run("scored", "both", prompt, max_tokens=2, prompt_logprobs=1, logprobs=1)
    with torch.inference_mode():
        every = tiny.use("both")(torch.tensor([prompt + answer.tokens])).logits[0].log_softmax(-1)
    assert answer.prompt_logprobs is not None
    found = [entry.logprob for entry in (*answer.prompt_logprobs, *answer.logprobs)]
    want = [float(every[at, token]) for at, token in enumerate([*prompt[1:], *answer.tokens])]
    assert found == pytest.approx(want, abs=2e-4)
