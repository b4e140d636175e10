"""Routers choose as transformers' own, ties included; a row's bits don't depend on the other rows."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from chorus.core.model.families.longcat.layer import LongCatExperts
from chorus.core.model.families.zaya.layer import ZayaExperts
from chorus.core.model.moe.experts import choose, mix_experts
from chorus.core.model.moe.listed_experts import ListedExperts
from chorus.core.model.moe.mixture_lora import MixtureLora
from chorus.core.model.specs.feed_forward import (
    Activation,
    BoundedSwiglu,
    ClampedSwiglu,
    Experts,
    LimitedSwiglu,
    Routing,
    Scoring,
)
from chorus.memory.pages.projections import MIXTURE_ROLES, Role
from chorus.ops.library import native_library
from chorus.ops.lora.sgmv import AdapterRows, Segments
from chorus.ops.moe.expert_gemms import Matrix, pack, unpack

pytestmark = [pytest.mark.native(needed=False), pytest.mark.wide]

HIDDEN = 32


def router_of(module: str, name: str, **config):
    """A router of transformers whose logits are its input."""
    import importlib

    modelling = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
    count = config["count"]
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    router = getattr(modelling, name)(SimpleNamespace(hidden_size=count, **dict.fromkeys(names, count), **config))
    torch.nn.init.eye_(router.weight.data)
    return router


ROUTERS = {
    "mixtral": (("mixtral", "MixtralTopKRouter"), {}, {"renormalised": True}),
    "qwen3": (("qwen3_moe", "Qwen3MoeTopKRouter"), {"norm_topk_prob": True}, {"renormalised": True}),
    "olmoe": (("olmoe", "OlmoeTopKRouter"), {"norm_topk_prob": False}, {}),
    "granite": (("granitemoe", "GraniteMoeTopKRouter"), {}, {"scoring": Scoring.SOFTMAX_OF_CHOSEN}),
    "gpt-oss": (("gpt_oss", "GptOssTopKRouter"), {}, {"scoring": Scoring.SOFTMAX_OF_CHOSEN, "bias": True}),
    "glm-4": (
        ("glm4_moe", "Glm4MoeTopkRouter"),
        {"norm_topk_prob": True, "routed_scaling_factor": 2.5, "n_group": 4, "topk_group": 2},
        {
            "scoring": Scoring.SIGMOID, "renormalised": True, "epsilon": 1e-20, "factor": 2.5, "corrected": True,
            "groups": 4, "kept_groups": 2,
        },
    ),
    "kolibri-1": (
        ("kolibri1", "Kolibri1TopKRouter"),
        {"norm_topk_prob": True},
        {"scoring": Scoring.SIGMOID_OF_CHOSEN, "renormalised": True, "corrected": True},
    ),
    "phi-moe": (
        ("phimoe", "PhimoeTopKRouter"),
        {"router_jitter_noise": 0.1, "input_jitter_noise": 0.0, "num_experts_per_tok": 2},
        {"scoring": Scoring.SPARSE_MIXER, "jitter": 0.1, "per_token": 2},
    ),
}  # fmt: skip


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("name", ROUTERS)
def test_routers_choose_as_transformers_own(name, ties):
    """With ties, logits are one of four values."""
    where, config, fields = ROUTERS[name]
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(500, 16, generator=generator)
    logits = logits.mul(1.5).round().clamp(-2, 1) if ties else logits
    routing, correction = Routing(**{"per_token": 4, **fields}), None
    router = router_of(*where, count=16, **{"num_experts_per_tok": 4, **config})
    router.eval()
    if routing.corrected:
        correction = torch.randn(16, generator=generator).mul(2).round() / 2 if ties else torch.randn(16)
        router.e_score_correction_bias.copy_(correction)
    with torch.inference_mode():
        _, weights, experts = router(logits)
        found = choose(logits, routing, correction)
    order, own = experts.argsort(-1), found.experts.argsort(-1)
    assert torch.equal(experts.gather(1, order), found.experts.gather(1, own))
    torch.testing.assert_close(weights.gather(1, order), found.weights.gather(1, own), rtol=1e-6, atol=1e-7)


SPEC = Experts(16, 40, Routing(3, renormalised=True))


@pytest.fixture(autouse=True, params=[*native_library.levels(), "none"])
def level(request, monkeypatch) -> str:
    """What computes: the native library of each level, or PyTorch and oneDNN."""
    monkeypatch.setenv(native_library.ISA, request.param)
    return request.param


def weights_of(spec: Experts, dtype: torch.dtype = torch.float32) -> ListedExperts:
    generator = torch.Generator().manual_seed(0)

    def matrix(rows: int, columns: int) -> Matrix:
        made = torch.randn(rows, columns, generator=generator) / columns**0.5
        return pack(made.to(dtype))

    def biases(columns: int) -> list[torch.Tensor] | None:
        return list(torch.randn(spec.count, columns, generator=generator).to(dtype)) if spec.biased else None

    shared = spec.shared_size
    return ListedExperts(
        router=pack(torch.randn(spec.choices, HIDDEN, generator=generator)),
        gate_up=[matrix(2 * spec.size, HIDDEN) for _ in range(spec.count)],
        down=[matrix(HIDDEN, spec.size) for _ in range(spec.count)],
        correction=torch.randn(spec.choices, generator=generator) if spec.routing.corrected else None,
        shared_gate_up=matrix(2 * shared, HIDDEN) if shared else None,
        shared_down=matrix(HIDDEN, shared) if shared else None,
        shared_gate=torch.randn(1, HIDDEN, generator=generator) if spec.shared_gate else None,
        router_bias=torch.randn(spec.count, generator=generator) if spec.routing.bias else None,
        gate_up_bias=list(torch.randn(spec.count, 2 * spec.size, generator=generator).to(dtype))
        if spec.biased
        else None,
        down_bias=list(torch.randn(spec.count, HIDDEN, generator=generator).to(dtype)) if spec.biased else None,
    )


SPECS = {
    "softmax": SPEC,
    "shared, gated": replace(SPEC, shared_size=24, shared_gate=True, activation=Activation.GELU_TANH),
    "clamped, biased": Experts(
        16, 40, Routing(3, Scoring.SOFTMAX_OF_CHOSEN, bias=True), ClampedSwiglu(1.702, 1.5), biased=True
    ),
    "bounded": replace(SPEC, activation=BoundedSwiglu(0.6)),
    "bounded, shared": replace(SPEC, shared_size=24, shared_activation=BoundedSwiglu(0.2)),
    "limited": replace(SPEC, activation=LimitedSwiglu(0.6), shared_size=24, shared_activation=Activation.SILU),
    "identity": LongCatExperts(SPEC.count, SPEC.size, replace(SPEC.routing, corrected=True), identity=5),
    "skipped": ZayaExperts(SPEC.count, SPEC.size, replace(SPEC.routing, corrected=True), router_size=HIDDEN),
    "sigmoid": replace(SPEC, shared_size=24, routing=Routing(4, Scoring.SIGMOID, True, groups=4, kept_groups=2)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SPECS)
def test_bits_of_a_row_do_not_depend_on_its_company(name, dtype):
    """Alone, among few, in any order, among so many that all go to one expert: 4,000 rows in all."""
    spec = SPECS[name]
    weights, generator = weights_of(spec, dtype), torch.Generator().manual_seed(1)
    rows = torch.randn(400, HIDDEN, generator=generator).to(dtype)
    want = mix_experts(rows, weights, spec)
    for count in [1] * 25 + [2, 3, 5, 8, 33] * 10 + [150] * 23:
        own = torch.randperm(len(rows), generator=generator)[:count]
        assert torch.equal(mix_experts(rows[own], weights, spec), want[own])
    crowd = torch.cat([rows[:1].expand(300, -1), rows])
    assert torch.equal(mix_experts(crowd, weights, spec)[300:], want)


@pytest.mark.parametrize("name", SPECS)
def test_rows_are_the_weighted_sums_of_their_experts(name):
    """Against float64, expert by expert."""
    spec = SPECS[name]
    weights = weights_of(spec)
    rows = torch.randn(20, HIDDEN, generator=torch.Generator().manual_seed(2))

    def activated(gate: torch.Tensor, up: torch.Tensor, activation: object) -> torch.Tensor:
        if isinstance(activation, ClampedSwiglu):
            limit = activation.limit
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            return (up + 1) * gate * (activation.alpha * gate).sigmoid()
        if isinstance(activation, BoundedSwiglu):
            limit = activation.limit
            return torch.nn.functional.silu(gate).minimum(torch.tensor(limit)) * up.clamp(-limit, limit)
        if isinstance(activation, LimitedSwiglu):
            limit = activation.limit
            return torch.nn.functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
        if activation is Activation.SILU:
            return torch.nn.functional.silu(gate) * up
        return torch.nn.functional.gelu(gate, approximate="tanh") * up

    def expert(
        row: torch.Tensor, gate_up: Matrix, down: Matrix, *biases: torch.Tensor, by: object = spec.activation
    ) -> torch.Tensor:
        of_in, of_out = biases or (0, 0)
        gate, up = (unpack(gate_up).double() @ row.double() + of_in).chunk(2)
        return unpack(down).double() @ activated(gate, up, by) + of_out

    logits = rows @ unpack(weights.router).T
    logits = logits if weights.router_bias is None else logits + weights.router_bias
    choice = choose(logits, spec.routing, weights.correction)
    matrices = [weights.gate_up, weights.down]
    matrices += [each for each in (weights.gate_up_bias, weights.down_bias) if each is not None]
    for row, chosen, factors, found in zip(rows, *choice, mix_experts(rows, weights, spec), strict=True):
        given = 0 * row if isinstance(spec, ZayaExperts) else row
        want = sum(
            factor * (expert(row, *(each[index] for each in matrices)) if index < spec.count else given)
            for index, factor in zip(chosen.tolist(), factors.double(), strict=True)
        )
        if weights.shared_gate_up is not None:
            own = spec.activation if spec.shared_activation is None else spec.shared_activation
            shared = expert(row, weights.shared_gate_up, weights.shared_down, by=own)
            gate = 1.0 if weights.shared_gate is None else (weights.shared_gate @ row).sigmoid().double()
            want = want + gate * shared
        torch.testing.assert_close(found.double(), want, rtol=1e-4, atol=1e-5)


COLUMNS = {
    **dict.fromkeys(MIXTURE_ROLES, ()),
    Role.ROUTER: ((0, 0, 16),),
    Role.EXPERT_GATE_UP: ((1, 0, 40), (2, 40, 40)),
    Role.EXPERT_DOWN: ((3, 0, HIDDEN),),
}
WIDTHS = [(HIDDEN, 16), (HIDDEN, 40), (HIDDEN, 40), (40, HIDDEN)]
SLAB = sum(map(sum, WIDTHS[1:]))


def adapter_rows(pages: list[int], rank: int, experts: list[int], *, with_router: bool) -> list[AdapterRows]:
    """An adapter on some experts, and on the router in the same pages."""
    offsets = [-1, 0, HIDDEN + 40, 2 * (HIDDEN + 40)]
    ends = [-1, *(at + width for at, (width, _) in zip(offsets[1:], WIDTHS[1:], strict=True))]
    found = [AdapterRows(pages, rank, 0.7, SLAB, offsets, ends, [0], experts=experts)]
    if with_router:
        found.append(AdapterRows(pages, 2, 0.5, SLAB, [0, -1, -1, -1], [HIDDEN, -1, -1, -1], [0]))
    return found


@pytest.mark.parametrize("num_rows", [1_000, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_of_base_rows_do_not_change_beside_adapters_on_experts(dtype, num_rows):
    """Each row in a batch of any mix of adapters, of which others change what the row goes through."""
    weights, generator = weights_of(SPEC, dtype), torch.Generator().manual_seed(3)
    arena = torch.randn(60, 1000, generator=generator).to(dtype) / 8
    rows = torch.randn(400, HIDDEN, generator=generator).to(dtype)
    want, num_checked, num_changed = mix_experts(rows, weights, SPEC), 0, 0
    adapters = [
        adapter_rows(list(range(59, 39, -1)), 3, [0, 2, 5, 7, 11, 15], with_router=True),
        adapter_rows(list(range(20, 60)), 2, list(range(16)), with_router=False),
        adapter_rows(list(range(20)), 1, [4, 5], with_router=True),
    ]
    while num_checked < num_rows:
        count = int(torch.randint(1, 200, (), generator=generator))
        own, segments, begin = torch.randperm(len(rows), generator=generator)[:count], Segments(), 0
        is_base = torch.ones(count, dtype=torch.bool)
        while begin < count:
            end = min(count, begin + int(torch.randint(1, 30, (), generator=generator)))
            if (index := int(torch.randint(4, (), generator=generator))) < 3:
                for part in adapters[index]:
                    segments.add(begin, end, part)
                is_base[begin:end] = False
            begin = end
        found = mix_experts(rows[own], weights, SPEC, MixtureLora.of(arena, segments, 0, COLUMNS))
        assert torch.equal(found[is_base], want[own][is_base])
        num_checked += int(is_base.sum())
        num_changed += int((found[~is_base] != want[own][~is_base]).any(-1).sum())
    assert num_changed > num_rows


EVERY_COLUMNS = {
    **COLUMNS,
    Role.SHARED_GATE: ((4, 0, 1),),
    Role.SHARED_GATE_UP: ((17, 0, 24), (18, 24, 24)),
    Role.SHARED_DOWN: ((19, 0, HIDDEN),),
}
"""With numbers of modules for which the native library's descriptors have no room."""
SHARED_WIDTHS = [(HIDDEN, 1), (HIDDEN, 24), (HIDDEN, 24), (24, HIDDEN)]


def of_every_token(pages: list[int], rank: int, scale: float) -> AdapterRows:
    """An adapter on the router and the shared expert."""
    a_offset, b_offset, at = [-1] * 20, [-1] * 20, 0
    for module, (inputs, outputs) in zip((0, 4, 17, 18, 19), (WIDTHS[0], *SHARED_WIDTHS), strict=True):
        a_offset[module], b_offset[module], at = at, at + inputs, at + inputs + outputs
    return AdapterRows(pages, rank, scale, at, a_offset, b_offset, [-1, 5])


def of_experts(pages: list[int], rank: int, scale: float, experts: list[int]) -> AdapterRows:
    (part,) = adapter_rows(pages, rank, experts, with_router=False)
    others = [-1] * 16
    return replace(
        part, scale=scale, a_offset=[*part.a_offset, *others], b_offset=[*part.b_offset, *others], first_elem=[-1, 9]
    )


@pytest.mark.parametrize(
    "dtypes", [(torch.float32, torch.float32), (torch.float32, torch.bfloat16), (torch.bfloat16,) * 2]
)
@pytest.mark.parametrize("threads", [1, 3])
def test_adapters_on_all_parts_are_as_by_pytorch(dtypes, threads, monkeypatch):
    """Of one row or many, several for the same rows, ranks of one to 40, rank-rows over several pages."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    dtype, of_arena = dtypes
    spec = replace(SPEC, shared_size=24, shared_gate=True)
    weights, generator = weights_of(spec, dtype), torch.Generator().manual_seed(5)
    arena = (torch.randn(600, 170, generator=generator) / 8).to(of_arena)
    pages = torch.randperm(600, generator=generator).tolist()
    rows, segments = torch.randn(240, HIDDEN, generator=generator).to(dtype), Segments()
    segments.add(0, 1, of_every_token(pages, 1, 0.9))
    segments.add(0, 1, of_experts(pages, 2, 0.4, list(range(16))))
    segments.add(4, 7, of_experts(pages[300:], 3, 0.8, [1, 2, 3, 5, 8, 13]))
    segments.add(7, 9, of_every_token(pages[200:], 2, 0.5))
    segments.add(20, 200, of_every_token(pages[100:], 40, 0.2))
    segments.add(20, 200, of_experts(pages[150:], 5, 0.6, list(range(0, 16, 2))))
    segments.add(20, 200, of_experts(pages[350:], 4, -0.3, list(range(16))))
    segments.add(200, 201, replace(of_every_token(pages, 3, 1.0), first_elem=[5, -1]))  # of another layer
    lora = MixtureLora.of(arena, segments, 1, EVERY_COLUMNS)
    found = mix_experts(rows, weights, spec, lora)
    plain = {
        name: unpack(matrix).float()
        for name in ("router", "shared_gate_up", "shared_down")
        for matrix in (getattr(weights, name),)
    }
    of_each = {name: [unpack(each).float() for each in getattr(weights, name)] for name in ("gate_up", "down")}
    want = mix_experts(
        rows.float(),
        replace(weights, **plain, **of_each),
        spec,
        MixtureLora.of(arena.float(), segments, 1, EVERY_COLUMNS),
    )
    bound = 1e-4 if of_arena == torch.float32 else 3e-2
    is_same = torch.isclose(found.float(), want, rtol=bound, atol=bound).all(1)
    # where products round inputs to bfloat16, a router's choice may change
    assert is_same.all() if of_arena == torch.float32 else is_same.float().mean() > 0.95
    base, is_base = mix_experts(rows, weights, spec), torch.ones(240, dtype=torch.bool)
    for begin, end, _ in segments:
        is_base[begin:end] = begin == 200
    assert torch.equal(found[is_base], base[is_base])
    changed = [0, 7, 8, *range(20, 200)]  # experts of rows 4 … 6 may have no adapter
    assert not torch.isclose(found[changed], base[changed]).all(1).any()


def test_rows_of_an_adapter_are_those_of_merged_weights():
    """Against weights with B·A added, expert by expert; an expert that the adapter leaves out stays as it is."""
    weights, generator = weights_of(SPEC), torch.Generator().manual_seed(4)
    arena = torch.randn(40, 1000, generator=generator) / 8
    rows, experts, rank = torch.randn(60, HIDDEN, generator=generator), [1, 2, 8, 9, 14], 3
    (part,) = adapter_rows(list(range(39, -1, -1)), rank, experts, with_router=False)
    flat = arena.flip(0).reshape(-1)
    gate_up, down = list(weights.gate_up), list(weights.down)
    for place, expert in enumerate(experts):
        slabs = flat[place * rank * SLAB :][: rank * SLAB].view(rank, SLAB)
        deltas = []
        for module, (inputs, outputs) in list(enumerate(WIDTHS))[1:]:
            a = slabs[:, part.a_offset[module] :][:, :inputs]
            b = slabs[:, part.b_offset[module] :][:, :outputs]
            deltas.append(part.scale * b.T @ a)
        gate_up[expert] = pack(unpack(weights.gate_up[expert]) + torch.cat(deltas[:2]))
        down[expert] = pack(unpack(weights.down[expert]) + deltas[2])
    segments = Segments()
    segments.add(10, 50, part)
    found = mix_experts(rows, weights, SPEC, MixtureLora.of(arena, segments, 0, COLUMNS))
    torch.testing.assert_close(
        found[10:50], mix_experts(rows, replace(weights, gate_up=gate_up, down=down), SPEC)[10:50], rtol=1e-3, atol=1e-4
    )
    base = mix_experts(rows, weights, SPEC)
    assert torch.equal(found[:10], base[:10])
    assert torch.equal(found[50:], base[50:])
    assert not torch.allclose(found[10:50], base[10:50], rtol=1e-2)
