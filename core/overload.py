"""The refusal of work that can't be queued now."""

from __future__ import annotations


class Overloaded(Exception):
    """More requests wait than the engine queues; the same request may be accepted later.

    retry_after: seconds after which trying again makes sense.
    """

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after
