"""Adapters of the token embeddings and the output projection give PEFT's tokens, on every path of an engine."""

from __future__ import annotations

import random
from functools import cache

import pytest

from .model_module_forms import FORMS, make_forms

pytestmark = [pytest.mark.numerics, pytest.mark.native]

#: Untied and tied; with factors of embeddings and logits, soft caps, and several layers of norms.
FAMILIES = ("llama2", "llama3", "granite", "gemma-2", "cohere-2-untied", "qwen3.5-tied")


@pytest.fixture(scope="module")
def forms(tmp_path_factory):
    return cache(lambda family: make_forms(family, tmp_path_factory.mktemp(family)))


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


@pytest.mark.parametrize("kernels", ["torch", "native"])
@pytest.mark.parametrize("family", FAMILIES)
def test_all_forms_in_one_batch(forms, drive, family):
    it = forms(family)
    driver = drive(it, max_num_seqs=8, max_num_batched_tokens=24, max_model_len=128)
    want = ask_all(it, driver, seed=1, times=2)
    assert told(driver, want) == want
