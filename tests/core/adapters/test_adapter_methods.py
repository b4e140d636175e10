"""Adapters of PEFT's other methods are composed like others."""

from __future__ import annotations

import pytest

from .adapter_zoo import kept_zoo

pytestmark = [pytest.mark.native, pytest.mark.wide]


@pytest.fixture(scope="module")
def zoo():
    return kept_zoo(methods=True)


@pytest.mark.parametrize("kernels", ["native"])
def test_composed(zoo, drive):
    """Of methods with LoRA's ranks, A and B are those of any adapter."""
    driver = drive(zoo, max_num_seqs=4)
    prompt, tokens = zoo.case("loha", 20, 6, seed=3)
    driver.run("composed", "loha*1.0", prompt, max_tokens=6)
    assert driver.answers["composed"].tokens == tokens
