"""Draw tokens from logits."""

from __future__ import annotations

import numpy as np
import torch

_MASK64 = (1 << 64) - 1


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on (seed, position) only: SplitMix64 of the pair.

    A stateless generator makes a draw independent of batch neighbours, of preemption and of the executor.
    """
    z = (seed * 0x9E3779B97F4A7C15 + (position + 1) * 0xD1B54A32D192ED03) & _MASK64
    for multiplier, shift in ((0xBF58476D1CE4E5B9, 30), (0x94D049BB133111EB, 27)):
        z = ((z ^ (z >> shift)) * multiplier) & _MASK64
    z ^= z >> 31
    return (z >> 11) / (1 << 53)


def greedy(logits: torch.Tensor) -> tuple[list[int], list[bool]]:
    """The most likely token of each row, and whether its logit is finite: it is not if any of the row's is NaN or +inf.

    logits: `[rows, vocab]` float32. On a CPU numpy's vectorised search is ten times faster than torch's.
    """
    if logits.device.type == "cpu":
        values = logits.numpy()
        tokens = values.argmax(1)
        return tokens.tolist(), np.isfinite(values[np.arange(len(tokens)), tokens]).tolist()
    best, tokens = logits.max(-1)
    tokens, finite = torch.stack((tokens, best.isfinite().long())).tolist()
    return tokens, [bool(value) for value in finite]


def apply_penalties(
    scores: torch.Tensor,
    seen: torch.Tensor,
    generated: torch.Tensor,
    repetition: float,
    presence: float,
    frequency: float,
) -> None:
    """Penalise one row's logits `[vocab]` in place.

    seen: `[n]` int64, prompt and output tokens, for `repetition` (CTRL, Keskar et al. 2019, §4.1); generated: `[m]`
    int64, output tokens, for `presence` and `frequency` (OpenAI: logit − presence·[count > 0] − frequency·count).
    """
    if repetition != 1.0:
        ids = seen.unique()
        values = scores[ids]
        scores[ids] = torch.where(values > 0, values / repetition, values * repetition)
    if len(generated) and (presence or frequency):
        ids, counts = generated.unique(return_counts=True)
        scores[ids] -= presence + frequency * counts


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    u: torch.Tensor,
    min_p: torch.Tensor | None = None,
) -> torch.Tensor:
    """One token id per row by inverse transform sampling over the kept tokens in vocabulary order.

    logits: `[rows, vocab]` float32. temperature, top_p, min_p, u: `[rows]` float; top_k: `[rows]` int64, 0 keeps all;
    these in host memory, wherever the logits are.
    temperature 0 is greedy. min_p over the tempered distribution, then top_k, then top_p over what is left,
    renormalised (as vLLM does). Vocabulary order, not probability order, so that two nearly equal logits can't swap
    places between batches.
    """
    greedy = temperature == 0
    if greedy.all():
        return logits.argmax(-1)
    if min_p is not None and not min_p.any():
        min_p = None
    vocab, device = logits.shape[-1], logits.device
    greedy, temperature, top_k, top_p, u = (values.to(device) for values in (greedy, temperature, top_k, top_p, u))
    scaled = logits - logits.amax(-1, keepdim=True)  # the largest is 0, so that no temperature overflows it
    scaled = scaled / torch.where(greedy, 1.0, temperature)[:, None]
    ordered, index = scaled.sort(dim=-1, descending=True, stable=True)
    if min_p is not None:
        ordered = ordered.masked_fill(ordered < ordered[:, :1] + min_p.to(device).log()[:, None], -torch.inf)
    rank = torch.arange(vocab, device=logits.device)
    ordered = ordered.masked_fill(rank >= torch.where(top_k > 0, top_k, vocab)[:, None], -torch.inf)
    probs = ordered.softmax(-1)
    before = probs.cumsum(-1) - probs
    probs = probs.masked_fill((before >= top_p[:, None]) & (rank > 0), 0.0)
    kept = torch.zeros_like(probs).scatter_(-1, index, probs).double()
    mass = kept.cumsum(-1)
    token = torch.searchsorted(mass, (u.double() * mass[:, -1])[:, None], right=True)[:, 0].clamp_(max=vocab - 1)
    return torch.where(greedy, logits.argmax(-1), token)
