"""Expected lengths of answers, and the pages that admission reserves for them.

Tests: tests/core/scheduling/test_scheduling.py.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from ...memory.pages.layout import PageLayout
from ..requests.request import Request

if TYPE_CHECKING:
    import numpy as np

_FIRST_GUESS = 256
_NUM_REMEMBERED = 128
_ENDLESS = 1 << 40


class OutputLengths:
    """Lengths of the latest answers, from which the length of a running one is estimated.

    Mean residual life: expected remaining length, given that the answer has reached this length. Truncated answers are
    censored: their tokens count, their ends do not. If all were truncated, the request's limit is expected.

    A limit alone says little: most answers end long before the limit that their clients set.
    """

    def __init__(self) -> None:
        self._latest: deque[tuple[int, int]] = deque(maxlen=_NUM_REMEMBERED)  # lengths, and 1 if it ended of itself
        self._sorted: list[int] = []
        self._sums: list[int] = []  # of the sorted lengths from each on
        self._ends: list[int] = []  # number of these that were not truncated
        self._is_new = False

    def __len__(self) -> int:
        """Number of remembered answers."""
        return len(self._latest)

    @property
    def mean(self) -> float:
        """Mean length of the latest answers, truncated ones included; there must be one."""
        return sum([length for length, _ in self._latest]) / len(self._latest)

    def end(self, num_tokens: int, was_cut: bool) -> None:
        """Record the length of an ended answer. was_cut: truncated at its limit."""
        self._latest.append((num_tokens, int(not was_cut)))
        self._is_new = True

    def final_length(self, request: Request) -> int:
        """Return the tokens, prompt included, that a request is expected to end with; the last one needs no KV."""
        return self.final_lengths([request])[0]

    def final_lengths(self, requests: Sequence[Request]) -> list[int]:
        """Return `final_length` of each request."""
        drawn = [len(request.token_ids) - request.num_prompt_tokens for request in requests]
        lengths = {each: self._answer_length(each) + 1 for each in set(drawn)}
        return [
            end if (end := each.num_prompt_tokens + lengths[count]) < each.max_length else each.max_length
            for each, count in zip(requests, drawn, strict=True)
        ]

    def _answer_length(self, drawn: int) -> int:
        """Return the expected length of an answer that has `drawn` tokens; a quarter more if no answer got so far."""
        if self._is_new:
            self._is_new = False
            latest = sorted(self._latest)
            self._sorted = [length for length, _ in latest]
            self._sums = list(accumulate(reversed(self._sorted)))[::-1]
            self._ends = list(accumulate([ended for _, ended in reversed(latest)]))[::-1]
        index = bisect_right(self._sorted, drawn)
        count = len(self._sorted) - index
        if not count:
            return max(drawn + drawn // 4, 0 if any(self._ends[:1]) else _FIRST_GUESS)
        if not self._ends[index]:
            return _ENDLESS
        return drawn + (self._sums[index] - count * drawn) // self._ends[index]


class Growth:
    """Pages that running requests are expected to need beyond the pages that they have."""

    def __init__(self, lengths: OutputLengths, layout: PageLayout, running: Sequence[Request]) -> None:
        self._lengths = lengths
        self._layout = layout
        self._pages_of = layout.pages_for_tokens
        self._running = running
        ends = lengths.final_lengths(running)
        self.finals = layout.pages_for_each([end - 1 for end in ends])
        """Pages that each running request is expected to end with."""
        has = layout.pages_for_each([request.room for request in running])
        grown = [final - pages for final, pages in zip(self.finals, has, strict=True)]
        self.total = sum([pages for pages in grown if pages > 0])
        """Pages by which all of them grow."""
        self._by_tenant: Counter[str] | None = None
        self._ends: np.ndarray | None = None  # `_ends_of` all; computed only if the sum does not fit

    def add(self, request: Request) -> None:
        """Add a running request, the last of them."""
        self.total += self._pages(request, request.room)
        self.finals.append(pages := self.final_pages(request))
        if self._by_tenant is not None:
            self._by_tenant[request.fairness_key] += pages
        if self._ends is not None:
            import numpy as np

            self._ends = np.vstack((self._ends, self._ends_of([request])))

    @property
    def by_tenant(self) -> Counter[str]:
        """Pages that each tenant's running requests are expected to end with."""
        if self._by_tenant is None:
            self._by_tenant = Counter()
            for request, pages in zip(self._running, self.finals, strict=True):
                self._by_tenant[request.fairness_key] += pages
        return self._by_tenant

    def final_pages(self, request: Request) -> int:
        """Return the pages that a request which does not run yet is expected to end with."""
        return self._pages_of(self._lengths.final_length(request) - 1)

    def total_with(self, request: Request) -> int:
        """Return the pages by which they and `request` grow in all; its known tokens count as having pages."""
        return self.total + self._pages(request, request.num_tokens)

    def peak_with(self, request: Request) -> int:
        """Return the most pages, beyond today's, that they and `request` will need at any time while it runs.

        Less than they grow by in all: a request that ends frees its pages while others go on growing. Pages that it
        shares with the prefix cache are not freed. `request` counts as having pages for its known tokens; once it has
        ended, the others need as many as without it.
        """
        import numpy as np  # not above: a command line that only names routing policies does without

        if self._ends is None:
            self._ends = np.array(self._ends_of(self._running), np.int64).reshape(-1, 3)
        layout, count, final = self._layout, request.num_tokens, self._lengths.final_length(request)
        frees = layout.blocks_for_tokens(count) * layout.num_growing + layout.fixed_pages(final - 1)
        own = final - 1 - count, frees, layout.pages_for_tokens(count)
        steps, frees, has = np.vstack((self._ends, own)).T
        order = np.argsort(-steps)  # when a request ends, the earlier ones in this order still run
        block, growing = layout.block_tokens, layout.num_growing
        needs = np.cumsum(frees[order]) * block + np.arange(1, len(steps) + 1) * steps[order] * growing
        most = int(needs[steps[order] <= own[0]].max())
        return max(0, -(-most // block) - int(has.sum()))

    def _pages(self, request: Request, room: int) -> int:
        """Return the pages that a request with room for `room` tokens grows by."""
        return max(0, self.final_pages(request) - self._pages_of(room))

    def _ends_of(self, requests: Sequence[Request]) -> list[tuple[int, int, int]]:
        """For each request, return the steps until it ends, the pages that it frees then if its tokens are today's, and
        how many of these it has now.

        Pages that do not grow without end count as many as at the end.
        """
        layout = self._layout
        block, growing, fixed_pages = layout.block_tokens, layout.num_growing, layout.fixed_pages
        has = layout.pages_for_each([request.room for request in requests])
        ends = []
        for request, final, pages in zip(requests, self._lengths.final_lengths(requests), has, strict=True):
            count, shared = len(request.token_ids), request.began_at // block * growing
            blocks = -(-max(request.room, count) // block)
            ends.append((final - 1 - count, blocks * growing + fixed_pages(final - 1) - shared, pages - shared))
        return ends
