"""Logits and sampling of sequences whose adapter adds tokens to the model's.

Logits of a step with such an adapter have more columns than the model's: those of added tokens follow, and are -inf in
rows of adapters that lack them. Each row is sampled from its own adapter's columns alone, as without its neighbours.

Tests: tests/core/adapters/test_added_tokens.py
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch

from ...memory.adapters.adapter import Adapter
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
    """A step's logits, with the columns of added tokens, as of `sample_tokens`."""

    argmax: Sequence[int]
    logits: RowLogits
    chosen: Collection[int]


def sample_with_added(
    rows: Sequence[ScheduledSequence],
    adapters: Mapping[int, Adapter],
    vocab: int,
    step: StepLogits,
    sample: SampleRows,
    sampling: Sampling,
) -> StepResult:
    """Sample all rows of a step. adapters: by row, those that add tokens. vocab: columns of the other rows."""
    result, by_width = StepResult(), dict[int, list[int]]()
    for index in range(len(rows)):
        by_width.setdefault(_width(adapters.get(index), vocab), []).append(index)
    for width, indices in by_width.items():
        place = {index: place for place, index in enumerate(indices)}
        logits = RowLogits(
            step.logits.values[:, :width],
            {place[index]: row for index, row in step.logits.at.items() if index in place},
        )
        own, argmax = [rows[index] for index in indices], [step.argmax[index] for index in indices]
        chosen = {place[index] for index in step.chosen if index in place}
        result.merge(sample(own, argmax, logits, sampling, chosen=chosen))
    return result


def with_added(
    logits: torch.Tensor,
    adapters: Mapping[int, Adapter],
    states: Callable[[int], torch.Tensor],
    added: AddedLogits,
) -> torch.Tensor:
    """Logits `[rows, vocab]` with the columns of added tokens. adapters: by row, those that add tokens. states: hidden
    states `[1, hidden]` of a row.
    """
    if not adapters:
        return logits
    vocab, width = logits.shape[1], max(adapter.manifest.num_tokens for adapter in adapters.values())
    found = torch.full((len(logits), width), -torch.inf)
    found[:, :vocab] = logits
    for index, adapter in adapters.items():
        found[index, vocab : adapter.manifest.num_tokens] = added(adapter, states(index))[0]
    return found


def _width(adapter: Adapter | None, vocab: int) -> int:
    """Columns of a row. adapter: its, if that adds tokens."""
    return vocab if adapter is None else adapter.manifest.num_tokens


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


def adding_tokens(runs: Sequence[Run], begin: int, end: int) -> dict[int, Adapter]:
    """The adapters that add tokens of prompt-logprob tokens `begin` … end-1, by their place after `begin`."""
    found = {}
    for run in runs:
        if run.adapter is not None:
            for token in range(max(begin, run.begin), min(end, run.end)):
                found[token - begin] = run.adapter
    return found


def part_runs(runs: Sequence[Run], vocab: int, begin: int, end: int, logits: torch.Tensor) -> Iterator[torch.Tensor]:
    """Logits of prompt-logprob tokens `begin` … end-1, run by run, with each run's own columns."""
    for run in runs:
        first, last = max(begin, run.begin), min(end, run.end)
        if first < last:
            yield logits[first - begin : last - begin, : _width(run.adapter, vocab)]
