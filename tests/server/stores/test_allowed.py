"""The allow-list: hosts by scheme and port, buckets, and addresses that a connection may lead to."""

import socket

import pytest

from chorus.server.stores.allowed import Allowed
from chorus.server.stores.errors import StoreAway, StoreRefused


@pytest.fixture
def leads_to(monkeypatch):
    def set_addresses(*addresses):
        found = [(socket.AF_INET6 if ":" in one else socket.AF_INET, 1, 6, "", (one, 443)) for one in addresses]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **options: found)

    return set_addresses


LISTED = ["store.example", "*.cdn.example:8443", "http://minio:9000", "s3://bucket", "10.1.2.3", "http://[::1]:80"]


@pytest.mark.parametrize(
    ("scheme", "host", "port"),
    [
        ("https", "store.example", None),
        ("https", "STORE.example.", 443),
        ("https", "a.b.cdn.example", 8443),
        ("http", "minio", 9000),
        ("https", "10.1.2.3", None),
        ("http", "::1", None),
    ],
)
def test_listed_hosts_are_allowed(scheme, host, port):
    Allowed(LISTED).check_url(scheme, host, port)


@pytest.mark.parametrize(
    ("scheme", "host", "port"),
    [
        ("http", "store.example", None),
        ("http", "store.example", 443),
        ("https", "store.example", 8443),
        ("https", "a.store.example", None),
        ("https", "evilstore.example", None),
        ("https", "cdn.example", 8443),
        ("https", "minio", 9000),
        ("https", "10.1.2.4", None),
        ("ftp", "store.example", 21),
        ("https", "bucket", None),
    ],
)
def test_no_other_host_is(scheme, host, port):
    with pytest.raises(StoreRefused):
        Allowed(LISTED).check_url(scheme, host, port)
    with pytest.raises(StoreRefused):
        Allowed().check_url("https", "store.example", None)


def test_buckets_are_listed_by_name():
    Allowed(LISTED).check_bucket("s3", "bucket")
    for scheme, bucket in (("gs", "bucket"), ("s3", "other"), ("s3", "")):
        with pytest.raises(StoreRefused):
            Allowed(LISTED).check_bucket(scheme, bucket)


PRIVATE = [
    "127.0.0.1",
    "10.0.0.1",
    "192.168.1.1",
    "169.254.169.254",
    "100.64.0.1",
    "0.0.0.0",
    "224.0.0.1",
    "::1",
    "fe80::1",
    "fd00::1",
    "::ffff:127.0.0.1",
    "64:ff9b::7f00:1",
    "2002:7f00:1::",
]


@pytest.mark.parametrize("address", PRIVATE)
def test_a_name_that_leads_to_a_private_address_is_refused_unless_the_address_is_listed(leads_to, address):
    leads_to(address)
    with pytest.raises(StoreRefused, match="address"):
        Allowed(["store.example"]).resolve("store.example", 443)
    leads_to("93.184.215.14", address)
    with pytest.raises(StoreRefused, match="address"):
        Allowed(["store.example"]).resolve("store.example", 443)


def test_public_and_listed_addresses_may_be_connected_to(leads_to):
    leads_to("93.184.215.14", "2606:2800:21f:cb07::1", "93.184.215.14")
    assert Allowed().resolve("store.example", 443) == ["93.184.215.14", "2606:2800:21f:cb07::1"]
    leads_to("10.1.7.7")
    assert Allowed(["store.example", "10.1.0.0/16"]).resolve("store.example", 443) == ["10.1.7.7"]


def test_a_name_without_an_address_is_away(monkeypatch):
    def fail(*args, **options):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    with pytest.raises(StoreAway):
        Allowed(["store.example"]).resolve("store.example", 443)


@pytest.mark.parametrize(
    "entry", ["", "a b", "*", "a*.example", "ftp://x", "10.0.0.0/99", "10.0.0.1/8", "x:y", "https://a/b"]
)
def test_what_is_no_entry_is_refused(entry):
    with pytest.raises(ValueError, match=r"."):
        Allowed([entry])
