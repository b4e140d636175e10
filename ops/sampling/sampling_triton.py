"""Token sampling on a GPU: the same tokens as `sampling.sample`, by three launches and one upload; and a kernel that
bans tokens before them.

Masses and their sums are float64. The sums of a row are split by the vocabulary alone and added in one order, whatever
else is in the step: sampling is batch-invariant. top_k and top_p keep a prefix of the tokens in the order of their
logits; among equal logits the lower token comes first. Each token has a key in that order, and a limit is the key of
the last token that is kept.

An entry has FIELDS float64 values: row of the logits, inverse temperature (0: greedy), u, top_p, floor (the least
tempered logit, relative to the largest, that has a mass), reach (how far below the largest logit top_p may keep one),
top_k (0: all), and its number among the entries with top_k or top_p.

Import this module lazily: it needs triton.
"""

# A kernel is Triton's language in Python's syntax, so type checkers misread its arguments and loops.

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from ..launch_triton import KernelLauncher
from .sampling_schedule import (
    ban_options,
    blocks,
    peak_options,
    pick_options,
    sampling_constants,
    sum_shape,
    weigh_options,
)

_INF = tl.constexpr(float("inf"))
_MOST_KEY = tl.constexpr((1 << 63) - 1)
_TOKENS = tl.constexpr(1 << 24)  # more than the tokens of any vocabulary


@triton.jit(do_not_specialize=["width"])
def ban_tokens(logits, masks, width, row_stride, C: tl.constexpr):
    """Ban tokens: logits[masks[m, 0], t] = -inf where bit t of masks[m, 1:] is 0.

    Grid (blocks, masks). logits: [rows, vocab] float32, rows row_stride apart. masks: [masks, width] int32. C:
    `SamplingConstants`, as for all launches.
    """
    VOCAB: tl.constexpr = C.vocab
    BLOCK: tl.constexpr = C.block
    block, number = tl.program_id(0), tl.program_id(1)
    mask = masks + number.to(tl.int64) * width
    row = tl.load(mask).to(tl.int64)
    token = block * BLOCK + tl.arange(0, BLOCK)
    inside = token < VOCAB
    word = tl.load(mask + 1 + token // 32, mask=inside, other=-1)
    banned = ((word >> (token % 32)) & 1) == 0
    tl.store(logits + row * row_stride + token, tl.full([BLOCK], -_INF, tl.float32), mask=inside & banned)


@triton.jit
def _load_logits(place, own):
    """Load logits in float32, whatever they are kept in; -inf where `own` is false."""
    return tl.load(place, mask=own, other=-_INF).to(tl.float32)


@triton.jit
def find_peaks(peaks, lows, logits, entries, row_stride, C: tl.constexpr):
    """peaks[d, b], lows[d, b]: the largest and the least finite logit in block b of entry d's row; +inf if it has a
    NaN.

    Grid (blocks, entries). logits: [rows, vocab], rows row_stride apart. entries: [entries, fields].
    """
    VOCAB: tl.constexpr = C.vocab
    BLOCK: tl.constexpr = C.block
    BLOCKS: tl.constexpr = C.blocks
    FIELDS: tl.constexpr = C.fields
    block, entry = tl.program_id(0), tl.program_id(1)
    row = tl.load(entries + entry * FIELDS).to(tl.int64)
    token = block * BLOCK + tl.arange(0, BLOCK)
    x = _load_logits(logits + row * row_stride + token, token < VOCAB)
    has_nan = tl.max((x != x).to(tl.int32), axis=0) > 0
    place = entry * BLOCKS + block
    tl.store(peaks + place, tl.where(has_nan, _INF, tl.max(x, axis=0)))
    tl.store(lows + place, tl.min(tl.where(x > -_INF, x, _INF), axis=0))


@triton.jit
def _pivot(most, low, reach, index, PIVOTS: tl.constexpr):
    """Pivot `index` of PIVOTS logits that fall from the largest to the least relevant one; the last is -inf."""
    low = tl.maximum(low.to(tl.float64), most - reach)
    value = most - (most - low) * ((index + 1) * (1.0 / PIVOTS))
    return tl.where(index == PIVOTS - 1, -_INF, value.to(tl.float32))


@triton.jit
def _key(x, token):
    """Key of a token, int64: it rises with the logit, and falls with the token number where logits are equal."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return bits.to(tl.int64) * _TOKENS + (_TOKENS - 1 - token)


@triton.jit
def weigh_blocks(sums, peaks, lows, logits, entries, row_stride, C: tl.constexpr):
    """sums[d, b, j]: mass of the tokens of block b with logits not below pivot j; with top_k, their number.

    Grid (blocks, entries). Entries without limits get only the last sum, which counts all tokens.
    """
    VOCAB: tl.constexpr = C.vocab
    BLOCK: tl.constexpr = C.block
    BLOCKS: tl.constexpr = C.blocks
    FIELDS: tl.constexpr = C.fields
    PADDED: tl.constexpr = C.padded
    PIVOTS: tl.constexpr = C.pivots
    block, entry = tl.program_id(0), tl.program_id(1)
    fields = entries + entry * FIELDS
    row, inverse, top_p = tl.load(fields).to(tl.int64), tl.load(fields + 1), tl.load(fields + 3)
    floor, reach, limited = tl.load(fields + 4), tl.load(fields + 5), tl.load(fields + 6) > 0.0
    each = tl.arange(0, PADDED)
    peak = tl.max(tl.load(peaks + entry * BLOCKS + each, mask=each < BLOCKS, other=-_INF), axis=0)
    if (inverse > 0.0) & (peak > -_INF) & (peak < _INF):
        token = block * BLOCK + tl.arange(0, BLOCK)
        x = _load_logits(logits + row * row_stride + token, token < VOCAB)
        most = peak.to(tl.float64)
        scaled = (x.to(tl.float64) - most) * inverse
        weight = tl.where(scaled >= floor, tl.where(limited, 1.0, tl.exp(scaled)), 0.0)
        target = sums + (entry * BLOCKS + block) * PIVOTS
        tl.store(target + PIVOTS - 1, tl.sum(weight, axis=0))
        if limited | (top_p < 1.0):
            low = tl.min(tl.load(lows + entry * BLOCKS + each, mask=each < BLOCKS, other=_INF), axis=0)
            for index in range(PIVOTS - 1):
                pivot = _pivot(most, low, reach, index, PIVOTS)
                tl.store(target + index, tl.sum(tl.where(x >= pivot, weight, 0.0), axis=0))


@triton.jit
def _collect(out, tokens, count, row, most, inverse, floor, least, above, LISTED: tl.constexpr, BLOCK: tl.constexpr):
    """Write into `out` the tokens that have a mass and keys from `least` up to but excluding `above`; return their
    number.

    tokens: a list, possibly `out` itself; not LISTED: all tokens.
    """
    found = 0
    for begin in range(0, count, BLOCK):
        place = begin + tl.arange(0, BLOCK)
        own = place < count
        token = place
        if LISTED:
            token = tl.load(tokens + place, mask=own, other=0)
        x = _load_logits(row + token, own)
        key = _key(x, token)
        own = own & (key >= least) & (key < above) & ((x.to(tl.float64) - most) * inverse >= floor)
        rank = tl.cumsum(own.to(tl.int32), axis=0) - 1
        tl.debug_barrier()  # all have read the values that are now overwritten
        tl.store(out + found + rank, token, mask=own)
        found += tl.sum(own.to(tl.int32), axis=0)
    tl.debug_barrier()
    return found


@triton.jit
def _weigh(tokens, count, row, most, inverse, by_mass, keys, KEYS: tl.constexpr, CHUNK: tl.constexpr):
    """Mass of a list's tokens with keys from each of `keys` on; without by_mass, their number."""
    total = tl.zeros([KEYS, CHUNK], tl.float64)
    for begin in range(0, count, CHUNK):
        place = begin + tl.arange(0, CHUNK)
        own = place < count
        token = tl.load(tokens + place, mask=own, other=0)
        x = _load_logits(row + token, own)
        mass = tl.where(by_mass, tl.exp((x.to(tl.float64) - most) * inverse), 1.0)
        weight = tl.where(own, mass, 0.0)
        total += tl.where(_key(x, token)[None, :] >= keys[:, None], weight[None, :], 0.0)
    return tl.sum(total, axis=1)


@triton.jit
def _last_kept(
    spare,
    tokens,
    count,
    row,
    most,
    inverse,
    floor,
    least,
    above,
    weight,
    target,
    by_mass,
    C: tl.constexpr,
):
    """Find the largest key such that the tokens from it on weigh at least `target`.

    The key lies between `least` and `above`; the tokens from `above` on weigh `weight`. tokens: a list with all tokens
    in between. The tokens themselves are the pivots, so each round leaves fewer of them.
    """
    BLOCK: tl.constexpr = C.block
    PIVOTS: tl.constexpr = C.pivots
    left = _collect(spare, tokens, count, row, most, inverse, floor, least, above, True, BLOCK)
    found = least
    while left > 1:
        at = tl.load(spare + (tl.arange(0, PIVOTS).to(tl.int64) * left // PIVOTS))
        keys = _key(tl.load(row + at).to(tl.float32), at)
        upto = weight + _weigh(spare, left, row, most, inverse, by_mass, keys, PIVOTS, C.chunk)
        enough = upto >= target
        found = tl.maximum(found, tl.max(tl.where(enough, keys, found), axis=0))
        above = tl.minimum(above, tl.min(tl.where(enough, above, keys), axis=0))
        weight = tl.maximum(weight, tl.max(tl.where(enough, weight, upto), axis=0))
        left = _collect(spare, spare, left, row, most, inverse, floor, found, above, True, BLOCK)
    if left == 1:
        token = tl.load(spare)
        found = _key(tl.load(row + token).to(tl.float32), token)
    return found


@triton.jit
def _weigh_blocks(tokens, count, row, most, inverse, least, C: tl.constexpr):
    """Mass of a list's tokens with keys from `least` on, by blocks of the vocabulary."""
    BLOCK: tl.constexpr = C.block
    PADDED: tl.constexpr = C.padded
    CHUNK: tl.constexpr = C.block_chunk
    block = tl.arange(0, PADDED)
    total = tl.zeros([PADDED, CHUNK], tl.float64)
    for begin in range(0, count, CHUNK):
        place = begin + tl.arange(0, CHUNK)
        own = place < count
        token = tl.load(tokens + place, mask=own, other=0)
        x = _load_logits(row + token, own)
        mass = tl.where(own & (_key(x, token) >= least), tl.exp((x.to(tl.float64) - most) * inverse), 0.0)
        total += tl.where((token // BLOCK)[None, :] == block[:, None], mass[None, :], 0.0)
    return tl.sum(total, axis=1)


@triton.jit
def _first_above(mass, target, SIZE: tl.constexpr):
    """Index of the first mass whose running sum is above the target, and the sum before it.

    If rounding leaves none above the target, the index is that of the last positive mass.
    """
    index = tl.arange(0, SIZE)
    upto = tl.cumsum(mass, axis=0)
    found = tl.min(tl.where((upto > target) & (mass > 0.0), index, SIZE), axis=0)
    last = tl.max(tl.where(mass > 0.0, index, 0), axis=0)
    found = tl.minimum(found, last)
    return found, tl.sum(tl.where(index == found - 1, upto, 0.0), axis=0)


@triton.jit(do_not_specialize=["columns"])
def pick_tokens(
    tokens,
    lists,
    sums,
    peaks,
    lows,
    logits,
    entries,
    columns,
    row_stride,
    C: tl.constexpr,
):
    """Sample: tokens[0, row] is the row's token, -1 if it has none; tokens[1, row] is the same, but 0 if it has none.

    Grid (entries,). tokens: [2, columns] int64. lists: [entries with limits, 2, vocab] int32, scratch for candidates.
    """
    VOCAB: tl.constexpr = C.vocab
    BLOCK: tl.constexpr = C.block
    BLOCKS: tl.constexpr = C.blocks
    FIELDS: tl.constexpr = C.fields
    PADDED: tl.constexpr = C.padded
    PIVOTS: tl.constexpr = C.pivots
    entry = tl.program_id(0)
    fields = entries + entry * FIELDS
    number, inverse = tl.load(fields).to(tl.int64), tl.load(fields + 1)
    u, top_p = tl.load(fields + 2), tl.load(fields + 3)
    floor, reach, top_k = tl.load(fields + 4), tl.load(fields + 5), tl.load(fields + 6)
    row = logits + number * row_stride
    each = tl.arange(0, PADDED)
    tops = tl.load(peaks + entry * BLOCKS + each, mask=each < BLOCKS, other=-_INF)
    peak = tl.max(tops, axis=0)
    token = tl.full([], -1, tl.int64)
    if (peak > -_INF) & (peak < _INF):
        if inverse == 0.0:
            block = tl.min(tl.where(tops == peak, each, PADDED), axis=0)
            at = block * BLOCK + tl.arange(0, BLOCK)
            x = _load_logits(row + at, at < VOCAB)
            token = tl.min(tl.where(x == peak, at, VOCAB), axis=0).to(tl.int64)
        else:
            most = peak.to(tl.float64)
            least = tl.full([], -_MOST_KEY, tl.int64)
            place = sums + (entry * BLOCKS + each) * PIVOTS
            limited = top_k > 0.0
            if limited | (top_p < 1.0):
                index = tl.arange(0, PIVOTS)
                by_block = tl.load(place[:, None] + index[None, :], mask=(each < BLOCKS)[:, None], other=0.0)
                upto = tl.sum(by_block, axis=0)
                mass = tl.sum(tl.where(index == PIVOTS - 1, upto, 0.0), axis=0)
                target = tl.where(limited, top_k, top_p * mass)
                at = tl.min(tl.where(upto >= target, index, PIVOTS - 1), axis=0)
                low = tl.min(tl.load(lows + entry * BLOCKS + each, mask=each < BLOCKS, other=_INF), axis=0)
                least = _key(_pivot(most, low, reach, at, PIVOTS), _TOKENS - 1)
                above = tl.full([], _MOST_KEY, tl.int64)
                weight = tl.full([], 0.0, tl.float64)
                before = index == tl.where(limited, -1, at - 1)  # with top_k, the list has all tokens from the pivot on
                if (at > 0) & (top_k == 0.0):
                    above = _key(_pivot(most, low, reach, at - 1, PIVOTS), _TOKENS - 1)
                    weight = tl.sum(tl.where(before, upto, 0.0), axis=0)
                masses = tl.sum(tl.where(before[None, :], by_block, 0.0), axis=1)
                first = lists + tl.load(fields + 7).to(tl.int64) * (2 * VOCAB)
                second = first + VOCAB
                count = _collect(first, first, VOCAB, row, most, inverse, floor, least, above, False, BLOCK)
                for by_mass in range(2):  # a loop, so that the code exists only once
                    if (by_mass == 0) & limited | (by_mass == 1) & (top_p < 1.0):
                        if (by_mass == 1) & limited:
                            key = tl.full([1], 0, tl.int64) + least
                            kept = _weigh(first, count, row, most, inverse, by_mass == 1, key, 1, BLOCK)
                            target = top_p * tl.sum(kept, axis=0)
                        least = _last_kept(
                            second,
                            first,
                            count,
                            row,
                            most,
                            inverse,
                            floor,
                            least,
                            above,
                            weight,
                            target,
                            by_mass == 1,
                            C,
                        )
                masses += _weigh_blocks(first, count, row, most, inverse, least, C)
            else:
                masses = tl.load(place + PIVOTS - 1, mask=each < BLOCKS, other=0.0)
            share = u * tl.sum(masses, axis=0)
            block, sum_before = _first_above(masses, share, PADDED)
            at = block * BLOCK + tl.arange(0, BLOCK)
            x = _load_logits(row + at, at < VOCAB)
            scaled = (x.to(tl.float64) - most) * inverse
            own = (scaled >= floor) & (_key(x, at) >= least)
            within, _ = _first_above(tl.where(own, tl.exp(scaled), 0.0), share - sum_before, BLOCK)
            token = (block * BLOCK + within).to(tl.int64)
    tl.store(tokens + number, token)
    tl.store(tokens + columns + number, tl.maximum(token, 0))


def sample(tokens: torch.Tensor, logits: torch.Tensor, entries: torch.Tensor, num_limited: int) -> None:
    """Sample into `tokens` `[2, rows]` int64 from logits `[rows, vocab]`; see the module.

    entries: `[entries, FIELDS]` float64, on the device. num_limited: entries with top_k or top_p.
    """
    count, vocab = len(entries), logits.shape[1]
    if logits.stride(1) != 1 or not tokens.is_contiguous():
        raise ValueError("rows of logits and all of tokens must be contiguous")
    peaks, lows = (torch.empty(count, blocks(vocab), dtype=torch.float32, device=logits.device) for _ in range(2))
    sums = torch.empty(sum_shape(count, vocab), dtype=torch.float64, device=logits.device)
    lists = torch.empty(max(1, num_limited), 2, vocab, dtype=torch.int32, device=logits.device)
    find, weigh, pick = _launchers(vocab)
    stride = logits.stride(0)
    find((blocks(vocab), count, 1), (peaks, lows, logits, entries), (), (stride,))
    weigh((blocks(vocab), count, 1), (sums, peaks, lows, logits, entries), (), (stride,))
    pick((count, 1, 1), (tokens, lists, sums, peaks, lows, logits, entries), (tokens.shape[1],), (stride,))


def ban(logits: torch.Tensor, masks: torch.Tensor) -> None:
    """Set logits `[rows, vocab]` float32 to -inf where masks `[n, 1 + words]` int32 ban them; see `sampling.ban`."""
    if logits.stride(1) != 1 or not masks.is_contiguous():
        raise ValueError("rows of logits and all of masks must be contiguous")
    vocab = logits.shape[1]
    grid = blocks(vocab), len(masks), 1
    _ban_launcher(vocab)(grid, (logits, masks), (masks.shape[1],), (logits.stride(0),))


@cache
def _ban_launcher(vocab: int) -> KernelLauncher:
    return KernelLauncher(ban_tokens, {"C": sampling_constants(vocab), **ban_options()})


@cache
def _launchers(vocab: int) -> tuple[KernelLauncher, KernelLauncher, KernelLauncher]:
    constants = {"C": sampling_constants(vocab)}
    return (
        KernelLauncher(find_peaks, {**constants, **peak_options()}),
        KernelLauncher(weigh_blocks, {**constants, **weigh_options()}),
        KernelLauncher(pick_tokens, {**constants, **pick_options()}),
    )


# Rules for type checkers are at the end, so that kernels keep their lines.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
