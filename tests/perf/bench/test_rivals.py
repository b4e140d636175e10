"""The other ways to compute LoRA products compute them, so that their times mean something."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

from chorus.ops.sgmv_schedule import decode
from chorus.perf.bench.lora_case import ArenaPages, LoraCase, num_pages
from chorus.perf.bench.rivals import GatherBmm, Loop, RivalAbsent, VllmKernels
from chorus.perf.bench.sizes import SIZES

TINY = SIZES["tiny"]
LENGTHS, RANKS, LAYERS = [2, 1, 1], [4, 8, 2], 2


@pytest.fixture
def case() -> LoraCase:
    arena = ArenaPages(TINY, torch.float32, "cpu", num_pages(TINY, RANKS, LAYERS, 4), seed=0)
    return LoraCase(TINY, arena, LENGTHS, RANKS, LAYERS, decode(4, 8), 8)


def outputs(rival_type: type, case: LoraCase) -> list[torch.Tensor]:
    """The product that a way adds to y, with the same weights for every way."""
    torch.manual_seed(0)
    rival = rival_type(case)
    for group in case.groups:
        group.y.zero_()
    rival.run()
    return [group.y.clone() for group in case.groups]


def definition(case: LoraCase) -> list[torch.Tensor]:
    """Both products, token by token, of each adapter's own rank."""
    torch.manual_seed(0)
    weights = Loop(case).weights
    found = [torch.zeros_like(group.y) for group in case.groups]
    owner = [index for index, length in enumerate(LENGTHS) for _ in range(length)]
    for layer in weights:
        for y, group, modules in zip(found, case.groups, layer, strict=True):
            for (_, column, width), (a, b) in zip(group.modules, modules, strict=True):
                for token, adapter in enumerate(owner):
                    rank = RANKS[adapter]
                    h = a[adapter, :rank] @ group.x[token]
                    y[token, column : column + width] += b[adapter, :, :rank] @ h
    return found


@pytest.mark.parametrize("rival_type", [GatherBmm, Loop])
def test_values(case, rival_type):
    for got, want in zip(outputs(rival_type, case), definition(case), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))


def test_vllm_is_optional(case, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm.lora.ops.triton_ops", None)
    with pytest.raises(RivalAbsent, match="vllm's LoRA kernels can't be imported"):
        VllmKernels(case)


class Meta:
    """The kernels' arguments for a step, in vLLM's order."""

    @staticmethod
    def make(max_loras: int, max_num_tokens: int, device: torch.device) -> Meta:
        return Meta()

    def prepare_tensors(self, mapping: torch.Tensor) -> None:
        assert mapping.dtype is torch.int32
        self.mapping = mapping.long()

    def meta_args(self, token_nums: int, specialize_active_lora: bool) -> tuple:
        assert specialize_active_lora
        return (self.mapping[:token_nums], None, None, None, None, None, None)


def shrink(inputs, weights, output, mapping, *rest) -> None:
    *_, scaling = rest
    assert len(rest) == 7
    for index, a in enumerate(weights):
        output[index] = scaling * torch.einsum("tk,trk->tr", inputs, a[mapping])


def expand(inputs, weights, output, mapping, *rest, offset_start: int, add_inputs: bool) -> None:
    assert len(rest) == 6
    assert add_inputs
    column = offset_start
    for index, b in enumerate(weights):
        output[:, column : column + b.shape[1]] += torch.einsum("tr,tnr->tn", inputs[index], b[mapping])
        column += b.shape[1]


def test_vllm_is_called_as_its_kernels_want(case, monkeypatch):
    """Stand-ins of the documented shapes: A [adapters, rank, in], B [adapters, out, rank], h [slices, tokens, rank]."""
    ops = ModuleType("vllm.lora.ops.triton_ops")
    ops.lora_shrink, ops.lora_expand, ops.LoRAKernelMeta = shrink, expand, Meta
    for name in ("vllm", "vllm.lora", "vllm.lora.ops"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "vllm.lora.ops.triton_ops", ops)
    for got, want in zip(outputs(VllmKernels, case), definition(case), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))
