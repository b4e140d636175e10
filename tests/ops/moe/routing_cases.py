"""Cases of routing tokens to experts by a GPU's kernels, against torch's; on a GPU, or interpreted on a CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from chorus.core.model.moe.experts import SharedOutputs, choose
from chorus.core.model.moe.listed_experts import ListedExperts
from chorus.core.model.moe.stacked_experts import StackedExperts
from chorus.core.model.specs.feed_forward import Routing, Scoring
from chorus.ops.moe.expert_tiles import Stack
from chorus.ops.moe.expert_tiles_schedule import num_tiles, tile_rows

DTYPES = torch.float32, torch.bfloat16

#: Experts, and how they are chosen: of Mixtral, Qwen3, Granite, gpt-oss, GLM-4 and DeepSeek, with odd numbers as well.
ROUTINGS = {
    "mixtral": (8, Routing(2, renormalised=True)),
    "qwen3": (20, Routing(8)),
    "granite": (5, Routing(3, Scoring.SOFTMAX_OF_CHOSEN)),
    "scaled": (32, Routing(4, Scoring.SOFTMAX_OF_CHOSEN, factor=1.5)),
    "glm-4": (24, Routing(3, Scoring.SIGMOID, renormalised=True, epsilon=1e-20, factor=2.5, corrected=True)),
    "groups": (24, Routing(4, Scoring.SIGMOID, renormalised=True, corrected=True, groups=4, kept_groups=2)),
    "groups by their best": (16, Routing(3, factor=1.5, groups=4, kept_groups=2, group_best=1)),
    "odd groups": (15, Routing(4, Scoring.SOFTMAX, groups=3, kept_groups=2)),
    "others at zero": (
        16,
        Routing(4, Scoring.SIGMOID, True, corrected=True, groups=4, kept_groups=2, masked_score=0.0),
    ),
    "one": (3, Routing(1, renormalised=True)),
    "all": (4, Routing(4)),
    "llama-4": (16, Routing(2, Scoring.SIGMOID_OF_CHOSEN, of_inputs=True)),
    "kolibri-1": (20, Routing(4, Scoring.SIGMOID_OF_CHOSEN, renormalised=True, epsilon=1e-20, corrected=True)),
    "groups of logits": (16, Routing(3, Scoring.SOFTMAX_OF_CHOSEN, corrected=True, groups=4, kept_groups=2)),
    "phi-moe": (16, Routing(2, Scoring.SPARSE_MIXER, jitter=0.1)),
}

#: Rows, experts, and experts of a row: few pairs and many, tiles of every size, more pairs than are sorted at once.
SORTED = [(1, 8, 2), (5, 16, 4), (70, 4, 2), (200, 6, 3), (9, 3, 3), (64, 4, 1), (400, 5, 3), (3, 64, 8), (0, 4, 2)]


def stacked(
    experts: int,
    hidden: int = 24,
    size: int = 8,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    **given: Any,
) -> StackedExperts:
    """Random experts of a layer, with their router; the same numbers for every dtype."""
    generator = torch.Generator().manual_seed(0)

    def weight(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) / shape[-1] ** 0.5).bfloat16().to(device, dtype)

    return StackedExperts(
        router=weight(experts, hidden) * 2,
        gate_up=Stack(weight(experts, 2 * size, hidden)),
        down=Stack(weight(experts, hidden, size)),
        **given,
    )


def random_rows(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def check_choice(name: str, rows: int, device: str) -> None:
    experts, routing = ROUTINGS[name]
    logits = random_rows(rows, experts, seed=rows) * 3
    correction = random_rows(experts, seed=1) if routing.corrected else None
    weights = stacked(experts, device=device, correction=None if correction is None else correction.to(device))
    found, want = weights.choose(logits.to(device), routing), choose(logits, routing, correction)
    assert found.experts.dtype == torch.int64
    assert found.weights.dtype == torch.float32
    assert torch.equal(found.experts.cpu(), want.experts)
    torch.testing.assert_close(found.weights.cpu(), want.weights, rtol=2e-6, atol=0)


def check_odd_logits(name: str, device: str) -> None:
    """Those that are equal, or no numbers, choose experts that there are."""
    experts, routing = ROUTINGS[name]
    correction = torch.zeros(experts, device=device) if routing.corrected else None
    rows = torch.zeros(1, experts), torch.full((1, experts), torch.nan), torch.full((1, experts), -torch.inf)
    logits = torch.cat(rows).to(device)
    chosen = stacked(experts, device=device, correction=correction).choose(logits, routing).experts
    assert ((chosen >= 0) & (chosen < experts)).all()
    assert chosen[0].tolist() == list(range(routing.per_token))


def check_logits(dtype: torch.dtype, device: str, *, bias: bool) -> None:
    """Products in float32, also of a router that no narrower dtype has. A row's bits don't depend on its company."""
    biases = random_rows(33, seed=3) if bias else None
    x, wide = random_rows(70, 51, seed=4).to(dtype)[:, :50], random_rows(33, 50, seed=5)
    x, there = x.to(device), None if biases is None else biases.to(device)
    for router in (wide, wide.to(dtype)):
        weights = replace(stacked(33, 50, dtype=dtype, device=device), router=router.to(device), router_bias=there)
        for rows in (70, 20):
            found = weights.logits(x[:rows])
            want = x[:rows].cpu().double() @ router.double().T + (0 if biases is None else biases.double())
            assert found.dtype == torch.float32
            assert (found.cpu().double() - want).abs().max() <= 1e-5 * want.abs().max()
        assert torch.equal(found[7:8], weights.logits(x[7:8]))
        assert torch.equal(found[[5, 2]], weights.logits(x[[5, 2]]))
    assert not len(weights.logits(x[:0]))
    assert not len(weights.choose(weights.logits(x[:0]), Routing(2)).experts)


def check_sort(rows: int, experts: int, each: int, device: str, *, skewed: bool) -> None:
    """Pairs are in the order of experts, and an expert's in the order of rows; each is in one tile of its expert.
    skewed: all rows go to the last experts.
    """
    from chorus.ops.moe.routing_triton import tiles_of  # needs triton

    chosen = random_rows(rows, experts, seed=0).topk(each).indices
    if skewed:
        chosen = (experts - 1 - torch.arange(each)).expand(rows, each).contiguous()
    tiles, flat = tiles_of(chosen.to(device), experts), chosen.flatten()
    assert tiles.pairs.tolist() == flat.argsort(stable=True).tolist()
    assert len(tiles.expert) == num_tiles(rows * each, experts, tiles.block_t)
    assert tiles.block_t == tile_rows(rows, rows * each, experts)
    pairs_of, experts_of = tiles.pairs.tolist(), flat.tolist()
    seen = []
    for expert, first, end in zip(tiles.expert.tolist(), tiles.first.tolist(), tiles.end.tolist(), strict=True):
        assert 0 <= end - first <= tiles.block_t
        pairs = pairs_of[first:end]
        assert {experts_of[pair] for pair in pairs} <= {expert}
        seen += pairs
    assert sorted(seen) == list(range(rows * each))


def check_sum(dtype: torch.dtype, shared: str, device: str) -> None:
    """Experts are added up as torch adds them, bit for bit but for the gates' sigmoid."""
    outputs, weights = random_rows(7, 3, 1030, seed=4).to(dtype), random_rows(7, 3, seed=5)
    added = there = None
    if shared != "none":
        gates = random_rows(7, 1, seed=6) if shared == "gated" else None
        added = SharedOutputs(random_rows(7, 1030, seed=7).to(dtype), gates)
        there = SharedOutputs(added.outputs.to(device), None if gates is None else gates.to(device))
    listed = ListedExperts(router=torch.zeros(1, 1), gate_up=[], down=[])
    found = stacked(3, device=device).add_up(outputs.to(device), weights.to(device), there).cpu()
    want = listed.add_up(outputs, weights, added)
    assert found.dtype == dtype
    if shared == "gated":
        torch.testing.assert_close(found, want, rtol=2.0**-7 if dtype == torch.bfloat16 else 1e-6, atol=1e-6)
    else:
        assert torch.equal(found, want)
