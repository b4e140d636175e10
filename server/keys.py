"""API keys: who may use the server, who may change its adapters, and the name each client goes by inside."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from .errors import ApiError

READING = ("GET", "HEAD", "OPTIONS")
"""Methods that change nothing."""

TENANT = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
"""A tenant's name."""

MIN_KEY_CHARACTERS = 8
MAX_KEY_CHARACTERS = 512

_ADAPTERS = "/v1/adapters"
_ADAPTER_CALLS = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")


class InvalidKey(ValueError):
    """A key that can't be used; the text never holds it."""


@dataclass(frozen=True, slots=True)
class Identity:
    """The sender of a request. tenant: the name that the key was
    given, or a short one that can't be turned back into it; "" without a key.
    """

    tenant: str = ""
    may_change_adapters: bool = True


class NamedKey(NamedTuple):
    """A key, and the name of its tenant; None: one is made of the key's hash."""

    key: str
    tenant: str | None = None


class Keys:
    """The keys of one server, kept as hashes.

    API keys guard every route but those that tell whether it is well. Where there are admin keys, only they may change
    adapters; otherwise every API key may. An admin key is an API key, too.
    """

    def __init__(self, api_keys: Iterable[NamedKey] = (), admin_keys: Iterable[NamedKey] = ()) -> None:
        named = {_digest(each.key): each.tenant for each in (*api_keys, *admin_keys)}
        admins = {_digest(each.key) for each in admin_keys}
        users = named.keys() - admins
        self.guarded = bool(users)
        """True if a key is needed at all."""
        self._has_admins = bool(admins)
        known = [(key, True) for key in sorted(admins)] + [(key, not admins) for key in sorted(users)]
        self._known = [(key, Identity(named[key] or f"key-{key[:16]}", may_change)) for key, may_change in known]

    def identify(self, authorization: str | None) -> Identity:
        """The caller with this Authorization header. Raises an ApiError for a wrong key, or a missing one."""
        scheme, _, key = (authorization or "").partition(" ")
        given = _digest(key.strip()) if scheme.lower() == "bearer" else ""
        found: Identity | None = None
        for known, identity in self._known:  # all of them: how long it takes tells nothing about which one it is
            if hmac.compare_digest(known, given):
                found = identity
        if found is not None:
            return found
        if not self.guarded:  # keys that SDKs send because they must send one mean nothing here
            return Identity(may_change_adapters=not self._has_admins)
        if authorization is None:
            message = "an API key is needed; send it as 'Authorization: Bearer KEY'"
        else:
            message = "the API key is not known here; send one of this server's as 'Authorization: Bearer KEY'"
        raise ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})


def changes_adapters(method: str, path: str) -> bool:
    """True if a request would change which adapters there are."""
    is_theirs = path == _ADAPTERS or path.startswith(f"{_ADAPTERS}/") or path.rstrip("/") in _ADAPTER_CALLS
    return is_theirs and method not in READING


def check_key(key: str) -> str:
    """The key without blanks around it. Raises InvalidKey for one that no header carries, or that is too short."""
    key = key.strip()
    if not MIN_KEY_CHARACTERS <= len(key) <= MAX_KEY_CHARACTERS:
        raise InvalidKey(f"a key has {MIN_KEY_CHARACTERS} to {MAX_KEY_CHARACTERS} characters, this one has {len(key)}")
    if not key.isascii() or not key.isprintable() or " " in key:
        raise InvalidKey("a key is printable ASCII without blanks")
    return key


def read_keys(path: Path) -> list[NamedKey]:
    """The keys of a file, one a line, behind each the name of its tenant if it shall have one. Raises InvalidKey.

    Empty lines and those that begin with # are left out. Several keys may be one tenant's.
    """
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise InvalidKey(f"the key file {path} can't be read: {reason}") from None
    keys = []
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            keys.append(_named(line))
        except InvalidKey as error:
            raise InvalidKey(f"line {number} of the key file {path}: {error}") from None
    if not keys:
        raise InvalidKey(f"the key file {path} has no key")
    return keys


def _named(line: str) -> NamedKey:
    key, *names = line.split()
    if not names:
        return NamedKey(check_key(key))
    if len(names) > 1 or not TENANT.fullmatch(names[0]):
        raise InvalidKey(
            "behind a key comes the name of its tenant, one word of up to 128 letters, digits and ._:/+=@-"
        )
    return NamedKey(check_key(key), names[0])


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()
