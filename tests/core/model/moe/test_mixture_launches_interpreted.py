"""Adapters on mixtures of experts by a GPU's launches, interpreted, against those of a CPU; bits of rows in other
company.

Run in a process that interprets, see `tests/interpreted.py`.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from chorus.core.model.compose.decoder_layer import DecoderLayer
from chorus.core.model.lora.lora_state import LoraState
from chorus.core.model.lora.lora_state_cuda import CudaLoraState, StepLimits
from chorus.core.model.moe.experts import ExpertPack, mix_experts
from chorus.core.model.moe.listed_experts import ListedExperts
from chorus.core.model.moe.mixture_launches import MixtureForm
from chorus.core.model.specs.attention import AttentionSpec
from chorus.core.model.specs.feed_forward import Experts, Routing
from chorus.core.model.specs.rope_config import RopeConfig
from chorus.core.requests.types import BASE_LORA_INDEX
from chorus.memory.pages.adapter_layout import AdapterLayout, AdapterPart
from chorus.memory.pages.layout import PageLayout
from chorus.memory.pages.projections import MIXTURE_ROLES, Role
from chorus.ops.gemm.packed_gemm import pack
from chorus.ops.lora.sgmv_tables import TablesFull
from chorus.ops.moe import mixture_tables

from ...tiny_config import LLAMA
from ..lora.test_lora_state_cuda import Resident

HIDDEN, NUM_PAGES, LAYER = 32, 40, 1
SPEC = Experts(6, 24, Routing(2, renormalised=True), shared_size=16, shared_gate=True)
ATTENTION = AttentionSpec(2, 1, 16, 0.25, RopeConfig(16), qkv_bias=False)
CONFIG = replace(LLAMA, architecture="Qwen3MoeForCausalLM", layers=(DecoderLayer(ATTENTION, SPEC),) * 2)
GATE_UP, DOWN = ("experts.gate_proj", "experts.up_proj"), "experts.down_proj"
EVERY, BOTH = tuple(range(6)), (0, 1)

#: Parts of adapters: all experts and the router; some experts, gate and up in several parts, and the shared expert; all
#: of it in the other layer; attention alone.
ADAPTERS = [
    [AdapterPart(4, 0.5, BOTH, ("gate",)), AdapterPart(3, 0.7, BOTH, (*GATE_UP, DOWN), experts=EVERY)],
    [
        AdapterPart(2, 0.4, BOTH, ("shared_expert.gate_proj", "shared_expert.down_proj", "shared_expert_gate")),
        AdapterPart(5, 0.3, BOTH, ("shared_expert.up_proj",)),
        AdapterPart(2, 0.9, BOTH, (*GATE_UP,), experts=(0, 3)),
        AdapterPart(1, 0.8, BOTH, (GATE_UP[0],), experts=(1, 5)),
        AdapterPart(8, 0.6, (LAYER,), (GATE_UP[1], DOWN), experts=(1, 2, 5)),
    ],
    [AdapterPart(8, 0.5, (0,), ("gate",)), AdapterPart(8, 0.5, (0,), (*GATE_UP, DOWN), experts=EVERY)],
    [AdapterPart(8, 0.5, BOTH, ("q_proj",))],
]

#: Steps of (adapter, tokens): decode steps; prompts; prompts, then decoding sequences; with adapters of these alone.
DECODED = [(0, 1), (1, 1), (BASE_LORA_INDEX, 1), (0, 1), (2, 1), (3, 1), (1, 1)]
PROMPTS = [(0, 40), (BASE_LORA_INDEX, 11), (1, 30), (0, 9), (2, 5)]
MIXED = [(1, 33), (0, 30), *DECODED]
TAIL = [(BASE_LORA_INDEX, 70), *DECODED]

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


@pytest.fixture(scope="module", autouse=True)
def exact():
    from ....ops.bf16_interpreter import fix_bf16, multiply_row_by_row

    fix_bf16()
    multiply_row_by_row()


class World:
    """A layer's experts, adapters in an arena, and both ways to compute them."""

    def __init__(self, dtype: torch.dtype = torch.float32, adapters: int = 4) -> None:
        self.generator = torch.Generator().manual_seed(0)
        layout = PageLayout(num_layers=2, kv_heads=1, head_dim=16, block_tokens=16, itemsize=dtype.itemsize)
        self.arena = (torch.randn(NUM_PAGES, layout.page_elems, generator=self.generator) / 4).to(dtype)
        self.dtype, self.adapters = dtype, [self._resident(parts, layout) for parts in ADAPTERS]
        self.cpu = LoraState(CONFIG, self.arena)
        limits = StepLimits(8, adapters=adapters, rows=16, tokens=128)
        make = {"max_stall": 0.0, "make_copy": lambda num_bytes: torch.Tensor.copy_}
        self.gpu = CudaLoraState(CONFIG, self.arena, layout, limits, **make)
        self.packed = self._weights(ExpertPack(dtype, pack)).packed(dtype)
        self.stacked = self._weights().stacked(dtype, torch.device("cpu"))

    def _resident(self, parts, layout):
        placed = AdapterLayout.build(parts, CONFIG.projections, layout.page_elems, layout.itemsize)
        pages = torch.randperm(NUM_PAGES, generator=self.generator)[: placed.num_pages].tolist()
        return Resident(placed, SimpleNamespace(parts=parts), pages)

    def _weights(self, packed=lambda weight: weight) -> ListedExperts:
        generator = torch.Generator().manual_seed(1)

        def matrix(*shape):
            return torch.randn(*shape, generator=generator) / shape[-1] ** 0.5

        return ListedExperts(
            router=matrix(SPEC.count, HIDDEN),
            gate_up=[packed(matrix(2 * SPEC.size, HIDDEN)) for _ in range(SPEC.count)],
            down=[packed(matrix(HIDDEN, SPEC.size)) for _ in range(SPEC.count)],
            shared_gate_up=packed(matrix(2 * SPEC.shared_size, HIDDEN)),
            shared_down=packed(matrix(HIDDEN, SPEC.shared_size)),
            shared_gate=matrix(1, HIDDEN),
        )

    def rows(self, step):
        return torch.randn(sum(length for _, length in step), HIDDEN, generator=self.generator).to(self.dtype)

    def on_cpu(self, x, step):
        self.cpu.set_step(self.adapters, [index for index, _ in step], [length for _, length in step])
        return mix_experts(x, self.packed, SPEC, self.cpu.mixture(LAYER))

    def on_gpu(self, x, step):
        lengths = [length for _, length in step]
        launches = self.gpu.begin_ragged(self.adapters, [index for index, _ in step], lengths)
        return mix_experts(x, self.stacked, SPEC, launches.mixture(LAYER))


def tokens_of(step):
    """The adapter of each token."""
    return torch.tensor([index for index, length in step for _ in range(length)])


@pytest.mark.parametrize("step", [DECODED, MIXED], ids=["decoded", "mixed"])
def test_both_ways_give_the_same(step):
    compare(step, torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "dtype"),
    [(PROMPTS, torch.float32), (TAIL, torch.float32), *((step, torch.bfloat16) for step in (DECODED, PROMPTS, MIXED))],
)
def test_both_ways_give_the_same_in_other_steps(step, dtype):
    compare(step, dtype)


def compare(step, dtype):
    world = World(dtype)
    x = world.rows(step)
    want, found = world.on_cpu(x, step).double(), world.on_gpu(x, step).double()
    assert (found - want).abs().max() <= TOLERANCE[dtype] * want.abs().max()
    base = mix_experts(x, world.stacked, SPEC)
    own, of = found != base.double(), tokens_of(step)
    assert not own[(of != 0) & (of != 1)].any(), "rows without adapters on this layer's experts have other bits"
    assert own[(of == 0) | (of == 1)].any(1).all()


@pytest.mark.slow
@pytest.mark.parametrize("step", [DECODED, PROMPTS, MIXED], ids=["decoded", "prompts", "mixed"])
def test_a_rows_bits_do_not_depend_on_its_company(step):
    """Of sequences in another order, without some of the others, which then have other places in the tables."""
    world = World()
    x = world.rows(step)
    want, begins = world.on_gpu(x, step), [0]
    for _, length in step:
        begins.append(begins[-1] + length)
    prompts = [at for at, (_, length) in enumerate(step) if length > 1]
    fewer = [*prompts[::-1], *[at for at in range(len(step)) if step[at][1] == 1][::-2]]
    rows = torch.cat([torch.arange(begins[at], begins[at + 1]) for at in fewer])
    assert torch.equal(world.on_gpu(x[rows], [step[at] for at in fewer]), want[rows])


def test_captured_launches_read_the_tables_of_the_present_step():
    """Of other adapters than at capture, of none, of one that was moved to other pages."""
    world = World()
    x, captured = world.rows([(0, 1)] * 4), world.gpu.bucket(4)

    def step(*indices):
        found = world.gpu.begin_bucket(world.adapters, list(indices), captured)
        want = world.on_cpu(x, [(index, 1) for index in indices])
        return found, want

    launches, want = step(0, 1, -1, 2)
    assert launches.mixture_groups == MIXTURE_ROLES
    for indices in ((0, 1, -1, 2), (1, 1, 2, 0), (-1, -1, -1, 1)):
        _, want = step(*indices)
        found = mix_experts(x, world.stacked, SPEC, launches.mixture(LAYER))
        torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)
    adapter = world.adapters[1]
    moved = [page for page in range(NUM_PAGES) if page not in adapter.pages][: len(adapter.pages)]
    world.arena[moved] = world.arena[adapter.pages]
    world.arena[adapter.pages] = torch.nan
    adapter.pages = moved
    step(-1, -1, -1, 1)
    assert torch.equal(mix_experts(x, world.stacked, SPEC, launches.mixture(LAYER)), found)
    world.gpu.rest()
    assert torch.equal(
        mix_experts(x, world.stacked, SPEC, launches.mixture(LAYER)), mix_experts(x, world.stacked, SPEC)
    )


def test_a_step_has_the_launches_of_what_its_adapters_change():
    world = World()
    captured = world.gpu.bucket(2)
    router, experts = (Role.ROUTER,), (Role.EXPERT_GATE_UP, Role.EXPERT_DOWN)
    shared = (Role.SHARED_GATE_UP, Role.SHARED_DOWN, Role.SHARED_GATE)
    for indices, groups in (((0, -1), router + experts), ((1, -1), shared + experts), ((3, -1), ())):
        launches = world.gpu.begin_bucket(world.adapters, list(indices), captured)
        assert launches.mixture_groups == groups
        assert (launches.mixture(LAYER) is None) == (not groups)


class Operators(TorchDispatchMode):
    """Records the operators that are called, without views, which launch nothing."""

    def __init__(self):
        super().__init__()
        self.called = []

    def __torch_dispatch__(self, called, types, args=(), kwargs=None):
        name = called.overloadpacket.__name__
        if not called.is_view and name != "_unsafe_view":
            self.called.append(name)
        return called(*args, **(kwargs or {}))


def test_rows_of_a_decode_step_are_gathered_for_experts_in_one_launch():
    """Each token's row as often as it goes to experts, whatever their numbers."""
    world = World()
    x, chosen = world.rows([(0, 1)] * 3), torch.tensor([[3, 1], [0, 2], [1, 3]])
    world.gpu.begin_bucket(world.adapters, [0, -1, 0], world.gpu.bucket(3))
    routed = world.gpu.mixture_launches(LAYER, MixtureForm((Role.EXPERT_GATE_UP,))).routed(chosen)
    with Operators() as operators:
        rows = routed.gathered(x)
    assert torch.equal(rows, x[[0, 0, 1, 1, 2, 2]])
    assert operators.called == ["clone"]


def test_rows_of_adapters_are_used_again(monkeypatch):
    """With room for two adapters, the one that was unused longest leaves; a step of three is refused."""
    world = World(adapters=2)
    written = []
    entries = mixture_tables.MixtureTables._entries  # noqa: SLF001
    monkeypatch.setattr(
        mixture_tables.MixtureTables, "_entries", lambda self, parts: written.append(parts) or entries(self, parts)
    )
    for indices in ((0, 1), (1, 0), (1, 2), (2, 1), (0, 2)):
        step = [(index, 1) for index in indices]
        x = world.rows(step)
        torch.testing.assert_close(world.on_gpu(x, step), world.on_cpu(x, step), rtol=1e-4, atol=1e-5)
    own = [tuple(world.gpu.of_mixtures.rows_of(adapter)) for adapter in world.adapters]
    assert written == [own[0], own[1], own[2], own[0]]
    with pytest.raises(TablesFull, match="3 adapters on experts, but tables have 2 rows"):
        world.on_gpu(world.rows([(0, 1)] * 3), [(0, 1), (1, 1), (2, 1)])
