"""A sign of a trainer that loads adapters and then asks the base model: its adapters have no effect.

Tests: tests/server/api/test_base_after_load.py
"""

from __future__ import annotations

import logging

from prometheus_client import CollectorRegistry, Counter

from ..rare_log import RareLog

MAX_TENANTS = 1 << 12

log = logging.getLogger(__name__)


class BaseAfterLoad:
    """Counts, and rarely logs, requests for the base model's name from tenants that have loaded an adapter."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._latest: dict[str, str] = {}  # tenants' latest adapters
        self._log = RareLog(log)
        self._count = Counter(
            "chorus_base_requests_after_load",
            "Requests for the base model from tenants that have loaded an adapter: perhaps they forget to name it",
            registry=registry,
        )

    def loaded(self, tenant: str, adapter: str) -> None:
        """A tenant has loaded an adapter over HTTP."""
        if tenant in self._latest or len(self._latest) < MAX_TENANTS:
            self._latest[tenant] = adapter

    def asked(self, tenant: str) -> None:
        """A tenant's request is answered by the base model itself."""
        if (adapter := self._latest.get(tenant)) is not None:
            self._count.inc()
            self._log.warning(
                "tenant %s has loaded adapter %s and asks for the base model, which does not use it; if that is not "
                "meant, name the adapter in the field model, or load it with as_base",
                tenant,
                adapter,
            )
