"""Addresses, and peers without a certificate of the cluster's."""

from __future__ import annotations

import asyncio
import re
import shutil
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from chorus.server.cluster import address
from chorus.server.cluster.address import (
    CA,
    CERTIFICATE,
    KEY,
    AddressError,
    AddressFile,
    TcpSocket,
    TlsError,
    UnixSocket,
    parse_address,
    tls_context,
)
from chorus.server.cluster.registry import serve
from chorus.server.cluster.registry_client import RegistryClient
from chorus.server.cluster.stream import FrameStream, PeerRefused, accept, connect
from chorus.server.cluster.wire import WireError
from chorus.server.rare_log import RareLog

from .certificates import new_authority
from .test_registry import entry, run

SECRET = b"s" * 32
KINDS = ("ask", "answer")
ANY_PORT = "tcp://127.0.0.1:0"


@pytest.fixture(autouse=True)
def no_refusal_logged_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refusals are logged once a minute for the whole process."""
    monkeypatch.setattr(address, "_refusals", RareLog(address.log))


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return new_authority(tmp_path_factory.mktemp("tls") / "ours")


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return new_authority(tmp_path_factory.mktemp("tls") / "theirs")


@asynccontextmanager
async def answering(tls: Path | None) -> AsyncIterator[TcpSocket]:
    """A server that answers each frame."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            stream = await accept(reader, writer, SECRET, KINDS)
            while (frame := await stream.read()) is not None:
                stream.send("answer", *frame.fields)
        except OSError:
            writer.close()

    server, address = await parse_address(ANY_PORT, tls).listen(handle)
    assert isinstance(address, TcpSocket)
    async with server:
        yield address


async def ask(stream: FrameStream, what: object) -> object:
    stream.send("ask", what)
    frame = await stream.read()
    assert frame is not None
    return frame.fields[0]


def test_members_of_a_cluster_talk_and_the_secret_is_needed_all_the_same(ours):
    async def test():
        async with answering(ours) as address:
            assert address.port > 0 and str(address) == f"tcp://127.0.0.1:{address.port}"
            stream = await connect(address, SECRET, KINDS)
            big = b"x" * (1 << 20)  # more than a socket's buffers
            assert [await ask(stream, "hello"), await ask(stream, big)] == ["hello", big]
            with pytest.raises(PeerRefused, match="does not have this cluster's secret"):
                await connect(address, b"w" * 32, KINDS)
            stream.close()

    run(test())


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
@pytest.mark.parametrize(
    ("stranger", "reason"),
    [
        ("plain", "wrong version number|http request|record layer failure|packet length too long"),
        ("nobody", "peer did not return a certificate"),
        ("theirs", "certificate verify failed"),
    ],
)
def test_a_stranger_is_refused_by_name_and_hurts_no_member(ours, theirs, caplog, stranger, reason, version):
    async def test():
        async with answering(ours) as address:
            member = await connect(address, SECRET, KINDS)
            if stranger == "plain":
                reader, writer = await asyncio.open_connection(address.host, address.port)
                writer.write(b"GET / HTTP/1.1\r\n\r\n")
                await reader.read()
                writer.close()
            else:
                context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
                context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
                context.maximum_version = version
                if stranger == "theirs":
                    context.load_cert_chain(theirs / CERTIFICATE, theirs / KEY)
                with pytest.raises(OSError):
                    reader, writer = await asyncio.open_connection(address.host, address.port, ssl=context)
                    writer.write(b"CW\x02")
                    if not await reader.read():
                        raise ConnectionResetError
            assert await ask(member, "still there?") == "still there?"
            member.close()

    with caplog.at_level("WARNING"):
        run(test())
    assert re.search(f"refused: TlsError: TLS failed: ({reason})", caplog.text), caplog.text


def test_a_member_finds_out_by_name_what_kind_of_server_is_not_its_cluster_s(ours, theirs):
    async def test():
        async with answering(theirs) as address:
            with pytest.raises(TlsError, match="certificate verify failed"):
                await connect(TcpSocket(address.host, address.port, ours), SECRET, KINDS)
            # a client with their CA and a certificate of another one
            mixed = theirs.parent / "mixed"
            mixed.mkdir()
            for name, place in ((CERTIFICATE, ours), (KEY, ours), (CA, theirs)):
                shutil.copy(place / name, mixed / name)
            with pytest.raises(OSError) as refusal:
                await connect(TcpSocket(address.host, address.port, mixed), SECRET, KINDS)
            assert isinstance(refusal.value, TlsError | ConnectionResetError | WireError)
        async with answering(None) as plain:
            with pytest.raises(OSError):
                await connect(TcpSocket(plain.host, plain.port, ours), SECRET, KINDS)

    run(test())


def test_a_renewed_certificate_is_used_without_a_new_process_and_open_connections_go_on(tmp_path, ours, theirs, caplog):
    site = shutil.copytree(ours, tmp_path / "site")

    async def test():
        async with answering(site) as address:
            before = await connect(address, SECRET, KINDS)
            shutil.copytree(theirs, site, dirs_exist_ok=True)
            after = await connect(TcpSocket(address.host, address.port, theirs), SECRET, KINDS)
            assert [await ask(one, "there?") for one in (before, after)] == ["there?"] * 2
            (site / KEY).write_text("half of it")
            with pytest.raises(OSError):
                await connect(TcpSocket(address.host, address.port, theirs), SECRET, KINDS)
            shutil.copy(theirs / KEY, site / KEY)
            last = await connect(address, SECRET, KINDS)
            for one in (before, after, last):
                one.close()

    run(test())
    assert "a connection was refused: TlsError" in caplog.text and KEY in caplog.text


def test_a_registry_is_followed_over_tls(tmp_path, ours):
    async def test():
        ready = asyncio.get_running_loop().create_future()
        serving = asyncio.create_task(
            serve(tmp_path / "db", parse_address(ANY_PORT, ours), SECRET, ready.set_result, 0.0)
        )
        (tmp_path / "registry.address").write_text(str(await ready))
        client = RegistryClient(AddressFile(tmp_path / "registry.address", ours), SECRET)
        client.start()
        await client.wait_for_copy()
        assert await client.put(entry("alice")) == (1, False)
        await client.stop()
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)

    run(test())


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "[::]", "replica-0.example", "[fe80::1]"])
def test_tcp_without_tls_stays_on_loopback(host, ours):
    with pytest.raises(AddressError, match="mutual TLS"):
        parse_address(f"tcp://{host}:7000")
    assert parse_address(f"tcp://{host}:7000", ours).tls == ours


def test_what_an_address_says():
    assert str(parse_address("unix:/run/r0.sock")) == "unix:/run/r0.sock"
    assert parse_address("tcp://") == parse_address(ANY_PORT) == TcpSocket("127.0.0.1", 0)
    assert str(parse_address("tcp://[::1]:80")) == "tcp://[::1]:80"
    assert str(parse_address("tcp://localhost:80")) == "tcp://localhost:80"
    for wrong in (
        "",
        "unix:",
        "/run/r0.sock",
        "http://127.0.0.1:1",
        "tcp://127.0.0.1:port",
        "tcp://127.0.0.1:99999",
        "tcp://me@127.0.0.1:1",
        "tcp://127.0.0.1:1/path",
    ):
        with pytest.raises(AddressError):
            parse_address(wrong)


def test_a_file_is_followed_to_where_a_process_has_moved(tmp_path):
    async def test():
        address = AddressFile(tmp_path / "r0.address")
        assert address.stamp() is None
        with pytest.raises(FileNotFoundError):
            await address.open()
        (tmp_path / "r0.address").write_text("tcp://10.0.0.1:80")
        with pytest.raises(AddressError, match="mutual TLS"):
            await address.open()
        seen = set()
        for name in ("a", "b"):

            async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, name: str = name) -> None:
                writer.write(name.encode())
                writer.close()

            server, opened = await UnixSocket(tmp_path / name).listen(handle)
            address.write(str(opened))
            seen.add(address.stamp())
            reader, writer = await address.open()
            assert await reader.read() == name.encode()
            writer.close()
            server.close()
        assert len(seen) == 2

    run(test())


def test_a_directory_without_what_tls_needs_is_named(tmp_path, ours):
    with pytest.raises(TlsError, match=str(tmp_path)):
        tls_context(tmp_path, is_client=True)
    for name in (CERTIFICATE, KEY, CA):
        shutil.copy(ours / name, tmp_path / name)
    (tmp_path / KEY).write_text("-----BEGIN PRIVATE KEY-----\n")
    with pytest.raises(TlsError, match=KEY):
        tls_context(tmp_path, is_client=False)
    for is_client in (False, True):
        context = tls_context(ours, is_client=is_client)
        assert context.verify_mode == ssl.CERT_REQUIRED and context.minimum_version >= ssl.TLSVersion.TLSv1_2
