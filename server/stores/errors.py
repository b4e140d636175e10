"""Errors raised while fetching an adapter from a store."""

from __future__ import annotations


class StoreError(Exception):
    """A store does not provide the adapter. The text is for clients: it names no host, no path and no address.

    detail: the text for the operator's log.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason)
        self.detail = detail or reason


class NotInStore(StoreError):
    """The store has no such adapter."""


class StoreRefused(StoreError):
    """The store's data, or the place that it redirects to, are not accepted; a retry would give the same."""


class NoAccess(StoreRefused):
    """The store refuses access. Some stores say so of files that they don't have."""


class StoreAway(StoreError):
    """The store did not respond, or broke off; it may respond later."""


class CacheFull(StoreError):
    """All cached adapters are in use, and another one does not fit."""
