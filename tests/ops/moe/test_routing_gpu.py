"""Routing of tokens to experts by kernels on a GPU, against torch's on a CPU."""

from __future__ import annotations

import pytest
import torch

from .routing_cases import DTYPES, ROUTINGS, SORTED, check_choice, check_logits, check_odd_logits, check_sort, check_sum

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


@pytest.mark.parametrize("name", ROUTINGS)
def test_routing_chooses_the_experts_that_torch_chooses(name):
    for rows in (1, 9, 300):
        check_choice(name, rows, "cuda")
    check_odd_logits(name, "cuda")


@pytest.mark.parametrize("dtype", DTYPES)
def test_routing_logits_are_products_in_float32(dtype):
    for bias in (False, True):
        check_logits(dtype, "cuda", bias=bias)


def test_routing_sorts_every_pair_into_one_tile_of_its_expert():
    for sizes in [*SORTED, (2048, 128, 8), (64, 128, 8), (16, 384, 8)]:
        for skewed in (False, True):
            check_sort(*sizes, "cuda", skewed=skewed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shared", ["none", "plain", "gated"])
def test_routing_adds_outputs_up_as_torch_does(dtype, shared):
    check_sum(dtype, shared, "cuda")
