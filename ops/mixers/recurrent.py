"""Recurrent mixers of tokens: what Gated DeltaNet, Mamba 2 and short convolutions have in common.

A mixer has a causal depthwise convolution over the last `conv_size` tokens, and some have a state in heads besides.
A sequence's state is the convolution's last inputs and the heads' state; both go from step to step, in float32.

A sequence's last tokens may be drafts. A step stores the state before its drafts, and next to it one row of inputs for
each draft. The next step first updates the state with the rows of the accepted drafts.

Tests: tests/ops/mixers/test_recurrent.py, tests/ops/mixers/test_gated_delta.py
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

import torch
from torch.nn.functional import pad

from ..attention.attention import count_prefills

if TYPE_CHECKING:
    from ..ranks.ranks import Collectives

CHUNK = 64
"""Tokens of a prompt that are computed at once, where a mixer computes chunks."""


class StatePart(NamedTuple):
    """The part of a layer's state that one of a mixer's parts has."""

    has_conv: bool
    has_heads: bool
    drafts: slice
    """Columns of a draft's inputs."""

    channels: slice = slice(None)
    """Channels of the convolution."""


@dataclass(slots=True)
class RecurrentState:
    """The state of a step's sequences in a layer, float32; zeros before a sequence's first token."""

    conv: torch.Tensor
    """`[sequences, conv_size - 1, channels]`: the convolution's last inputs, oldest first."""

    recurrent: torch.Tensor
    """`[sequences, heads, …]`: the state of each head; `[sequences, 0]` without heads."""

    drafts: torch.Tensor | None = None
    """`[sequences, most drafts, draft inputs]`: inputs of the last step's drafts; None where neither that step nor this
    one has any."""

    fresh: torch.Tensor | None = None
    """`[sequences]` of booleans: their next token is their first. None for mixers that compute it as others."""

    def of(self, sequences: slice) -> RecurrentState:
        """Of some sequences, in the same memory."""
        drafts, fresh = (None if each is None else each[sequences] for each in (self.drafts, self.fresh))
        return RecurrentState(self.conv[sequences], self.recurrent[sequences], drafts, fresh)

    def ahead(self) -> RecurrentState:
        """A copy that drafts may change."""
        fresh = None if self.fresh is None else self.fresh.clone()
        return RecurrentState(self.conv.clone(), self.recurrent.clone(), fresh=fresh)

    def choose(self, chosen: torch.Tensor, other: RecurrentState) -> None:
        """Take the other's state of the chosen sequences. chosen: `[sequences]` of booleans."""
        for own, its in ((self.conv, other.conv), (self.recurrent, other.recurrent), (self.fresh, other.fresh)):
            if own is not None and its is not None:
                own.copy_(torch.where(chosen.view(-1, *[1] * (own.dim() - 1)), its, own))


WHOLE = StatePart(has_conv=True, has_heads=True, drafts=slice(None))


class RecurrentWeights(ABC):
    """A layer's mixer: its tensors besides the projections, in float32, and its formula.

    Rows are the mixer's input: `[tokens, in_size]`. What a mixer computes of a sequence doesn't depend on others.
    Of several TP ranks, each has a share of the heads or channels.
    """

    __slots__ = ()

    further: ClassVar[bool] = False
    """Its state is one of the further ones: see `StateShape.further`."""

    @property
    def part(self) -> StatePart:
        """What it has of a layer's state: all of it, unless a mixer has two parts."""
        return WHOLE

    @abstractmethod
    def prompt(self, rows: torch.Tensor, state: RecurrentState) -> torch.Tensor:
        """Several tokens of one sequence, whose state is updated: what `output` takes, `[tokens, out]` float32."""

    @abstractmethod
    def tokens(self, rows: torch.Tensor, state: RecurrentState) -> torch.Tensor:
        """As `prompt`, of one token of each sequence."""

    @abstractmethod
    def output(self, mixed: torch.Tensor, rows: torch.Tensor, ranks: Collectives | None) -> torch.Tensor:
        """The input of the output projection, float32. mixed: of all tokens of a step. ranks: that add up what a norm
        of all heads needs.
        """

    @abstractmethod
    def draft_inputs(self, rows: torch.Tensor, state: RecurrentState) -> torch.Tensor:
        """The part of rows that changes a state: `[tokens, draft inputs]`."""

    @abstractmethod
    def take_in(self, inputs: torch.Tensor, state: RecurrentState) -> None:
        """Update states with one token of each sequence, by its draft inputs."""

    @property
    @abstractmethod
    def native_tensors(self) -> Mapping[str, torch.Tensor | None]:
        """Its tensors by their names in the native library's description of a layer."""

    def mix(
        self,
        rows: torch.Tensor,
        state: RecurrentState,
        qo_indptr: Sequence[int],
        accepted: Sequence[int] = (),
        drafts: Sequence[int] = (),
        ranks: Collectives | None = None,
    ) -> torch.Tensor:
        """Compute a step's tokens; return `[tokens, out]` in the dtype of `rows`, and update `state` in place.

        qo_indptr: sequence i has the tokens `qo_indptr[i]` … `qo_indptr[i + 1]`-1; sequences with more than one token
        come first. accepted: drafts of the step before that each sequence has accepted; by default none. drafts: the
        last of the tokens of each sequence, fewer than all; by default none.

        One token takes `tokens`, and several take `prompt`, so how a prompt is cut may change rounding. Drafts take the
        form of one token.
        """
        count = len(state.conv)
        for index, number in enumerate(accepted):
            if number:
                own = state.of(slice(index, index + 1))
                assert own.drafts is not None
                for inputs in own.drafts[0, :number].split(1):
                    self.take_in(inputs, own)
        prefills = count_prefills(qo_indptr, count)
        first = qo_indptr[prefills]
        parts = []
        for index in range(prefills):
            part, own = rows[qo_indptr[index] : qo_indptr[index + 1]], state.of(slice(index, index + 1))
            number = drafts[index] if drafts else 0
            parts += self._drafted(part, number, own) if number else [self.prompt(part, own)]
        if prefills < count:
            parts.append(self.tokens(rows[first : first + count - prefills], state.of(slice(prefills, count))))
        mixed = torch.cat(parts) if len(parts) > 1 else parts[0]
        return self.output(mixed, rows[: len(mixed)], ranks).to(rows.dtype)

    def _drafted(self, rows: torch.Tensor, number: int, state: RecurrentState) -> list[torch.Tensor]:
        """Mix one sequence. The state does not include its last tokens, the drafts; their inputs are next to it."""
        assert state.drafts is not None
        known = rows[:-number]
        parts = [(self.prompt if len(known) > 1 else self.tokens)(known, state)]
        state.drafts[0, :number] = self.draft_inputs(rows[-number:], state)
        ahead = state.ahead()
        return parts + [self.tokens(row, ahead) for row in rows[-number:].split(1)]

    def step(
        self,
        rows: torch.Tensor,
        state: RecurrentState,
        begins: torch.Tensor,
        counts: torch.Tensor,
        accepted: torch.Tensor,
        ranks: Collectives | None = None,
    ) -> torch.Tensor:
        """As `mix`, of sequences with one known token, without a look at the numbers: a GPU can capture it.

        begins, counts, accepted: `[sequences]` of integers on the device: each sequence's first token; how many it has,
        all drafts but the first, or 0; the accepted drafts of the step before. Returns rows for all tokens; those of
        other sequences are not to be read.
        """
        most = 0 if state.drafts is None else state.drafts.shape[1]
        for draft in range(most):
            assert state.drafts is not None
            after = state.ahead()
            self.take_in(state.drafts[:, draft], after)
            state.choose(accepted > draft, after)
        found, ahead = None, state
        for token in range(most + 1):
            at = (begins + token).clamp(max=len(rows) - 1)
            own = rows[at]
            if token:
                assert state.drafts is not None
                state.drafts[:, token - 1] = self.draft_inputs(own, state)
            mixed = self.tokens(own, ahead)
            if found is None:
                found = mixed.new_zeros(len(rows) + 1, mixed.shape[1])
                ahead = state.ahead() if most else state
            found[torch.where(counts > token, at, len(rows))] = mixed
        assert found is not None
        return self.output(found[:-1], rows, ranks).to(rows.dtype)

    def to(self, device: torch.device) -> Self:
        """The same on a device."""
        own: Any = self
        parts = {each.name: getattr(own, each.name) for each in fields(own)}
        moved = (torch.Tensor, RecurrentWeights)
        return replace(own, **{name: it.to(device) for name, it in parts.items() if isinstance(it, moved)})


def convolve(x: torch.Tensor, taps: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """A causal convolution of one sequence's tokens `[tokens, channels]`; state: `[1, conv_size - 1, channels]`.

    taps: `[conv_size, channels]`: each channel's factors, of the oldest token first.
    """
    seen = torch.cat((state[0], x))
    state[0] = seen[len(x) :]
    return _weighted([seen[tap : tap + len(x)] for tap in range(len(taps))], taps)


def convolve_tokens(x: torch.Tensor, taps: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """As `convolve`, of one token `[sequences, channels]` of each sequence."""
    seen = torch.cat((state, x[:, None]), 1)
    state.copy_(seen[:, 1:])
    return _weighted(seen.unbind(1), taps)


def _weighted(inputs: Sequence[torch.Tensor], taps: torch.Tensor) -> torch.Tensor:
    """inputs: of each tap `[tokens, channels]`."""
    total = inputs[0] * taps[0]
    for x, factors in zip(inputs[1:], taps[1:], strict=True):
        total = total + x * factors
    return total


def in_chunks(x: torch.Tensor, chunks: int) -> torch.Tensor:
    """`[tokens, heads, …]` as `[heads, chunks, CHUNK, …]`, with zeros behind the last token."""
    x = pad(x.transpose(0, 1), (0, 0) * (x.dim() - 2) + (0, chunks * CHUNK - len(x)))
    return x.unflatten(1, (chunks, CHUNK)).contiguous()


def scanned(decay: torch.Tensor, added: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What a linear recurrence from 0 has after each token, and how much is left of what it began with; both arguments
    `[tokens, …]`, and so are both results. Spans twice as long are joined in each turn.
    """
    span = 1
    while span < len(added):
        added = torch.cat((added[:span], added[span:] + decay[span:] * added[:-span]))
        decay = torch.cat((decay[:span], decay[span:] * decay[:-span]))
        span *= 2
    return decay, added
