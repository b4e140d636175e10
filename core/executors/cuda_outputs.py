"""Static outputs of a step on a GPU: its logits, and the tokens that are sampled from them.

Tests: tests/core/executors/test_cuda_interpreted.py, tests/core/executors/test_cuda_ranks_interpreted.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from ...graphs.device import CudaDevice, Download
from ...ops.ranks.ranks import Collectives
from ...ops.sampling.sampling import TorchSampling
from ..config import EngineConfig
from ..model.decoder import DecoderModel
from ..model.pooling import add_pooled
from ..model.sampler import (
    DeviceSampling,
    add_prompt_logprobs,
    max_fetched_values,
    needs_logits,
    prompt_logprob_slices,
    sample_tokens,
)
from ..requests.draft_length import most_logits
from ..requests.grammars import grammars_of
from ..requests.types import ScheduledSequence, StepResult

#: A step's logits, at least one row per sequence, in the model's dtype or float32; and `[2, rows]` int64: the argmax,
#: and 1 if it is defined (no NaN or +inf). Both are on the device, perhaps still being computed. With several TP ranks,
#: only the first rank's `[2, rows]` is valid.
Outputs = tuple[torch.Tensor, torch.Tensor]


class _Asks(NamedTuple):
    """Needs of any sequence in a step."""

    logits: bool
    """More than the argmax of its logits."""
    prompt_logprobs: bool
    """Log-probabilities of its prompt."""
    pooled: bool
    """Sums of its hidden states."""
    tokens: bool
    """Its previous tokens on the host."""


class StepOutputs:
    """Logits and tokens of the last step, in buffers that are allocated once.

    Each TP rank has its columns of the logits. The first rank finds the argmax over all ranks within the step, and
    gathers whole rows if a sequence needs more than that. It also samples.
    """

    def __init__(self, config: EngineConfig, model: DecoderModel, device: CudaDevice) -> None:
        self._decoder = model
        rows, where = most_logits(config), device.torch_device
        self.logits = torch.zeros(rows, model.logits_width, dtype=model.logits_dtype, device=where)
        vocab = torch.arange(model.config.vocab_size, device=where)
        self._samplable = torch.cat((torch.zeros(2 * rows, dtype=torch.long, device=where), vocab))
        """The last step's tokens and the other output of `pick`; then every token id of the vocabulary."""
        self.chosen = self._samplable[: 2 * rows]
        self._views: dict[int, Outputs] = {}  # of logits and `chosen`, by number of rows
        self._download = Download(device, 8 * max_fetched_values(rows))
        self._sampling = TorchSampling()
        self._grammars = grammars_of(config.tokenizer_dir, model.config.vocab_size, model.config.eos_token_ids)
        # for the last list of rows
        self._last_asks: tuple[Sequence[ScheduledSequence], _Asks] = (), _Asks(False, False, False, False)

    def of(self, rows: int) -> Outputs:
        """Static logits `[rows, vocab]`, and the output `[2, rows]` of `pick`, contiguous."""
        if (found := self._views.get(rows)) is None:
            found = self._views[rows] = self.logits[:rows], self.chosen[: 2 * rows].view(2, rows)
        return found

    def pick(self, logits: torch.Tensor, out: torch.Tensor) -> None:
        """Write to out `[2, rows]` int64 the argmax of each row, and 1 if it is defined: no NaN and no +inf."""
        best, tokens = logits.max(-1)
        if (ranks := self._decoder.ranks) is not None:
            found = _of_all_ranks(best.float(), tokens, ranks, self._decoder.config.vocab_size)
            if found is None:
                return
            best, tokens = found
        out[0].copy_(tokens)
        out[1].copy_(best.isfinite())

    def whole(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the last step's logits with all ranks' columns, on the first rank; all ranks must call it."""
        return self._decoder.gathered(logits)

    def indices(self, rows: Sequence[ScheduledSequence], sources: Sequence[int] | None) -> Sequence[int] | None:
        """Indices of the entries' tokens for `take_sampled`; None if the entries have their tokens.

        sources: for each entry the index in the last step of the sequence that sampled its token, or -1 if the entry
        has its own token; None if all have.
        """
        if sources is None or -1 not in sources:
            return sources
        return [self.index_of(row.tokens[0]) if at < 0 else at for row, at in zip(rows, sources, strict=True)]

    def index_of(self, token: int) -> int:
        """Index for `take_sampled` of a known token."""
        return len(self.chosen) + token

    def take_sampled(self, token_ids: torch.Tensor) -> None:
        """Replace indices by the tokens there, in stream order; the first rank has sampled them."""
        if (ranks := self._decoder.ranks) is not None:
            ranks.lead(self.chosen)
        token_ids.copy_(self._samplable.index_select(0, token_ids))

    # -- sampling

    def sample(
        self, rows: Sequence[ScheduledSequence], logits: torch.Tensor, chosen: torch.Tensor
    ) -> Callable[[], StepResult]:
        """Sample the last step's tokens and compute prompt logprobs; the returned function waits for both."""
        eos, asks = self._decoder.config.eos_token_ids, self._asks_of(rows)
        if asks.logits:
            begun = DeviceSampling(
                rows, chosen, logits, eos_token_ids=eos, fetch=self._download, grammars=self._grammars
            )
            self.chosen[: len(begun.tokens)].copy_(begun.tokens)
            read = begun.result
        else:
            fetched = self._download(chosen)

            def read() -> StepResult:
                tokens, healthy = fetched().tolist()
                if 0 in healthy:
                    tokens = [token if good else -1 for token, good in zip(tokens, healthy, strict=True)]
                return sample_tokens(rows, tokens, None, self._sampling, eos)

        return partial(self._read_kept_states, rows, read) if asks.prompt_logprobs or asks.pooled else read

    @torch.inference_mode()
    def _read_kept_states(self, rows: Sequence[ScheduledSequence], read: Callable[[], StepResult]) -> StepResult:
        """Add prompt log-probabilities and pooled states to the result that `read` returns."""
        result, asks = read(), self._asks_of(rows)
        if asks.prompt_logprobs:
            vocab = self._decoder.config.vocab_size
            add_prompt_logprobs(rows, self._decoder.prompt_logits, self._sampling, vocab, result)
        if asks.pooled:
            add_pooled(rows, self._decoder.hidden_states, result)
        return result

    def join_prompt_logprobs(self, rows: Sequence[ScheduledSequence]) -> None:
        """Do another rank's share of the prompt log-probabilities that `sample` computes on the first rank."""
        for begin, end in prompt_logprob_slices(rows, self._decoder.config.vocab_size):
            self._decoder.prompt_logits(begin, end)

    def asks_logits(self, rows: Sequence[ScheduledSequence]) -> bool:
        """True if a sequence needs more than the argmax of its logits."""
        return self._asks_of(rows).logits

    def look_back(self, rows: Sequence[ScheduledSequence]) -> bool:
        """True if sampling for a sequence needs its previous tokens on the host; see `ScheduledSequence.looks_back`."""
        return self._asks_of(rows).tokens

    def _asks_of(self, rows: Sequence[ScheduledSequence]) -> _Asks:
        """Return the needs of a step, found once per list: decode steps reuse their list, and its needs stay."""
        if rows is not self._last_asks[0]:
            logits, prompt_logprobs = any(map(needs_logits, rows)), any(row.wants_prompt_logprobs for row in rows)
            pooled = any(row.params.pooling is not None for row in rows)
            self._last_asks = rows, _Asks(logits, prompt_logprobs, pooled, any(row.looks_back for row in rows))
        return self._last_asks[1]


def _of_all_ranks(
    best: torch.Tensor, tokens: torch.Tensor, ranks: Collectives, vocab: int
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the largest logit of each row and its token over all ranks; None on ranks other than the first.

    best: float32, in which token ids are exact below 2^24. NaN counts as the largest, as in `max`.
    """
    first = vocab * ranks.rank // ranks.size
    pairs = ranks.gather(torch.stack((best, (tokens + first).to(best.dtype)), -1), 2 * ranks.size)
    if ranks.rank:
        return None
    best, at = pairs[:, ::2].max(-1)
    return best, pairs[:, 1::2].gather(-1, at[:, None])[:, 0].long()
