"""Loads of an adapter on all connected replicas, and what it means that one of them can't."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from ...memory.files.error import AdapterFormatError
from ..errors import ApiError, EngineUnavailable
from .link import Link, LoadRefusal

RETRY_SECONDS = 2.0
"""Seconds for which replicas that could not read a pushed adapter try again before the push fails."""

RETRY_PAUSE = 0.25
"""Seconds between two such tries."""


class ReplicaRefused(ApiError):
    """A connected replica can't load a pushed adapter; others could, or the reason may pass. Nothing was changed."""

    def __init__(self, refused: Mapping[str, LoadRefusal], num_replicas: int) -> None:
        """refused: by the replica's name."""
        name, (failure, text, _) = next(iter(refused.items()))
        others = f" ({len(refused)} of {num_replicas} replicas can't)" if len(refused) > 1 else ""
        message = f"replica {name} can't load the adapter{others}: {text}; nothing was changed, so try again later"
        super().__init__(503, message, code=failure, retry_after=1)


class ReplicaLoads:
    """Has replicas load adapters, and waits for them; for any thread but the links'."""

    def __init__(
        self,
        links: Sequence[Link],
        change: threading.Condition,
        call: Callable[..., Future[Any]],
        failure: Callable[[], str | None],
    ) -> None:
        """change: notified when a replica has answered or come. call: calls a function on the links' loop. failure: why
        the cluster serves nothing, or None.
        """
        self._links = links
        self._change = change
        self._call = call
        self._failure = failure

    def load(self, content_hash: str, path: Path, *, is_push: bool) -> None:
        """Return once every connected replica has loaded an adapter, or could not while another one has.

        is_push: every replica that takes requests must have it; those that could not read it try again. Raises
        AdapterFormatError if no replica could, EngineUnavailable if none is connected, ReplicaRefused.
        """
        deadline = 0.0
        while not self._load_once(content_hash, path, everywhere=is_push):
            deadline = deadline or time.monotonic() + RETRY_SECONDS
            refused = self._refused(content_hash)
            is_late = time.monotonic() >= deadline
            if refused and (is_late or not (is_push and _may_pass(refused))):
                raise self._error(content_hash, refused, is_push=is_push)
            if is_late:  # its requests, which fail for it, have taken the reasons
                raise EngineUnavailable("no replica could load the adapter; try again later")
            time.sleep(RETRY_PAUSE)

    def _load_once(self, content_hash: str, path: Path, *, everywhere: bool) -> bool:
        """Send the load to all replicas that lack the adapter, and wait for their answers; True if they have it now."""

        def load() -> None:
            for link in self._links:
                link.load(content_hash, path)

        self._call(load, otherwise=None).result()
        with self._change:
            while any(link.is_up and content_hash in link.loading for link in self._links):
                self._change.wait(0.1)
                self._check_failure()
        self._check_failure()
        lack_it = any(link.takes_requests and content_hash not in link.loaded for link in self._links)
        if any(content_hash in link.loaded for link in self._links):
            return not (everywhere and lack_it)
        if not lack_it and not self._refused(content_hash):
            raise EngineUnavailable("no replica is connected that could check the adapter; try again later")
        return False

    def _refused(self, content_hash: str) -> dict[str, LoadRefusal]:
        """Why replicas could not load an adapter, by their names."""
        return {one.name: why for one in self._links if (why := one.failed.get(content_hash)) is not None}

    def _error(self, content_hash: str, refused: Mapping[str, LoadRefusal], *, is_push: bool) -> Exception:
        if is_push and (_may_pass(refused) or any(content_hash in link.loaded for link in self._links)):
            return ReplicaRefused(refused, len(self._links))
        first = next(iter(refused.values()))
        error = AdapterFormatError(first.text)
        error.failure = first.failure
        return error

    def _check_failure(self) -> None:
        if (failure := self._failure()) is not None:
            raise EngineUnavailable(failure)


def _may_pass(refused: Mapping[str, LoadRefusal]) -> bool:
    return all(why.failure.may_pass for why in refused.values())
