"""Makes the engine's requests of one call of a client.

Tests: tests/server/api/test_generate.py, tests/server/api/pooling/test_pooling_api.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ...core.requests.request import Request
from .caller import Caller

if TYPE_CHECKING:
    from ...core.requests.media import MediaItem
    from ...core.requests.request_params import RequestParams


@dataclass(slots=True, kw_only=True)
class EngineRequests:
    """One request for each choice of a call; all are of one version of the adapter."""

    call_id: str
    caller: Caller
    adapter: str | None
    arrival: float
    """Seconds of the monotonic clock."""
    cache_salt: str
    is_alone: bool
    """The call has one choice."""
    prediction: Sequence[int] = ()
    """Tokens that answers are predicted to have; see `Request`."""
    _made: list[Request] = field(default_factory=list)

    def next(self, prompt: list[int], params: RequestParams, media: tuple[MediaItem, ...] = ()) -> Request:
        """The request of the next choice. media: the prompt's images."""
        request = Request(
            f"{self.call_id}-{len(self._made)}",
            prompt,
            params,
            self.adapter,
            self.arrival,
            tenant=self.caller.tenant,
            cache_salt=self.cache_salt,
            choice_group="" if self.is_alone else self.call_id,
            prediction=self.prediction,
            media=media,
            sibling=self._made[0] if self._made else None,
        )
        self._made.append(request)
        return request
