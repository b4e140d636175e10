"""Routing of tokens to experts by a GPU's kernels: values in Triton's interpreter against torch's.

Run in a process that interprets, see `tests/interpreted.py`.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from chorus.core.model.moe.experts import mix_experts
from chorus.core.model.specs.feed_forward import Activation, ClampedSwiglu, Experts, Routing, UngatedActivation
from chorus.ops import dependent_launch
from chorus.ops.launch_triton import KernelLauncher
from chorus.ops.moe.expert_tiles import Stack
from chorus.ops.moe.expert_tiles_schedule import ExpertLaunches

from ...dispatched import dispatched
from .routing_cases import (
    DTYPES,
    ROUTINGS,
    SORTED,
    check_choice,
    check_logits,
    check_odd_logits,
    check_sort,
    check_sum,
    random_rows,
    stacked,
)


@pytest.fixture(scope="module", autouse=True)
def exact():
    from ..bf16_interpreter import fix_bf16, multiply_row_by_row

    fix_bf16()
    multiply_row_by_row()


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("rows", [1, 9])
def test_rows_choose_the_experts_that_torch_chooses(name, rows):
    check_choice(name, rows, "cpu")


@pytest.mark.parametrize("name", ["qwen3", "granite", "groups", "odd groups"])
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_logits_that_are_equal_or_no_numbers_choose_experts_that_there_are(name):
    check_odd_logits(name, "cpu")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
def test_logits_are_products_in_float32(dtype, bias):
    check_logits(dtype, "cpu", bias=bias)


@pytest.mark.parametrize("sizes", SORTED)
@pytest.mark.parametrize("skewed", [False, True])
def test_every_pair_is_in_one_tile_of_its_expert(sizes, skewed):
    check_sort(*sizes, "cpu", skewed=skewed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shared", ["none", "plain", "gated"])
def test_outputs_are_added_up_as_torch_adds_them(dtype, shared):
    check_sum(dtype, shared, "cpu")


def test_a_mixture_takes_a_launch_for_each_of_its_steps(monkeypatch):
    """Of torch's operations there is the activation alone, which is one kernel on a GPU."""
    launched = []
    monkeypatch.setattr(KernelLauncher, "__call__", lambda self, *_: launched.append(self._kernel.__name__))
    weights, spec = stacked(16), Experts(16, 8, Routing(4, renormalised=True))
    x = torch.ones(5, 24)
    with dispatched() as operations:
        mix_experts(x, weights, spec)
    products = ["multiply_tiles"] * 2
    assert launched == ["multiply_router", "choose_experts", "sort_pairs", *products, "add_experts"]
    assert operations == {"neg": 1, "exp_": 1, "add_": 1, "div": 1, "mul": 1}, "of silu, on a CPU, and of the product"
    launched.clear()
    with dispatched() as operations:
        mix_experts(x, weights, spec, launches=ExpertLaunches(joins=True))
    assert launched == ["multiply_router", "choose_experts", "sort_pairs", *products, "add_experts"]
    assert not operations, "the activation is in the first product's launch"
    launched.clear()
    mix_experts(x[:4], weights, spec, launches=ExpertLaunches(joins=True))
    assert launched == ["multiply_router", "choose_experts", *products, "add_experts"], "four rows are not sorted"


def test_every_launch_of_a_mixture_begins_early_where_launches_do(monkeypatch):
    """That none reads too early is checked on the compiled kernels: `perf.kernels`."""
    launched = []

    def note(self, *_):
        launched.append((self._constants["C"].pdl, self._constants.get("launch_pdl", False)))

    monkeypatch.setattr(KernelLauncher, "__call__", note)
    for early in (True, False):
        launched.clear()
        monkeypatch.setattr(dependent_launch, "begins_early", lambda device, early=early: early)
        mix_experts(torch.ones(5, 24), stacked(16), Experts(16, 8, Routing(4)), launches=ExpertLaunches(joins=True))
        assert launched == [(early, early)] * 6


@pytest.mark.parametrize("rows", [1, 4, 5, 70])
@pytest.mark.parametrize("activation", [Activation.SILU, ClampedSwiglu(1.702, 7.0), UngatedActivation.RELU_SQUARED])
def test_joined_launches_give_the_values_of_launches_apart(rows, activation):
    """Also where the activation is not joined: it has no gate, or weights are of the experts' inputs."""
    up = isinstance(activation, UngatedActivation)
    weights = stacked(16, hidden=24, size=4 if up else 8)
    weights = replace(weights, down=Stack(stacked(16).down.data)) if up else weights
    x = random_rows(rows, 24, seed=rows)
    for of_inputs in (False, True):
        spec = Experts(16, 8, Routing(4, renormalised=True, of_inputs=of_inputs), activation=activation)
        ways = (ExpertLaunches(joins=joins) for joins in (False, True))
        apart, joined = (mix_experts(x, weights, spec, launches=each) for each in ways)
        torch.testing.assert_close(joined, apart, rtol=1e-5, atol=1e-6)
