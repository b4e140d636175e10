"""Pages come from adapters and from other requests: a mask must hide their former content."""

from __future__ import annotations

import math

import pytest
import torch

from chorus.ops.attention.attention import HeadShape, PagedAttention

from .attention_ref import paged_attention_ref

HEADS, KV_HEADS, HEAD_DIM, BLOCK, PAGES = 4, 2, 8, 4, 12


@pytest.mark.parametrize("stale", [math.nan, math.inf, -math.inf, 3e38])
def test_what_a_page_held_before_is_never_seen(stale):
    torch.manual_seed(0)
    clean = torch.randn(2, PAGES, BLOCK, KV_HEADS, HEAD_DIM)
    tables, kv_lens, qo_indptr = [[1, 2], [3], [4, 5, 6], [7, 8]], [6, 1, 9, 8], [0, 3, 4, 5, 6]
    dirty = torch.full_like(clean, stale)
    for table, length in zip(tables, kv_lens, strict=True):
        for token in range(length):
            place = table[token // BLOCK], token % BLOCK
            dirty[:, *place] = clean[:, *place]
    q = torch.randn(6, HEADS, HEAD_DIM)
    page_table = torch.tensor([table + [0] * (3 - len(table)) for table in tables])
    attention = PagedAttention(HeadShape(HEADS, KV_HEADS, HEAD_DIM, BLOCK))
    attention.plan(qo_indptr, page_table, kv_lens)
    expected = paged_attention_ref(q, *clean, qo_indptr, tables, kv_lens).view(6, -1)
    torch.testing.assert_close(attention.run(q, *dirty), expected, atol=1e-5, rtol=1e-5)
