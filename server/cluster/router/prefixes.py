"""Where the beginnings of prompts were computed last: replicas whose memory has them, and folders of files.

A router knows what it sent where, and how many tokens of cached prefixes a replica has in memory. It takes the latest
ones for those that are there. A wrong guess costs a prefill and no answer.

Tests: tests/server/cluster/router/test_prefixes.py
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .affinity import FREE_REQUESTS, SLACK
from .replicas import Policy, Replicas, Routed

RUN_TOKENS = 64
"""Prompts are compared in runs of so many tokens. A prefix must have at least one run to decide."""

MAX_RUNS = 128
"""Runs at the beginning of a prompt that are compared."""

MAX_REMEMBERED = 1 << 17
"""Runs remembered of a replica, and of a folder."""


def runs_of(record: Mapping[str, Any]) -> list[bytes]:
    """Keys of the runs that a request's prompt begins with; each covers the adapter, who may share it, and all tokens
    before. A prompt with images has none.
    """
    tokens = record["tokens"]
    count = min(MAX_RUNS, (len(tokens) - 1) // RUN_TOKENS)
    if count <= 0 or record.get("media"):
        return []
    scope = (record["content_hash"] or "", record["tenant"], record.get("cache_salt", ""))
    digest = hashlib.blake2b(repr(scope).encode(), digest_size=16)
    keys = []
    for start in range(0, count * RUN_TOKENS, RUN_TOKENS):
        digest.update(array("q", tokens[start : start + RUN_TOKENS]).tobytes())
        keys.append(digest.copy().digest())
    return keys


class _Runs(OrderedDict[bytes, None]):
    """Runs, the latest last. Of a prompt the first run is the latest, so that a prompt's end is forgotten before."""

    def note(self, keys: Sequence[bytes]) -> None:
        for key in reversed(keys):
            self[key] = None
            self.move_to_end(key)
        self.limit(MAX_REMEMBERED)

    def limit(self, most: int) -> None:
        while len(self) > most:
            self.popitem(last=False)

    def count(self, keys: Iterable[bytes]) -> int:
        """How many of the first keys are known."""
        known = 0
        for key in keys:
            if key not in self:
                break
            known += 1
        return known


class PrefixPlaces:
    """What replicas have in memory, and folders in files."""

    def __init__(self) -> None:
        self._memory: dict[str, _Runs] = {}
        self._files: dict[str, _Runs] = {}
        self._folders: dict[str, str] = {}  # by replica

    def note_folder(self, replica: str, folder: str) -> None:
        """A replica has come, with nothing in memory. folder: what its files have in common with those of others;
        empty: it has none.
        """
        self.forget(replica)
        if folder:
            self._folders[replica] = folder

    def note(self, replica: str, keys: Sequence[bytes]) -> None:
        """A replica computes a prompt."""
        if keys:
            self._memory.setdefault(replica, _Runs()).note(keys)
            if (folder := self._folders.get(replica)) is not None:
                self._files.setdefault(folder, _Runs()).note(keys)

    def limit(self, replica: str, num_tokens: int) -> None:
        """A replica has told how many tokens of prefixes its memory has: what it computed before those has left."""
        if (runs := self._memory.get(replica)) is not None:
            runs.limit(-(-num_tokens // RUN_TOKENS))

    def forget(self, replica: str) -> None:
        """A replica is gone, with its memory; files stay."""
        self._memory.pop(replica, None)
        self._folders.pop(replica, None)

    def choose(self, policy: Policy, request: Routed, keys: Sequence[bytes], replicas: Replicas) -> int | None:
        """The policy's choice among the replicas whose memory has most of a prompt's beginning, else among those whose
        folder has it, else among all.

        A replica that is overloaded, as `Affinity` has it, or that has no room, is left out.
        """
        for found in self._preferred(keys, replicas) if keys else ():
            if len(found) == len(replicas):
                break
            if fit := _fit(found, request, replicas):
                chosen = policy(request, Replicas(replicas[at] for at in fit))
                return None if chosen is None else fit[chosen]
        return policy(request, replicas)

    def _preferred(self, keys: Sequence[bytes], replicas: Replicas) -> list[list[int]]:
        """Indices of the replicas with the longest beginning in memory, and of those with the longest in files."""
        files = {folder: runs.count(keys) for folder, runs in self._files.items()}
        memory, nothing = [], _Runs()
        disk = []
        for each in replicas:
            memory.append(self._memory.get(each.name, nothing).count(keys))
            disk.append(files.get(self._folders.get(each.name, ""), 0))
        in_memory, in_files = _longest(memory), _longest(disk)
        if max(memory, default=0) * 2 < max(disk, default=0):  # most of it would be read all the same
            return [in_files]
        return [found for found in (in_memory, in_files) if found]


def _longest(counts: Sequence[int]) -> list[int]:
    """Indices of the largest counts; none if nothing was counted."""
    most = max(counts, default=0)
    return [index for index, count in enumerate(counts) if count == most] if most else []


def _fit(found: Sequence[int], request: Routed, replicas: Replicas) -> list[int]:
    """Those replicas of `found` that have room and are not overloaded."""
    most = max(FREE_REQUESTS, SLACK * sum(each.num_requests for each in replicas) / len(replicas))
    return [at for at in found if replicas[at].num_requests < most and replicas[at].has_room(request)]
