"""A sign of a trainer that loads adapters and then asks the base model: its adapters have no effect.

Tests: tests/server/api/test_base_after_load.py
"""

from __future__ import annotations

import logging

from prometheus_client import CollectorRegistry, Counter

from ..rare_log import RareLog

log = logging.getLogger(__name__)


class BaseAfterLoad:
    """Counts, and rarely logs, requests for the base model's name with keys that may use a loaded adapter."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._log = RareLog(log)
        self._count = Counter(
            "chorus_base_requests_after_load",
            "Requests for the base model with keys that may use an adapter that was loaded over HTTP: perhaps they "
            "forget to name it",
            registry=registry,
        )

    def asked(self, tenant: str, adapter: str | None) -> None:
        """A tenant's request is answered by the base model itself. adapter: the latest loaded one that it may use."""
        if adapter is not None:
            self._count.inc()
            self._log.warning(
                "tenant %s asks for the base model, which does not use adapter %s, though that was loaded; if that is "
                "not meant, name the adapter in the field model, or load it with as_base",
                tenant,
                adapter,
            )
