"""A mixture of experts by the native library: choices as PyTorch's, what is read, bits, values that are not finite."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from chorus.core.model.moe.experts import choose
from chorus.core.model.moe.listed_experts import ListedExperts
from chorus.core.model.specs.feed_forward import ClampedSwiglu, Experts, Routing, Scoring
from chorus.ops.library import native_library
from chorus.ops.moe.expert_gemms import Panels, pack
from chorus.ops.moe.native_mixture import NativeMixture

pytestmark = pytest.mark.native

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
    "of inputs": Routing(2, Scoring.SIGMOID_OF_CHOSEN, of_inputs=True),
    "corrected logits": Routing(4, Scoring.SIGMOID_OF_CHOSEN, renormalised=True, corrected=True),
    "groups of logits": Routing(3, Scoring.SOFTMAX_OF_CHOSEN, corrected=True, groups=4, kept_groups=2),
    "sparse mixer": Routing(2, Scoring.SPARSE_MIXER, jitter=0.1),
    "groups, others at 0": Routing(4, Scoring.SIGMOID, corrected=True, groups=8, kept_groups=3, masked_score=0.0),
    "logits times": Routing(4, Scoring.SIGMOID, renormalised=True, logits_factor=0.5),
    "groups by their best": Routing(3, factor=1.5, groups=4, kept_groups=2, group_best=1),
}


@pytest.mark.parametrize("count", [16, 160])
@pytest.mark.parametrize("name", ROUTINGS)
def test_experts_are_chosen_as_by_pytorch(level, name, count):
    """By the same logits, as the router is the identity. Some rows have few different values: there are ties."""
    routing = ROUTINGS[name]
    if count == 160 and routing.groups == 1:
        routing = replace(routing, per_token=min(routing.per_token, 2))  # torch.topk has another way for few of many
    spec = Experts(count, 8, routing)
    experts = replace(experts_of(spec, count), router=pack(torch.eye(count)))
    logits = torch.randn(2500, count, generator=torch.Generator().manual_seed(7)) * 3
    logits[1000:2000] = logits[1000:2000].mul(0.5).round().clamp(-2, 1)
    logits[2000:2400, ::3] = 30.0
    logits[2400:2450, ::7] = float("nan")
    logits[2450:] = 1.0
    if experts.correction is not None:
        experts.correction = experts.correction.mul(2).round() / 4
    own = (logits if experts.router_bias is None else logits + experts.router_bias) * routing.logits_factor
    want = choose(own, routing, experts.correction)
    _, chosen, weights = native_of(experts, spec).mix(logits)
    of_numbers = ~logits.isnan().any(1)  # a NaN is in each of the row's logits, by its products
    assert torch.equal(chosen[of_numbers], want.experts[of_numbers])
    torch.testing.assert_close(weights[of_numbers], want.weights[of_numbers], rtol=2e-6, atol=1e-8)
    assert weights[~of_numbers].isnan().all()
    assert all(len(set(row)) == routing.per_token for row in chosen.tolist())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_are_those_of_one_thread(level, dtype, monkeypatch):
    mixture = native_of(experts_of(SPEC, dtype=dtype), SPEC)
    x = made(70, HIDDEN, seed=8).to(dtype)
    found = []
    for threads in (1, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        found.append(mixture.mix(x).y)
    assert torch.equal(*found)
    assert found[0].dtype == dtype


def test_no_other_expert_is_read(level):
    """The others' matrices are at no address at all."""
    experts = experts_of(SPEC)
    x = made(2, HIDDEN, seed=9)
    want = native_of(experts, SPEC).mix(x)
    used = set(want.chosen.flatten().tolist())
    assert len(used) < SPEC.count
    nowhere = torch.empty(0)
    for matrices in (experts.gate_up, experts.down):
        matrices[:] = [
            matrix if expert in used else Panels(nowhere, matrix.outputs, matrix.inputs)
            for expert, matrix in enumerate(matrices)
        ]
    assert torch.equal(native_of(replace(experts), SPEC).mix(x).y, want.y)


def test_values_that_are_not_finite_stay_in_their_rows(level):
    spec = replace(SPEC, activation=ClampedSwiglu(1.702, 7.0), biased=True, shared_size=0, shared_gate=False)
    mixture = native_of(experts_of(spec), spec)
    x = made(9, HIDDEN, seed=10)
    want = mixture.mix(x).y
    x[4] = float("nan")
    found = mixture.mix(x).y
    assert found[4].isnan().all()
    others = [row for row in range(9) if row != 4]
    assert torch.equal(found[others], want[others])


def test_a_step_without_rows_is_empty(level):
    assert native_of(experts_of(SPEC), SPEC).mix(torch.empty(0, HIDDEN)).y.shape == (0, HIDDEN)


def test_a_router_is_of_float32(level):
    with pytest.raises(ValueError, match=r"a router's weights are of torch\.bfloat16; they must be of float32"):
        replace(experts_of(SPEC), router=pack(made(16, HIDDEN, seed=1).bfloat16())).native(SPEC)


def test_a_library_that_is_no_longer_in_use_is_missed(level, monkeypatch):
    mixture = native_of(experts_of(SPEC), SPEC)
    monkeypatch.setenv(native_library.ISA, "none")
    with pytest.raises(RuntimeError, match="packed for the native library, which is no longer in use"):
        mixture.mix(made(2, HIDDEN, seed=0))
