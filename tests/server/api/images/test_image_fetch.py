"""Images by URLs: from allowed domains alone, within bounds, and without holding up other tenants."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from chorus.core.media import images
from chorus.core.media.images import BadImage
from chorus.server.api.images import image_fetch
from chorus.server.api.images.image_fetch import OF_A_TENANT, ImageFetcher, Room

from ...stores.store_server import StoreServer, send, store_server

DATA = b"\x89PNG some bytes"


@pytest.fixture
def host() -> Iterator[StoreServer]:
    with store_server() as server:
        server.paths["/a.png"] = DATA
        yield server


def fetched(fetcher: ImageFetcher, url: str, room: Room | None = None) -> bytes:
    return asyncio.run(fetcher.fetched("acme", url, room or Room(1 << 20)))


def refusal(fetcher: ImageFetcher, url: str, room: Room | None = None) -> str:
    with pytest.raises(BadImage) as error:
        fetched(fetcher, url, room)
    return str(error.value)


def test_an_image_of_an_allowed_domain(host: StoreServer) -> None:
    assert fetched(ImageFetcher([host.url]), f"{host.url}/a.png") == DATA


def test_a_proxy_of_the_environment_is_not_used(host: StoreServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    assert fetched(ImageFetcher([host.url]), f"{host.url}/a.png") == DATA


@pytest.mark.parametrize(
    "url",
    [
        "https://elsewhere.example/a.png",
        "http://169.254.169.254/latest/meta-data",
        "http://localhost/a.png",
        "http://[::ffff:127.0.0.1]/a.png",
        "http://allowed.example@127.0.0.1/a.png",
        "https://allowed.example.evil.example/a.png",
        "http://allowed.example/a.png",
    ],
)
def test_other_hosts_are_not_asked(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: pytest.fail("no name is resolved"))
    assert "does not fetch from (allowed_media_domains)" in refusal(ImageFetcher(["allowed.example"]), url)


@pytest.mark.parametrize("address", ["127.0.0.1", "10.0.0.1", "169.254.169.254", "::1", "64:ff9b::7f00:1"])
def test_an_allowed_name_that_leads_inside_is_not_followed(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    found = [(family, socket.SOCK_STREAM, 6, "", (one, 443)) for one in ("93.184.215.14", address)]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    message = refusal(ImageFetcher(["allowed.example"]), "https://allowed.example/a.png")
    assert "does not fetch from" in message and address not in message


def test_without_domains_nothing_is_fetched(host: StoreServer) -> None:
    assert "fetches none (allowed_media_domains)" in refusal(ImageFetcher(()), f"{host.url}/a.png")
    assert not host.asked


def test_a_redirect_is_not_followed(host: StoreServer) -> None:
    def redirect(handler: Any) -> None:
        handler.send_response(302)
        handler.send_header("location", f"{host.url}/a.png")
        handler.send_header("content-length", "0")
        handler.end_headers()

    host.paths["/moved.png"] = redirect
    assert "redirects are not followed" in refusal(ImageFetcher([host.url]), f"{host.url}/moved.png")
    assert not host.asked["/a.png"]


def test_answers_that_are_no_images(host: StoreServer) -> None:
    fetcher = ImageFetcher([host.url])
    host.paths["/empty.png"] = b""
    host.paths["/packed.png"] = lambda handler: send(handler, DATA, content_encoding="gzip")
    host.paths["/short.png"] = lambda handler: send(handler, DATA, length=len(DATA) + 1)
    assert "answers 404" in refusal(fetcher, f"{host.url}/absent.png")
    assert "is empty" in refusal(fetcher, f"{host.url}/empty.png")
    assert "compresses" in refusal(fetcher, f"{host.url}/packed.png")
    assert "breaks off" in refusal(fetcher, f"{host.url}/short.png")
    assert "does not answer" in refusal(ImageFetcher(["http://127.0.0.1:1"]), "http://127.0.0.1:1/a.png")
    assert "does not" in refusal(fetcher, "http:///a.png")


def test_size_is_bounded_before_and_while_it_comes(host: StoreServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "MAX_BYTES", 1000)
    fetcher = ImageFetcher([host.url])
    host.paths["/announced.png"] = lambda handler: send(handler, b"", length=1001)

    def endless(handler: Any) -> None:
        handler.send_response(200)
        handler.end_headers()
        while not host.over.is_set():
            handler.wfile.write(b"x" * 500)

    host.paths["/endless.png"] = endless
    for name in ("announced", "endless"):
        assert "at most 1000 are taken" in refusal(fetcher, f"{host.url}/{name}.png")


def test_images_of_a_request_share_its_room(host: StoreServer) -> None:
    room, fetcher = Room(2 * len(DATA)), ImageFetcher([host.url])
    assert [fetched(fetcher, f"{host.url}/a.png", room) for _ in range(2)] == [DATA, DATA]
    assert "one too many" in refusal(fetcher, f"{host.url}/a.png", room)


def test_a_host_that_sends_slowly_is_left(host: StoreServer) -> None:
    def slowly(handler: Any) -> None:
        handler.send_response(200)
        handler.end_headers()
        while not host.over.wait(0.02):
            handler.wfile.write(b"x")

    host.paths["/slow.png"] = slowly
    assert "took over 0.2 s" in refusal(ImageFetcher([host.url], seconds=0.2), f"{host.url}/slow.png")


def test_a_tenants_slow_hosts_hold_up_nobody_else(host: StoreServer) -> None:
    """Nor do its clients that leave: a turn lasts as long as its thread."""
    go, most, now, lock = threading.Event(), 0, 0, threading.Lock()

    def waits(handler: Any) -> None:
        nonlocal most, now
        with lock:
            now += 1
            most = max(most, now)
        go.wait(60)
        with lock:
            now -= 1
        send(handler, DATA)

    host.paths["/waits.png"] = waits
    fetcher = ImageFetcher([host.url], seconds=60)

    async def run() -> list[bytes]:
        left = [
            asyncio.ensure_future(fetcher.fetched("acme", f"{host.url}/waits.png", Room(1 << 20))) for _ in range(3)
        ]
        while now < len(left):
            await asyncio.sleep(0.01)
        for each in left:
            each.cancel()
        more = [
            asyncio.ensure_future(fetcher.fetched("acme", f"{host.url}/waits.png", Room(1 << 20))) for _ in range(12)
        ]
        while now < OF_A_TENANT:
            await asyncio.sleep(0.01)
        assert await fetcher.fetched("beta", f"{host.url}/a.png", Room(1 << 20)) == DATA
        assert not any(each.done() for each in more)
        go.set()
        return await asyncio.gather(*more)

    began = time.monotonic()
    assert asyncio.run(run()) == [DATA] * 12
    assert most == OF_A_TENANT < image_fetch.THREADS and time.monotonic() - began < 60
