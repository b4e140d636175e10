"""True if a request may start while its adapter is still being read (DESIGN §4: wait or stream)."""

from __future__ import annotations

from ..memory.adapter import Adapter, Tier
from ..memory.adapter_store import AdapterStore
from ..memory.eviction import RestoreCosts


class LoadPolicy:
    """Starts a request when the rest of its adapter will come under the cover of its prefill, or little later.

    The prefill waits for each layer when it reaches it, and every request of that step with it. So what is still to be
    read must not take much longer than the prefill itself, unless nobody else is running.
    """

    def __init__(self, store: AdapterStore, costs: RestoreCosts, block_tokens: int, max_stall: float) -> None:
        """max_stall: seconds that a step waits for adapters at most, else it is computed in vain. 0: no request starts
        before its adapter has been read."""
        self._store = store
        self._costs = costs
        self._block_tokens = block_tokens
        self._max_stall = max_stall

    def may_start(self, adapter: Adapter, num_tokens: int, *, alone: bool) -> bool:
        """num_tokens: that the request computes in the step. alone: nobody else would have to wait."""
        if adapter.pages:
            return True
        tier = self._store.tier(adapter)
        if tier is not Tier.LOADING:
            return tier is not Tier.DISK  # beginning with a failed one tells why
        if self._max_stall == 0:
            return False
        prefill = self._costs.prefix_page * num_tokens / self._block_tokens
        return alone or self._store.reads.seconds_left(adapter) <= prefill + self._max_stall
