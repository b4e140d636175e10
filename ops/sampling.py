"""Draw tokens from logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

#: Of a slice of logits that are drawn from or scored together.
SLICE_BYTES = 32 << 20

_MASK64 = (1 << 64) - 1
_MOST_INVERSE = 1e300
_NO_MASS = -700.0  # e^x below that is taken as 0, here and in the native library
_FIRST_WIDTH, _WIDER = 512, 16  # how many of the largest logits top_p looks at first, and how that grows


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on (seed, position) only: SplitMix64 of the pair.

    A stateless generator makes a draw independent of batch neighbours, of preemption and of the executor.
    """
    z = (seed * 0x9E3779B97F4A7C15 + (position + 1) * 0xD1B54A32D192ED03) & _MASK64
    for multiplier, shift in ((0xBF58476D1CE4E5B9, 30), (0x94D049BB133111EB, 27)):
        z = ((z ^ (z >> shift)) * multiplier) & _MASK64
    z ^= z >> 31
    return (z >> 11) / (1 << 53)


class Chances(NamedTuple):
    """Sampling of one row's token. temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 keep all tokens."""

    temperature: float
    u: float
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def cuts(self) -> bool:
        """True if some tokens may be kept out."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0


class Scores(NamedTuple):
    """Log-probabilities, an entry per row: of the row's token, and of its most likely tokens, best first.

    own: NaN where a logit is NaN or +inf. ids, values: as many as any row asks for; of equal ones the first come first.
    """

    own: list[float]
    ids: list[list[int]]
    values: list[list[float]]


def inverse_temperature(temperature: float) -> float:
    """Factor of the logits: finite even for temperatures whose reciprocal is not, 0 for greedy rows."""
    return min(1.0 / temperature, _MOST_INVERSE) if temperature else 0.0


def greedy(logits: torch.Tensor) -> list[int]:
    """The most likely token of each row; -1 where that can't be told: a logit is NaN or +inf, or all are -inf.

    logits: `[rows, vocab]` float32. On a CPU numpy's vectorised search is ten times faster than torch's.
    """
    if logits.device.type == "cpu":
        values = logits.numpy()
        tokens = values.argmax(1)
        return np.where(np.isfinite(values[np.arange(len(tokens)), tokens]), tokens, -1).tolist()
    best, tokens = logits.max(-1)
    return torch.where(best.isfinite(), tokens, -1).tolist()


def score_rows(vocab: int) -> int:
    """Rows of logits that are scored at a time, so that a long prompt takes no more memory than a short one."""
    return max(1, SLICE_BYTES // (vocab * 4))


class TorchSampling:
    """Draws and scores rows of logits where they are, a slice of rows at a time."""

    def sample(self, logits: torch.Tensor, rows: Sequence[int], chances: Sequence[Chances]) -> list[int]:
        """A token for each of `rows` of the logits; -1 where no logit is above -inf, or one is NaN or +inf."""
        return sample(_pick(logits, rows), chances).tolist()

    def score(self, logits: torch.Tensor, rows: Sequence[int], tokens: Sequence[int], counts: Sequence[int]) -> Scores:
        """Log-probabilities of a token of each of `rows`, and of as many of the row's most likely tokens."""
        logits, count = _pick(logits, rows), min(max(counts), logits.shape[1])
        own = torch.tensor(tokens).to(logits.device, non_blocking=True)
        step = _slice_rows(logits.shape[1])
        parts = [_score(*part, count) for part in zip(logits.split(step), own.split(step), strict=True)]
        found = torch.cat(parts).tolist()  # the only values that are waited for
        return Scores(
            [row[0] for row in found],
            [[int(token) for token in row[1 : 1 + count]] for row in found],
            [row[1 + count :] for row in found],
        )


def sample(logits: torch.Tensor, chances: Sequence[Chances]) -> torch.Tensor:
    """One token id per row by inverse transform sampling over the kept tokens in vocabulary order; nothing is sorted.

    logits: `[rows, vocab]` float32.
    temperature 0 is greedy. min_p over the tempered distribution, then top_k, then top_p over what is left,
    renormalised (as vLLM does); of equal logits the first are kept. Vocabulary order, not probability order, so that
    two nearly equal logits can't swap places between batches. Masses are float64, so that an exponential that differs
    in its last bit, as those of other devices do, still gives the same token. -1 where no logit is above -inf, or one
    is NaN or +inf.
    """
    step = _slice_rows(logits.shape[1])
    parts = [_sample(part, chances[i * step : (i + 1) * step]) for i, part in enumerate(logits.split(step))]
    return torch.cat(parts)


def _sample(logits: torch.Tensor, chances: Sequence[Chances]) -> torch.Tensor:
    vocab, device = logits.shape[1], logits.device
    most, best = logits.max(-1)
    drawn = [i for i, row in enumerate(chances) if row.temperature]
    if drawn:
        inverse, u = torch.tensor(
            [[inverse_temperature(chances[i].temperature) for i in drawn], [chances[i].u for i in drawn]],
            dtype=torch.float64,
        ).to(device, non_blocking=True)
        x = _pick(logits, drawn)
        scaled = x.double().sub_(_pick(most, drawn).double()[:, None]).mul_(inverse[:, None])
        scaled.masked_fill_(scaled < _NO_MASS, -torch.inf)
        cut = [j for j, i in enumerate(drawn) if _cuts(chances[i], vocab)]
        if cut:
            kept = _kept(_pick(x, cut), _pick(scaled, cut), [chances[drawn[j]] for j in cut])
            mass = scaled.exp_()
            mass[cut] = mass[cut].masked_fill_(~kept, 0.0)
        else:
            mass = scaled.exp_()
        upto = mass.cumsum(-1)
        token = torch.searchsorted(upto, (u * upto[:, -1])[:, None], right=True)[:, 0].clamp_(max=vocab - 1)
        best = token if len(drawn) == len(chances) else best.index_copy(0, torch.tensor(drawn, device=device), token)
    return torch.where(most.isfinite(), best, -1)


def _cuts(row: Chances, vocab: int) -> bool:
    return 0 < row.top_k < vocab or row.top_p < 1.0 or row.min_p > 0.0


def _kept(logits: torch.Tensor, scaled: torch.Tensor, chances: list[Chances]) -> torch.Tensor:
    """Mask `[rows, vocab]` of tokens that may be drawn. scaled: the logits below their largest, tempered, float64."""
    device, vocab = logits.device, logits.shape[1]
    values = torch.tensor([(row.top_p, row.min_p) for row in chances], dtype=torch.float64)
    top_p, min_p = values.to(device, non_blocking=True).unbind(1)
    kept = scaled >= min_p.log()[:, None]  # all where it is 0
    if limited := [i for i, row in enumerate(chances) if 0 < row.top_k < vocab]:
        part = _pick(logits.masked_fill(~kept, -torch.inf), limited)
        counts = torch.tensor([chances[i].top_k for i in limited], device=device)
        largest = part.topk(int(max(chances[i].top_k for i in limited)), sorted=True).values
        kept[limited] &= _largest(part, largest, counts)
    if nucleus := [i for i, row in enumerate(chances) if row.top_p < 1.0]:
        part = _pick(scaled.masked_fill(~kept, -torch.inf), nucleus)
        target = _pick(top_p, nucleus) * part.exp().sum(-1)
        width = _FIRST_WIDTH
        while nucleus:
            width = min(width, vocab)
            largest = part.topk(width, sorted=True).values
            upto = largest.exp().cumsum(-1)
            counts = 1 + (upto[:, :-1] < target[:, None]).sum(-1)
            enough = [True] * len(nucleus) if width == vocab else (counts < width).tolist()
            done = [i for i, good in enumerate(enough) if good]
            left = [i for i, good in enumerate(enough) if not good]
            if done:
                rows = [nucleus[i] for i in done]
                kept[rows] &= _largest(_pick(part, done), _pick(largest, done), _pick(counts, done))
            part, target, nucleus = _pick(part, left), _pick(target, left), [nucleus[i] for i in left]
            width *= _WIDER
    return kept


def _largest(values: torch.Tensor, largest: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Mask of each row's `counts` largest `values`, of equal ones the first.

    largest: each row's largest values, at least `counts` of them, best first.
    """
    least = largest.gather(-1, counts[:, None] - 1)
    above, same = values > least, values == least
    return above | (same & (same.cumsum(-1) <= counts[:, None] - above.sum(-1, keepdim=True)))


def _score(logits: torch.Tensor, tokens: torch.Tensor, count: int) -> torch.Tensor:
    """`[rows, 1 + 2 · count]` float64: the token's log-probability, the most likely tokens, theirs."""
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
    ids.clamp_(max=vocab - 1)  # of rows that hold a NaN
    values, order = logits.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
    return torch.cat((own, ids.gather(-1, order).double(), values.double() - norm), -1)


def _pick(values: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """Some rows of `values`; the same tensor when they are all of them in order, a view when they are the first."""
    if len(rows) == (rows[-1] + 1 if rows else 0) and list(rows) == list(range(len(rows))):
        return values[: len(rows)]
    return values[torch.tensor(rows, dtype=torch.long).to(values.device, non_blocking=True)]


def _slice_rows(vocab: int) -> int:
    """Rows that are drawn at a time: each takes some 32 bytes per token of the vocabulary."""
    return max(1, SLICE_BYTES * 2 // (vocab * 32))
