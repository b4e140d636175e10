"""The interface of proposers, which guess a sequence's next tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from ..requests.request import Request


class Proposer(Protocol):
    """Proposes tokens that may follow a request's known tokens.

    A proposal affects the speed, never the output. State of a request belongs in `request.proposing`, and
    ends with the request. A request's `token_ids` only grow, also while it is preempted.
    """

    def propose(self, wanted: Mapping[Request, int]) -> Mapping[Request, Sequence[int]]:
        """Return at most `wanted` tokens for each request; requests without any may be left out.

        Called once for each step, with all sequences that take proposals.
        """
        ...
