"""Shares of the seats: the rows of a step by account, and who sits out where more requests run than it has rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence

from ..requests.request import Request
from .running import Running


class SeatShares:
    """Deals the rows of a step to accounts, max-min fair over their weights.

    With every seat taken, an account may still begin a request if it has fewer rows than another, which is left with no
    less than it has then. The newest decoding request of whoever has most sits out for it: it keeps its pages and its
    state, nothing is computed twice, and it goes on when a row is free. An account keeps one row at least, of its
    oldest request, and begins nothing while one of its own sits out.
    """

    def __init__(self, max_rows: int, weights: Mapping[str, float]) -> None:
        """max_rows: of a step. weights: by account; 1 where nothing is said."""
        self._max_rows = max_rows
        self._most_running = 2 * max_rows - 1
        self._weights = weights
        self._running = Running()
        self._taking: Sequence[Request] = self._running  # those that have rows of the step being decided
        self._rows: dict[str, int] = {}  # their number by account, with those that begin
        self._num_rows = 0
        self._begun: list[Request] = []

    def deal(self, requests: Sequence[Request], begun: Container[Request] = ()) -> list[Request]:
        """Return those of `requests`, which are in order of admission, that share a step: as many as it has rows.

        begun: those of them that have a row in any case.
        """
        short = len(requests) - self._max_rows
        members: dict[str, list[Request]] = {}
        for request in requests:
            members.setdefault(request.account, []).append(request)
        rows = {account: len(each) for account, each in members.items()}
        yielding: dict[str, list[Request]] = {}
        sits_out: set[Request] = set()
        while len(sits_out) < short:
            account = self._richest(rows)
            if account not in yielding:  # the newest last; a prompt that has begun is computed to its end
                yielding[account] = sorted((r for r in members[account] if r not in begun), key=_decodes)
            if yielding[account]:
                sits_out.add(yielding[account].pop())
                rows[account] -= 1
            else:
                rows[account] = 0
        return [request for request in requests if request not in sits_out]

    def begin_step(self, running: Running, taking: Sequence[Request]) -> None:
        """Take note of a step before requests are admitted to it. taking: those of `running` that have rows of it."""
        self._running, self._taking = running, taking
        self._num_rows, self._begun = len(taking), []
        everybody = self._num_rows == len(running)
        self._rows = dict(running.accounts) if everybody else dict(Counter(request.account for request in taking))

    def can_give(self) -> bool:
        """True if an account has more than one row of the step."""
        return self._most_left() > 0

    def is_open_to(self, accounts: Iterable[str], late: Mapping[str, float]) -> bool:
        """True if one of `accounts` may begin a request though every seat is taken.

        late: those of them that have waited too long for a turn.
        """
        return any(self.may_begin(account, account in late) for account in accounts)

    def may_begin(self, account: str, is_late: bool) -> bool:
        """True if an account may begin a request though every seat is taken: another has more than it.

        One that is late for its turn, and has nothing running, may whatever its weight.
        """
        own, accounts = self._rows.get(account, 0), self._running.accounts
        if own < accounts.get(account, 0):  # some of its own sit out
            return False
        if self.is_crowded() if own else len(accounts) >= self._max_rows:  # each account keeps a row
            return False
        left = self._most_left()
        return left > 0 and ((is_late and not own) or (own + 1) / self._weights.get(account, 1.0) <= left)

    def take(self, request: Request) -> None:
        """Note that a request begins in the step."""
        self._begun.append(request)
        account = request.account
        self._rows[account] = self._rows.get(account, 0) + 1
        self._num_rows += 1
        if self._num_rows > self._max_rows:
            self._rows[self._richest(self._rows)] -= 1
            self._num_rows -= 1

    def is_crowded(self) -> bool:
        """True if so many sit out that one of them has to leave before another request begins."""
        return len(self._running) >= self._most_running

    def sitting_out(self, account: str) -> Request | None:
        """Return the newest request of another account that has no row of the step, None where all have one."""
        if len(self._taking) >= len(self._running):
            return None
        taking = {*self._taking, *self._begun}
        out = (r for r in reversed(self._running) if r not in taking and r.account != account)
        return next(out, None)

    def _most_left(self) -> float:
        """Return the most that an account would be left with, over its weight, if it gave a row away; 0 if none can."""
        weights = self._weights
        return max(((rows - 1) / weights.get(account, 1.0) for account, rows in self._rows.items()), default=0.0)

    def _richest(self, rows: Mapping[str, int]) -> str:
        weights = self._weights
        return max(rows, key=lambda account: (rows[account] - 1) / weights.get(account, 1.0))


def _decodes(request: Request) -> bool:
    return request.num_tokens - request.num_computed_tokens == 1
