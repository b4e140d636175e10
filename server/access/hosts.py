"""Host names that the server answers to: a web page can't reach it through a name of its own."""

from __future__ import annotations

import socket
from collections.abc import Collection, Sequence
from functools import lru_cache
from urllib.parse import urlsplit

from .addresses import parse_address

_ANY_ADDRESS = ("", "0.0.0.0", "::")


class Hosts:
    """The accepted Host headers: by default the loopback names and the address that the server is bound to.

    A server that is bound to all addresses accepts any of them and the machine's name. If keys guard it, it accepts any
    name, because a foreign page has no key. allowed: names to accept instead; `*` is any name, `*.example.com` any
    below it. origins: web pages elsewhere that may also call the server; `*` is any.
    """

    def __init__(
        self,
        bound_to: str,
        allowed: Sequence[str] | None = None,
        origins: Collection[str] = (),
        *,
        guarded: bool = False,
    ) -> None:
        self._origins = origins
        wide = bound_to in _ANY_ADDRESS
        self.only_this_machine = is_loopback(bound_to)
        """True if no other machine can reach the server."""
        self._any = "*" in allowed if allowed is not None else wide and guarded
        self._any_address = wide and allowed is None
        names = {plain(name) for name in allowed or ()}
        if allowed is None:
            names |= {plain(bound_to), plain(socket.gethostname()) if wide else ""}
        self._suffixes = tuple(name[1:] for name in names if name.startswith("*."))
        self._names = {name for name in names if name and not name.startswith("*")}

    def serves(self, header: str | None) -> bool:
        """True if a request with this Host header is meant for this server."""
        if self._any:
            return True
        name = host_name(header)
        if name is None:
            return False
        address = parse_address(name)
        if address is not None and (self._any_address or address.is_loopback):
            return True
        return name in self._names or name == "localhost" or name.endswith((".localhost", *self._suffixes))

    def admits(self, origin: str, header: str | None) -> bool:
        """True if pages of this origin may call the server under this Host header."""
        return "*" in self._origins or origin in self._origins or is_same_origin(origin, header)


def is_loopback(host: str) -> bool:
    """True if only this machine can reach a server that listens on `host`."""
    address = parse_address(plain(host))
    return address.is_loopback if address is not None else plain(host) == "localhost"


@lru_cache(1024)
def host_name(header: str | None) -> str | None:
    """The name or address in a Host header, without its port; None if the header is invalid."""
    if not header or len(header) > 300:
        return None
    try:
        parts = urlsplit(f"//{header}")
        name, _ = parts.hostname, parts.port  # an invalid port raises
    except ValueError:
        return None
    if not name or parts.path or parts.query or parts.fragment or parts.username is not None:
        return None
    return plain(name)


def is_same_origin(origin: str, host: str | None) -> bool:
    """True if an Origin header names exactly the host and port that the request was sent to."""
    scheme, separator, rest = origin.partition("://")
    if not separator or host is None or scheme not in ("http", "https"):
        return False
    default = ":443" if scheme == "https" else ":80"
    return rest.lower().removesuffix(default) == host.lower().removesuffix(default)


def plain(name: str) -> str:
    """A host's name or address in normal form: lower case, without brackets and without a trailing dot."""
    return name.strip().strip("[]").rstrip(".").lower()
