"""Schedules that a step's rows get on a GPU, and the tiles they are cut into."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch

from chorus.core.model.lora.lora_state_cuda import CudaLoraState, StepLimits
from chorus.core.model.lora.sample_adapters import SampleAdapters
from chorus.core.requests.types import BASE_LORA_INDEX
from chorus.graphs.runner import NO_TAIL, USUAL_ROOM, LaunchSize
from chorus.memory.pages.adapter_layout import AdapterLayout, AdapterPart, uniform_parts
from chorus.memory.pages.layout import PageLayout
from chorus.ops.lora.sgmv_schedule import decode, prefill
from chorus.ops.lora.sgmv_tables import BEGIN, END, RANK, SCALE, TABLE_ROW
from chorus.ops.lora.sgmv_tiles import MERGED_TERMS

from ....tables import hybrid_table
from ...tiny_config import LLAMA

CONFIG = LLAMA
LAYOUT = PageLayout(num_layers=2, kv_heads=1, head_dim=16, block_tokens=16, itemsize=2)
MAX_RANK = 32


@dataclass(eq=False)
class Resident:
    """The part of an adapter that a step's tables are written from."""

    layout: AdapterLayout
    manifest: SimpleNamespace
    pages: list[int] = field(default_factory=list)
    transfer: None = None


def resident(rank: int) -> Resident:
    part = AdapterPart(rank, 1.0, (0, 1), CONFIG.projections.names)
    layout = AdapterLayout.build((part,), CONFIG.projections, LAYOUT.page_elems, LAYOUT.itemsize)
    return Resident(layout, SimpleNamespace(parts=(part,)), list(range(layout.num_pages)))


@pytest.fixture
def state() -> CudaLoraState:
    return CudaLoraState(
        CONFIG,
        torch.zeros(1, LAYOUT.page_elems, dtype=torch.bfloat16),
        LAYOUT,
        StepLimits(MAX_RANK, adapters=4, rows=16, tokens=512),
        max_stall=0.0,
        make_copy=lambda num_bytes: torch.Tensor.copy_,
    )


def begin(state: CudaLoraState, *rows: tuple[int, int]):
    """A step of (slot, tokens) rows of adapters of ranks 4, 16 and 32."""
    adapters = [resident(rank) for rank in (4, 16, 32)]
    launches = state.begin_ragged(adapters, [lora_index for lora_index, _ in rows], [length for _, length in rows])
    tiles = [(row[BEGIN], row[END]) for row in state.tables.tiles.tolist() if row[TABLE_ROW] >= 0]
    return launches, tiles


def test_decode_rows_behind_a_prompt_have_the_schedule_of_a_decode_step(state):
    launches, tiles = begin(state, (0, 100), (BASE_LORA_INDEX, 7), (1, 1), (2, 1), (BASE_LORA_INDEX, 1), (1, 1))
    assert launches.schedule == prefill(107, 16), "of the adapters that have tokens there, rank 4"
    assert launches.tail is not None
    assert launches.tail.schedule == decode(4, MAX_RANK) == state.bucket(4).schedule
    assert launches.tail.border == 107
    assert (launches.num_tiles, launches.tail.num_tiles) == (2, 3)
    assert tiles == [(0, 64), (64, 100), (0, 1), (1, 2), (3, 4)], "the tail's are counted from the border"


def test_an_adapter_of_a_prompt_and_of_decode_rows_is_cut_between_them(state):
    launches, tiles = begin(state, (0, 70), *[(0, 1)] * 10)
    assert tiles == [(0, 64), (64, 70), *((token, token + 1) for token in range(10))]
    assert (launches.num_tiles, launches.tail.num_tiles, launches.tail.border) == (2, 10, 70)


def test_steps_of_prompts_or_of_decode_rows_alone_have_one_schedule(state):
    launches, tiles = begin(state, (0, 70), (1, 30))
    assert launches.tail is None
    assert launches.schedule == prefill(100, 16)
    assert tiles == [(0, 64), (64, 70), (70, 100)]
    launches, tiles = begin(state, (0, 1), (1, 1), (2, 1))
    assert launches.tail is None
    assert launches.schedule == decode(3, MAX_RANK)
    launches, _ = begin(state, (0, 100), (BASE_LORA_INDEX, 1))
    assert launches.tail is None, "its decode rows have no adapter"
    launches, _ = begin(state, (BASE_LORA_INDEX, 100), (0, 1))
    assert (launches.num_tiles, launches.tail.num_tiles) == (0, 1), "only they have"


def test_kernels_are_tried_with_more_rows_than_the_tables_hold_adapters():
    """Where a step has fewer adapters than the largest bucket has rows, rows share them, a tile each."""
    limits = StepLimits(MAX_RANK, adapters=1, rows=64, tokens=512)
    state = CudaLoraState(
        CONFIG,
        torch.zeros(2, LAYOUT.page_elems, dtype=torch.bfloat16),
        LAYOUT,
        limits,
        max_stall=0.0,
        make_copy=lambda num_bytes: torch.Tensor.copy_,
    )
    samples = SampleAdapters(state, 64, 0)
    for rows in (1, 16, 64):
        assert samples.launches(rows).num_tiles == rows
        tiles = [row for row in state.tables.tiles.tolist() if row[TABLE_ROW] >= 0]
        assert [(row[BEGIN], row[END]) for row in tiles] == [(token, token + 1) for token in range(rows)]
        assert len({row[TABLE_ROW] for row in tiles}) == min(rows, 32), "two adapters of up to 16 parts"


def test_sample_adapters_have_pages_of_their_own(state):
    """As far as a quarter of the free memory goes, so that a timed step finds none of them in a cache."""
    own = resident(16).layout.num_pages
    page_bytes = LAYOUT.page_elems * LAYOUT.itemsize
    for free, num_pages in ((1 << 30, 3 * own), (4 * (own + 1) * page_bytes, own + 1), (0, 1)):
        with SampleAdapters(state, 3, free) as samples:
            assert samples.pages.shape == (num_pages, LAYOUT.page_elems)
            assert samples.pages.std() > 0
            assert state.arena is samples.pages
            samples.launches(3)
            rows = sorted({row[TABLE_ROW] for row in state.tables.tiles.tolist() if row[TABLE_ROW] >= 0})
            found = [page for row in rows for page in state.tables.pages[row, :own].tolist()]
        assert found == [index % num_pages for index in range(3 * own)]
        assert len(state.arena) == 1
        assert not state.arena.any(), "the arena itself is left alone"


def test_a_captured_step_has_as_few_launches_as_it_needs(state):
    """Of prompts alone no launch for decode rows; with many adapters or decode rows more tiles, each for itself."""
    captured, adapters = state.padded(128), [resident(rank) for rank in (4, 16, 32)]
    usual = captured.num_tiles

    def room(*rows: tuple[int, int]):
        found = state.begin_padded(adapters, [index for index, _ in rows], [length for _, length in rows], captured)
        assert found.eager is None
        assert found.num_tiles == usual * 4**found.room.prompts
        assert (found.tail is None) == (found.room.tail == NO_TAIL.tail)
        return found.room

    assert room((0, 100), (1, 20)) == NO_TAIL
    assert room((0, 100), (1, 1)) == USUAL_ROOM
    assert room(*[(index % 3, 2) for index in range(12)]) == LaunchSize(1, NO_TAIL.tail)
    assert room((0, 100), *[(1, 1)] * 16) == USUAL_ROOM


def records(state: CudaLoraState, num_tiles: int) -> list[list[tuple[int, int, float] | None]]:
    """Of each tile: the first token, the rank and the scale of its records, None for an empty one."""
    table = state.tables.tiles[: num_tiles * MERGED_TERMS]
    scales = table[:, SCALE].view(torch.float32).tolist()
    found = [
        (row[BEGIN], row[RANK], scale) if row[TABLE_ROW] >= 0 else None
        for row, scale in zip(table.tolist(), scales, strict=True)
    ]
    return [found[at : at + MERGED_TERMS] for at in range(0, len(found), MERGED_TERMS)]


def test_a_merged_steps_tile_takes_the_merged_adapter_off_and_adds_the_rows_own(state):
    merged, other = resident(4), resident(16)
    captured = state.bucket(8, MERGED_TERMS)
    assert captured.num_tiles == 2, "a quarter of the rows"
    rows = [0, 0, 1, 0, BASE_LORA_INDEX, 0, 0, 0]
    assert state.begin_bucket([merged, other], rows, captured, merged) is captured
    assert records(state, 2) == [[(2, 4, -1.0), (2, 16, 1.0)], [(4, 4, -1.0), None]]
    found = state.begin_bucket([merged, other], [1, 1, 1, BASE_LORA_INDEX, 0, 0, 0, 0], captured, merged)
    assert (found.num_tiles, found.terms, found.eager) == (8, MERGED_TERMS, None)
    assert state.begin_bucket([merged, other], [0] * 8, captured, merged) is None, "the weights have all of it"


def test_a_merged_steps_rows_have_as_many_records_in_any_company(state):
    """Else a row of the base model would be computed by another kernel beside one of another adapter."""
    merged, other = resident(4), resident(16)
    for rows in ([BASE_LORA_INDEX, BASE_LORA_INDEX], [BASE_LORA_INDEX, 1]):
        assert state.begin_ragged([merged, other], rows, [1, 1], merged).terms == MERGED_TERMS
        assert state.begin_ragged([merged, other], rows, [70, 1], merged).terms == MERGED_TERMS
    assert state.begin_ragged([merged, other], [0, 1], [70, 1]).terms == 1


def test_a_prompt_beside_merged_weights_is_captured_in_one_pass(state):
    merged, other = resident(4), resident(16)
    captured = state.padded(128, MERGED_TERMS)
    found = state.begin_padded([merged, other], [1, BASE_LORA_INDEX, 0, 1], [70, 9, 4, 1], captured, merged)
    assert (found.eager, found.terms, found.room) == (None, MERGED_TERMS, USUAL_ROOM)
    assert records(state, 3) == [
        [(0, 4, -1.0), (0, 16, 1.0)],
        [(64, 4, -1.0), (64, 16, 1.0)],
        [(70, 4, -1.0), None],
    ]
    tail = state.tables.tiles[found.num_tiles * MERGED_TERMS :][:MERGED_TERMS]
    assert tail[:, [BEGIN, END, RANK]].tolist() == [[83, 84, 4], [83, 84, 16]]


class TestLayersOfTwoKinds:
    """Adapters of a model with linear attention have a part for each set of layers."""

    TABLE = hybrid_table("LLAL", hidden=32, ffn=48)

    @pytest.fixture
    def state(self) -> CudaLoraState:
        config = SimpleNamespace(projections=self.TABLE, num_layers=4, vocab_size=96, one_latent=None)
        return CudaLoraState(
            config, torch.zeros(1, LAYOUT.page_elems, dtype=torch.bfloat16), LAYOUT,
            StepLimits(MAX_RANK, adapters=4, rows=16, tokens=512), max_stall=0.0,
            make_copy=lambda num_bytes: torch.Tensor.copy_,
        )  # fmt: skip

    def resident(self, rank: int) -> Resident:
        parts = uniform_parts(self.TABLE, rank)
        layout = AdapterLayout.build(parts, self.TABLE, LAYOUT.page_elems, LAYOUT.itemsize)
        return Resident(layout, SimpleNamespace(parts=parts), list(range(layout.num_pages)))

    def test_captured_steps_have_a_tile_for_each_part(self, state):
        captured = state.bucket(4)
        assert (
            state.begin_bucket([self.resident(4), self.resident(16)], [0, 1, 0, BASE_LORA_INDEX], captured) is captured
        )
        assert (state.tables.terms, captured.num_tiles) == (1, 12)
        tiles = [row for row in state.tables.tiles.tolist() if row[TABLE_ROW] >= 0]
        assert sorted(row[BEGIN] for row in tiles) == [0, 0, 0, 1, 1, 1, 2, 2, 2]

    def test_a_merged_adapters_parts_are_taken_off_beside_those_of_the_rows_own(self, state):
        merged, other = self.resident(4), self.resident(16)
        captured = state.bucket(4, MERGED_TERMS)
        assert state.begin_bucket([merged, other], [0, 0, 0, 1], captured, merged) is captured
        tiles = records(state, captured.num_tiles)
        assert tiles == [[(3, 4, -1.0), (3, 16, 1.0)]] * 3, "parts of the same layers are of one tile"

    def test_tables_say_which_layers_have_a_module(self, state):
        state.begin_bucket([self.resident(4)], [0], state.bucket(1))
        for row in range(3):
            offsets = state.tables.offsets[row].tolist()
            names = {name for name in self.TABLE.names if offsets[self.TABLE.num_own + self.TABLE.id(name)] >= 0}
            layers = [layer for layer, first in enumerate(state.tables.first_elem[row].tolist()) if first >= 0]
            assert layers and all(list(self.TABLE.layers_of(name)) == layers for name in names)

    def test_an_adapter_on_all_modules_of_one_layer_fits(self, state):
        """Its slabs are longer than those of any part of an adapter on every layer."""
        names = tuple(projection.name for projection in self.TABLE.layers[0])
        part = AdapterPart(MAX_RANK, 1.0, (0,), tuple(name for name in self.TABLE.names if name in names))
        layout = AdapterLayout.build((part,), self.TABLE, LAYOUT.page_elems, LAYOUT.itemsize)
        one = Resident(layout, SimpleNamespace(parts=(part,)), list(range(layout.num_pages)))
        assert state.begin_bucket([one], [0], captured := state.bucket(1)) is captured

    def test_launches_are_of_the_layers_products(self, state):
        assert [len(shape.modules) for shape in state.gemm_shapes] == [4, 1, 2, 1, 3, 1]
        shapes = [tuple(each.values()) for each in self.TABLE.gemm_shape_of]
        assert shapes == [(0, 1, 2, 3), (0, 1, 2, 3), (4, 5, 2, 3), (0, 1, 2, 3)]

    def test_sample_adapters_have_all_parts(self, state):
        assert SampleAdapters(state, 4, 0).launches(4).num_tiles == 12
