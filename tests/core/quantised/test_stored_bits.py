"""The stored bits of a sequence's keys and values, whatever the size of steps and whoever shares them."""

from __future__ import annotations

import random
from functools import cache

import pytest
import torch

from ..conftest import Driver
from ..exact_products import ATTENTION, PRODUCTS, ExactProducts
from ..tiny_families import ADAPTERS
from ..tiny_mixtures import ADAPTERS as OF_MIXTURES
from ..tiny_mixtures import make_mixture

pytestmark = [pytest.mark.native(needed=False), pytest.mark.wide]

#: Requests one after another in two sizes of steps, and together.
BATCHES = [(1, 64), (1, 7), (8, 64)]

TOKENS = 6


@pytest.fixture(scope="module")
def mixture():
    """`mixture("qwen3-moe")`: the family's model with adapters, made once in a process."""
    return cache(make_mixture)


class Stored:
    """Notes what a step leaves in the pages of its sequences."""

    def __init__(self, driver: Driver) -> None:
        self.found: dict[tuple[str, int], bytes] = {}
        """By request and position: the bytes of all layers' keys and values."""
        inner, self._arena = driver.executor.inner, driver.executor.rank.arena
        execute = inner.execute

        def noted(plan):
            result = execute(plan)
            for sequence in plan.sequences:
                for position in range(sequence.start, sequence.start + len(sequence.tokens)):
                    self.found[sequence.request_id, position] = self._bytes(sequence.pages, position)
            return result

        inner.execute = noted

    def _bytes(self, pages: list[int], position: int) -> bytes:
        layout = self._arena.layout
        block, at = divmod(position, layout.block_tokens)
        own = [pages[block * layout.pages_per_block + group] for group in layout.group_of_layer]
        parts = [part[page, at] for page, both in zip(own, self._arena.kv_layers, strict=True) for part in both]
        return torch.cat([part.flatten() for part in parts]).view(torch.uint8).numpy().tobytes()


def requests_of(count, adapters):
    rng = random.Random(count)
    return [
        (str(index), adapters[index % len(adapters)], [rng.randrange(3, 150) for _ in range(rng.randint(5, 70))])
        for index in range(count)
    ]


def stored(drive, it, requests, num_seqs, chunk, **config):
    driver = drive(it, max_num_seqs=num_seqs, max_num_batched_tokens=chunk, prefix_cache=False, **config)
    noted = Stored(driver)
    for request in requests:
        driver.add(*request, max_tokens=TOKENS)
        if num_seqs == 1:
            driver.drain()
    answers = driver.drain()
    assert max(len(plan.sequences) for plan in driver.plans) == num_seqs
    return noted.found, {name: answer.tokens for name, answer in answers.items()}


def check_equal(drive, it, requests, **config):
    first, *others = [stored(drive, it, requests, *batch, **config) for batch in BATCHES]
    assert len(first[0]) == sum(len(prompt) + TOKENS - 1 for _, _, prompt in requests)
    for bits, tokens in others:
        assert tokens == first[1]
        assert [at for at in first[0] if bits[at] != first[0][at]] == []


@pytest.mark.native
@pytest.mark.parametrize("kernels", ["native"])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama3", "gemma-3", "qwen3.5"])
def test_those_of_the_native_decoder_do_not_depend_on_the_batch(tiny, drive, family, dtype, kv_cache_dtype):
    requests = requests_of(12, [None, *ADAPTERS])
    check_equal(drive, tiny(family), requests, dtype=dtype, kv_cache_dtype=kv_cache_dtype)


@pytest.mark.native
@pytest.mark.parametrize("kernels", ["native"])
@pytest.mark.parametrize("experts", [False, True])
def test_those_of_a_native_mixture_do_not_depend_on_the_batch(tiny, mixture, drive, experts):
    it = mixture("qwen3-moe") if experts else tiny("qwen3-moe")
    requests = requests_of(24, [None, *(OF_MIXTURES if experts else ADAPTERS)])
    check_equal(drive, it, requests, kv_cache_dtype="fp8")


@pytest.mark.parametrize("kernels", ["torch"])
@pytest.mark.parametrize("experts", [False, True])
def test_those_of_a_mixture_depend_on_it_by_rounding_alone(tiny, mixture, drive, experts):
    """PyTorch's products and attention add up in an order that depends on the number of rows, and in FP8 the last bit
    of a sum may be 1/16 of a key. Without that nothing may differ: not by the order of experts or of adapters.
    """
    it = mixture("qwen3-moe") if experts else tiny("qwen3-moe")
    requests = requests_of(24, [None, *(OF_MIXTURES if experts else ADAPTERS)])
    with ExactProducts() as products:
        check_equal(drive, it, requests, kv_cache_dtype="fp8")
    assert products.counts.keys() & PRODUCTS
    assert products.counts.keys() & ATTENTION
