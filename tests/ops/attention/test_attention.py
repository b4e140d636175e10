"""Paged attention against its definition, over a cache strided as the arena's is; and the cache's writes."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from chorus.ops.attention.attention import PLAIN, HeadShape, PagedAttention, Scores
from chorus.ops.elementwise.elementwise import write_kv
from chorus.ops.elementwise.float8_kv import UNSCALED, KvScales, rounded
from chorus.ops.elementwise.rotation import KvSlots

from .attention_ref import paged_attention_ref

DUMMY = 0


def strided_caches(generator, num_pages, block_tokens, kv_heads, head_dim):
    """K and V of the middle one of three layers, page outermost."""
    arena = torch.randn(num_pages, 3, 2, block_tokens, kv_heads, head_dim, generator=generator)
    return arena[:, 1, 0], arena[:, 1, 1]


class Step:
    """Random caches and block tables for rows of (tokens now, tokens before)."""

    def __init__(self, seed, rows, *, heads=4, kv_heads=2, head_dim=8, block_tokens=4, spare_columns=0):
        generator = torch.Generator().manual_seed(seed)
        self.shape = (heads, kv_heads, head_dim, block_tokens)
        self.kv_lens = [now + before for now, before in rows]
        self.qo_indptr = [0, *itertools.accumulate(now for now, _ in rows)]
        counts = [-(-kv_len // block_tokens) for kv_len in self.kv_lens]
        self.k, self.v = strided_caches(generator, sum(counts) + 3, block_tokens, kv_heads, head_dim)
        order = (torch.randperm(sum(counts) + 2, generator=generator) + 1).tolist()
        self.tables = [[order.pop() for _ in range(count)] for count in counts]
        width = max(counts) + spare_columns
        self.page_table = torch.tensor([table + [DUMMY] * (width - len(table)) for table in self.tables])
        self.q = torch.randn(self.qo_indptr[-1], heads, head_dim, generator=generator)
        self.kv_scales, self.caches = UNSCALED, (self.k, self.v)

    def in_float8(self, scales):
        """Keep keys and values in FP8, strided as they were; `caches` are what they stand for."""
        arena = torch.zeros(len(self.k), 3, 2, *self.k.shape[1:], dtype=torch.uint8)
        for side, (cache, scale) in enumerate(zip(self.caches, scales, strict=True)):
            arena[:, 1, side] = rounded(cache, scale).view(torch.uint8)
        self.k, self.v = (arena[:, 1, side].view(torch.float8_e4m3fn) for side in (0, 1))
        self.kv_scales = scales
        self.caches = self.k.float() * scales.k, self.v.float() * scales.v
        return self

    def run(self, attention=None, scores=PLAIN, **of_heads):
        attention = attention or PagedAttention(HeadShape(*self.shape))
        attention.plan(self.qo_indptr, self.page_table, self.kv_lens)
        return attention.run(self.q, self.k, self.v, scores=scores, kv_scales=self.kv_scales, **of_heads)

    def check(self, attention=None, scores=PLAIN):
        want = paged_attention_ref(self.q, *self.caches, self.qo_indptr, self.tables, self.kv_lens, scores)
        torch.testing.assert_close(self.run(attention, scores), want.flatten(1), rtol=1e-4, atol=1e-5)


chunks = st.tuples(st.integers(2, 9), st.integers(0, 9))
decodes = st.tuples(st.just(1), st.integers(0, 20))


@pytest.mark.wide
@settings(max_examples=120)
@given(
    seed=st.integers(0, 2**32 - 1),
    prefills=st.lists(chunks, max_size=4),
    decoding=st.lists(decodes, max_size=5),
    heads=st.sampled_from([(1, 1), (4, 4), (4, 2), (4, 1), (6, 3)]),
    head_dim=st.sampled_from([2, 8, 10]),
    block_tokens=st.sampled_from([1, 3, 4, 16]),
    spare_columns=st.integers(0, 3),
)
def test_equals_its_definition(seed, prefills, decoding, heads, head_dim, block_tokens, spare_columns):
    """Whole prompts, later chunks and decode rows of any lengths; block tables wider than any row needs."""
    rows = prefills + decoding
    assume(rows)
    Step(
        seed,
        rows,
        heads=heads[0],
        kv_heads=heads[1],
        head_dim=head_dim,
        block_tokens=block_tokens,
        spare_columns=spare_columns,
    ).check()


def test_reference_is_scaled_dot_product_attention():
    """The definition itself, against torch's on contiguous tensors."""
    step = Step(0, [(7, 0)], heads=4, kv_heads=2)
    k, v = (
        cache[step.tables[0]].flatten(0, 1)[:7].repeat_interleave(2, dim=1).transpose(0, 1)
        for cache in (step.k, step.v)
    )
    want = torch.nn.functional.scaled_dot_product_attention(step.q.transpose(0, 1), k, v, is_causal=True)
    got = paged_attention_ref(step.q, step.k, step.v, step.qo_indptr, step.tables, step.kv_lens)
    torch.testing.assert_close(got, want.transpose(0, 1), rtol=1e-5, atol=1e-6)


def test_reference_chunks_continue_each_other():
    whole = Step(1, [(9, 0)])
    full = paged_attention_ref(whole.q, whole.k, whole.v, [0, 9], whole.tables, [9])
    parts = [
        paged_attention_ref(whole.q[first:last], whole.k, whole.v, [0, last - first], whole.tables, [last])
        for first, last in ((0, 4), (4, 5), (5, 9))
    ]
    torch.testing.assert_close(torch.cat(parts), full, rtol=1e-5, atol=1e-6)


def test_one_object_serves_steps_of_every_kind():
    """A plan leaves nothing behind for the next one."""
    attention = PagedAttention(HeadShape(4, 2, 8, 4))
    for seed, rows in enumerate(
        [[(5, 0), (3, 4), (1, 9)], [(1, 3)] * 4, [(6, 0)], [(1, 30)], [(2, 2), (1, 0)], [(1, 0)] * 3, [(4, 12)]]
    ):
        Step(seed, rows).check(attention)


class ElsewhereAttention(PagedAttention):
    """As on a GPU: nothing is read, no mask of a chunk is kept, and k and v have as many heads as q."""

    def __init__(self, *arguments):
        from torch.nn.attention.bias import causal_lower_right  # imports the compiler

        super().__init__(*arguments)
        self._on_host, self._mask = False, causal_lower_right


@pytest.mark.parametrize("rows", [[(5, 0), (3, 4), (1, 9)], [(4, 12)], [(6, 0)], [(1, 3), (1, 0)]], ids=str)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)], ids=str)
def test_what_a_gpu_computes_equals_its_definition(rows, heads):
    Step(8, rows, heads=heads[0], kv_heads=heads[1]).check(ElsewhereAttention(HeadShape(*heads, 8, 4)))


@pytest.mark.parametrize("rows", [[(7, 0)], [(5, 9), (3, 0), (1, 11), (1, 0)], [(1, 6), (1, 19)]])
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("at_once", [1 << 26, 150])
def test_sinks_join_the_denominator_alone(rows, window, softcap, at_once, monkeypatch):
    """Head by head and token by token against the equation, in float64; with all scores of a chunk made at once, and
    those of some tokens.
    """
    monkeypatch.setattr("chorus.ops.attention.attention.MOST_SCORES", at_once)
    step = Step(0, rows)
    sinks = torch.tensor([-3.0, 0.0, 1.0, 4.0])
    found = step.run(scores=Scores(None, window, softcap, has_sinks=True), sinks=sinks).view(step.q.shape)
    heads, kv_heads, head_dim, _ = step.shape
    for row, (first, end) in enumerate(itertools.pairwise(step.qo_indptr)):
        pages, length = step.tables[row], step.kv_lens[row]
        k, v = (each[pages].reshape(-1, kv_heads, head_dim)[:length].double() for each in (step.k, step.v))
        for token, head in itertools.product(range(first, end), range(heads)):
            position = length - (end - token)
            seen = slice(0 if window is None else max(0, position - window + 1), position + 1)
            group = head // (heads // kv_heads)
            scores = k[seen, group] @ step.q[token, head].double() / head_dim**0.5
            scores = scores if softcap is None else softcap * (scores / softcap).tanh()
            weights = scores.exp() / (scores.exp().sum() + sinks[head].double().exp())
            torch.testing.assert_close(found[token, head].double(), weights @ v[seen, group], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rows", [[(7, 0)], [(5, 9), (3, 0), (1, 11), (1, 0)], [(1, 6), (1, 19)]])
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("at_once", [1 << 26, 150])
@pytest.mark.parametrize("elsewhere", [False, True])
def test_scores_fall_by_slopes_with_the_distance(rows, window, softcap, at_once, elsewhere, monkeypatch):
    """Likewise, beside the equation of ALiBi."""
    monkeypatch.setattr("chorus.ops.attention.attention.MOST_SCORES", at_once)
    step, slopes = Step(0, rows), torch.tensor([0.0, 0.125, 0.5, 2.0])
    attention = ElsewhereAttention(HeadShape(*step.shape)) if elsewhere else None
    found = step.run(attention, Scores(None, window, softcap, has_slopes=True), slopes=slopes).view(step.q.shape)
    heads, kv_heads, head_dim, _ = step.shape
    for row, (first, end) in enumerate(itertools.pairwise(step.qo_indptr)):
        pages, length = step.tables[row], step.kv_lens[row]
        k, v = (each[pages].reshape(-1, kv_heads, head_dim)[:length].double() for each in (step.k, step.v))
        for token, head in itertools.product(range(first, end), range(heads)):
            position = length - (end - token)
            seen = range(0 if window is None else max(0, position - window + 1), position + 1)
            group, ages = head // (heads // kv_heads), position - torch.tensor([*seen])
            scores = k[seen, group] @ step.q[token, head].double() / head_dim**0.5
            scores = scores if softcap is None else softcap * (scores / softcap).tanh()
            weights = (scores - slopes[head].double() * ages).softmax(0)
            torch.testing.assert_close(found[token, head].double(), weights @ v[seen, group], rtol=1e-4, atol=1e-5)


def test_attention_without_slopes_refuses_them():
    class Other(PagedAttention):
        supports_slopes = False

    with pytest.raises(NotImplementedError, match="Other has no slopes of ALiBi; use attention torch"):
        Step(0, [(1, 3)]).run(Other(HeadShape(4, 2, 8, 4)), slopes=torch.zeros(4))


def test_attention_without_sinks_refuses_them():
    class Other(PagedAttention):
        supports_sinks = False

    with pytest.raises(NotImplementedError, match="Other has no attention sinks; use attention triton or torch"):
        Step(0, [(1, 3)]).run(Other(HeadShape(4, 2, 8, 4)), sinks=torch.zeros(4))


def test_padding_rows_do_not_touch_the_others():
    """Rows of one token at position 0 of the dummy page."""
    step = Step(5, [(1, 11), (1, 3)])
    alone = step.run()
    step.qo_indptr = list(range(5))
    step.kv_lens += [1, 1]
    step.page_table = torch.cat((step.page_table, torch.full((2, step.page_table.shape[1]), DUMMY)))
    step.q = torch.cat((step.q, torch.randn(2, 4, 8)))
    padded = step.run()
    torch.testing.assert_close(padded[:2], alone, rtol=1e-5, atol=1e-6)
    assert padded.isfinite().all()


@pytest.mark.parametrize("rows", [[(1, 4), (1, 0)], [(3, 2)], [(3, 0), (1, 4)]], ids=["decode", "chunk", "mixed"])
@pytest.mark.parametrize("left_behind", [float("nan"), float("inf"), 3e38])
def test_what_an_earlier_owner_left_in_a_page_is_not_seen(rows, left_behind):
    """Positions after a row's last token hold anything: other requests' KV, adapter weights, NaN."""
    step = Step(6, rows)
    want = step.run()
    for table, kv_len in zip(step.tables, step.kv_lens, strict=True):
        assert kv_len % 4, "the row's last page must have room behind its last token"
        for cache in (step.k, step.v):
            cache[table[-1], kv_len % 4 :] = left_behind
    torch.testing.assert_close(step.run(), want)


def test_pages_of_others_are_never_read():
    step = Step(7, [(5, 3), (1, 9)])
    want = step.run()
    others = set(range(len(step.k))) - {page for table in step.tables for page in table} - {DUMMY}
    assert others
    for page in others:
        step.k[page] = step.v[page] = float("nan")
    torch.testing.assert_close(step.run(), want)


def test_prefill_rows_must_come_first():
    with pytest.raises(ValueError, match="must come before"):
        PagedAttention(HeadShape(4, 2, 8, 4)).plan([0, 1, 4], torch.zeros(2, 2, dtype=torch.long), [1, 3])


SCALES = [UNSCALED, KvScales(0.01, 0.25), KvScales(0.001, 3.0)]
"""The last ones leave keys beyond the range."""


@pytest.mark.parametrize("scales", SCALES, ids=str)
@pytest.mark.parametrize("kind", [PagedAttention, ElsewhereAttention])
@pytest.mark.parametrize("scores", [PLAIN, Scores(0.3, 5), Scores(softcap=2.0)], ids=str)
def test_a_cache_in_float8_is_what_it_stands_for(scales, kind, scores):
    for seed, rows in enumerate([[(5, 0), (3, 4), (1, 9)], [(1, 3), (1, 21)], [(4, 12)]]):
        step = Step(seed, rows).in_float8(scales)
        step.check(kind(HeadShape(4, 2, 8, 4)), scores)


def test_places_of_a_float8_cache_that_nobody_sees_may_be_nan():
    step = Step(5, [(4, 2), (1, 5), (1, 14)]).in_float8(UNSCALED)
    want = step.run()
    seen = torch.zeros(step.k.shape[:2], dtype=torch.bool)
    for table, length in zip(step.tables, step.kv_lens, strict=True):
        for token in range(length):
            seen[table[token // 4], token % 4] = True
    for cache in (step.k, step.v):
        cache.view(torch.uint8)[~seen] = 0x7F
    assert torch.equal(step.run(), want)


@given(seed=st.integers(0, 2**32 - 1), count=st.integers(0, 12))
def test_kv_is_written_where_it_belongs_and_nowhere_else(seed, count):
    generator = torch.Generator().manual_seed(seed)
    k_cache, v_cache = strided_caches(generator, 6, 4, 2, 8)
    places = torch.randperm(24, generator=generator)[:count]
    page, offset = places // 4, places % 4
    k, v = torch.randn(2, count, 2, 8, generator=generator)
    before = k_cache.clone(), v_cache.clone()
    write_kv(KvSlots(k_cache, v_cache, page, offset), k, v)
    for cache, old, new in ((k_cache, before[0], k), (v_cache, before[1], v)):
        old[page, offset] = new
        assert torch.equal(cache, old)
        for index in range(count):
            assert torch.equal(cache[page[index], offset[index]], new[index])


def test_padding_may_write_one_place_many_times():
    k_cache, v_cache = torch.zeros(2, 3, 4, 2, 8)
    zeros = torch.zeros(5, dtype=torch.long)
    write_kv(KvSlots(k_cache, v_cache, zeros, zeros), torch.ones(5, 2, 8), torch.ones(5, 2, 8))
    assert k_cache[0, 0].eq(1).all()
    assert k_cache.sum() == v_cache.sum() == 16


@pytest.mark.parametrize("before", [0, 5])
@pytest.mark.parametrize("which", ["k", "v"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", [PagedAttention, ElsewhereAttention])
def test_what_a_later_token_holds_does_not_reach_an_earlier_one(before, which, bad, kind):
    step = Step(3, [(9, before), (4, 0)])
    clean, at = step.run(), 6
    slot = before + at
    block_tokens = step.shape[-1]
    getattr(step, which)[step.tables[0][slot // block_tokens], slot % block_tokens] = bad
    found = step.run(kind(HeadShape(*step.shape)))
    torch.testing.assert_close(found[:at], clean[:at])
    assert not found[at:9].isfinite().any()
    torch.testing.assert_close(found[9:], clean[9:])
