"""The choice of an indexer, and attention to chosen tokens alone, against formulas of one query at a time."""

from __future__ import annotations

import itertools
from unittest.mock import patch

import pytest
import torch

from chorus.ops.attention import attention
from chorus.ops.attention.attention import HeadShape, PagedAttention, Scores
from chorus.ops.attention.attention_backend import choose_attention, triton_obstacle
from chorus.ops.attention.indexer import chosen_places
from chorus.ops.attention.latent_attention import LatentAttention
from chorus.ops.attention.latents import LatentHeads

from .test_latent_attention import BLOCK, HEADS, KEY, RANK, ROTATED, SCALE, given_steps, step

INDEX_HEADS, INDEX_KEY, TOP = 3, 6, 7
SHAPE = HeadShape(HEADS, 1, RANK + ROTATED, BLOCK)


def scored(q, weights, keys):
    """Scores of all keys for one query, by the paper's formula."""
    products = (keys.double() @ q.double().T * INDEX_KEY**-0.5).clamp(min=0)
    return (products * weights.double() * INDEX_HEADS**-0.5).sum(-1)


def indexed(seed, rows):
    """A step of `step` with an indexer's keys, queries and weights; keys are behind the latents."""
    cache, q, kv_up, starts, page_table, tables, lens = step(seed, rows)
    generator = torch.Generator().manual_seed(seed + 1)
    cache = torch.cat((cache, torch.randn(*cache.shape[:3], INDEX_KEY, generator=generator)), -1)
    index_q = torch.randn(len(q), INDEX_HEADS, INDEX_KEY, generator=generator)
    weights = torch.randn(len(q), INDEX_HEADS, generator=generator)
    return cache, (index_q, weights), q, kv_up, starts, page_table, tables, lens


def of_row(cache, table, length):
    """What pages keep of a row's tokens."""
    return cache[table, :, 0].flatten(0, 1)[:length]


def planned(starts, page_table, lens):
    found = LatentAttention(SHAPE)
    found.plan(starts, page_table, lens)
    return found


def run(cache, index, q, kv_up, starts, page_table, lens, top=TOP):
    """What tokens are chosen, and what is attended."""
    latents, own = planned(starts, page_table, lens), RANK + ROTATED
    chosen = latents.choose(*index, cache[..., own:], top)
    heads, scores = LatentHeads(kv_up, HEADS, KEY, ROTATED), Scores(SCALE, top_k=top)
    return chosen, latents.run_latents(q, cache[..., :own], heads, None, scores, chosen)


def attended(q, kept, kv_up):
    """Attention of one query `[heads, key + rotated]` over some tokens' latents, by keys and values of all heads."""
    both = (kept[:, :RANK] @ kv_up.T).unflatten(-1, (HEADS, -1))
    keys = torch.cat((both[..., :KEY], kept[:, None, RANK:].expand(-1, HEADS, -1)), -1)
    shares = ((q[None] * keys).sum(-1) * SCALE).softmax(0)
    return (shares[..., None] * both[..., KEY:]).sum(0).flatten()


@pytest.mark.wide
@given_steps()
def test_queries_attend_to_the_tokens_with_the_highest_scores(seed, rows, most):
    """Chunks of 17 tokens and more have keys and values made. most: scores that are made at once."""
    cache, index, q, kv_up, starts, page_table, tables, lens = indexed(seed, rows)
    with patch.object(attention, "MOST_SCORES", most):
        chosen, found = run(cache, index, q, kv_up, starts, page_table, lens)
    for row, (begin, end) in enumerate(itertools.pairwise(starts)):
        kept = of_row(cache, tables[row], lens[row])
        for token in range(begin, end):
            seen = kept[: lens[row] - (end - 1 - token)]
            scores = scored(index[0][token], index[1][token], seen[:, RANK + ROTATED :])
            best = scores.sort(descending=True, stable=True).indices[:TOP].sort().values
            if lens[row] > TOP:
                assert [each for each in chosen[token].tolist() if each < len(seen)] == best.tolist()
            want = attended(q[token], seen[best, : RANK + ROTATED], kv_up)
            torch.testing.assert_close(found[token], want, rtol=1e-3, atol=1e-4)


def test_a_choice_depends_on_no_other_sequence_and_on_no_chunk():
    cache, index, q, kv_up, starts, page_table, _, lens = indexed(3, [(20, 12), (1, 29), (1, 3)])
    chosen, found = run(cache, index, q, kv_up, starts, page_table, lens)
    for row, (begin, end) in enumerate(itertools.pairwise(starts)):
        for first, last in ((begin, (begin + end) // 2), ((begin + end) // 2, end)):
            if first == last:
                continue
            own, parts = slice(first, last), tuple(each[first:last] for each in index)
            length = lens[row] - (end - last)
            table = page_table[row : row + 1, : -(-length // BLOCK)]
            alone, out = run(cache, parts, q[own], kv_up, [0, last - first], table, [length])
            if length > TOP:
                every = range(length - (last - first), length)  # a token's place: it sees those up to it
                for token, place in enumerate(every):
                    here, there = (
                        [each for each in one.tolist() if each <= place] for one in (alone[token], chosen[own][token])
                    )
                    assert here == there
            torch.testing.assert_close(out, found[own])


def test_the_first_of_equal_scores_are_chosen_however_many_places_there_are():
    """So a batch's longest sequence has no say."""
    keys = torch.zeros(1, 200, INDEX_KEY)
    keys[0, [3, 50]] = 1.0
    q, weights = torch.ones(1, 1, INDEX_HEADS, INDEX_KEY), torch.ones(1, 1, INDEX_HEADS)
    for places in (51, 60, 200):
        seen = torch.arange(places)[None, None] < 51
        found = chosen_places(q, weights, keys[:, :places], seen, 5)
        assert found.tolist() == [[[0, 1, 2, 3, 50]]]
    below = -weights  # what matches scores less than what does not
    assert chosen_places(q, below, keys[:, :60], seen[..., :60], 5).tolist() == [[[0, 1, 2, 4, 5]]]


def test_as_many_tokens_as_are_chosen_are_all_attended_to():
    """No score is made: every query sees all, to the bit."""
    rows = [(TOP, 0), (1, TOP - 1), (1, 2)]
    cache, index, q, kv_up, starts, page_table, _, lens = indexed(5, rows)
    with patch("chorus.ops.attention.latent_attention.chosen_places", side_effect=AssertionError):
        _, found = run(cache, index, q, kv_up, starts, page_table[:, : -(-TOP // BLOCK)], lens, top=2 * BLOCK)
    own = cache[..., : RANK + ROTATED]
    latents, heads = planned(starts, page_table, lens), LatentHeads(kv_up, HEADS, KEY, ROTATED)
    assert torch.equal(found, latents.run_latents(q, own, heads, None, Scores(SCALE)))


def test_keys_of_many_long_rows_are_gathered_a_few_rows_at_a_time():
    """32 places of 6 elements: three rows have 576."""
    cache, index, q, kv_up, starts, page_table, _, lens = indexed(6, [(1, 28), (1, 25), (1, 9), (1, 30)])
    want, made = run(cache, index, q, kv_up, starts, page_table, lens)[0], list[int]()

    def noting(q, weights, keys, seen, top_k):
        made.append(keys.numel())
        return chosen_places(q, weights, keys, seen, top_k)

    with (
        patch.object(attention, "MOST_SCORES", 600),
        patch("chorus.ops.attention.latent_attention.chosen_places", noting),
    ):
        found = run(cache, index, q, kv_up, starts, page_table, lens)[0]
    assert torch.equal(found, want)
    assert made == [576, 192]


@pytest.mark.parametrize("rows", [[(1, 20), (1, 2)], [(5, 20), (1, 2)]])
def test_what_an_earlier_owner_left_in_a_page_is_chosen_by_nobody(rows):
    cache, index, q, kv_up, starts, page_table, tables, lens = indexed(8, rows)
    want = run(cache, index, q, kv_up, starts, page_table, lens)
    for table, length in zip(tables, lens, strict=True):
        cache[table[-1], (length - 1) % BLOCK + 1 :] = torch.nan
    found = run(cache, index, q, kv_up, starts, page_table, lens)
    assert torch.equal(found[1], want[1])


def test_indices_and_values_of_transformers():
    """The very module of DeepSeek-V3.2 chooses the same tokens."""
    from transformers import DeepseekV32Config
    from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Indexer, apply_rotary_pos_emb

    torch.manual_seed(0)
    config = DeepseekV32Config(
        hidden_size=32, q_lora_rank=16, qk_rope_head_dim=4, index_n_heads=8, index_head_dim=12, index_topk=9
    )
    indexer, tokens = DeepseekV32Indexer(config, 0), 30
    x, low, angles = torch.randn(1, tokens, 32), torch.randn(1, tokens, 16), torch.rand(1, tokens, 2).repeat(1, 1, 2)
    seen = torch.ones(1, tokens, tokens, dtype=torch.bool).tril()
    with torch.no_grad():
        theirs = indexer(x, low, (angles.cos(), angles.sin()), seen, torch.arange(tokens)[None])
        q, k = indexer.wq_b(low).view(1, tokens, 8, 12), indexer.k_norm(indexer.wk(x))[:, :, None]
        turned = apply_rotary_pos_emb(q[..., :4], k[..., :4], angles.cos(), angles.sin(), unsqueeze_dim=2)
        q, k = (torch.cat((one, each[..., 4:]), -1) for one, each in zip(turned, (q, k), strict=True))
        ours = chosen_places(q, indexer.weights_proj(x), k[:, :, 0], seen, 9)
    for token in range(tokens):
        one, other = ([each for each in found[0, token].tolist() if each <= token] for found in (ours, theirs))
        assert one == sorted(other)


def test_other_kinds_of_attention_say_that_they_choose_nothing():
    shape = HeadShape(2, 1, 16, BLOCK)
    with pytest.raises(NotImplementedError, match="PagedAttention has no indexer; use attention torch"):
        PagedAttention(shape).choose(torch.zeros(0), torch.zeros(0), torch.zeros(0), 1)
    heads = LatentHeads(torch.zeros(22, 12), 2, 6, 4)
    with pytest.raises(NotImplementedError, match="PagedAttention has no attention to chosen tokens"):
        PagedAttention(shape).run_latents(torch.zeros(1, 2, 10), torch.zeros(0), heads, chosen=torch.zeros(1, 1))


def test_on_a_gpu_pytorchs_operators_attend_to_chosen_tokens():
    device = torch.device("cuda")
    setup = attention.AttentionSetup(SHAPE, torch.bfloat16, device, 1, 1, scores=(Scores(top_k=4),), value_dim=RANK)
    obstacle = triton_obstacle(1, 64, torch.bfloat16, device, setup.scores)
    assert obstacle is not None
    assert (
        obstacle.reason == "the decode kernel has no attention to tokens that an indexer chooses, and the model has it"
    )
    chosen = choose_attention(setup)
    assert (chosen.name, chosen.captures) == ("torch", False)
    assert "an indexer" in chosen.reason
