"""Reasons why an adapter's files could not be had from a store."""

from __future__ import annotations


class StoreError(Exception):
    """An adapter that a store does not give. The text is for clients: it names no host, no path and no address.

    detail: the same for the operator's log.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason)
        self.detail = detail or reason


class NotInStore(StoreError):
    """The store has no such adapter."""


class StoreRefused(StoreError):
    """What the store gave, or where it led to, is not taken; asking again brings the same."""


class StoreAway(StoreError):
    """The store did not answer, or broke off; it may answer later."""


class CacheFull(StoreError):
    """All cached adapters are in use, and another one does not fit beside them."""
