"""Draw tokens from logits."""

from __future__ import annotations

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


def sample(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, u: torch.Tensor
) -> torch.Tensor:
    """One token id per row by inverse transform sampling over the kept tokens in vocabulary order.

    logits: `[rows, vocab]` float32. temperature, top_p, u: `[rows]` float; top_k: `[rows]` int64, 0 keeps all.
    temperature 0 is greedy. top_k first, then top_p over what is left, renormalised (as transformers and vLLM do).
    Vocabulary order, not probability order, so that two nearly equal logits can't swap places between batches.
    """
    greedy = temperature == 0
    if greedy.all():
        return logits.argmax(-1)
    vocab = logits.shape[-1]
    scaled = logits - logits.amax(-1, keepdim=True)  # the largest is 0, so that no temperature overflows it
    scaled = scaled / torch.where(greedy, 1.0, temperature)[:, None]
    ordered, index = scaled.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(vocab, device=logits.device)
    ordered = ordered.masked_fill(rank >= torch.where(top_k > 0, top_k, vocab)[:, None], -torch.inf)
    probs = ordered.softmax(-1)
    before = probs.cumsum(-1) - probs
    probs = probs.masked_fill((before >= top_p[:, None]) & (rank > 0), 0.0)
    kept = torch.zeros_like(probs).scatter_(-1, index, probs).double()
    mass = kept.cumsum(-1)
    token = torch.searchsorted(mass, (u.double() * mass[:, -1])[:, None], right=True)[:, 0].clamp_(max=vocab - 1)
    return torch.where(greedy, logits.argmax(-1), token)
