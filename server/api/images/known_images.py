"""A cache of what prompts need to know of images, by whoever sent them, so that nobody learns what others have sent.

Tests: tests/server/api/images/test_known_images.py
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class Owner(NamedTuple):
    """Whose images are known."""

    tenant: str
    salt: str
    """The request's `cache_salt`."""


class KnownImages(Generic[T]):
    """When it is full, the tenant with most images loses the one that it has not used for longest. Thread-safe."""

    def __init__(self, most: int) -> None:
        """most: images of all tenants together."""
        self._most = most
        self._size = 0
        self._lock = threading.Lock()
        self._of: dict[str, OrderedDict[tuple[str, bytes], T]] = {}  # by tenant

    def count(self, tenant: str) -> int:
        """Images of a tenant that are known."""
        return len(self._of.get(tenant, ()))

    def find(self, owner: Owner, key: bytes) -> T | None:
        """key: of the file and its settings."""
        with self._lock:
            own = self._of.get(owner.tenant, {})
            if (found := own.pop((owner.salt, key), None)) is not None:
                own[owner.salt, key] = found  # the latest use last
            return found

    def add(self, owner: Owner, key: bytes, image: T) -> None:
        with self._lock:
            own = self._of.setdefault(owner.tenant, OrderedDict())
            self._size += (owner.salt, key) not in own
            own[owner.salt, key] = image
            while self._size > self._most:
                self._drop_one()

    def _drop_one(self) -> None:
        tenant = max(self._of, key=lambda each: len(self._of[each]))
        self._of[tenant].popitem(last=False)
        self._size -= 1
        if not self._of[tenant]:
            del self._of[tenant]
