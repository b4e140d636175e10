"""Hosts and buckets that adapters may be fetched from, and the addresses that connections may go to."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable

from ..access.addresses import IpAddress, parse_address
from ..access.hosts import plain
from .errors import StoreAway, StoreRefused

_ENTRY = re.compile(r"(?:(http|s3|gs)://)?([A-Za-z0-9*._-]+|\[[0-9A-Fa-f:.]+\])(?::([0-9]{1,5}))?")
_PORTS = {"https": 443, "http": 80}


class Allowed:
    """The allow-list. An entry is a host (`store.example`, `*.example`, with `:PORT` if not 443), a host without TLS
    (`http://minio:9000`), a bucket (`s3://BUCKET`, `gs://BUCKET`), or an address or network that is not public
    (`10.1.0.0/16`) but that host names may resolve to.
    """

    def __init__(self, entries: Iterable[str] = ()) -> None:
        """Raises ValueError for an invalid entry."""
        self._hosts: set[tuple[str, str, int]] = set()
        self._buckets: set[tuple[str, str]] = set()
        self._networks: list[ipaddress.IPv4Network | ipaddress.IPv6Network] = []
        for entry in entries:
            self._add(entry)

    @classmethod
    def of_hosts(cls, entries: Iterable[str] = ()) -> Allowed:
        """A list without buckets. Raises ValueError for one, and for an invalid entry."""
        found = cls(entries)
        for scheme, bucket in sorted(found._buckets):
            raise ValueError(f"'{scheme}://{bucket}' is a bucket; give hosts, addresses or networks")
        return found

    def check_url(self, scheme: str, host: str, port: int | None) -> None:
        """Raises StoreRefused unless a request with this scheme may go to this host."""
        host, port = plain(host), port or _PORTS.get(scheme, 0)
        names = [host]
        if parse_address(host) is None:
            labels = host.split(".")
            names += ["*." + ".".join(labels[first:]) for first in range(1, len(labels))]
        if not any((scheme, name, port) in self._hosts for name in names):
            raise StoreRefused(
                "its store, or a redirect, leads to a host that the server does not allow",
                f"{scheme}://{host}:{port} is not in adapter_source_hosts",
            )

    def check_bucket(self, scheme: str, bucket: str) -> None:
        """Raises StoreRefused unless the bucket is listed."""
        if (scheme, bucket) not in self._buckets:
            reason = "its store is a bucket that the server does not allow"
            raise StoreRefused(reason, f"{scheme}://{bucket} is not in adapter_source_hosts")

    def resolve(self, host: str, port: int) -> list[str]:
        """Addresses of a host, all of which are allowed. Raises StoreAway, and StoreRefused if any is not allowed: a
        name that resolves to forbidden addresses, even in part, is not trusted.
        """
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise StoreAway("its store's name can't be resolved", f"{host}: {error}") from None
        addresses = list(dict.fromkeys(str(address[0]) for *_, address in found))
        for text in addresses:
            if not self._may_connect(text):
                reason = "its store's name leads to an address that the server does not allow"
                raise StoreRefused(reason, f"{host} leads to {text}, which is neither public nor listed")
        return addresses

    def _may_connect(self, text: str) -> bool:
        address = parse_address(text)
        if address is None:
            return False
        return any(address in network for network in self._networks) or _is_of_the_internet(address)

    def _add(self, entry: str) -> None:
        if "://" not in entry and ("/" in entry or entry.count(":") > 1) and "[" not in entry:
            self._networks.append(ipaddress.ip_network(entry))
            return
        found = _ENTRY.fullmatch(entry)
        if found is None:
            raise ValueError(f"{entry!r} must be a host, bucket or network")
        scheme, host, port = found[1] or "https", plain(found[2]), found[3]
        if scheme in ("s3", "gs"):
            self._buckets.add((scheme, found[2]))
            return
        if "*" in host and (not host.startswith("*.") or "*" in host[1:]):
            raise ValueError(f"{entry!r}: a * must replace whole names at the beginning, as in *.example.com")
        self._hosts.add((scheme, host, int(port) if port else _PORTS[scheme]))
        if (address := parse_address(host)) is not None:
            self._networks.append(ipaddress.ip_network(address))


def _is_of_the_internet(address: IpAddress) -> bool:
    """False for private, loopback, link-local and other special addresses, also for IPv6 forms of IPv4 ones."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.sixtofour or (address.teredo or (None, None))[1]
        if address in _NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None and not _is_of_the_internet(inner):
            return False
    return address.is_global and not address.is_multicast


_NAT64 = ipaddress.ip_network("64:ff9b::/96")
