"""Work of a step's grammars: tokens consumed and masks computed, in threads of its own, and measured.

Tests: tests/core/scheduling/test_grammar_budget.py, tests/core/test_grammars.py
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ...memory.host.daemon_pool import DaemonPool

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

HEAVY_SECONDS = 2.5e-4
"""A sequence whose grammar takes longer for a token is heavy: its time counts against the step's budget. Most schemas
take a tenth of it. Chosen."""

SLOW_SECONDS = 1e-3
"""A step's grammars that take longer together are measured one by one in the next step. Chosen."""


class GrammarState:
    """Where a request is in its grammar.

    pending: tokens that the matcher has not consumed; `num_seen` of the request's tokens are consumed, or pending, or
    before the grammar. seconds: time of a processor for the last token if that makes the
    request heavy, else 0. is_watched: whether its next mask is measured by itself. was_heavy: as of the last report.
    """

    __slots__ = ("is_watched", "matcher", "num_seen", "pending", "seconds", "was_heavy")

    def __init__(self, matcher: LLMatcher, num_seen: int = 0) -> None:
        self.matcher = matcher
        self.num_seen = num_seen
        self.pending: list[int] = []
        self.seconds = 0.0
        self.is_watched = False
        self.was_heavy = False

    def see(self, token_ids: Sequence[int]) -> None:
        """Let the request's new tokens be pending. token_ids: all that are known."""
        self.pending += token_ids[self.num_seen :]
        self.num_seen = len(token_ids)

    def consume(self) -> LLMatcher | None:
        """Consume the pending tokens on this thread; return the matcher, None if it is in an error."""
        if self.pending:
            self.matcher.consume_tokens(self.pending)
            self.pending.clear()
        return None if self.matcher.is_error() else self.matcher

    def after(self, tokens: Sequence[int]) -> GrammarState:
        """Return where the request would be after further tokens."""
        state = GrammarState(self.matcher.deep_copy())
        state.pending = [*self.pending, *tokens]
        return state

    def note(self, seconds: float) -> None:
        """Record the time of a processor that a token took."""
        self.is_watched = seconds > HEAVY_SECONDS
        self.seconds = seconds if self.is_watched else 0.0


class GrammarWork:
    """Moves requests on in their grammars and computes their next masks.

    llguidance's threads, which don't hold the interpreter's lock, consume tokens and compute the masks of ordinary
    requests. If all of them together are slow, each request's next mask is computed by a thread that measures its own
    processor time, which other processes and the lock don't change. To consume a token takes about as long as the mask
    after it: a token's time is twice the mask's.
    """

    def __init__(
        self,
        threads: LLExecutor,
        num_threads: int,
        num_words: int,
        spare: LLMatcher,
        clock: Callable[[], float] = time.perf_counter,
        processor_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        """num_words: of a mask, int32. spare: a matcher in an error, which consumes nothing. clock: of a step's work.
        processor_clock: of the calling thread.
        """
        self._threads, self._num_threads, self._num_words, self._spare = threads, num_threads, num_words, spare
        self._clock, self._processor_clock = clock, processor_clock
        self._workers = DaemonPool("grammar", num_threads, float("inf"))

    def masks(self, states: Sequence[GrammarState]) -> np.ndarray:
        """Consume the pending tokens; return masks of the tokens that states allow next, `[states, words]` int32."""
        masks = np.empty((len(states), self._num_words), np.int32)
        began = self._clock()
        self._consume(states)
        measured = [(state, index) for index, state in enumerate(states) if state.is_watched]
        ordinary = [(state, index) for index, state in enumerate(states) if not state.is_watched]
        futures = [self._workers.submit(self._measure, state.matcher, masks[index]) for state, index in measured]
        if ordinary:
            self.compute([(state.matcher, index) for state, index in ordinary], masks)
        is_slow = self._clock() - began > SLOW_SECONDS + HEAVY_SECONDS * len(ordinary) / (2 * self._num_threads)
        for state, _ in ordinary:
            state.is_watched = is_slow
        for (state, _), future in zip(measured, futures, strict=True):
            state.note(2 * future.result())
        failed = [index for index, state in enumerate(states) if state.matcher.is_error()]
        masks[failed] = 0  # they say that the answer may end, which it may not
        return masks

    def compute(self, matchers: Sequence[tuple[LLMatcher, int]], masks: np.ndarray) -> None:
        """Compute matchers' masks into the rows with these indices."""
        self._threads.unsafe_compute_mask_ptr(list(matchers), masks.ctypes.data, masks.strides[0], len(masks))

    def _measure(self, matcher: LLMatcher, mask: np.ndarray) -> float:
        """Compute a mask on this thread; return its processor time."""
        began = self._processor_clock()
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        return self._processor_clock() - began

    def _consume(self, states: Sequence[GrammarState]) -> None:
        """Consume all pending tokens, one of each state at a time."""
        if len(states) == 1 and not states[0].is_watched and len(states[0].pending) == 1:  # the threads cost more
            states[0].matcher.consume_token(states[0].pending.pop())
            return
        at = 0
        while pairs := [(state.matcher, state.pending[at]) for state in states if at < len(state.pending)]:
            if len(pairs) == 1:  # a pair alone is consumed on this thread, with the interpreter's lock
                pairs.append((self._spare, 0))
            self._threads.consume_token_par(pairs)
            at += 1
        for state in states:
            state.pending.clear()
