"""A mixture of experts by the native library: parts one by one, what is read, and choices as PyTorch's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from chorus.core.model.experts import ListedExperts, choose
from chorus.core.model.layers import ClampedSwiglu, Experts, Routing, Scoring
from chorus.ops import native_library
from chorus.ops.expert_products import Panels, pack
from chorus.ops.native_mixture import MixturePart, NativeMixture

LEVELS = native_library.levels()
HIDDEN = 32
SPEC = Experts(16, 40, Routing(3, renormalised=True), shared_size=24, shared_gate=True)


@pytest.fixture(params=LEVELS or [pytest.param("none", marks=pytest.mark.skip("needs the native library"))])
def level(request, monkeypatch) -> str:
    monkeypatch.setenv(native_library.ISA, request.param)
    return request.param


def made(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) / shape[-1] ** 0.5


def experts_of(spec: Experts, hidden: int = HIDDEN, dtype: torch.dtype = torch.float32) -> ListedExperts:
    def matrices(rows: int, columns: int, count: int, seed: int) -> list[Panels]:
        return [pack(made(rows, columns, seed=seed + i).to(dtype)) for i in range(count)]  # pyright: ignore[reportReturnType]

    shared = spec.shared_size
    return ListedExperts(
        router=pack(made(spec.count, hidden, seed=1) * 4),
        gate_up=[*matrices(2 * spec.size, hidden, spec.count, 100)],
        down=[*matrices(hidden, spec.size, spec.count, 200)],
        correction=made(spec.count, seed=2) if spec.routing.corrected else None,
        shared_gate_up=matrices(2 * shared, hidden, 1, 300)[0] if shared else None,
        shared_down=matrices(hidden, shared, 1, 301)[0] if shared else None,
        shared_gate=made(1, hidden, seed=3) if spec.shared_gate else None,
        router_bias=made(spec.count, seed=4) if spec.routing.bias else None,
        gate_up_bias=list(made(spec.count, 2 * spec.size, seed=5)) if spec.biased else None,
        down_bias=list(made(spec.count, hidden, seed=6)) if spec.biased else None,
    )


def native_of(experts: ListedExperts, spec: Experts) -> NativeMixture:
    found = experts.native(spec)
    assert found is not None
    return found


ROUTINGS = {
    "softmax": Routing(4),
    "renormalised": Routing(8, renormalised=True),
    "of many": Routing(2, renormalised=True),
    "of the chosen": Routing(4, Scoring.SOFTMAX_OF_CHOSEN, bias=True, factor=0.5),
    "sigmoid": Routing(8, Scoring.SIGMOID, renormalised=True, epsilon=1e-20, factor=2.5),
    "groups": Routing(4, Scoring.SIGMOID, renormalised=True, corrected=True, groups=8, kept_groups=3),
    "groups by softmax": Routing(3, groups=4, kept_groups=1),
}


@pytest.mark.parametrize("count", [16, 160])
@pytest.mark.parametrize("name", ROUTINGS)
def test_experts_are_chosen_as_by_pytorch(level, name, count):
    """By the same logits, of which some rows have few different values: ties, and values that are not finite."""
    routing = ROUTINGS[name]
    if count == 160 and routing.groups == 1:
        routing = replace(routing, per_token=min(routing.per_token, 2))  # torch.topk has another way for few of many
    spec = Experts(count, 8, routing)
    experts = experts_of(spec)
    generator = torch.Generator().manual_seed(7)
    logits = torch.randn(3000, count, generator=generator) * 3
    logits[1000:2000] = logits[1000:2000].mul(0.5).round().clamp(-2, 1)
    logits[2000:2500, ::3] = 30.0
    logits[2500:2600, ::5] = float("inf")
    logits[2600:2700, ::7] = float("nan")
    logits[2700:2800] = 1.0
    if experts.correction is not None:
        experts.correction = experts.correction.mul(2).round() / 4
    step = native_of(experts, spec).step(torch.zeros(len(logits), HIDDEN))
    step.logits.copy_(logits)
    step.run(MixturePart.GATE_UP)
    want = choose(logits, routing, experts.correction)
    assert torch.equal(step.chosen, want.experts)
    torch.testing.assert_close(step.weights, want.weights, rtol=2e-6, atol=1e-8, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_one_by_one_have_the_bits_of_one_call(level, dtype, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    mixture = native_of(experts_of(SPEC, dtype=dtype), SPEC)
    x = made(70, HIDDEN, seed=8).to(dtype)
    whole = mixture.step(x)
    whole.run(MixturePart.ROUTE, MixturePart.COMBINE)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    parts = mixture.step(x)
    for part in MixturePart:
        mixture.step(x[:5]).run(MixturePart.ROUTE, MixturePart.COMBINE)  # another step of the same thread
        parts.run(part)
    assert torch.equal(parts.y, whole.y)
    assert parts.y.dtype == dtype
    rows = [row for _, each in parts.rows_by_expert() for row in each]
    assert sorted(rows) == sorted(row for row in range(70) for _ in range(3))
    assert all((parts.chosen[row] == expert).any() for expert, each in parts.rows_by_expert() for row in each)


def test_no_other_expert_is_read(level):
    """The others' matrices are at no address at all."""
    experts = experts_of(SPEC)
    x = made(2, HIDDEN, seed=9)
    step = native_of(experts, SPEC).step(x)
    step.run(MixturePart.ROUTE, MixturePart.COMBINE)
    used = {expert for expert, _ in step.rows_by_expert()}
    assert len(used) < SPEC.count
    nowhere = torch.empty(0)
    for matrices in (experts.gate_up, experts.down):
        matrices[:] = [
            matrix if expert in used else Panels(nowhere, matrix.outputs, matrix.inputs)
            for expert, matrix in enumerate(matrices)
        ]
    again = native_of(replace(experts), SPEC).step(x)
    again.run(MixturePart.ROUTE, MixturePart.COMBINE)
    assert torch.equal(again.y, step.y)


def test_values_that_are_not_finite_stay_in_their_rows(level):
    spec = replace(SPEC, activation=ClampedSwiglu(1.702, 7.0), biased=True, shared_size=0, shared_gate=False)
    mixture = native_of(experts_of(spec), spec)
    x = made(9, HIDDEN, seed=10)
    want = mixture.step(x)
    want.run(MixturePart.ROUTE, MixturePart.COMBINE)
    x[4] = float("nan")
    found = mixture.step(x)
    found.run(MixturePart.ROUTE, MixturePart.COMBINE)
    assert found.y[4].isnan().all()
    others = [row for row in range(9) if row != 4]
    assert torch.equal(found.y[others], want.y[others])


def test_a_step_without_rows_is_empty(level):
    step = native_of(experts_of(SPEC), SPEC).step(torch.empty(0, HIDDEN))
    step.run(MixturePart.ROUTE, MixturePart.COMBINE)
    assert step.y.shape == (0, HIDDEN)
    assert step.rows_by_expert() == []


def test_a_router_is_of_float32(level):
    with pytest.raises(ValueError, match=r"a router's weights are of torch\.bfloat16; they must be of float32"):
        replace(experts_of(SPEC), router=pack(made(16, HIDDEN, seed=1).bfloat16())).native(SPEC)


def test_a_library_that_is_no_longer_in_use_is_missed(level, monkeypatch):
    step = native_of(experts_of(SPEC), SPEC).step(made(2, HIDDEN, seed=0))
    monkeypatch.setenv(native_library.ISA, "none")
    with pytest.raises(RuntimeError, match="packed for the native library, which is no longer in use"):
        step.run(MixturePart.ROUTE)
