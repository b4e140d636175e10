"""SGMV over pages: the torch operator against its definition, the native decoder against the torch one.

Logits of whole decoder steps are compared, with every mix of ranks, segment lengths, modules and layers. Bounds are on
the root-mean-square of the difference relative to the logits': in float32 only the order of additions differs; in bf16
both are compared with the same weights computed in float32.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from chorus.core.config import EngineConfig
from chorus.core.executors.cpu import CpuExecutor
from chorus.core.model.batch import StepBatch
from chorus.core.model.lora.lora_state import LoraState
from chorus.core.model.read_config import read_model_config
from chorus.core.model.weights.layer_weights import LayerWeights
from chorus.memory.pages.adapter_layout import AdapterLayout, AdapterPart
from chorus.memory.pages.layout import PageLayout
from chorus.ops.gemm.packed_gemm import unpack
from chorus.ops.lora.sgmv import AdapterRows, Segments, sgmv

from ...tables import LAYER_MATRICES, LLAMA
from ..lora.sgmv_ref import sgmv_ref

pytestmark = pytest.mark.wide

F32_BOUND = 5e-6
BF16_BOUND = 0.03
BF16_OVER_TORCH = 1.25  # how much farther from float32 the native decoder may be than torch in bf16

LENGTHS = [1, 2, 3, 4, 5, 17, 200]
RANKS = [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 64, 100, 255, 256]
LAYERS, NUM_PAGES = 3, 1500


class Base:
    """A random checkpoint whose weights bf16 holds exactly, and its executors, made once each."""

    def __init__(
        self, path: Path, block_tokens: int, hidden: int, ffn: int, heads: int, kv_heads: int, head_dim: int
    ) -> None:
        self.block_tokens = block_tokens
        self.path = path
        self._executors: dict[tuple[torch.dtype, str, int], CpuExecutor] = {}
        description = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": 97,
            "hidden_size": hidden,
            "intermediate_size": ffn,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "max_position_embeddings": 256,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
            "dtype": "bfloat16",
        }
        (path / "config.json").write_text(json.dumps(description))
        self.config = read_model_config(path)
        generator = torch.Generator().manual_seed(3)
        tensors = {"model.norm.weight": torch.ones(hidden)}

        def weight(name: str, out: int, width: int) -> None:
            tensors[f"{name}.weight"] = torch.randn(out, width, generator=generator) / width**0.5

        weight("model.embed_tokens", 97, hidden)
        weight("lm_head", 97, hidden)
        for layer in range(LAYERS):
            for name in ("input_layernorm", "post_attention_layernorm"):
                tensors[f"model.layers.{layer}.{name}.weight"] = torch.ones(hidden)
            for each in self.config.projections.layers[layer]:
                weight(f"model.layers.{layer}.{each.path}", each.outputs, each.inputs)
        save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, path / "model.safetensors")

    def executor(self, dtype: torch.dtype, kernels: str, threads: int = 1) -> CpuExecutor:
        key = dtype, kernels, threads
        if key not in self._executors:
            config = EngineConfig(
                model=self.path,
                dtype=str(dtype).removeprefix("torch."),
                cpu_kernels=kernels,
                threads=threads,
                num_pages=NUM_PAGES,
                block_tokens=self.block_tokens,
                max_num_seqs=1,
            )
            self._executors[key] = CpuExecutor(config)
        return self._executors[key]


SHAPES = {
    "usual": (16, 64, 88, 4, 2, 16),
    "small pages": (8, 48, 80, 3, 3, 16),
    "large pages": (64, 40, 72, 2, 2, 32),
    "one kv head": (32, 128, 352, 4, 1, 32),
    "odd widths": (100, 36, 54, 3, 1, 10),
    "gate and up in panels of their own": (16, 64, 96, 4, 2, 16),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Base]:
    """`base("usual")`: a Base of SHAPES."""
    return cache(lambda name: Base(tmp_path_factory.mktemp("base"), *SHAPES[name]))


def random_parts(rng: random.Random) -> list[AdapterPart]:
    """An adapter: one rank everywhere, or several parts with layers and modules of their own."""
    rank = rng.choice(RANKS)
    modules = tuple(name for name in LLAMA if rng.random() < 0.7) or ("q_proj",)
    kind = rng.randrange(3)
    if kind == 0:
        return [AdapterPart(rank, 0.7, tuple(range(LAYERS)), modules)]
    if kind == 1:
        layers = tuple(sorted(rng.sample(range(LAYERS), rng.randint(1, LAYERS - 1))))
        return [AdapterPart(rank, 1.3, layers, modules)]
    places: dict[tuple[int, tuple[int, ...]], list[str]] = {}
    for module in modules:
        split = rng.randrange(LAYERS + 1)
        for layers in (tuple(range(split)), tuple(range(split, LAYERS))):
            if layers:
                places.setdefault((rng.choice(RANKS), layers), []).append(module)
    return [AdapterPart(rank, 1.0, layers, tuple(names)) for (rank, layers), names in places.items()]


@dataclass
class Step:
    """One ragged step: a row per segment, `lengths[i]` tokens of a sequence of its own; its KV goes to `tables[i]`.

    adapters: page → the random numbers that it holds.
    """

    base: Base
    layout: PageLayout
    lengths: list[int]
    tables: list[list[int]]
    token_ids: torch.Tensor
    generator: torch.Generator
    free: list[int]
    segments: Segments = field(default_factory=Segments)
    adapters: dict[int, torch.Tensor] = field(default_factory=dict)

    def add_adapter(self, begin: int, end: int, parts: list[AdapterPart]) -> None:
        """Let tokens begin … end-1 use an adapter that lies in shuffled pages."""
        config, layout = self.base.config, self.layout
        placed = AdapterLayout.build(parts, config.projections, layout.page_elems, 4)
        pages = [self.free.pop() for _ in range(placed.num_pages)]
        for page in pages:
            self.adapters[page] = (0.1 * torch.randn(layout.page_elems, generator=self.generator)).bfloat16()
        for part, place in zip(parts, placed.parts, strict=True):
            slabs = place.slabs
            rows = AdapterRows(
                pages,
                part.rank,
                part.scale / part.rank**0.5,
                slabs.slab_elems,
                slabs.a_offset,
                slabs.b_offset,
                place.first_elem,
            )
            self.segments.add(begin, end, rows)

    def add_rows(self, begin: int, end: int, which: int, factor: float) -> None:
        """Let tokens begin … end-1 use the rows of segment `which`, too, with another scale; -1 takes them off."""
        rows = self.segments.rows[which]
        self.segments.add(begin, end, replace(rows, scale=factor * rows.scale))

    def logits(
        self, dtype: torch.dtype, kernels: str, threads: int = 1, merged: Sequence[AdapterRows] = ()
    ) -> torch.Tensor:
        """Logits of every token, computed with `merged` in the weights. All that no adapter holds is NaN, as if others
        had left it.
        """
        executor = self.base.executor(dtype, kernels, threads)
        arena = executor.arena
        assert arena.layout.page_elems == self.layout.page_elems
        arena.pages.fill_(float("nan"))
        for page, values in self.adapters.items():
            arena.pages[page] = values
        lora = LoraState(executor.config, arena.pages)
        lora.in_layers.segments = replace(self.segments, rows=[replace(rows) for rows in self.segments.rows])
        attention = executor.decoder.new_attention()
        indptr = [0, *accumulate(self.lengths)]
        width = max(len(table) for table in self.tables)
        attention.plan(indptr, torch.tensor([t + [0] * (width - len(t)) for t in self.tables]), self.lengths)
        spans = [range(length) for length in self.lengths]
        page = [
            table[position // self.layout.block_tokens]
            for table, span in zip(self.tables, spans, strict=True)
            for position in span
        ]
        positions = torch.tensor([position for span in spans for position in span])
        offset = positions % self.layout.block_tokens
        batch = StepBatch(self.token_ids, positions, offset, torch.tensor([page]), attention, lora)
        with torch.inference_mode():
            if merged:
                batch.merged = True
                executor.decoder.use_merged(merged_layers(executor.decoder, lora, merged))
            return executor.decoder.forward(batch).clone()  # the next step overwrites them


def merged_layers(decoder: Any, lora: LoraState, parts: Sequence[AdapterRows]) -> list[LayerWeights]:
    """The decoder's layers with an adapter in them; unchanged modules are the decoder's own."""
    layers = list(decoder.layers)
    for part in parts:
        part._blocks.clear()  # noqa: SLF001 - found for other pages
    for index, layer in enumerate(layers):
        for name in LAYER_MATRICES:
            here = [part for part in parts if part.first_elem[index] >= 0]
            here = [part for part in here if any(part.a_offset[module] >= 0 for module in lora.modules(index, name))]
            if here:
                out = torch.full_like(unpack(origin := layer[name]), float("nan"))
                assert decoder.merge(index, name, here, origin, out) < 10
                layer = {**layer, name: out}
        layers[index] = layer
    return layers


def random_step(seed: int, base: Base, lengths: list[int]) -> Step:
    """A step without adapters."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    config = base.config
    layout = PageLayout(LAYERS, config.num_kv_heads, config.head_dim, base.block_tokens, 2)
    free = list(range(1, NUM_PAGES))
    rng.shuffle(free)
    lengths = sorted(lengths, key=lambda length: length == 1)  # single tokens last, as every step has them
    tables = [[free.pop() for _ in range(-(-length // layout.block_tokens))] for length in lengths]
    token_ids = torch.randint(0, config.vocab_size, (sum(lengths),), generator=generator)
    return Step(base, layout, lengths, tables, token_ids, generator, free)


def mixed_step(seed: int, base: Base, lengths: list[int]) -> Step:
    """A step whose rows have an adapter of their own each, some none."""
    step, rng = random_step(seed, base, lengths), random.Random(seed)
    begin = 0
    for length in step.lengths:
        if rng.random() < 0.85:
            step.add_adapter(begin, begin + length, random_parts(rng))
        begin += length
    return step


def distance(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Root-mean-square of the difference over that of the expected values; NaN counts as infinitely far."""
    value = float((actual.double() - expected.double()).norm() / expected.double().norm())
    return value if value == value else float("inf")


def mixes() -> list[tuple[int, list[int]]]:
    """Seeds and segment lengths: each length alone, all of them, and many tokens in few segments and the reverse."""
    alone = [(seed, [length]) for seed, length in enumerate(LENGTHS)]
    rng = random.Random(0)
    mixed = [(100 + i, rng.choices(LENGTHS[:-1], k=rng.randint(2, 20))) for i in range(12)]
    return [*alone, *mixed, (200, [1] * 32), (201, LENGTHS), (202, [200, 200, 1]), (203, [2] * 9), (204, [3, 97, 98])]


@pytest.mark.native
@pytest.mark.parametrize(("seed", "lengths"), mixes())
def test_native_and_torch_agree(base, seed, lengths):
    """The shapes take turns: `test_every_rank_with_every_length` has each length in one of them."""
    step = mixed_step(seed, base("usual" if seed % 2 else "gate and up in panels of their own"), lengths)
    expected = step.logits(torch.float32, "torch")
    assert distance(step.logits(torch.float32, "native"), expected) < F32_BOUND
    by_torch = distance(step.logits(torch.bfloat16, "torch"), expected)
    by_native = distance(step.logits(torch.bfloat16, "native"), expected)
    assert by_native < min(BF16_BOUND, BF16_OVER_TORCH * by_torch)


def twice_step(base: Base, lengths: list[int], ranks: tuple[int, int]) -> Step:
    """Every token has two adapters on all modules, the second taken off; the last row only that."""
    step = random_step(sum(lengths), base, lengths)
    own, merged = (AdapterPart(rank, 1.0, tuple(range(LAYERS)), LLAMA) for rank in ranks)
    indptr = [0, *accumulate(step.lengths)]
    step.add_adapter(indptr[-2], indptr[-1], [merged])
    step.add_rows(0, indptr[-2], 0, factor=-1)
    step.segments.rows[0] = replace(step.segments.rows[0], scale=-step.segments.rows[0].scale)
    for begin, end in pairwise(indptr[:-1]):
        step.add_adapter(begin, end, [own])
    return step


@pytest.mark.native
@pytest.mark.parametrize("lengths", [[1, 1], [1] * 9, [3, 2, 1], [5, 13, 1], [60, 1, 1], [200, 17, 3, 1]], ids=str)
@pytest.mark.parametrize("ranks", [(8, 8), (1, 5), (33, 16)], ids=str)
@pytest.mark.parametrize("shape", ["usual", "gate and up in panels of their own"])
def test_entries_of_a_token_may_share_a_module(base, shape, lengths, ranks):
    step = twice_step(base(shape), lengths, ranks)
    assert max(step.segments.level) == 1
    expected = step.logits(torch.float32, "torch")
    assert distance(step.logits(torch.float32, "native"), expected) < F32_BOUND
    assert distance(step.logits(torch.bfloat16, "native"), expected) < BF16_BOUND
    for threads in (2, 3):
        assert torch.equal(step.logits(torch.bfloat16, "native", threads), step.logits(torch.bfloat16, "native"))


@pytest.mark.native
def test_an_adapter_taken_off_itself_leaves_the_base_model(base):
    step = random_step(1, base("usual"), [4, 1])
    expected = step.logits(torch.float32, "native")
    step.segments = Segments()  # a step's segments don't change once it has run
    step.add_adapter(0, 5, [AdapterPart(16, 1.0, tuple(range(LAYERS)), LLAMA)])
    with_adapter = replace(step.segments)
    assert distance(step.logits(torch.float32, "native"), expected) > 0.05
    step.segments = with_adapter
    step.add_rows(0, 5, 0, factor=-1)
    assert distance(step.logits(torch.float32, "native"), expected) < F32_BOUND


@pytest.mark.native
@pytest.mark.parametrize("threads", [2, 3, 5])
@pytest.mark.parametrize("lengths", [[1] * 9, [1] * 40, [2, 1, 1], [60, 1, 1, 1], [200, 17, 3]], ids=str)
def test_threads_share_the_work_without_a_trace(base, threads, lengths):
    """The threads' shares of the work depend on luck; the logits don't, to the last bit."""
    step = mixed_step(len(lengths), base("usual"), lengths)
    expected = step.logits(torch.bfloat16, "native")
    for _ in range(5):
        assert torch.equal(step.logits(torch.bfloat16, "native", threads), expected)


@pytest.mark.native
@pytest.mark.parametrize("rank", RANKS)
def test_every_rank_with_every_length(base, rank):
    """Each segment is as near to its own logits as a whole step has to be. They have an adapter each, which lie in the
    same pages; the last has none.
    """
    step = random_step(rank, base("usual"), [*LENGTHS, 1])
    indptr = [0, *accumulate(step.lengths)]
    step.add_adapter(0, indptr[1], [AdapterPart(rank, 1.0, tuple(range(LAYERS)), LLAMA)])
    for segment, (begin, end) in enumerate(pairwise(indptr[1:-1]), start=1):
        step.add_rows(begin, end, 0, factor=1 + segment / 8)
    expected = step.logits(torch.float32, "torch")
    by_native = {F32_BOUND: step.logits(torch.float32, "native"), BF16_BOUND: step.logits(torch.bfloat16, "native")}
    step.segments = Segments()
    without = step.logits(torch.float32, "torch")
    for begin, end in pairwise(indptr):
        changes = distance(without[begin:end], expected[begin:end]) > 0.05
        assert changes == (end < indptr[-1]), "adapters change other segments than theirs"
        for bound, logits in by_native.items():
            assert distance(logits[begin:end], expected[begin:end]) < bound


@pytest.mark.native
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", range(2))
def test_page_boundaries_anywhere(base, shape, seed):
    """Widths and page sizes for which pages end anywhere in a layer's slabs, and slabs anywhere in a page."""
    step = mixed_step(seed, base(shape), random.Random(seed).choices(LENGTHS[:-1], k=9))
    expected = step.logits(torch.float32, "torch")
    assert distance(step.logits(torch.float32, "native"), expected) < F32_BOUND


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", range(2))
def test_torch_does_what_the_definition_says(base, shape, seed):
    step = mixed_step(seed, base(shape), random.Random(seed).choices([1, 2, 3, 5], k=4))
    arena = torch.full((NUM_PAGES, step.layout.page_elems), float("nan"))
    for page, values in step.adapters.items():
        arena[page] = values
    for shape in step.base.config.projections.gemm_shapes:
        for layer in range(LAYERS):
            x = torch.randn(sum(step.lengths), shape.inputs, generator=step.generator)
            actual, expected = torch.ones(len(x), shape.outputs), torch.ones(len(x), shape.outputs)
            sgmv(actual, x, arena, step.segments, layer, shape.modules)
            sgmv_ref(expected, x, arena, step.segments, layer, shape.modules)
            torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)
