"""What tests draw is the same in each run of them, whatever ran before."""

from __future__ import annotations

import random
from zlib import crc32

import numpy as np
import pytest
import torch


@pytest.fixture(scope="module")
def drawn():
    return _draws()


def _draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def _draws_of(name: str) -> tuple[float, float, float]:
    number = crc32(name.encode())
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)
    return _draws()


def test_a_test_draws_by_its_name(request):
    assert _draws() == _draws_of(request.node.nodeid)


def test_a_fixture_of_several_tests_draws_by_its_name_and_takes_no_draws_of_the_test(request, drawn):
    assert _draws() == _draws_of(request.node.nodeid)
    assert drawn == _draws_of(f"{request.node.parent.nodeid}::drawn[0]")
