"""Adapters of the token embeddings and the output projection give PEFT's tokens and log-probabilities."""

from __future__ import annotations

import random
from functools import cache

import pytest
import torch

from chorus.graphs.runner import StepMode
from chorus.ops.library import native_library

from ..merging.test_merged import merge
from .model_module_forms import FORMS, make_forms

pytestmark = [pytest.mark.native, pytest.mark.wide]


@pytest.fixture(scope="module")
def forms():
    return cache(make_forms)


def ask_all(it, driver, seed, lengths=(1, 40), tokens=8, names=(None, *FORMS), times=1, **params):
    """Add requests of every form and the base model; return PEFT's answers."""
    rng, want = random.Random(seed), {}
    for turn in range(times):
        for name in names:
            request_id = f"{seed}.{turn}.{name}"
            prompt, want[request_id] = it.case(name, rng.randint(*lengths), turn, tokens)
            driver.add(request_id, name, prompt, max_tokens=tokens, **params)
    return want


def told(driver, want):
    answered = driver.drain()
    return {name: answered[name].tokens for name in want}


def test_every_form_changes_the_answers(forms):
    it = forms("llama3")
    answers = {name: it.greedy(name, list(range(20, 40)), 8)[0] for name in (None, *FORMS)}
    assert len({tuple(tokens) for tokens in answers.values()}) == len(answers)


@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize("merged", ["all", "head", "layers"])
def test_merged(forms, drive, merged):
    """The model's own modules are never in the merged weights: they are applied beside them."""
    it = forms("llama3")
    driver = drive(it, max_num_seqs=8, max_num_batched_tokens=24)
    merge(driver, merged)
    want = ask_all(it, driver, seed=4)
    assert told(driver, want) == want
    assert {plan.mode for plan in driver.plans} == {StepMode.MERGED}


@pytest.mark.parametrize("kernels", ["native"])
def test_removed_and_reloaded(forms, drive):
    """Under the name of one adapter another one is loaded: nothing of the first is left."""
    it = forms("llama2")
    driver = drive(it, block_tokens=8, adapters={"x": it.adapters["head"]})
    for name in ("head", "embed", "layers", "both", "head"):
        driver.engine.store.register("x", it.adapters[name])
        driver.engine.reclaimer.reclaim_all()
        prompt, want = it.case(name, 20, seed=7)
        assert driver.run(f"{len(driver.answers)}", "x", prompt, max_tokens=8).tokens == want


@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_log_probabilities_are_of_the_adapters_logits(forms, drive, ranks):
    """Of the prompt and of the answer, capped after the adapter's term."""
    it = forms("gemma-2")
    driver = drive(it, max_num_seqs=8, max_num_batched_tokens=24, tensor_parallel_size=ranks)
    asked = {}
    for name in (None, *FORMS):
        prompt, _ = it.case(name, 30, seed=8)
        asked[str(name)] = name, prompt
        driver.add(str(name), name, prompt, max_tokens=4, logprobs=3, prompt_logprobs=2)
    for request_id, answer in driver.drain().items():
        name, prompt = asked[request_id]
        with torch.inference_mode():
            every = it.use(name)(torch.tensor([prompt + answer.tokens])).logits[0].log_softmax(-1)
        assert answer.prompt_logprobs is not None
        found = [entry.logprob for entry in (*answer.prompt_logprobs, *answer.logprobs)]
        want = [float(every[at, token]) for at, token in enumerate([*prompt[1:], *answer.tokens])]
        assert found == pytest.approx(want, abs=2e-4)


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_samples_and_allowed_tokens_see_the_adapters_logits(forms, drive):
    """Among a few allowed tokens the adapter's likeliest is taken; a sample is from them alone."""
    it = forms("cohere-2-untied")
    driver = drive(it, max_num_seqs=16, max_num_batched_tokens=64)
    allowed, want = (7, 20, 33, 90, 121, 149), {}
    for name in (None, *FORMS):
        prompt, _ = it.case(name, 12, seed=9)
        with torch.inference_mode():
            logits = it.use(name)(torch.tensor([prompt])).logits[0, -1]
        want[f"allowed {name}"] = allowed[int(logits[list(allowed)].argmax())]
        want[f"top {name}"] = int(logits.argmax())
        driver.add(f"allowed {name}", name, prompt, max_tokens=1, allowed_token_ids=allowed)
        driver.add(f"top {name}", name, prompt, max_tokens=1, temperature=0.7, top_k=1, seed=1)
        driver.add(f"any {name}", name, prompt, max_tokens=1, temperature=1e-3, top_p=0.9, seed=1)
        want[f"any {name}"] = want[f"top {name}"]
    answers = driver.drain()
    assert {name: answers[name].tokens[0] for name in want} == want


@pytest.mark.parametrize("isa", ["", "avx512", "avx2"])
@pytest.mark.parametrize("kernels", ["native"])
def test_bfloat16_is_float32_within_rounding(forms, drive, monkeypatch, isa):
    """At every instruction set of this machine."""
    if isa and isa not in native_library.levels():
        pytest.skip(f"this machine or build has no {isa}")
    monkeypatch.setenv(native_library.ISA, isa)
    it, scored = forms("llama2"), {}
    for dtype in ("bfloat16", "float32"):
        driver = drive(it, dtype=dtype, max_num_seqs=8, max_num_batched_tokens=64)
        for name in (None, *FORMS):
            prompt, _ = it.case(name, 40, seed=12)
            driver.add(str(name), name, prompt, max_tokens=1, prompt_logprobs=0)
        answers = driver.drain()
        scored[dtype] = {
            name: torch.tensor([entry.logprob for entry in answer.prompt_logprobs or ()])
            for name, answer in answers.items()
        }
    for name, want in scored["float32"].items():
        error = (scored["bfloat16"][name] - want).norm() / want.norm()
        assert float(error) < 6e-2, (name, error)
