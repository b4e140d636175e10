"""API keys: the rights of their holders, and the tenant that each one belongs to.

Tests: tests/server/access/test_grants.py
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import secrets
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from ..errors import ApiError
from .grants import ALL, Grant, InvalidKey

log = logging.getLogger(__name__)
audit = logging.getLogger("chorus.audit")

TENANT = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
"""A tenant's name."""

MIN_KEY_CHARACTERS = 8
MAX_KEY_CHARACTERS = 512

LOOK_SECONDS = 1.0
"""Seconds between two looks at the key files."""


_GENERATED = re.compile(r"ck-([0-9a-f]{16})-[0-9a-f]{64}")
"""A key that `new_key` has made, and the id by which its hash is found."""

HASHED = re.compile(r"sha256:[0-9a-f]{16}:[0-9a-f]{64}")
"""A generated key as key files keep it: its id, and the hash of all of it."""


class Right(StrEnum):
    """Right that a route asks for. ADMIN: an admin key where the server has any, else a key. OPERATOR: an admin key
    where the server has any key at all.
    """

    OPEN = "open"
    KEY = "key"
    ADMIN = "admin"
    OPERATOR = "operator"


@dataclass(frozen=True, slots=True)
class RequestIdentity:
    """The sender of a request."""

    tenant: str = ""
    """The name that the key was given, or a short one that can't be turned back into it; "" without a key."""
    may_change_adapters: bool = True
    sees_tenants: bool = True
    """May see the names of other tenants."""
    grant: Grant = ALL
    """What it may use."""

    def has(self, right: Right) -> bool:
        """True if it may use routes that ask for a right."""
        return {Right.ADMIN: self.may_change_adapters, Right.OPERATOR: self.sees_tenants}.get(right, True)


class NamedKey(NamedTuple):
    """A key, or what a key file keeps of it, and the name of its tenant; None: one is made of the key's hash."""

    key: str
    tenant: str | None = None
    grant: Grant = ALL

    @property
    def id(self) -> str:
        """Its public part; empty for a key that `new_key` has not made."""
        return self.key.split(":")[1] if HASHED.fullmatch(self.key) else ""


class Keys:
    """The keys of one server, kept as hashes.

    API keys guard every route but the open ones. Where there are admin keys, only they may change adapters; otherwise
    every API key may. An admin key is an API key, too. InvalidKey for a key of two tenants.
    """

    def __init__(self, api_keys: Iterable[NamedKey] = (), admin_keys: Iterable[NamedKey] = ()) -> None:
        given: dict[str, NamedKey] = {}
        admins: set[str] = set()
        self.weights: dict[str, float] = {}
        """Shares of a busy engine, by tenant."""
        for one in api_keys:
            self._add(one, given, admins)
        self.guarded = bool(given)
        """True if a key is needed at all."""
        for one in admin_keys:
            if one.grant.limited:
                raise InvalidKey("an admin key may use every adapter; leave out adapters= and base=no")
            self._add(one._replace(grant=replace(one.grant, admin=True)), given, admins)
        self._open = RequestIdentity(may_change_adapters=not admins, sees_tenants=not admins)
        self._known: list[tuple[str, RequestIdentity]] = []
        self._by_id: dict[str, tuple[str, RequestIdentity]] = {}
        for digest, one in sorted(given.items()):
            changes = digest in admins or not (admins or one.grant.limited)
            known = digest, RequestIdentity(one.tenant or f"key-{digest[:16]}", changes, digest in admins, one.grant)
            if one.id:
                self._by_id[one.id] = known
            else:
                self._known.append(known)

    def _add(self, one: NamedKey, given: dict[str, NamedKey], admins: set[str]) -> None:
        """Take a key to the ones given so far, by their digests. Raises InvalidKey for one that contradicts another."""
        digest, tenant, weight = _digest(one), one.tenant, one.grant.weight
        known = given.get(digest, one)
        if tenant and known.tenant not in (None, "", tenant):
            raise InvalidKey(f"one key is given to two tenants, {known.tenant} and {tenant}; give each a key")
        if one.grant.admin:
            admins.add(digest)
        grant = known.grant if digest in admins and not one.grant.admin else one.grant
        given[digest] = NamedKey(one.key, tenant or known.tenant, grant)
        if tenant and weight and self.weights.setdefault(tenant, weight) != weight:
            raise InvalidKey(f"the keys of tenant {tenant} have different weights; give them one")

    @property
    def tenants(self) -> list[str]:
        """Sorted names of the tenants that have a key."""
        return sorted({identity.tenant for _, identity in (*self._known, *self._by_id.values())})

    def replace(self, others: Keys) -> None:
        """Take the place of these keys: requests to come are held against `others`."""
        vars(self).update(vars(others))

    def identify(self, authorization: str | None) -> RequestIdentity:
        """The caller with this Authorization header. Raises an ApiError for a wrong key, or a missing one."""
        scheme, _, key = (authorization or "").partition(" ")
        key = key.strip() if scheme.lower() == "bearer" else ""
        given = _digest(NamedKey(key)) if key and not HASHED.fullmatch(key) else ""  # a hash is no key
        generated = _GENERATED.fullmatch(key)
        by_id = self._by_id.get(generated[1]) if generated else None
        found: RequestIdentity | None = None
        candidates = self._known if by_id is None else (*self._known, by_id)
        for known, identity in candidates:  # all of them: how long it takes tells nothing about which one it is
            if hmac.compare_digest(known, given):
                found = identity
        if found is not None:
            return found
        if not self.guarded:  # keys that SDKs send because they must send one mean nothing here
            return self._open
        if authorization is None:
            message = "an API key is needed; send it as 'Authorization: Bearer KEY'"
        else:
            message = "the API key is not known here; send one of this server's as 'Authorization: Bearer KEY'"
        raise ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})


class KeyWatch:
    """A daemon thread that reads keys anew when one of their files changes, or on `reload`.

    Files that can't be used leave the keys as they are.
    """

    def __init__(self, keys: Keys, read: Callable[[], Keys], files: Sequence[Path]) -> None:
        self._keys = keys
        self._read = read
        self.files = files
        self._wake = threading.Event()
        self._asked = self._stopped = False
        self._used = self._seen = self._stamp()

    def start(self) -> None:
        if self.files:
            threading.Thread(target=self._run, name="chorus-keys", daemon=True).start()

    def stop(self) -> None:
        self._stopped = True
        self._wake.set()

    def reload(self) -> None:
        """Read the keys anew, soon; from any thread, and from a signal's handler."""
        self._asked = True
        self._wake.set()

    def look(self) -> None:
        """Read the keys if that was asked for, or if a file has changed and nothing was written since the last look."""
        stamp, asked = self._stamp(), self._asked
        self._asked = False
        has_settled = stamp == self._seen
        self._seen = stamp
        if not asked and (stamp == self._used or not has_settled):
            return
        self._used = stamp
        try:
            keys = self._read()
        except InvalidKey as error:
            log.error("the keys stay as they were: %s", error)
            return
        before = set(self._keys.tenants)
        self._keys.replace(keys)
        now = set(keys.tenants)
        audit.info(
            "the keys were read anew; %d tenants, new: %s, gone: %s",
            len(now),
            ", ".join(sorted(now - before)) or "none",
            ", ".join(sorted(before - now)) or "none",
        )

    def _run(self) -> None:
        while not self._stopped:
            self._wake.wait(LOOK_SECONDS)
            self._wake.clear()
            self.look()

    def _stamp(self) -> list[tuple[int, int, int] | None]:
        return [_state(path) for path in self.files]


def check_key(key: str) -> str:
    """The key without blanks around it. Raises InvalidKey for one that no header carries, or that is too short."""
    key = key.strip()
    if not MIN_KEY_CHARACTERS <= len(key) <= MAX_KEY_CHARACTERS:
        raise InvalidKey(f"a key has {MIN_KEY_CHARACTERS} to {MAX_KEY_CHARACTERS} characters, this one has {len(key)}")
    if not key.isascii() or not key.isprintable() or " " in key:
        raise InvalidKey("a key is printable ASCII without blanks")
    return key


def read_keys(path: Path) -> list[NamedKey]:
    """The keys of a file, one a line, each with an optional tenant's name behind it and its rights. Raises InvalidKey.

    Empty lines and lines that begin with # are skipped. Several keys may be one tenant's.
    """
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise InvalidKey(f"the key file {path} can't be read: {reason}") from None
    keys: dict[str, NamedKey] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            named = _named(line)
            if named.key in keys:
                raise InvalidKey("this key stands in the file twice; leave one of the lines out")
        except InvalidKey as error:
            raise InvalidKey(f"line {number} of the key file {path}: {error}") from None
        keys[named.key] = named
    if not keys:
        raise InvalidKey(f"the key file {path} has no key")
    return list(keys.values())


def _named(line: str) -> NamedKey:
    key, *names = line.split()
    if not names:
        return NamedKey(check_key(key))
    if not TENANT.fullmatch(names[0]):
        raise InvalidKey(
            "behind a key comes the name of its tenant, one word of up to 128 letters, digits and ._:/+=@-"
        )
    return NamedKey(check_key(key), names[0], Grant.parse(names[1:]))


def new_key() -> tuple[str, str]:
    """A key of 256 random bits, and what a key file keeps of it."""
    key = f"ck-{secrets.token_hex(8)}-{secrets.token_hex(32)}"
    return key, f"sha256:{key.split('-')[1]}:{_digest(NamedKey(key))}"


def _digest(one: NamedKey) -> str:
    if one.id:
        return one.key.rpartition(":")[2]
    return hashlib.sha256(one.key.encode("utf-8", "surrogateescape")).hexdigest()


def _state(path: Path) -> tuple[int, int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns
