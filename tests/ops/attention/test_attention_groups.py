"""Attention of models whose layers differ: several page groups, windows, soft caps and scales, planned once a step."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from chorus.ops.attention import attention_flashinfer
from chorus.ops.attention.attention import AttentionSetup, GroupTable, HeadShape, Scores
from chorus.ops.attention.attention_backend import GroupedBackend, TorchBackend
from chorus.ops.attention.attention_flashinfer import FlashInferBackend
from chorus.ops.attention.attention_plan import PlanBuffers

from .attention_ref import paged_attention_ref
from .fake_flashinfer import FakeFlashInfer, Stream

pytestmark = pytest.mark.wide

HEADS = HeadShape(4, 2, 8, 4)
GONE = 0
"""The dummy page, which here holds NaN: no row may see it."""

#: The scores of each group's layers. Windows of less than a page, of several, and longer than any sequence here; two
#: groups of one window; layers of a group that differ.
GROUPS = {
    "softcap": [[Scores(softcap=2.0)]],
    "scales": [[Scores(), Scores(scale=0.2), Scores(scale=0.2, softcap=3.0)]],
    "one-window": [[Scores(window=6)]],
    "window-of-one": [[Scores(window=1)]],
    "windows": [
        [Scores(scale=0.5)],
        [Scores(window=3, softcap=1.5)],
        [Scores(window=9), Scores(window=9, scale=0.7)],
        [Scores(window=9)],
        [Scores(window=64)],
    ],
}

#: Of groups whose windows are chunks: of one page, of several, and longer than any sequence here.
CHUNKS = {
    "chunks-of-pages": [[Scores()], [Scores(window=8)], [Scores(window=4, softcap=1.5)]],
    "one-chunk": [[Scores(window=64)]],
}

STEPS = [
    [(5, 0), (3, 6), (1, 9), (1, 0)],
    [(1, 12), (1, 3), (1, 30)],
    [(9, 0)],
    [(2, 21), (1, 7)],
    [(11, 14)],
    [(1, 8), (1, 4), (1, 11)],
]
"""Rows of (tokens now, tokens before); prompts come first."""


class GroupedStep:
    """A step whose groups have pages and caches of their own; pages that no token of the step sees have left."""

    def __init__(self, seed, rows, groups, *, chunked=False):
        generator = torch.Generator().manual_seed(seed)
        _, kv_heads, head_dim, block = HEADS
        self.groups, self.chunked = groups, chunked
        self.kv_lens = [now + before for now, before in rows]
        self.qo_indptr = [0, *itertools.accumulate(now for now, _ in rows)]
        counts = [-(-length // block) for length in self.kv_lens]
        width = max(counts)
        self.q = torch.randn(self.qo_indptr[-1], HEADS.num_heads, head_dim, generator=generator)
        self.page_table = torch.full((len(rows), width * len(groups)), GONE)
        self.caches, self.tables = [], []
        for index, of_layers in enumerate(groups):
            arena = torch.randn(sum(counts) + 1, 2, block, kv_heads, head_dim, generator=generator)
            arena[GONE] = torch.nan
            pages = (torch.randperm(sum(counts), generator=generator) + 1).tolist()
            tables = [[pages.pop() for _ in range(count)] for count in counts]
            for row, (table, (_, before)) in enumerate(zip(tables, rows, strict=True)):
                window = of_layers[0].window
                first = 0 if window is None else max(0, before + 1 - window) // block
                first = before // window * window // block if chunked and window is not None else first
                for place in range(first, len(table)):
                    self.page_table[row, place * len(groups) + index] = table[place]
            self.caches.append(arena.unbind(1))
            self.tables.append(tables)

    def check(self, attention):
        """All groups are planned first, and their layers then take turns, as in a model."""
        attention.plan(self.qo_indptr, self.page_table, self.kv_lens)
        for layer in range(max(map(len, self.groups))):
            for index, of_layers in enumerate(self.groups):
                scores = of_layers[layer % len(of_layers)]
                own = replace(scores, window=None) if self.chunked else scores
                got = attention.of(index).run(self.q, *self.caches[index], scores=own)
                want = paged_attention_ref(
                    self.q, *self.caches[index], self.qo_indptr, self.tables[index], self.kv_lens, scores,
                    chunked=self.chunked,
                )  # fmt: skip
                torch.testing.assert_close(got, want.flatten(1), rtol=1e-4, atol=1e-5)


def backends_of(groups, make, *, chunked=False):
    setup = AttentionSetup(HEADS, torch.float32, torch.device("cpu"), max_rows=24, max_pages_per_row=16)
    kinds = [[replace(each, window=None) for each in scores] if chunked else scores for scores in groups]
    made = [
        (make(replace(setup, scores=tuple(own))), scores[0].window) for own, scores in zip(kinds, groups, strict=True)
    ]
    return GroupedBackend(made, HEADS.block_tokens, chunked=chunked)


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setattr(attention_flashinfer, "FLOAT_WORKSPACE_BYTES", 1)
    monkeypatch.setattr(attention_flashinfer, "DECODE_INT_WORKSPACE_BYTES", 64)
    return FakeFlashInfer(Stream())


def flashinfer(fake):
    return lambda setup: FlashInferBackend(setup, num_sms=2, module=fake, new_event=fake.stream.new_event)


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_torchs_ragged_steps_equal_the_definition(groups):
    attention = backends_of(groups, lambda setup: TorchBackend(setup.heads, setup.device, "asked for")).ragged()
    for seed, rows in enumerate(STEPS):
        GroupedStep(seed, rows, groups).check(attention)


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_flashinfers_ragged_steps_equal_the_definition(fake, groups):
    attention = backends_of(groups, flashinfer(fake)).ragged()
    for seed, rows in enumerate(STEPS):
        GroupedStep(seed, rows, groups).check(attention)


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_flashinfers_buckets_equal_the_definition(fake, groups):
    """Replanned over other lengths, below the window and beyond it, with another bucket planned between."""
    backend = backends_of(groups, flashinfer(fake))
    buckets = {size: backend.decode(size) for size in (1, 2, 3)}
    for seed, counts in enumerate([(2, 0, 5), (12,), (3, 31, 8), (4, 9), (30, 30, 30), (13,), (5, 10)]):
        rows = [(1, before) for before in counts]
        GroupedStep(seed, rows, groups).check(buckets[len(rows)])
    layers = sum(map(len, groups))
    assert fake.fast_plans == 4 * layers, (
        "each layer kind of each group has one plan a step, and all but the first fast"
    )


@pytest.mark.parametrize("kind", ["torch", "flashinfer"])
@pytest.mark.parametrize("groups", CHUNKS.values(), ids=CHUNKS)
def test_chunks_equal_the_definition(fake, groups, kind):
    """Rows that begin, end or lie between chunks, also with one token of a chunk."""
    make = flashinfer(fake) if kind == "flashinfer" else lambda setup: TorchBackend(setup.heads, setup.device, "it")
    backend = backends_of(groups, make, chunked=True)
    attention = backend.ragged()
    others = [[(6, 7), (2, 7), (9, 0), (1, 8), (1, 7)], [(2, 3), (2, 15)], [(1, 15), (1, 16), (1, 0)], [(20, 3)]]
    for seed, rows in enumerate([*STEPS, *others]):
        GroupedStep(seed, rows, groups, chunked=True).check(attention)
    bucket = backend.decode(3)
    for seed, counts in enumerate([(2, 0, 5), (3, 31, 8), (30, 7, 15), (8, 16, 24)]):
        GroupedStep(seed, [(1, before) for before in counts], groups, chunked=True).check(bucket)


def test_plans_of_a_step_are_as_many_as_kinds_of_layers(fake):
    """One for each group, window, soft cap and scale, whatever the number of layers."""
    groups = GROUPS["windows"]
    attention = backends_of(groups, flashinfer(fake)).decode(3)
    step = GroupedStep(1, STEPS[1], groups)
    for count in (1, 2):
        attention.plan(step.qo_indptr, step.page_table, step.kv_lens)
        assert sum(wrapper.plans for wrapper in fake.wrappers) == count * sum(map(len, groups))


def test_groups_share_scratch_and_nothing_that_a_plan_writes(fake):
    backends_of(GROUPS["windows"], flashinfer(fake)).decode(2)
    wrappers = fake.wrappers
    assert len({wrapper.workspace.data_ptr() for wrapper in wrappers}) == 1
    assert len({id(wrapper.int_workspace) for wrapper in wrappers}) == len(wrappers) == 6
    assert len({wrapper.indices.data_ptr() for wrapper in wrappers}) == len(GROUPS["windows"])


def test_the_log_names_a_backend_of_several_groups_once():
    backend = GroupedBackend([(SimpleNamespace(name="a", reason="r", fix="", captures=True), None)] * 3, 4)
    assert (backend.name, backend.reason, backend.fix) == ("a", "r", "")


def test_page_lists_of_groups_without_windows_are_written_once(fake, monkeypatch):
    """While sequences grow, only their new pages are, as in a model of one group; a window's are written again."""
    groups = [[Scores()], [Scores(scale=0.5)], [Scores(window=9)]]
    backend = backends_of(groups, flashinfer(fake))
    bucket, block, count = backend.decode(2), HEADS.block_tokens, len(groups)
    grown, plans = [], []
    grow = PlanBuffers._grow  # noqa: SLF001
    monkeypatch.setattr(PlanBuffers, "_grow", lambda *args: grown.append(grow(*args)) or grown[-1])
    keep = PlanBuffers._keep  # noqa: SLF001
    monkeypatch.setattr(PlanBuffers, "_keep", lambda self, counts: plans.append(self) or keep(self, counts))
    lists, used = [[], []], itertools.count(1)
    for length in range(1, 3 * block + 1):
        for pages in lists:
            while len(pages) < count * (-(-length // block)):
                pages.append(next(used))
        table = torch.zeros(2, count * 4, dtype=torch.long)
        for row, pages in zip(table, lists, strict=True):
            row[: len(pages)] = torch.tensor(pages)
        bucket.plan(range(3), table, [length, length], lists)
        for index in range(2):
            buffers = bucket.of(index)._backend.buffers  # noqa: SLF001
            want = [page for pages in lists for page in pages[index::count]]
            assert buffers.indices[: buffers.num_indices].tolist() == want
    assert grown == [True] * 4, "each of both groups got pages twice"
    assert len(set(map(id, plans))) == count
    assert GroupTable(lists[0], 1, count)[0] == lists[0][1]
    assert list(GroupTable(lists[0], 1, count)) == lists[0][1::count]
