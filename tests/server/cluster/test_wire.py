"""Frames, against peers that do not keep to the protocol."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chorus.server.cluster import stream as streams
from chorus.server.cluster import wire
from chorus.server.cluster.address import UnixSocket
from chorus.server.cluster.stream import FrameStream, PeerRefused, WrongSecret, accept, connect, new_secret, read_secret
from chorus.server.cluster.wire import Frame, FrameReader, FrameWriter

KINDS = ("out", "stats")
SECRET = b"s" * 32

plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)


def header(version: int = wire.VERSION, sequence: int = 0, length: int = 0) -> bytes:
    return struct.pack(">2sBII", wire.MAGIC, version, sequence, length)


def frame(*content: object, sequence: int = 0) -> bytes:
    payload = msgpack.packb(content)
    return header(sequence=sequence, length=len(payload)) + payload


def read_all(data: bytes, max_bytes: int = 1000) -> list[Frame]:
    reader = FrameReader(KINDS, max_bytes)
    reader.feed(data)
    found = []
    while (one := reader.next_frame()) is not None:
        found.append(one)
    reader.close()
    return found


@pytest.mark.wide
@given(st.lists(st.tuples(st.sampled_from(KINDS), st.lists(plain, max_size=3)), max_size=5), st.data())
def test_what_is_written_is_read_however_it_is_cut(sent, data):
    writer, reader = FrameWriter(), FrameReader(KINDS)
    text, found = b"".join(writer.frame(kind, *fields) for kind, fields in sent), []
    while text:
        cut = data.draw(st.integers(1, len(text)))
        reader.feed(text[:cut])
        text = text[cut:]
        while (one := reader.next_frame()) is not None:
            found.append(one)
    reader.close()
    assert [(one.kind, one.fields) for one in found] == sent


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", wire.NotAFrame),
        (b"G", wire.NotAFrame),
        (header(version=wire.VERSION + 1), wire.OtherVersion),
        (header(length=1001), wire.FrameTooLarge),
        (header(length=0xFFFFFFFF), wire.FrameTooLarge),
        (frame("out")[:-1], wire.Truncated),
        (header()[:5], wire.Truncated),
        (frame("out") + frame("out"), wire.OutOfOrder),  # replayed
        (frame("out", sequence=1) + frame("out"), wire.OutOfOrder),  # reordered
        (frame("exec", "rm"), wire.UnknownKind),
        (frame(), wire.Malformed),
        (frame(7), wire.Malformed),
        (header(length=1) + b"\xc1", wire.Malformed),
        (header(length=2) + b"\x91\x91", wire.Malformed),
        (frame("out", msgpack.ExtType(4, b"x")), wire.Malformed),
        (header(length=900) + b"\x91" * 900, wire.Malformed),  # nested
        (header(length=5) + b"\xdd\xff\xff\xff\xff", wire.Malformed),  # a list of 4 billion
    ],
)
def test_a_peer_that_breaks_the_protocol_gets_an_error_by_name(data, error):
    with pytest.raises(error):
        read_all(data)


@given(st.binary(max_size=200))
def test_any_bytes_are_frames_or_a_named_error(data):
    for text in (data, header(length=len(data)) + data):
        try:
            read_all(text)
        except wire.WireError as error:
            assert type(error) is not wire.WireError


def test_a_frame_that_no_peer_would_take_is_not_sent():
    writer = FrameWriter(max_bytes=100)
    with pytest.raises(wire.FrameTooLarge):
        writer.frame("out", "x" * 200)
    assert read_all(writer.frame("out")) == [Frame("out", [])]


def test_secrets_are_files_of_their_owner_alone(tmp_path):
    secret = new_secret(tmp_path / "secret")
    assert read_secret(tmp_path / "secret") == secret
    assert (tmp_path / "secret").stat().st_mode & 0o077 == 0
    (tmp_path / "wrong").write_text("password")
    with pytest.raises(ValueError, match="must hold a secret") as raised:
        read_secret(tmp_path / "wrong")
    assert "password" not in str(raised.value)


def run(client: Callable[[Path], Awaitable[object]], path: Path, secret: bytes = SECRET) -> tuple[object, object]:
    """A server's view of a client, and the client's own: results or errors."""

    async def both() -> tuple[object, object]:
        seen: asyncio.Future[object] = asyncio.get_running_loop().create_future()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                stream = await accept(reader, writer, secret, KINDS)
                got = [await stream.read()]
                stream.send("stats", 1)
                stream.close()
                seen.set_result(got)
            except wire.WireError as error:
                seen.set_result(error)

        server = await asyncio.start_unix_server(serve, path)
        async with server:
            try:
                did: object = await client(path)
            except wire.WireError as error:
                did = error
            return await seen, did

    return asyncio.run(both())


async def tell(path: Path) -> Frame | None:
    stream = await connect(UnixSocket(path), SECRET, KINDS)
    stream.send("out", [1, 2])
    return await stream.read()


def test_two_that_share_a_secret_talk(tmp_path):
    assert run(tell, tmp_path / "s") == ([Frame("out", [[1, 2]])], Frame("stats", [1]))


def test_a_client_with_a_wrong_secret_is_refused_and_told(tmp_path):
    seen, did = run(tell, tmp_path / "s", b"t" * 32)
    assert isinstance(seen, WrongSecret)
    assert isinstance(did, PeerRefused)


def raw(*data: bytes) -> Callable[[Path], Awaitable[bytes]]:
    async def client(path: Path) -> bytes:
        reader, writer = await asyncio.open_unix_connection(str(path))
        for part in data:
            writer.write(part)
        if writer.can_write_eof():
            writer.write_eof()
        answer = await reader.read()
        writer.close()
        return answer

    return client


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (frame("out", 1), wire.Malformed),
        (frame("greet", b"n" * 32) + frame("out", 1, sequence=1), wire.Malformed),
        (frame("greet", b"n"), wire.Malformed),
        (frame("greet", "n" * 32), wire.Malformed),
        (frame("greet", b"n" * 32) + frame("proof", b"p" * 32, sequence=1), WrongSecret),
        (frame("greet", b"n" * 32) + frame("greet", b"n" * 32), wire.OutOfOrder),
        (header(length=streams.OPENING_BYTES + 1), wire.FrameTooLarge),
        (header(version=9), wire.OtherVersion),
        (frame("greet", b"n" * 32), wire.WireError),  # and gone
        (b"", wire.WireError),
    ],
)
def test_a_stranger_is_heard_no_further_than_its_opening(tmp_path, data, error):
    seen, _ = run(raw(data), tmp_path / "s")
    assert type(seen) is error


def test_a_recorded_opening_opens_nothing_again(tmp_path, monkeypatch):
    sent: list[bytes] = []
    original = FrameWriter.frame

    def record(self: FrameWriter, kind: str, *fields: object) -> bytes:
        sent.append(original(self, kind, *fields))
        return sent[-1]

    monkeypatch.setattr(FrameWriter, "frame", record)
    run(tell, tmp_path / "a")
    ours = [data for data in sent if b"proof" in data or b"greet" in data]
    monkeypatch.undo()
    client = [data for data in ours if b"greet" in data][:1] + [data for data in ours if b"proof" in data][:1]
    seen, _ = run(raw(*client), tmp_path / "b")
    assert isinstance(seen, WrongSecret)


def test_a_peer_that_does_not_read_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(streams, "MAX_UNSENT_BYTES", 1 << 20)

    async def flood(stream: FrameStream) -> None:
        for _ in range(64):
            stream.send("out", b"x" * (1 << 20))

    async def client(path: Path) -> None:
        stream = await connect(UnixSocket(path), SECRET, KINDS)
        with pytest.raises(streams.PeerStuck):
            await flood(stream)
        stream.close()

    async def both() -> None:
        done = asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await accept(reader, writer, SECRET, KINDS)
            await done.wait()
            writer.transport.abort()

        server = await asyncio.start_unix_server(serve, tmp_path / "s")
        async with server:
            await client(tmp_path / "s")
            done.set()

    asyncio.run(both())
