"""Chooses the proposed tokens that a step verifies.

Tests: tests/core/speculation/test_speculation.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ..requests.draft_length import MOST_DRAFTS, Chance, DraftLength
from ..requests.request import Request, RequestState
from ..requests.types import StepPlan, forbids_drafts
from .grammar_drafts import GrammarDrafts
from .proposer import Proposer
from .token_cost import TokenCost

if TYPE_CHECKING:
    from ..requests.grammars import Grammars

_CHANCE_FORCED = 0.9
"""Assumed probability that a token of forced text is the one sampled: the text is certain, its tokens are not."""


class Speculation:
    """Adds proposed tokens to the sequences of a step, which verifies them: see `ScheduledSequence.drafts`.

    Drafts take only tokens and pages that the step has left. Text that a request's grammar forces is proposed as it
    is; of other proposals the part that the grammar allows. A request with a penalty or bad words of several tokens
    gets none, because the tokens generated so far change which ones may be sampled next.
    """

    def __init__(self, proposer: Proposer, grammars: Grammars | None = None) -> None:
        """grammars: the model's."""
        self._proposer = proposer
        self._grammars = GrammarDrafts(grammars)
        self.cost = TokenCost()
        self.chance = Chance()
        """Of the proposals of all requests."""
        self._chance_forced = Chance(_CHANCE_FORCED)
        self._forced: dict[Request, list[int]] = {}
        """Proposals of the step that their grammars force."""

    def drafts(
        self, requests: Sequence[Request], left: int, grow: Callable[[Request, int], bool]
    ) -> dict[Request, list[int]]:
        """Return proposed tokens for the decoding requests of a step.

        requests: in the step, with pages for their next token. left: tokens that the step may still take. grow: makes
        a request's pages cover so many tokens, or returns False.
        """
        self._forced = {}
        if left <= 0:
            return {}
        cost = self.cost.share(len(requests))
        proposals = self._proposals({each: most for each in requests if (most := self._most(each))}, cost)
        drafts: dict[Request, list[int]] = {}
        for request, proposal in proposals.items():
            count = min(len(proposal), left)
            known = len(request.token_ids)
            if not grow(request, known + count):
                count = min(count, request.room - known)
            if count > 0:
                drafts[request] = list(proposal[:count])
                left -= count
        return drafts

    def _proposals(self, most: dict[Request, int], cost: float) -> dict[Request, Sequence[int]]:
        """Return the proposals of requests. most: tokens for each. cost: see `DraftLength.take`."""
        forced = self._forced = {
            request: tokens
            for request in most
            if request.params.grammar is not None and (tokens := self._take_forced(request, most[request], cost))
        }
        wanted = {}
        for request in most:
            if request in forced:
                continue
            if request.draft_length is None:
                request.draft_length = DraftLength(self.chance.value)
            if count := min(most[request], request.draft_length.take(cost)):
                wanted[request] = count
        found: dict[Request, Sequence[int]] = dict(forced)
        for request, proposal in self._proposer.propose(wanted).items() if wanted else ():
            kept = proposal[: wanted[request]]
            if request.params.grammar is not None:
                kept = self._grammars.allowed(request, list(kept))
            found[request] = kept
        return found

    def _take_forced(self, request: Request, most: int, cost: float) -> list[int]:
        """The forced tokens that are worth their cost."""
        tokens = self._grammars.forced(request)
        if not tokens:
            return []
        if request.forced_length is None:
            request.forced_length = DraftLength(self._chance_forced.value, MOST_DRAFTS)
        return tokens[: min(most, request.forced_length.take(cost))]

    def note(self, request: Request, proposed: int, accepted: int) -> None:
        """Learn from a verified proposal of the last step."""
        is_forced = request in self._forced
        (self._chance_forced if is_forced else self.chance).note(proposed, accepted)
        length = request.forced_length if is_forced else request.draft_length
        if length is not None:
            length.note(proposed, accepted)

    def _most(self, request: Request) -> int:
        """The most tokens that may be proposed for a request of the step; 0 if none can be verified."""
        if not _decodes(request) or forbids_drafts(request.params):
            return 0
        if request.params.grammar is not None and not self._grammars.has_state(request):
            return 0
        return max(0, request.max_length - len(request.token_ids) - 1)  # another token follows the accepted ones

    def note_step(self, plan: StepPlan, seconds: float) -> None:
        """Learn the time of a step without prompts."""
        if plan.num_tokens - plan.num_drafts == len(plan.sequences):
            self.cost.note(len(plan.sequences), plan.num_tokens, seconds)


def _decodes(request: Request) -> bool:
    """True if the next token of a request with a generated token is computed in this step, on its whole adapter."""
    num_tokens = len(request.token_ids)
    return (
        request.state is RequestState.RUNNING
        and num_tokens - request.num_computed_tokens == 1
        and num_tokens > request.num_prompt_tokens
    )
