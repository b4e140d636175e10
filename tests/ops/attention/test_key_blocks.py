"""The choice of blocks of keys, and attention to chosen blocks alone, against formulas of one query at a time."""

from __future__ import annotations

import itertools
from unittest.mock import patch

import pytest
import torch

from chorus.ops.attention import attention
from chorus.ops.attention.attention import AttentionSetup, HeadShape, KeyBlocks, KvCache, PagedAttention, Scores
from chorus.ops.attention.attention_backend import choose_attention, flashinfer_obstacle, triton_obstacle
from chorus.ops.attention.block_attention import BlockAttention
from chorus.ops.attention.key_blocks import chosen_blocks, halves_of

from .test_latent_attention import BLOCK, given_steps

HEADS, GROUPS, DIM, KEY, FURTHER = 6, 2, 8, 7, 2
BLOCKS = KeyBlocks(3, 4, 1)
SCORES = Scores(0.3, top_k=12, key_block=3)
SHAPE = HeadShape(HEADS, GROUPS, DIM, BLOCK)


def step(seed, rows):
    """Pages of keys, values and an indexer's keys, and a step: rows of (tokens, tokens before them)."""
    generator = torch.Generator().manual_seed(seed)
    lens = [count + past for count, past in rows]
    pages = [-(-length // BLOCK) for length in lens]
    order = torch.randperm(sum(pages), generator=generator) + 1
    tables = list(order.split(pages))
    page_table = torch.zeros(len(rows), max(pages), dtype=torch.long)
    for row, table in enumerate(tables):
        page_table[row, : len(table)] = table
    shape = (2, sum(pages) + 1, BLOCK, GROUPS, DIM + FURTHER)
    k, v = torch.randn(shape, generator=generator)
    starts = [0, *itertools.accumulate(count for count, _ in rows)]
    q = torch.randn(starts[-1], HEADS, DIM, generator=generator)
    index = torch.randn(starts[-1], GROUPS, KEY, generator=generator)
    return (k, v), q, index, starts, page_table, tables, lens


def run(caches, q, index, starts, page_table, lens, scores=SCORES, blocks=BLOCKS):
    found = BlockAttention(SHAPE)
    found.plan(starts, page_table, lens)
    chosen = found.choose_blocks(index, KvCache(*(each[..., DIM:] for each in caches)), blocks)
    k, v = (each[..., :DIM] for each in caches)
    return chosen, found.run(q, k, v, None, scores, chosen=chosen)


def index_keys(caches, table, length):
    """Keys of the indexer, of the first half of elements behind keys and the second behind values."""
    parts = [each[table, ..., DIM:].flatten(0, 1).flatten(1)[:length] for each in caches]
    return torch.cat(parts, 1)[:, :KEY]


def best_blocks(q, keys):
    """Of one query of one head, which sees all these keys."""
    scores = [float((part @ q).max()) for part in keys.split(BLOCKS.size)]
    last = len(scores) - 1
    order = sorted(range(len(scores)), key=lambda block: (block <= last - BLOCKS.local, -scores[block]))
    return sorted(order[: BLOCKS.top])


@pytest.mark.wide
@given_steps()
def test_queries_attend_to_the_blocks_with_the_highest_scores(seed, rows, most):
    """most: scores that are made at once."""
    caches, q, index, starts, page_table, tables, lens = step(seed, rows)
    with patch.object(attention, "MOST_SCORES", most):
        _, found = run(caches, q, index, starts, page_table, lens)
    for row, (begin, end) in enumerate(itertools.pairwise(starts)):
        k, v = (each[tables[row], ..., :DIM].flatten(0, 1) for each in caches)
        keys = index_keys(caches, tables[row], lens[row])
        for token in range(begin, end):
            seen = lens[row] - (end - 1 - token)
            for head in range(HEADS):
                group = head // (HEADS // GROUPS)
                own = best_blocks(index[token, group], keys[:seen])
                places = [each for each in range(seen) if each // BLOCKS.size in own]
                shares = (k[places, group] @ q[token, head] * 0.3).softmax(0)
                want = shares @ v[places, group]
                torch.testing.assert_close(found[token].view(HEADS, DIM)[head], want, rtol=1e-3, atol=1e-4)


def test_a_choice_depends_on_no_other_sequence_and_on_no_chunk():
    rows = [(20, 12), (1, 29), (1, 3), (1, 14)]
    caches, q, index, starts, page_table, _, lens = step(3, rows)
    _, found = run(caches, q, index, starts, page_table, lens)
    for row, (begin, end) in enumerate(itertools.pairwise(starts)):
        middle = (begin + end) // 2
        for first, last in ((begin, middle), (middle, end)):
            if first < last:
                length = lens[row] - (end - last)
                table, own = page_table[row : row + 1, : -(-length // BLOCK)], slice(first, last)
                _, out = run(caches, q[own], index[own], [0, last - first], table, [length])
                torch.testing.assert_close(out, found[own])


def test_keys_of_many_long_rows_are_gathered_a_few_rows_at_a_time():
    """44 places of 7 elements: two rows have 616."""
    caches, q, index, starts, page_table, _, lens = step(6, [(1, 40)] * 5)
    want, made = run(caches, q, index, starts, page_table, lens)[0], list[int]()

    def noting(q, keys, own, blocks):
        made.append(keys.numel())
        return chosen_blocks(q, keys, own, blocks)

    with (
        patch.object(attention, "MOST_SCORES", 700),
        patch("chorus.ops.attention.block_attention.chosen_blocks", noting),
    ):
        found = run(caches, q, index, starts, page_table, lens)[0]
    assert torch.equal(found, want)
    assert made == [616, 616, 308]


def test_the_first_of_equal_blocks_are_chosen_and_the_last_ones_always():
    keys, q = torch.zeros(1, 30, KEY), torch.ones(1, 1, 1, KEY)
    keys[0, 13] = 1.0
    own = torch.tensor([[28]])
    for local, want in ((0, [0, 1, 2, 4]), (1, [0, 1, 4, 9]), (2, [0, 4, 8, 9])):
        found = chosen_blocks(q, keys, own, KeyBlocks(3, 4, local))
        assert sorted(found[0, 0, 0].tolist()) == want
    assert sorted(chosen_blocks(-q, keys, own, KeyBlocks(3, 4, 0))[0, 0, 0].tolist()) == [0, 1, 2, 3]


def test_as_many_tokens_as_are_chosen_are_all_attended_to():
    rows = [(12, 0), (1, 11), (1, 2)]
    caches, q, index, starts, page_table, _, lens = step(5, rows)
    scores, blocks = Scores(0.3, top_k=4 * BLOCK, key_block=2), KeyBlocks(2, 2 * BLOCK, 1)
    with patch("chorus.ops.attention.block_attention.chosen_blocks", side_effect=AssertionError):
        _, found = run(caches, q, index, starts, page_table, lens, scores, blocks)
    plain = PagedAttention(SHAPE)
    plain.plan(starts, page_table, lens)
    want = plain.run(q, *(each[..., :DIM] for each in caches), None, Scores(0.3))
    torch.testing.assert_close(found, want)


@pytest.mark.parametrize("rows", [[(1, 20), (1, 2)], [(5, 20), (1, 2)]])
def test_what_an_earlier_owner_left_in_a_page_is_chosen_by_nobody(rows):
    caches, q, index, starts, page_table, tables, lens = step(8, rows)
    want = run(caches, q, index, starts, page_table, lens)[1]
    for table, length in zip(tables, lens, strict=True):
        for each in caches:
            each[table[-1], (length - 1) % BLOCK + 1 :] = torch.nan
    assert torch.equal(run(caches, q, index, starts, page_table, lens)[1], want)


def test_a_broken_key_breaks_those_that_attend_to_it_alone():
    caches, q, index, starts, page_table, tables, lens = step(8, [(5, 20)])
    chosen, want = run(caches, q, index, starts, page_table, lens)
    caches[0][tables[0][0], 0, 0, :DIM] = torch.nan  # the first key of the first group, in its first block
    found = run(caches, q, index, starts, page_table, lens)[1].view(5, GROUPS, -1)
    hit = (chosen[:, :, None] == 0).any(-1)[:, :, 0] & torch.tensor([True, False])
    assert hit.any()
    assert torch.equal(found.isnan().any(-1), hit)
    torch.testing.assert_close(found[~hit], want.view(5, GROUPS, -1)[~hit])


def test_halves_of_a_key_come_back():
    key = torch.arange(14.0).view(2, KEY)
    first, second = halves_of(key, 4)
    assert (first.shape, second[:, -1].tolist()) == ((2, 4), [0, 0])
    assert torch.equal(torch.cat((first, second), 1)[:, :KEY], key)


def test_transformers_chooses_the_same_blocks():
    """The very module of MiniMax-M3."""
    from transformers import MiniMaxM3VLTextConfig
    from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLIndexer, apply_rotary_pos_emb

    torch.manual_seed(0)
    config = MiniMaxM3VLTextConfig(
        hidden_size=32, index_n_heads=2, index_head_dim=12, index_block_size=3, index_topk_blocks=4
    )
    indexer, tokens = MiniMaxM3VLIndexer(config, 0), 30
    x, angles = torch.randn(1, tokens, 32), torch.rand(1, tokens, 4).repeat(1, 1, 2)
    with torch.no_grad():
        theirs = indexer(x, (angles.cos(), angles.sin()), None, torch.arange(tokens)[None])
        q = indexer.q_norm(indexer.q_proj(x).view(1, tokens, 2, 12)).transpose(1, 2)
        k = indexer.k_norm(indexer.k_proj(x).view(1, tokens, 1, 12)).transpose(1, 2)
        q, k = apply_rotary_pos_emb(q, k, angles.cos(), angles.sin())
        ours = chosen_blocks(q.transpose(1, 2), k[:, 0], torch.arange(tokens)[None], KeyBlocks(3, 4, 1))
    for token, head in itertools.product(range(tokens), range(2)):
        own = {block for block in ours[0, token, head].tolist() if block <= token // 3}
        assert own == {block for block in theirs[0, head, token].tolist() if block >= 0}


def test_other_kinds_of_attention_say_that_they_choose_nothing():
    empty = torch.zeros(0, HEADS, DIM)
    with pytest.raises(NotImplementedError, match="PagedAttention has no indexer of blocks; use attention torch"):
        PagedAttention(SHAPE).choose_blocks(empty, KvCache(empty, empty), BLOCKS)
    with pytest.raises(NotImplementedError, match="PagedAttention has no attention to chosen blocks"):
        PagedAttention(SHAPE).run(empty, empty, empty, chosen=empty)


def test_on_a_gpu_pytorchs_operators_attend_to_chosen_blocks():
    device = torch.device("cuda")
    setup = AttentionSetup(SHAPE, torch.bfloat16, device, 1, 1, scores=(SCORES,))
    obstacle = triton_obstacle(3, 64, torch.bfloat16, device, setup.scores)
    assert obstacle is not None
    assert "tokens that an indexer chooses" in obstacle.reason
    obstacle = flashinfer_obstacle(3, 64, torch.bfloat16, device, setup.scores)
    assert obstacle is not None
    assert obstacle.reason == "FlashInfer is not asked for chosen blocks of keys, and the model has them"
    chosen = choose_attention(setup, "torch")
    assert isinstance(chosen.ragged(), BlockAttention)
