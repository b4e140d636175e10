"""Chooses the proposed tokens that a step verifies.

Tests: tests/core/speculation/test_speculation.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..requests.draft_length import Chance, DraftLength
from ..requests.request import Request, RequestState
from ..requests.types import StepPlan, looks_back
from .proposer import Proposer
from .step_cost import StepCost


class Speculation:
    """Adds proposed tokens to the sequences of a step, which verifies them: see `ScheduledSequence.drafts`.

    Drafts take only tokens and pages that the step has left. A request with a grammar, a penalty or bad words of
    several tokens gets none, because the tokens generated so far change which ones may be sampled next.
    """

    def __init__(self, proposer: Proposer) -> None:
        self._proposer = proposer
        self.cost = StepCost()
        self.chance = Chance()
        """Of the proposals of all requests."""

    def drafts(
        self, requests: Sequence[Request], left: int, grow: Callable[[Request, int], bool]
    ) -> dict[Request, list[int]]:
        """Return proposed tokens for the decoding requests of a step.

        requests: in the step, with pages for their next token. left: tokens that the step may still take. grow: makes
        a request's pages cover so many tokens, or returns False.
        """
        if left <= 0:
            return {}
        cost = self.cost.share(len(requests))
        wanted = {request: count for request in requests if (count := self._wanted(request, cost))}
        drafts: dict[Request, list[int]] = {}
        for request, proposal in self._proposer.propose(wanted).items() if wanted else ():
            count = min(len(proposal), wanted[request], left)
            known = len(request.token_ids)
            if not grow(request, known + count):
                count = min(count, request.room - known)
            if count > 0:
                drafts[request] = list(proposal[:count])
                left -= count
        return drafts

    def note(self, request: Request, proposed: int, accepted: int) -> None:
        """Learn from a verified proposal."""
        self.chance.note(proposed, accepted)
        if request.draft_length is not None:
            request.draft_length.note(proposed, accepted)

    def note_step(self, plan: StepPlan, seconds: float) -> None:
        """Learn the time of a step without prompts."""
        if plan.num_tokens - plan.num_drafts == len(plan.sequences):
            self.cost.note(len(plan.sequences), plan.num_tokens, seconds)

    def _wanted(self, request: Request, cost: float) -> int:
        """The most tokens to propose for a request of the step. cost: see `DraftLength.take`."""
        most = request.max_length - len(request.token_ids) - 1  # another token follows the accepted ones
        if most <= 0 or not _decodes(request) or looks_back(request.params):
            return 0
        if request.draft_length is None:
            request.draft_length = DraftLength(self.chance.value)
        return min(most, request.draft_length.take(cost))


def _decodes(request: Request) -> bool:
    """True if the next token of a request with a generated token is computed in this step, on its whole adapter."""
    num_tokens = len(request.token_ids)
    return (
        request.state is RequestState.RUNNING
        and num_tokens - request.num_computed_tokens == 1
        and num_tokens > request.num_prompt_tokens
    )
