"""API keys, the rights of their holders, and the tenant that each belongs to.

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
"""Pattern of a tenant's name."""

MIN_KEY_CHARACTERS = 8
MAX_KEY_CHARACTERS = 512

LOOK_SECONDS = 1.0
"""Seconds between two checks of the key files."""


_GENERATED = re.compile(r"ck-([0-9a-f]{16})-[0-9a-f]{64}")
"""Pattern of a key made by `new_key`, with the id that finds its hash."""

HASHED = re.compile(r"sha256:[0-9a-f]{16}:[0-9a-f]{64}")
"""Pattern of a generated key in a key file: its id and the hash of the whole key."""


class Right(StrEnum):
    """The right that a route requires. ADMIN: an admin key if the server has any, else a key that may change adapters.
    OPERATOR: an admin key
    if the server has any keys at all.
    """

    OPEN = "open"
    KEY = "key"
    ADMIN = "admin"
    OPERATOR = "operator"


@dataclass(frozen=True, slots=True)
class RequestIdentity:
    """The sender of a request."""

    tenant: str = ""
    """The name that was given with the key, or a short hash that does not reveal it; "" without a key."""
    may_change_adapters: bool = True
    sees_tenants: bool = True
    """The sender may see the names of other tenants."""
    grant: Grant = ALL
    """The models that the sender may use, and how much."""

    def has(self, right: Right) -> bool:
        """True if the sender may use routes that require a right."""
        return {Right.ADMIN: self.may_change_adapters, Right.OPERATOR: self.sees_tenants}.get(right, True)


class NamedKey(NamedTuple):
    """A key, or its entry in a key file, and the name of its tenant; None: a name is made from the key's hash."""

    key: str
    tenant: str | None = None
    grant: Grant = ALL

    @property
    def id(self) -> str:
        """The key's public part; empty for a key that `new_key` has not made."""
        return self.key.split(":")[1] if HASHED.fullmatch(self.key) else ""


class Keys:
    """The keys of one server, stored as hashes.

    API keys guard all routes except the open ones. If there are admin keys, only they may change adapters; otherwise
    API keys without a tenant's name may, and with `tenants_change` those of tenants, too. An admin key is also an API
    key. Raises InvalidKey for one key of two tenants.
    """

    def __init__(
        self,
        api_keys: Iterable[NamedKey] = (),
        admin_keys: Iterable[NamedKey] = (),
        *,
        tenants_change: bool = False,
    ) -> None:
        given: dict[str, NamedKey] = {}
        admins: set[str] = set()
        self.weights: dict[str, float] = {}
        """Shares of a busy engine, by tenant."""
        for one in api_keys:
            self._add(one, given, admins)
        self.guarded = bool(given)
        """True if requests need a key."""
        for one in admin_keys:
            if one.grant.limited:
                raise InvalidKey("an admin key may use every adapter; leave out adapters= and base=no")
            self._add(one._replace(grant=replace(one.grant, admin=True)), given, admins)
        self.has_admins = bool(admins)
        self._open = RequestIdentity(may_change_adapters=not admins, sees_tenants=not admins)
        self._known: list[tuple[str, RequestIdentity]] = []
        self._by_id: dict[str, tuple[str, RequestIdentity]] = {}
        for digest, one in sorted(given.items()):
            is_owner = not (admins or one.grant.limited) and (tenants_change or not one.tenant)
            changes = digest in admins or is_owner
            known = digest, RequestIdentity(one.tenant or f"key-{digest[:16]}", changes, digest in admins, one.grant)
            if one.id:
                self._by_id[one.id] = known
            else:
                self._known.append(known)

    def _add(self, one: NamedKey, given: dict[str, NamedKey], admins: set[str]) -> None:
        """Add a key, by its digests, to those added before. Raises InvalidKey if it contradicts one of them."""
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

    @property
    def changing_adapters(self) -> list[str]:
        """Sorted names of the tenants whose keys may change adapters."""
        known = (*self._known, *self._by_id.values())
        return sorted({identity.tenant for _, identity in known if identity.may_change_adapters})

    def replace(self, others: Keys) -> None:
        """Replace these keys: later requests are checked against `others`."""
        vars(self).update(vars(others))

    def identify(self, authorization: str | None) -> RequestIdentity:
        """The caller with this Authorization header. Raises an ApiError if the key is wrong or missing."""
        scheme, _, key = (authorization or "").partition(" ")
        key = key.strip() if scheme.lower() == "bearer" else ""
        # the hash of a key is not itself a key
        given = _digest(NamedKey(key)) if key and not HASHED.fullmatch(key) else ""
        generated = _GENERATED.fullmatch(key)
        by_id = self._by_id.get(generated[1]) if generated else None
        found: RequestIdentity | None = None
        candidates = self._known if by_id is None else (*self._known, by_id)
        for known, identity in candidates:  # compare all of them, so the time taken does not reveal which one matches
            if hmac.compare_digest(known, given):
                found = identity
        if found is not None:
            return found
        if not self.guarded:  # this server needs no keys: ignore the dummy keys that SDKs must send
            return self._open
        if authorization is None:
            message = "an API key is needed; send it as 'Authorization: Bearer KEY'"
        else:
            message = "this server does not know the API key; send one of its keys as 'Authorization: Bearer KEY'"
        raise ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})


class KeyWatch:
    """A daemon thread that reloads keys when one of their files changes, or on `reload`.

    If the files can't be used, the keys stay as they are.
    """

    def __init__(self, keys: Keys, read: Callable[[], Keys], files: Sequence[Path]) -> None:
        self._keys = keys
        self._read = read
        self.files = files
        self._wake = threading.Event()
        self._asked = self._stopped = False
        self._used = self._seen = self._stamp()

    def start(self) -> None:
        if not self._stopped:
            threading.Thread(target=self._run, name="chorus-keys", daemon=True).start()

    def stop(self) -> None:
        self._stopped = True
        self._wake.set()

    def reload(self) -> None:
        """Reload the keys soon; may be called from any thread and from a signal handler. Without files, say so."""
        self._asked = True
        self._wake.set()

    def look(self) -> None:
        """Reload the keys if requested, or if a file changed and was not written again since the last check."""
        stamp, asked = self._stamp(), self._asked
        self._asked = False
        if asked and not self.files:
            log.info("SIGHUP reloads key files, and this server has none: it goes on with its keys")
            return
        has_settled = stamp == self._seen
        self._seen = stamp
        if not asked and (stamp == self._used or not has_settled):
            return
        self._used = stamp
        try:
            keys = self._read()
        except InvalidKey as error:
            log.error("the keys were not reloaded and stay as they were: %s", error)
            return
        before = set(self._keys.tenants)
        self._keys.replace(keys)
        now = set(keys.tenants)
        audit.info(
            "reloaded the keys: %d tenants, new: %s, removed: %s",
            len(now),
            ", ".join(sorted(now - before)) or "none",
            ", ".join(sorted(before - now)) or "none",
        )

    def _run(self) -> None:
        while not self._stopped:
            self._wake.wait(LOOK_SECONDS if self.files else None)
            self._wake.clear()
            self.look()

    def _stamp(self) -> list[tuple[int, int, int] | None]:
        return [_state(path) for path in self.files]


def check_key(key: str) -> str:
    """The key without surrounding blanks. Raises InvalidKey if it is too short or can't be sent in a header."""
    key = key.strip()
    if not MIN_KEY_CHARACTERS <= len(key) <= MAX_KEY_CHARACTERS:
        raise InvalidKey(
            f"a key must have {MIN_KEY_CHARACTERS} to {MAX_KEY_CHARACTERS} characters, this one has {len(key)}"
        )
    if not key.isascii() or not key.isprintable() or " " in key:
        raise InvalidKey("a key must be printable ASCII without blanks")
    return key


def read_keys(path: Path) -> list[NamedKey]:
    """The keys of a file, one key per line, optionally followed by a tenant name and rights. Raises InvalidKey.

    Empty lines and lines that begin with # are skipped. A tenant may have several keys.
    """
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise InvalidKey(f"the key file {path} can't be read: {reason}") from None
    keys: dict[str, NamedKey] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            named = _named(line)
            if named.key in keys:
                raise InvalidKey("this key is in the file twice; remove one of the lines")
        except InvalidKey as error:
            raise InvalidKey(f"line {number} of the key file {path}: {error}") from None
        keys[named.key] = named
    if not keys:
        raise InvalidKey(f"the key file {path} has no key; write one key per line")
    return list(keys.values())


def _named(line: str) -> NamedKey:
    key, *names = line.split()
    if not names:
        return NamedKey(check_key(key))
    if not TENANT.fullmatch(names[0]):
        raise InvalidKey(
            "a key may be followed by the name of its tenant, one word of up to 128 letters, digits and ._:/+=@-"
        )
    return NamedKey(check_key(key), names[0], Grant.parse(names[1:]))


def new_key() -> tuple[str, str]:
    """A key of 256 random bits, and its entry for a key file."""
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
