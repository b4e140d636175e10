"""Samples tokens from logits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

from ..library.native_library import library
from ..upload import on_device
from .sampling_schedule import FIELDS

#: Bytes of logits that are processed together.
SLICE_BYTES = 32 << 20

_MASK64 = (1 << 64) - 1
_MOST_INVERSE = 1e300
_NO_MASS = -700.0  # e^x below that counts as 0, here and in the native library
_BLOCK = 128  # masses that are summed before a running sum; vocabularies are often padded to a multiple of it

#: Number of largest logits that top_p examines first, and the factor by which it grows if they are not enough.
FIRST_WIDTH, WIDER = 512, 16


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends only on (seed, position): SplitMix64 of the pair.

    A stateless generator makes a sampled token independent of batch neighbours, of preemption and of the executor.
    """
    z = (seed * 0x9E3779B97F4A7C15 + (position + 1) * 0xD1B54A32D192ED03) & _MASK64
    for multiplier, shift in ((0xBF58476D1CE4E5B9, 30), (0x94D049BB133111EB, 27)):
        z = ((z ^ (z >> shift)) * multiplier) & _MASK64
    z ^= z >> 31
    return (z >> 11) / (1 << 53)


class RowSamplingParams(NamedTuple):
    """Sampling parameters of one row. temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 keep all tokens."""

    temperature: float
    u: float
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def cuts(self) -> bool:
        """True if some tokens may be excluded."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0


class RowLogprobs(NamedTuple):
    """Log-probabilities of each row: of its token, and of its most likely tokens, best first."""

    own: list[float]
    """NaN if a logit is NaN or +inf."""
    ids: list[list[int]]
    """As many as any row asks for; among equal ones, the first come first."""
    values: list[list[float]]


def inverse_temperature(temperature: float) -> float:
    """Factor for the logits: finite even if 1 / temperature is not; 0 for greedy rows."""
    return min(1.0 / temperature, _MOST_INVERSE) if temperature else 0.0


def greedy(logits: torch.Tensor) -> list[int]:
    """The argmax of each row; -1 if it is undefined: a logit is NaN or +inf, or all are -inf.

    logits: `[rows, vocab]` float32. On a CPU, numpy's vectorised search is ten times faster than torch's.
    """
    if logits.device.type == "cpu":
        values = logits.numpy()
        tokens = values.argmax(1)
        return np.where(np.isfinite(values[np.arange(len(tokens)), tokens]), tokens, -1).tolist()
    best, tokens = logits.max(-1)
    return torch.where(best.isfinite(), tokens, -1).tolist()


def logprob_rows(vocab: int) -> int:
    """Rows of logits processed at a time for log-probabilities, so long prompts take no more memory."""
    return max(1, SLICE_BYTES // (vocab * 4))


class TorchSampling:
    """Samples and computes log-probabilities on the logits' own device, a slice of rows at a time."""

    def sample(self, logits: torch.Tensor, rows: Sequence[int], row_params: Sequence[RowSamplingParams]) -> list[int]:
        """Sample a token for each of `rows` of the logits; -1 if no logit is above -inf, or one is NaN or +inf."""
        return sample(pick(logits, rows), row_params).tolist()

    def row_logprobs(
        self, logits: torch.Tensor, rows: Sequence[int], tokens: Sequence[int], counts: Sequence[int]
    ) -> RowLogprobs:
        """Log-probability of a token for each of `rows`, and of as many of its most likely tokens as `counts` says."""
        own = on_device(torch.tensor(tokens), logits.device)
        return read_logprobs(row_logprobs(pick(logits, rows), own, max(counts)).tolist())


def sample_into(
    tokens: torch.Tensor, logits: torch.Tensor, rows: Sequence[int], row_params: Sequence[RowSamplingParams]
) -> None:
    """Write the token of each of `rows` of the logits to tokens `[2, …]` int64, see `sample`; the second row has 0 for
    -1.

    On a GPU the kernels of `sampling_triton` do it: the host makes one upload and three launches, and never waits.
    """
    if _on_host(logits):
        sampled = torch.tensor(TorchSampling().sample(logits, rows, row_params))
        tokens[:, torch.tensor(rows)] = torch.stack((sampled, sampled.clamp(min=0)))
        return
    entries, num_limited = sampling_rows(rows, row_params, logits.shape[1])
    _launch(tokens, logits, on_device(torch.from_numpy(entries), logits.device), num_limited)


def ban(logits: torch.Tensor, masks: np.ndarray) -> None:
    """Set the logits `[rows, vocab]` float32 to -inf where a token's bit is 0; on a GPU by one upload and one launch.

    masks: `[n, 1 + words]` int32: a row of the logits, then a bit for each token, lowest first.
    """
    if _on_host(logits):
        vocab = logits.shape[1]
        if (found := library()) is not None and logits.stride(1) == 1 and masks.flags.c_contiguous:
            found.chorus_ban(logits.data_ptr(), logits.stride(0), vocab, masks.ctypes.data, *masks.shape)
            return
        values = logits.numpy()
        for mask in masks:
            banned = np.unpackbits(~mask[1:].view(np.uint8), bitorder="little", count=vocab)
            np.copyto(values[mask[0]], -np.inf, where=banned.view(bool))
        return
    _launch_ban(logits, on_device(torch.from_numpy(masks), logits.device))


def _launch_ban(logits: torch.Tensor, masks: torch.Tensor) -> None:
    from . import sampling_triton  # needs triton

    sampling_triton.ban(logits, masks)


def _on_host(logits: torch.Tensor) -> bool:
    return logits.device.type == "cpu"


def _launch(tokens: torch.Tensor, logits: torch.Tensor, entries: torch.Tensor, num_limited: int) -> None:
    from . import sampling_triton  # needs triton

    sampling_triton.sample(tokens, logits, entries, num_limited)


def sampling_rows(rows: Sequence[int], row_params: Sequence[RowSamplingParams], vocab: int) -> tuple[np.ndarray, int]:
    """Entries for `sampling_triton`, `[rows, FIELDS]` float64, and the number of those with top_k or top_p."""
    entries, num_limited = np.empty((len(rows), FIELDS)), 0
    for entry, row, (temperature, u, top_k, top_p, min_p) in zip(entries, rows, row_params, strict=True):
        inverse, top_p, floor, reach, top_k = _limits(temperature, top_k, top_p, min_p, vocab)
        entry[:] = row, inverse, u, top_p, floor, reach, top_k, num_limited
        num_limited += top_k > 0 or top_p < 1.0
    return entries, num_limited


@lru_cache(1024)
def _limits(
    temperature: float, top_k: int, top_p: float, min_p: float, vocab: int
) -> tuple[float, float, float, float, float]:
    """Inverse temperature, top_p, floor, reach and top_k of an entry; see `sampling_triton`."""
    inverse = inverse_temperature(temperature)
    if not inverse:
        return 0.0, 1.0, 0.0, 0.0, 0.0
    floor = max(_NO_MASS, math.log(min_p)) if min_p > 0.0 else _NO_MASS
    limit = float(top_k) if 0 < top_k < vocab else 0.0
    reach = -floor
    if top_p < 1.0 and not limit:  # tokens further below than that weigh less than the mass that top_p excludes
        reach = min(reach, math.log(vocab / (1.0 - top_p)))
    return inverse, top_p, floor, reach / inverse, limit


def sample(logits: torch.Tensor, row_params: Sequence[RowSamplingParams], width: int = FIRST_WIDTH) -> torch.Tensor:
    """Sample one token per row by inverse transform sampling over the kept tokens in vocabulary order; nothing is
    sorted.

    logits: `[rows, vocab]`, any dtype. temperature 0 is greedy. min_p applies to the tempered distribution, then top_k,
    then top_p to the renormalised rest (as in vLLM); among equal logits the first are kept. Vocabulary order is used
    instead of probability order, so nearly equal logits can't swap places between batches. Masses are float64, so an
    exponential that differs in its last bit, as on other devices, still gives the same token. The host waits for the
    logits' device for top_p alone: of its rows the `width` largest logits are examined first, then WIDER times as many.

    Returns -1 if no logit is above -inf, or one is NaN or +inf.
    """
    step = _slice_rows(logits.shape[1])
    parts = [_sample(part, row_params[i * step : (i + 1) * step], width) for i, part in enumerate(logits.split(step))]
    return torch.cat(parts)


def row_logprobs(logits: torch.Tensor, tokens: torch.Tensor, count: int) -> torch.Tensor:
    """`[rows, 1 + 2 · count]` float64: log-probability of the token, the most likely tokens, and theirs; see
    `read_logprobs`.

    logits: `[rows, vocab]`, of any dtype. tokens: `[rows]` int64. The host never waits for their device.
    """
    step, count = _slice_rows(logits.shape[1]), min(count, logits.shape[1])
    return torch.cat([_score(*part, count) for part in zip(logits.split(step), tokens.split(step), strict=True)])


def read_logprobs(rows: Sequence[Sequence[float]]) -> RowLogprobs:
    """Convert the rows of `row_logprobs`, now on the host."""
    count = len(rows[0]) // 2
    return RowLogprobs(
        [row[0] for row in rows],
        [[int(token) for token in row[1 : 1 + count]] for row in rows],
        [list(row[1 + count :]) for row in rows],
    )


def pick(values: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """Return some rows of `values`: the same tensor if they are all of them in order, a view if they are the first."""
    if len(rows) == (rows[-1] + 1 if rows else 0) and list(rows) == list(range(len(rows))):
        return values[: len(rows)]
    return values[on_device(torch.tensor(rows, dtype=torch.long), values.device)]


def _sample(logits: torch.Tensor, row_params: Sequence[RowSamplingParams], width: int) -> torch.Tensor:
    vocab, device = logits.shape[1], logits.device
    most, best = logits.max(-1)
    sampled = [i for i, row in enumerate(row_params) if row.temperature]
    if sampled:
        wanted = [row_params[i] for i in sampled]
        values = [(inverse_temperature(it.temperature), it.u, it.top_p, it.min_p) for it in wanted]
        inverse, u, top_p, min_p = on_device(torch.tensor(values, dtype=torch.float64).t(), device)
        x = pick(logits, sampled)
        mass = x.double().sub_(pick(most, sampled).double()[:, None]).mul_(inverse[:, None])
        mass.masked_fill_(mass < _NO_MASS, -torch.inf)
        if cut := [j for j, row in enumerate(wanted) if _cuts(row, vocab)]:
            at = on_device(torch.tensor(cut), device)
            scaled, limits = mass[at], [wanted[j] for j in cut]
            kept = _kept(pick(x, cut), scaled, row_params=limits, top_p=top_p[at], min_p=min_p[at], width=width)
            mass[at] = scaled.masked_fill_(~kept, -torch.inf)
        token = first_above(mass.exp_(), u)
        if len(sampled) == len(row_params):
            best = token
        else:
            best = best.index_copy(0, on_device(torch.tensor(sampled), device), token)
    return torch.where(most.isfinite(), best, -1)


def first_above(mass: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """Each row's first token at which the running sum of mass `[rows, vocab]` exceeds the share u `[rows]` of the
    total.

    It uses sums of blocks, then a running sum within one block: sums of blocks are spread over a device, a running sum
    is not.
    """
    rows, vocab = mass.shape
    if tail := -vocab % _BLOCK:
        mass = torch.nn.functional.pad(mass, (0, tail))
    mass = mass.view(rows, -1, _BLOCK)
    upto = mass.sum(-1).cumsum(-1)
    target = u[:, None] * upto[:, -1:]
    block = _first_index(upto, target)
    before = torch.where(block > 0, upto.gather(1, (block - 1).clamp_(min=0)), 0.0)
    within = mass.gather(1, block[:, :, None].expand(-1, -1, _BLOCK))[:, 0].cumsum(-1)
    return (block * _BLOCK + _first_index(within, target - before))[:, 0].clamp_(max=vocab - 1)


def _first_index(upto: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Index `[rows, 1]` of the first of rising sums above the target; if rounding leaves none, of the last that adds to
    them.
    """
    last = torch.searchsorted(upto, upto[:, -1:].contiguous())
    return torch.minimum(torch.searchsorted(upto, target, right=True), last).clamp_(max=upto.shape[1] - 1)


def _cuts(row: RowSamplingParams, vocab: int) -> bool:
    return 0 < row.top_k < vocab or row.top_p < 1.0 or row.min_p > 0.0


def _kept(
    logits: torch.Tensor,
    scaled: torch.Tensor,
    row_params: Sequence[RowSamplingParams],
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    width: int,
) -> torch.Tensor:
    """Mask `[rows, vocab]` of tokens that may be sampled.

    scaled: the logits minus their largest, tempered, float64. top_p, min_p: as in `row_params`, on the device.
    """
    device, vocab = logits.device, logits.shape[1]
    kept = scaled >= min_p.log()[:, None]  # all tokens if min_p is 0
    if limited := [i for i, row in enumerate(row_params) if 0 < row.top_k < vocab]:
        at = on_device(torch.tensor(limited), device)
        counts = [row_params[i].top_k for i in limited]
        part = pick(logits.masked_fill(~kept, -torch.inf), limited)
        largest = part.topk(max(counts), sorted=True).values
        kept[at] = kept[at] & _largest(part, largest, on_device(torch.tensor(counts), device))
    if nucleus := [i for i, row in enumerate(row_params) if row.top_p < 1.0]:
        at = on_device(torch.tensor(nucleus), device)
        part = pick(scaled.masked_fill(~kept, -torch.inf), nucleus)
        target = top_p[at] * part.exp().sum(-1)
        while True:
            largest = part.topk(min(width, vocab), sorted=True).values
            counts = 1 + (largest.exp().cumsum(-1)[:, :-1] < target[:, None]).sum(-1)
            if width >= vocab or int(counts.max()) < width:
                break
            width *= WIDER
        kept[at] = kept[at] & _largest(part, largest, counts)
    return kept


def _largest(values: torch.Tensor, largest: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Mask of each row's `counts` largest `values`; among equal ones, the first.

    largest: each row's largest values, at least `counts` of them, best first.
    """
    least = largest.gather(-1, counts[:, None] - 1)
    above, same = values > least, values == least
    equal = counts - above.sum(-1)  # at least one
    last = first_above(same.double(), (equal - 0.5) / same.sum(-1))
    return above | (same & (torch.arange(values.shape[1], device=values.device) <= last[:, None]))


def _score(logits: torch.Tensor, tokens: torch.Tensor, count: int) -> torch.Tensor:
    """`[rows, 1 + 2 · count]` float64: log-probability of the token, the most likely tokens, and theirs."""
    vocab = logits.shape[1]
    most = logits.amax(-1, keepdim=True).double()
    norm = most + logits.double().sub_(most).exp_().sum(-1, keepdim=True).log_()
    own = logits.gather(-1, tokens[:, None]).double() - norm
    if not count:
        return own
    largest = logits.topk(count, sorted=True).values
    counts = torch.full((len(logits),), count, device=logits.device)
    kept = _largest(logits, largest, counts)
    ids = torch.arange(vocab, device=logits.device).where(kept, vocab).topk(count, largest=False, sorted=True).values
    ids.clamp_(max=vocab - 1)  # rows that contain a NaN
    values, order = logits.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
    return torch.cat((own, ids.gather(-1, order).double(), values.double() - norm), -1)


def _slice_rows(vocab: int) -> int:
    """Rows that are sampled at a time: each takes about 32 bytes per token of the vocabulary."""
    return max(1, SLICE_BYTES * 2 // (vocab * 32))
