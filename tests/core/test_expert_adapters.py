"""Adapters on routers, shared experts and experts answer as transformers + peft do, over every path."""

from __future__ import annotations

import pytest

from .test_family_paths import answers, told
from .tiny_families import EXPERTS
from .tiny_mixtures import ADAPTERS, make_mixture

every_family = pytest.mark.parametrize("family", EXPERTS)


@pytest.fixture
def kernels() -> str:
    """The native decoder has no experts."""
    return "torch"


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    made = {}

    def make(family):
        if family not in made:
            made.clear()
            made[family] = make_mixture(family, tmp_path_factory.mktemp(family))
        return made[family]

    return make


@pytest.mark.numerics
@every_family
def test_mixed_batch_equals_transformers_and_peft(mixture, drive, family):
    it = mixture(family)
    driver = drive(it, max_num_seqs=8, max_num_batched_tokens=24, max_model_len=128)
    want = answers(it, driver, 8, seed=1, adapters=(None, *ADAPTERS))
    assert told(driver, want) == want
    assert max(plan.num_adapters for plan in driver.plans) == len(ADAPTERS)


@every_family
def test_adapters_target_what_they_are_named_for(mixture, drive, family):
    it = mixture(family)
    store = drive(it).engine.store
    targets = {name: store.get(name).manifest.targets for name in ADAPTERS}
    assert "gate" in targets["r4-router"]
    has_shared = family.startswith(("glm", "qwen3.5"))
    assert has_shared == ("shared_expert.down_proj" in targets["r5-shared"])
    assert family.startswith("qwen3.5") == ("shared_expert_gate" in targets["r5-shared"])
