"""The refusal of work that can't be queued now."""

from __future__ import annotations

from collections.abc import Callable


class Overloaded(Exception):
    """More requests wait than the engine queues; the same request may be accepted later.

    retry_after: seconds after which trying again makes sense.
    """

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


def check_bounds(waiting: int, own: int, most: int, retry_after: Callable[[], float]) -> None:
    """Raise Overloaded unless one more request may wait. own: the tenant's waiting requests; 0 for no tenant.

    retry_after: seconds to say, asked for if it is refused.
    """
    if waiting >= most:
        text = f"{waiting} generations wait, the queue holds {most}"
    elif waiting >= most // 2 and own >= most - waiting:
        text = f"{own} of your generations wait, and the queue has room for {most - waiting} of all clients"
    else:
        return
    raise Overloaded(f"{text}; try again later", retry_after())
