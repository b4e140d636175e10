"""Client addresses: how they are grouped, which belong to proxies, and how many connections each has."""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


@lru_cache(4096)
def parse_address(text: str) -> IpAddress | None:
    """The parsed address, with IPv4-mapped IPv6 as IPv4; None if it is not an address."""
    try:
        known = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    return getattr(known, "ipv4_mapped", None) or known


@lru_cache(4096)
def network_of(address: str) -> str:
    """The tenant name of a client without a key. A /64 network is one client: it may be one machine."""
    known = parse_address(address)
    if known is None:
        return f"at-{address}"
    return f"at-{ipaddress.ip_network((known, 64), strict=False) if known.version == 6 else known}"


def forwarded_client(peer: str, forwarded: str, proxies: Networks) -> str:
    """The client's address from X-Forwarded-For: the last one there that is not a trusted proxy's.

    Each trusted proxy appended the address of its own peer. The search ends at an entry that is not an address: the
    proxy that sent it counts as the client.
    """
    for hop in reversed(forwarded.split(",")):
        text = hop.strip()
        host = text[1:].partition("]")[0] if text.startswith("[") else text
        known = parse_address(host.partition(":")[0] if host.count(":") == 1 else host)
        if peer not in proxies or known is None:
            break
        peer = str(known)
    return peer


class Networks:
    """A set of addresses, given one by one or as networks, such as 10.0.0.0/8. Raises ValueError for anything else."""

    def __init__(self, given: Iterable[str]) -> None:
        self._networks = [ipaddress.ip_network(text) for text in given]

    def __contains__(self, address: str) -> bool:
        known = parse_address(address)
        return known is not None and any(known in network for network in self._networks)


class ConnectionLimiter:
    """Counts the connections of each client address. `proxies` stand for many clients and have no limit."""

    def __init__(self, limit: int, proxies: Networks) -> None:
        self._limit = limit
        self._proxies = proxies
        self._counts: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._counts)

    def enter(self, address: str) -> str | None:
        """Count a connection; return the client address that it counts for, None for a proxy's."""
        if address in self._proxies:
            return None
        network = network_of(address)
        self._counts[network] += 1
        return network

    def leave(self, network: str | None) -> None:
        """Uncount a connection."""
        if network is not None:
            self._counts[network] -= 1
            if not self._counts[network]:
                del self._counts[network]

    def is_over(self, network: str | None) -> bool:
        """True if a client address has more connections than allowed."""
        return network is not None and self._counts[network] > self._limit
