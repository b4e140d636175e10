"""Changes to logits before sampling: grammars, bans, biases and penalties.

Tests: tests/core/model/test_sampler.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache

import numpy as np
import torch

from ...ops.sampling.sampling import ban
from ...ops.upload import on_device
from .grammar_work import GrammarState
from .grammars import Grammars
from .types import ScheduledSequence

_MOST = float(np.finfo(np.float32).max)


class LogitEdits:
    """One request's changes by token id, updated as tokens are generated.

    Only the table of the tokens in the text depends on the length of the text: a step adds the last token.

    grammar_state: its position in its grammar; None without a grammar. restricts: True if the request restricts the
    tokens by a grammar or a list.
    """

    def __init__(
        self, sequence: ScheduledSequence, vocab: int, eos_token_ids: Collection[int], grammars: Grammars | None
    ) -> None:
        """grammars: the model's; None where no request has one. Raises InvalidGrammar."""
        params = sequence.params
        self._params = params
        self._token_ids = sequence.token_ids
        self._prompt = sequence.num_prompt_tokens
        self._done = self._prompt
        self._repeats = params.repetition_penalty != 1.0
        self._counts_output = bool(self._repeats or params.presence_penalty or params.frequency_penalty)
        bias = dict(params.logit_bias)
        seen = set(sequence.token_ids[: self._prompt]) if self._repeats else set()
        ids = sorted(seen.union(bias))
        self._slot = {token: lora_index for lora_index, token in enumerate(ids)}
        room = max(64, 2 * len(ids))
        self._ids = np.zeros(room, np.int64)
        self._change = np.zeros((3, room), np.float32)  # added first; divisor; subtracted last
        self._count = np.zeros(room, np.int64)
        self._change[1] = 1.0
        self._ids[: len(ids)] = ids
        for token, value in bias.items():
            self._change[0, self._slot[token]] = value
        for token in seen:
            self._change[1, self._slot[token]] = params.repetition_penalty
        self._banned = [word[0] for word in params.bad_words if len(word) == 1]
        self.grammar_state: GrammarState | None = None
        if params.grammar is not None and grammars is not None:
            self.grammar_state = GrammarState(grammars.compile(params.grammar), self._prompt)
        listed = params.allowed_token_ids
        self._listed = None if listed is None else _bits(listed, vocab)
        self._ends = (
            _bits(tuple(eos_token_ids), vocab) if self.grammar_state is not None and params.ignore_eos else None
        )
        self.restricts = self.grammar_state is not None or listed is not None

    def belongs_to(self, sequence: ScheduledSequence) -> bool:
        """True if these are the changes of the row's request."""
        return self._token_ids is sequence.token_ids and self._params is sequence.params

    def advance(self) -> tuple[np.ndarray, np.ndarray]:
        """Update with the tokens generated since. Returns token ids `[n]` and their changes `[3, n]`."""
        if self._counts_output:
            for token in self._token_ids[self._done :]:
                self._see(token)
        if self.grammar_state is not None:
            self.grammar_state.see(self._token_ids)
        self._done = len(self._token_ids)
        count = len(self._slot)
        return self._ids[:count], self._change[:, :count]

    def banned(self, eos_token_ids: Collection[int], num_tokens: int) -> list[int]:
        """Return the token ids that are banned after the first `num_tokens`; the last may not be known yet, unless
        `ScheduledSequence.looks_back`.
        """
        params, output = self._params, num_tokens - self._prompt
        banned = self._banned
        if output < params.min_tokens:
            banned = [*banned, *eos_token_ids, *params.stop_token_ids]
        for length, endings in _endings(params.bad_words) if params.bad_words else ():
            if length <= output and (found := endings.get(tuple(self._token_ids[-length:]))):
                banned = [*banned, *found]
        return banned

    def state_after(self, drafts: Sequence[int]) -> GrammarState | None:
        """Return the position in the grammar after drafts; None without a grammar."""
        state = self.grammar_state
        return state.after(drafts) if state is not None and drafts else state

    def restrict(self, mask: np.ndarray) -> None:
        """Clear bits of the grammar's mask, `[words]` int32: of tokens that are not listed, and with `ignore_eos`
        of ends, unless nothing else can come.
        """
        if self._listed is not None:
            mask &= self._listed
        if self._ends is not None and (going_on := mask & ~self._ends).any():
            mask[:] = going_on

    def _see(self, token: int) -> None:
        params, lora_index = self._params, self._slot.get(token)
        if lora_index is None:
            lora_index = self._slot[token] = len(self._slot)
            if lora_index == len(self._ids):
                self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
                self._count = np.concatenate((self._count, np.zeros_like(self._count)))
                self._change = np.concatenate((self._change, np.zeros_like(self._change)), axis=1)
            self._ids[lora_index] = token
            self._change[:, lora_index] = 0.0, 1.0, 0.0
        if self._repeats:
            self._change[1, lora_index] = params.repetition_penalty
        self._count[lora_index] += 1
        self._change[2, lora_index] = params.presence_penalty + params.frequency_penalty * self._count[lora_index]


@lru_cache(64)
def _endings(bad_words: tuple[tuple[int, ...], ...]) -> list[tuple[int, dict[tuple[int, ...], list[int]]]]:
    """Of bad words of several tokens: lengths of their beginnings, and for each beginning the tokens that end one."""
    found: dict[int, dict[tuple[int, ...], list[int]]] = {}
    for *beginning, last in bad_words:
        if beginning:
            found.setdefault(len(beginning), {}).setdefault(tuple(beginning), []).append(last)
    return sorted(found.items())


def _edits_of(
    sequence: ScheduledSequence, vocab: int, eos_token_ids: Collection[int], grammars: Grammars | None
) -> LogitEdits:
    """The row's edits, made when it has none that are its own."""
    edits = sequence.state.edits
    if not isinstance(edits, LogitEdits) or not edits.belongs_to(sequence):
        edits = sequence.state.edits = LogitEdits(sequence, vocab, eos_token_ids, grammars)
        sequence.state.grammar = edits.grammar_state
    return edits


def grammar_seconds(sequences: Iterable[ScheduledSequence]) -> dict[str, float]:
    """Return `StepResult.grammar_seconds` of rows that were drawn."""
    found = {}
    for sequence in sequences:
        edits = None if sequence.params.grammar is None else sequence.state.edits
        if (
            isinstance(edits, LogitEdits)
            and edits.grammar_state is not None
            and (edits.grammar_state.seconds or edits.grammar_state.was_heavy)
        ):
            found[sequence.request_id] = edits.grammar_state.seconds
            edits.grammar_state.was_heavy = edits.grammar_state.seconds > 0
    return found


@contextmanager
def edited(
    logits: torch.Tensor,
    rows: Sequence[tuple[int, ScheduledSequence]],
    eos_token_ids: Collection[int],
    grammars: Grammars | None = None,
) -> Iterator[None]:
    """Apply requests' changes to rows of logits `[rows, vocab]`, perhaps the first columns of wider ones, for the
    duration of the context.

    rows: of the logits, with the scheduled row that each belongs to. All rows are changed by the same few operations.
    Order: allowed tokens, bias, repetition, presence and frequency; banned tokens stay banned. A token that a grammar
    or a list does not allow stays banned for good, unless the row's token is scored.
    """
    (count, vocab), stride, undo = logits.shape, logits.stride(0), []
    flat = logits.as_strided(((count - 1) * stride + vocab,), (1,))
    ids, changes, banned = [], [], []
    restricted: list[tuple[int, LogitEdits, GrammarState | None]] = []
    for index, sequence in rows:
        edits = _edits_of(sequence, vocab, eos_token_ids, grammars)
        at, change = edits.advance()
        if edits.restricts:
            restricted.append((index, edits, edits.state_after(sequence.unknown_tokens)))
            if sequence.params.logprobs is not None:
                undo.append((logits[index], slice(None), logits[index].clone()))
        ids.append(at + index * stride)
        changes.append(change)
        banned += [index * stride + token for token in edits.banned(eos_token_ids, sequence.kv_len)]
    if restricted:
        ban(logits, _masks(restricted, vocab, grammars))
    if logits.device.type == "cpu":  # where these few numbers cost torch several times as long
        _edit_here(flat.numpy(), np.concatenate(ids), np.concatenate(changes, axis=1), undo)
        indices = ()
    else:
        indices = _to(np.concatenate(ids), logits.device)
    if len(indices):
        bias, divisor, less = _to(np.concatenate(changes, axis=1), logits.device)
        before = flat[indices]
        undo.append((flat, indices, before))
        after = before + bias
        after = torch.where(after > 0, after / divisor, after * divisor) - less
        flat[indices] = after.clamp_(max=_MOST)
    if banned:
        indices = _to(np.unique(banned), logits.device)
        undo.append((flat, indices, flat[indices]))
        flat[indices] = -torch.inf
    try:
        yield
    finally:
        for target, indices, before in reversed(undo):
            target[indices] = before


def _edit_here(
    flat: np.ndarray, indices: np.ndarray, changes: np.ndarray, undo: list[tuple[np.ndarray, np.ndarray, np.ndarray]]
) -> None:
    """Change logits in this machine's memory as `edited` changes logits of a device, to the same bits."""
    bias, divisor, less = changes
    before = flat[indices]
    undo.append((flat, indices, before))
    with np.errstate(all="ignore"):
        after = before + bias
        after = np.where(after > 0, after / divisor, after * divisor) - less
        flat[indices] = np.minimum(after, np.float32(_MOST))


def _masks(
    rows: Sequence[tuple[int, LogitEdits, GrammarState | None]], vocab: int, grammars: Grammars | None
) -> np.ndarray:
    """Return masks of rows of logits as `ops.sampling.sampling.ban` takes them."""
    masks = np.full((len(rows), 1 + -(-vocab // 32)), -1, np.int32)
    masks[:, 0] = [index for index, _, _ in rows]
    allowed = masks[:, 1:]
    states = {index: state for index, (_, _, state) in enumerate(rows) if state is not None}
    if states and grammars is not None:
        found = grammars.advance(list(states.values()))[:, : allowed.shape[1]]
        allowed[list(states)] = 0  # grammars know the model's tokens alone, not those that an adapter adds
        allowed[list(states), : found.shape[1]] = found
    for mask, (_, edits, _) in zip(allowed, rows, strict=True):
        edits.restrict(mask)
    return masks


def _bits(ids: tuple[int, ...], vocab: int) -> np.ndarray:
    """Return a mask `[words]` int32 with the bits of some tokens set."""
    is_set = np.zeros(-(-vocab // 32) * 32, np.uint8)
    is_set[list(ids)] = 1
    return np.packbits(is_set, bitorder="little").view(np.int32)


def _to(values: np.ndarray, device: torch.device) -> torch.Tensor:
    return on_device(torch.from_numpy(values), device)
