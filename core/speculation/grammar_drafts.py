"""Proposals for requests with grammars: text that the grammar forces, and the part of other proposals that it allows.

Tests: tests/core/speculation/test_grammar_drafts.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..requests.draft_length import MOST_DRAFTS
from ..requests.request import Request

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from ..requests.grammars import Grammars


class GrammarDrafts:
    """Forces and prunes proposals. A request's state in its grammar is that of its sampler, on the same thread."""

    def __init__(self, grammars: Grammars | None) -> None:
        """grammars: the model's; None where no tokens are sampled."""
        self._grammars = grammars

    def has_state(self, request: Request) -> bool:
        """True if a request's proposals can be checked: its grammar is not heavy, and has allowed a token."""
        state = request.sampler.grammar
        return self._grammars is not None and state is not None and not state.seconds and not state.is_watched

    def forced(self, request: Request) -> list[int]:
        """The tokens of the only text that may follow, at most `MOST_DRAFTS`."""
        matcher = self._matcher(request)
        if matcher is None or self._grammars is None:
            return []
        return self.allowed(request, self._grammars.forced(matcher)[:MOST_DRAFTS])

    def allowed(self, request: Request, proposal: list[int]) -> list[int]:
        """The beginning of a proposal that the grammar allows."""
        matcher = self._matcher(request)
        if matcher is None or self._grammars is None:
            return []
        known = self._grammars.known(proposal)  # another token would put the matcher into an error
        return known[: matcher.validate_tokens(known)]

    def _matcher(self, request: Request) -> LLMatcher | None:
        """The matcher after all known tokens; None if it is in an error."""
        state = request.sampler.grammar
        assert state is not None
        state.see(request.token_ids)
        return state.consume()
