"""Adapters of PEFT's other methods in one batch give PEFT's tokens."""

from __future__ import annotations

import pytest

from .adapter_zoo import kept_zoo
from .test_adapter_forms import ask_all, told

pytestmark = [pytest.mark.numerics, pytest.mark.native, pytest.mark.wide]


@pytest.fixture(scope="module")
def zoo():
    return kept_zoo(methods=True)


@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize("chunk", [7, 64])
def test_all_methods_in_one_batch(zoo, drive, chunk):
    driver = drive(zoo, block_tokens=8, max_num_batched_tokens=chunk, max_num_seqs=min(chunk, 16))
    want = ask_all(zoo, driver, seed=1, times=2)
    assert told(driver, want) == want


@pytest.mark.parametrize("kernels", ["native"])
def test_composed(zoo, drive):
    """Of methods with LoRA's ranks, A and B are those of any adapter."""
    driver = drive(zoo, max_num_seqs=4)
    prompt, tokens = zoo.case("loha", 20, 6, seed=3)
    driver.run("composed", "loha*1.0", prompt, max_tokens=6)
    assert driver.answers["composed"].tokens == tokens
