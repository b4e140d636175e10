"""The native decoder's prefill: a token has the same bits in a step of many tokens as in a step of its own."""

from __future__ import annotations

import pytest
import torch

from chorus.core.config import EngineConfig
from chorus.core.executors.cpu import CpuExecutor
from chorus.core.model.batch import StepBatch
from chorus.core.model.lora.lora_state import LoraState
from chorus.memory.pages.adapter_layout import AdapterLayout, AdapterPart
from chorus.ops.lora.sgmv import AdapterRows
from chorus.perf.bench.models import random_model
from chorus.perf.bench.models.sizes import Geometry

from ...tables import LLAMA

pytestmark = [pytest.mark.native, pytest.mark.wide]

BLOCK, PAGES = 16, 700
LAYERS = 2
SHAPES = {
    "gate and up in panels of their own": Geometry(hidden=128, ffn=352, layers=LAYERS, heads=4, kv_heads=2, vocab=512),
    "a panel with columns of both": Geometry(hidden=96, ffn=80, layers=LAYERS, heads=6, kv_heads=2, vocab=512),
    "narrow heads": Geometry(hidden=80, ffn=64, layers=LAYERS, heads=5, kv_heads=1, vocab=512),
    "three heads with keys of their own": Geometry(hidden=96, ffn=96, layers=LAYERS, heads=3, kv_heads=3, vocab=512),
    "wide heads": Geometry(hidden=320, ffn=96, layers=LAYERS, heads=2, kv_heads=2, vocab=512),
}


class Rows:
    """Sequences over one executor: each computes its tokens in chunks, with or without company and an adapter."""

    def __init__(self, shape: Geometry, dtype: str, threads: int, work_dir, kv_cache_dtype: str = "auto") -> None:
        model = random_model.checkpoint(random_model.RandomModel(shape), work_dir)
        config = EngineConfig(
            model=model,
            dtype=dtype,
            kv_cache_dtype=kv_cache_dtype,
            cpu_kernels="native",
            threads=threads,
            num_pages=PAGES,
            block_tokens=BLOCK,
            max_num_seqs=8,
        )
        self._executor = CpuExecutor(config)
        self._pages = self._executor.arena.pages
        self._pages.view(torch.uint8).fill_(0xFF)  # NaN of any dtype
        self._free = list(range(1, PAGES))
        self.generator = torch.Generator().manual_seed(1)

    def adapter(self, rank: int, modules: tuple[str, ...]) -> AdapterRows:
        config, layout = self._executor.config, self._executor.arena.layout
        part = AdapterPart(rank, 0.5, tuple(range(LAYERS)), modules)
        placed = AdapterLayout.build([part], config.projections, layout.page_elems, 16 // self._pages.itemsize)
        pages = [self._free.pop() for _ in range(placed.num_pages)]
        for page in pages:
            values = 0.1 * torch.randn(layout.page_elems, generator=self.generator)
            self._pages[page] = values.to(self._pages.dtype)
        slabs, first = placed.parts[0].slabs, placed.parts[0].first_elem
        return AdapterRows(pages, rank, 0.5, slabs.slab_elems, slabs.a_offset, slabs.b_offset, first)

    def sequence(self, length: int, adapter: AdapterRows | None = None) -> Sequence:
        tokens = torch.randint(0, 512, (length,), generator=self.generator)
        return Sequence(tokens, [self._free.pop() for _ in range(-(-length // BLOCK))], adapter)

    def step(self, parts: list[tuple[Sequence, int, int]]) -> list[torch.Tensor]:
        """The logits of tokens begin … end-1 of each sequence."""
        lora = LoraState(self._executor.config, self._pages)
        at, indptr, positions, pages = 0, [0], [], []
        for row, begin, end in parts:
            if row.adapter is not None:
                lora.in_layers.segments.add(at, at + end - begin, row.adapter)
            at += end - begin
            indptr.append(at)
            positions += range(begin, end)
            pages += [row.pages[position // BLOCK] for position in range(begin, end)]
        width = max(len(row.pages) for row, _, _ in parts)
        tables = torch.tensor([row.pages + [0] * (width - len(row.pages)) for row, _, _ in parts])
        attention = self._executor.decoder.new_attention()
        attention.plan(indptr, tables, [end for _, _, end in parts])
        position = torch.tensor(positions)
        tokens = torch.cat([row.tokens[begin:end] for row, begin, end in parts])
        batch = StepBatch(tokens, position, position % BLOCK, torch.tensor([pages]), attention, lora)
        with torch.inference_mode():
            return list(self._executor.decoder.forward(batch).clone().split([end - begin for _, begin, end in parts]))

    def close(self) -> None:
        self._executor.close()


class Sequence:
    def __init__(self, tokens: torch.Tensor, pages: list[int], adapter: AdapterRows | None) -> None:
        self.tokens, self.pages, self.adapter = tokens, pages, adapter


@pytest.fixture(scope="module", params=SHAPES)
def shape(request) -> Geometry:
    return SHAPES[request.param]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_tokens_bits_depend_neither_on_the_chunk_nor_on_company(tmp_path, shape, dtype, kv_cache_dtype, threads):
    rows = Rows(shape, dtype, threads, tmp_path, kv_cache_dtype)
    length = 203
    alone = rows.sequence(length)
    one_by_one = torch.cat([rows.step([(alone, at, at + 1)])[0] for at in range(length)])
    for cuts in ([length], [1, 50, 115, 116, length], [60, length]):
        begin, found = 0, []
        for end in cuts:
            found += rows.step([(alone, begin, end)])
            begin = end
        assert torch.equal(torch.cat(found), one_by_one), cuts
    others = [rows.sequence(300, rows.adapter(33, LLAMA)), rows.sequence(5, rows.adapter(4, LLAMA[:3]))]
    mixed = rows.step([(others[0], 0, 300), (alone, 0, length), (others[1], 0, 5)])
    assert torch.equal(mixed[1], one_by_one)
    rows.close()


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("rank", [1, 4, 12, 24, 128])
def test_an_adapters_long_segment_has_the_same_bits_wherever_it_lies(tmp_path, shape, rank, threads):
    """Row chunks follow the segments: where they are cut must not show."""
    rows = Rows(shape, "bfloat16", threads, tmp_path)
    row = rows.sequence(330, rows.adapter(rank, LLAMA))
    (alone,) = rows.step([(row, 0, 330)])
    halves = rows.step([(row, 0, 150)]) + rows.step([(row, 150, 330)])
    assert torch.equal(torch.cat(halves), alone)
    for before in (1, 70, 191, 320):
        other = rows.sequence(before, rows.adapter(3, LLAMA))
        short = rows.sequence(4, rows.adapter(5, LLAMA))
        found = rows.step([(other, 0, before), (row, 0, 330), (short, 0, 4)])[1]
        assert torch.equal(found, alone), before
    rows.close()


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_prompts_and_running_requests_share_a_step(tmp_path, shape, threads):
    """Chunks of several adapters, and single tokens that have no chunk of their own."""
    rows = Rows(shape, "bfloat16", threads, tmp_path)
    parts = [(176, 128), (300, 4), (300, 12), (245, 24), (1, 33), (1, 1), (1, 24)]
    row = [rows.sequence(30 + count, rows.adapter(rank, LLAMA if rank != 12 else LLAMA[:3])) for count, rank in parts]
    alone = []
    for each, (count, _) in zip(row, parts, strict=True):
        rows.step([(each, 0, 30)])
        alone += rows.step([(each, 30, 30 + count)])
    for _ in range(3):
        together = rows.step([(each, 30, 30 + count) for each, (count, _) in zip(row, parts, strict=True)])
        for found, expected in zip(together, alone, strict=True):
            assert torch.equal(found, expected)
    rows.close()


@pytest.mark.parametrize("length", [889, 890, 1190, 1191])
def test_chunks_of_a_long_segment_fit_their_buffers(tmp_path, length):
    """Of these lengths, rounding to whole tiles makes a chunk longer than chunks are to be."""
    rows = Rows(SHAPES["gate and up in panels of their own"], "bfloat16", 1, tmp_path)
    row = rows.sequence(length, rows.adapter(8, LLAMA))
    (alone,) = rows.step([(row, 0, length)])
    parts = [(begin, min(begin + 200, length)) for begin in range(0, length, 200)]
    found = [rows.step([(row, begin, end)])[0] for begin, end in parts]
    assert torch.equal(torch.cat(found), alone)
    rows.close()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_what_a_later_token_holds_does_not_reach_an_earlier_one(tmp_path, shape, dtype, kv_cache_dtype):
    """A weight of 0 does not undo NaN: a later token's values stay out of the sum."""
    rows = Rows(shape, dtype, 2, tmp_path, kv_cache_dtype)
    row, bad = rows.sequence(123), 7
    row.tokens[row.tokens == bad] = bad + 1
    (clean,) = rows.step([(row, 0, 123)])
    assert clean.isfinite().all()
    rows._executor.decoder._decoder._model.embed[bad] = float("nan")  # noqa: SLF001 - it spoils a weight
    for at in (1, 2, 3, 15, 16, 17, 50, 121, 122):
        row.tokens[at], kept = bad, row.tokens[at].item()
        (found,) = rows.step([(row, 0, 123)])
        assert torch.equal(found[:at], clean[:at]), at
        assert found[at:].isnan().all()
        row.tokens[at] = kept
    rows.close()
