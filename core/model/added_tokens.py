"""Logits and sampling of sequences whose adapter adds tokens to the model's.

They have more columns than the model's logits: those of the adapter's own tokens follow. Other sequences of the step
are sampled as without them, from the model's columns alone.

Tests: tests/core/test_added_tokens.py
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch

from ...memory.adapters.adapter import Adapter
from ...ops.sampling import TorchSampling, greedy
from ..requests.types import ScheduledSequence, StepResult
from .sampler import RowLogits, Sampling, following_tokens


class AddedLogits(Protocol):
    """Logits `[rows, added]` float32 of an adapter's own tokens, from hidden states `[rows, hidden]`."""

    def __call__(self, adapter: Adapter, states: torch.Tensor, /) -> torch.Tensor: ...


class SampleRows(Protocol):
    """`sample_tokens`, with the arguments that all rows of a step have in common."""

    def __call__(
        self,
        rows: Sequence[ScheduledSequence],
        argmax: Sequence[int],
        logits: RowLogits,
        sampling: Sampling,
        *,
        chosen: Collection[int] = (),
    ) -> StepResult: ...


class StepLogits(NamedTuple):
    """A step's logits, and the means to compute the columns of added tokens.

    argmax, chosen, logits: as of `sample_tokens`. states: the hidden states of rows of the step, by index.
    """

    argmax: Sequence[int]
    logits: RowLogits
    chosen: Collection[int]
    states: Callable[[Sequence[int]], torch.Tensor]
    added: AddedLogits


def sample_with_added(
    rows: Sequence[ScheduledSequence],
    adapters: Mapping[int, Adapter],
    step: StepLogits,
    sample: SampleRows,
    sampling: Sampling,
) -> StepResult:
    """Sample all rows of a step. adapters: by row, those that add tokens. sampling: how the other rows are sampled."""
    result = _sample_others(rows, adapters, step, sample, sampling)
    by_width: dict[int, list[int]] = {}
    for index, adapter in adapters.items():
        if rows[index].samples:
            by_width.setdefault(adapter.manifest.num_tokens, []).append(index)
    vocab = step.logits.values.shape[-1]
    for width, indices in by_width.items():
        logits = torch.empty(len(indices), width)
        logits[:, :vocab] = step.logits.values[[step.logits.at[index] for index in indices]]
        states = step.states(indices)
        for place, index in enumerate(indices):
            logits[place, vocab:] = step.added(adapters[index], states[place : place + 1])[0]
        own = [rows[index] for index in indices]
        at = {place: place for place in range(len(own))}
        result.merge(sample(own, greedy(logits), RowLogits(logits, at), TorchSampling()))
    return result


def _sample_others(
    rows: Sequence[ScheduledSequence],
    adapters: Mapping[int, Adapter],
    step: StepLogits,
    sample: SampleRows,
    sampling: Sampling,
) -> StepResult:
    others = [index for index in range(len(rows)) if index not in adapters]
    place = {index: place for place, index in enumerate(others)}
    at = {place[index]: row for index, row in step.logits.at.items() if index in place}
    chosen = {place[index] for index in step.chosen if index in place}
    argmax = [step.argmax[index] for index in others]
    logits = RowLogits(step.logits.values, at)
    return sample([rows[index] for index in others], argmax, logits, sampling, chosen=chosen)


class Run(NamedTuple):
    """Neighbouring prompt-logprob tokens of a step that are of one adapter that adds tokens, or of none."""

    begin: int
    end: int
    adapter: Adapter | None


def prompt_runs(rows: Sequence[ScheduledSequence], adapters: Mapping[int, Adapter]) -> list[Run]:
    """The step's prompt-logprob tokens, by their adapters that add tokens."""
    found: list[Run] = []
    for index, row in enumerate(rows):
        if not row.wants_prompt_logprobs:
            continue
        begin, adapter = found[-1].end if found else 0, adapters.get(index)
        end = begin + len(following_tokens(row))
        if found and found[-1].adapter is adapter:
            begin = found.pop().begin
        found.append(Run(begin, end, adapter))
    return found


def part_runs(
    runs: Sequence[Run],
    states: Callable[[int, int], torch.Tensor],
    added: AddedLogits,
    sampling: Sampling,
    begin: int,
    end: int,
    logits: torch.Tensor,
) -> Iterator[tuple[torch.Tensor, Sampling]]:
    """Logits of prompt-logprob tokens `begin` … end-1, run by run, with all their columns.

    states: called with a range of these tokens. sampling: for runs without added tokens.
    """
    for run in runs:
        first, last = max(begin, run.begin), min(end, run.end)
        if first >= last:
            continue
        part = logits[first - begin : last - begin]
        if run.adapter is None:
            yield part, sampling
        else:
            yield torch.cat((part, added(run.adapter, states(first, last))), 1), TorchSampling()
