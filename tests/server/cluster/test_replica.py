"""A replica, asked over its socket: its answers, and no harm to others by a peer that breaks the protocol."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from chorus.core.executors.base import EngineLimits, ModelInfo
from chorus.core.requests.record import NotHere, from_record, to_record
from chorus.core.requests.request import Request
from chorus.core.requests.request_params import RequestParams
from chorus.memory.adapters.adapter import Tier
from chorus.memory.pages.pool import OutOfPages
from chorus.memory.transfers.transfer import ExecutorLost
from chorus.server.cluster.address import UnixSocket
from chorus.server.cluster.link import Link
from chorus.server.cluster.replica import FROM_REPLICA, Replica
from chorus.server.cluster.report import Hello, ModelIdentity, Report
from chorus.server.cluster.rows import from_row
from chorus.server.cluster.stream import FrameStream, PeerRefused, connect
from chorus.server.cluster.wire import MAX_BYTES, WireError
from chorus.server.engine.worker import EngineWorker
from tests.server.conftest import EOS, FakeEngine, FakeStore

SECRET = b"s" * 32
HELLO = Hello(ModelIdentity("model", "float32", "torch", "1"), ModelInfo(300, 512, (EOS,)), 8, 8, 16, 1 / 16, 1)


class Engine(FakeEngine):
    """Takes records; an adapter's content hash is its name."""

    def __init__(self) -> None:
        super().__init__(["alice"])

    def resume(self, record):
        if record["content_hash"] not in (None, *self.store.names()):
            return NotHere(record["adapter"], record["content_hash"])
        request = from_record(record, 0.0)
        self.add_request(request)
        return request


class World:
    """A replica that listens, in a directory."""

    def __init__(self, directory: Path) -> None:
        self.socket = directory / "r.sock"
        self.engine = Engine()
        self.worker = EngineWorker(lambda: self.engine)

    async def __aenter__(self):
        await asyncio.to_thread(self.worker.start)
        self.replica = Replica(self.worker, HELLO, SECRET, [])
        self.server = await asyncio.start_unix_server(self.replica.serve, self.socket)
        self.reports = asyncio.create_task(self.replica.report())
        return self

    async def __aexit__(self, *_: object):
        self.reports.cancel()
        self.server.close()
        self.engine.gate.set()
        await asyncio.to_thread(self.worker.stop)

    async def api_server(self) -> FrameStream:
        stream = await connect(UnixSocket(self.socket), SECRET, FROM_REPLICA)
        frame = await stream.read()
        assert frame is not None and frame.kind == "hello" and Hello.from_wire(frame.fields[0]) == HELLO
        return stream


@pytest.fixture
def play(tmp_path):
    """Runs a test's coroutine over a replica and its client."""

    def run(act):
        async def inside():
            async with World(tmp_path) as world, asyncio.timeout(60):
                await act(world)

        asyncio.run(inside())

    return run


def record(name: str, prompt=(5, 6, 7), **fields) -> dict:
    params = RequestParams(temperature=0, max_tokens=100)
    return {**to_record(Request(name, list(prompt), params), 0.0), **fields}


async def frames(stream: FrameStream, *kinds: str):
    """The next frame of one of these kinds."""
    while True:
        frame = await stream.read()
        assert frame is not None
        if frame.kind in kinds:
            return frame.kind, frame.fields


async def answer(stream: FrameStream) -> tuple[list[int], str | None]:
    tokens: list[int] = []
    while True:
        _, (_, rows) = await frames(stream, "out")
        for row in rows:
            output, _ = from_row(row, None)
            tokens += output.token_ids
            if output.finish_reason is not None:
                return tokens, output.finish_reason.value


def test_an_answer_comes_in_rows_of_its_life(play):
    async def act(world):
        api_server = await world.api_server()
        api_server.send("submit", record("q"), 7)
        assert await frames(api_server, "taken") == ("taken", ["q", 7])
        _, (_, rows) = await frames(api_server, "out")
        assert rows[0][:2] == ["q", 7]

    play(act)


def test_grammars_are_compiled_beside_the_steps(play):
    """Other requests go on meanwhile, and one that was aborted before its grammar was there never runs."""

    async def act(world):
        may_end, compiled = threading.Event(), []

        def compile_(grammar):
            compiled.append((grammar, threading.get_ident()))
            may_end.wait(20)

        world.worker.model.grammars = SimpleNamespace(compile=compile_)
        api_server = await world.api_server()
        for name in ("kept", "aborted"):
            asked = record(name)
            asked["params"]["grammar"] = {"kind": "regex", "text": name}
            api_server.send("submit", asked, 1)
        api_server.send("abort", "aborted")
        api_server.send("submit", record("other"), 1)
        assert await answer(api_server) == ([5, 6, 7, EOS], "stop")
        may_end.set()
        assert await answer(api_server) == ([5, 6, 7, EOS], "stop")
        api_server.send("submit", record("last"), 1)
        assert await answer(api_server) == ([5, 6, 7, EOS], "stop")
        while len(compiled) < 2:  # a busy machine may answer first
            await asyncio.sleep(0.01)
        assert [grammar.text for grammar, _ in compiled] == ["kept", "aborted"]
        assert not world.engine.threads & {thread for _, thread in compiled}
        assert [request.id for request in world.engine.asked] == ["other", "kept", "last"]

    play(act)


def test_what_a_front_sent_ends_with_its_connection_and_others_go_on(play):
    async def act(world):
        leaving, staying = await world.api_server(), await world.api_server()
        world.engine.step_seconds = 0.02
        leaving.send("submit", record("gone", prompt=[5] * 400), 1)
        staying.send("submit", record("kept"), 1)
        await frames(leaving, "out")
        leaving.close()
        assert await answer(staying) == ([5, 6, 7, EOS], "stop")
        while "gone" not in world.engine.aborted:
            await asyncio.sleep(0.01)

    play(act)


def test_a_front_has_adapters_brought_from_host_memory_into_the_arena(play):
    class Store(FakeStore):
        def __contains__(self, name):
            return name in self.tiers

        def prefetch(self, adapter):
            if adapter.name == "large":
                raise OutOfPages
            self.tiers[adapter.name] = Tier.DEVICE

    async def act(world):
        world.engine.store = store = Store(["bob", "large", "cold"])
        store.tiers |= {"bob": Tier.HOST, "large": Tier.HOST}
        api_server = await world.api_server()
        for name in ("nobody", "large", "cold", "bob"):
            api_server.send("prefetch", name)
        while store.tiers["bob"] is not Tier.DEVICE:
            await frames(api_server, "stats")
        assert store.tiers == {"bob": Tier.DEVICE, "large": Tier.HOST, "cold": Tier.DISK}

    play(act)


@pytest.mark.parametrize(
    "fields",
    [
        ("submit",),
        ("submit", {}, 1),
        ("submit", "x", 1),
        ("submit", {"id": 1, "tokens": [1]}, 1),
        ("submit", {**record("q"), "tokens": ["a"]}, 1),
        ("submit", {**record("q"), "tokens": [True]}, 1),
        ("submit", record("q"), "first"),
        ("abort",),
        ("abort", ["q"]),
        ("load", 1, 2),
        ("load", "h"),
        ("prefetch",),
        ("prefetch", 1),
        ("drain", 1),
        ("forget",),
        ("forget", 3),
        ("taken", "q", 1),
    ],
)
def test_a_peer_that_breaks_the_protocol_is_told_and_hurts_no_other(play, fields):
    async def act(world):
        good, bad = await world.api_server(), await world.api_server()
        world.engine.gate.clear()
        good.send("submit", record("kept"), 1)
        await frames(good, "taken")
        bad.send(*fields)
        with pytest.raises(PeerRefused, match=r"Malformed|UnknownKind"):
            while await bad.read() is not None:
                pass
        world.engine.gate.set()
        assert await answer(good) == ([5, 6, 7, EOS], "stop")

    play(act)


def test_a_record_of_another_version_or_with_wrong_parameters_is_refused_alone(play):
    async def act(world):
        api_server = await world.api_server()
        api_server.send("submit", record("old", v=99), 1)
        api_server.send("submit", record("odd", params={"temperature": "hot"}), 1)
        api_server.send("submit", record("long", prompt=range(1, 600)), 1)
        api_server.send("submit", record("away", adapter="x", content_hash="x"), 1)
        api_server.send("submit", record("good"), 1)
        seen = {}
        while len(seen) < 5:
            kind, (name, _, *more) = await frames(api_server, "taken", "refused")
            seen[name] = more[0] if kind == "refused" else kind
        assert seen == {
            "old": "malformed",
            "odd": "malformed",
            "long": "field:prompt",
            "away": "not_here",
            "good": "taken",
        }

    play(act)


def test_a_draining_replica_refuses_and_says_so(play):
    async def act(world):
        api_server = await world.api_server()
        api_server.send("drain")
        api_server.send("submit", record("q"), 1)
        assert (await frames(api_server, "refused"))[1][2] == "draining"
        while not Report.from_wire((await frames(api_server, "stats"))[1][0]).draining:
            pass
        assert world.replica.is_empty

    play(act)


def test_requests_of_a_broken_engine_get_no_end_as_their_front_has_them_go_on_elsewhere(play):
    async def act(world):
        stream = await world.api_server()
        world.engine.gate.clear()
        stream.send("submit", record("a"), 1)
        await frames(stream, "taken")
        world.engine.step_error = ExecutorLost("rank 1 of 2 has ended (signal SIGKILL)")
        world.engine.gate.set()
        while world.worker.failure is None:
            await asyncio.sleep(0.01)
        stream.send("submit", record("b"), 1)
        while (frame := await stream.read()).kind != "refused":
            assert frame.kind != "out" or all(from_row(row, None)[0].finish_reason is None for row in frame.fields[1])
        assert frame.fields[:3] == ["b", 1, "broken"]

    play(act)


def test_a_front_that_fails_over_a_frame_connects_anew(play):
    """A fault of the API server's own costs a connection, not the replica for good."""

    class Events:
        def __init__(self) -> None:
            self.ups = self.downs = 0
            self.came = asyncio.Event()

        def on_up(self, link: Link) -> None:
            self.ups += 1

        def on_frame(self, link: Link, frame: object) -> None:
            if self.ups == 1:
                raise KeyError(link.name)
            self.came.set()

        def on_down(self, link: Link, *, stuck: bool) -> None:
            self.downs += 1
            assert not stuck

    async def act(world):
        events = Events()
        running = asyncio.create_task(Link("r0", UnixSocket(world.socket), SECRET, 60.0).run(events))
        await events.came.wait()
        assert (events.ups, events.downs) == (2, 1)
        running.cancel()

    play(act)


def test_a_wrong_secret_and_a_stranger_leave_all_as_it_is(play):
    async def act(world):
        good = await world.api_server()
        with pytest.raises(WireError):
            await connect(UnixSocket(world.socket), b"t" * 32, FROM_REPLICA)
        _, writer = await asyncio.open_unix_connection(str(world.socket))
        writer.write(b"GET / HTTP/1.1\r\n\r\n" * 1000)
        good.send("submit", record("q"), 1)
        assert await answer(good) == ([5, 6, 7, EOS], "stop")
        writer.close()

    play(act)


def test_strangers_bring_one_line_of_the_log_however_many_they_are(play, caplog):
    async def act(world):
        for _ in range(20):
            with pytest.raises(WireError):
                await connect(UnixSocket(world.socket), b"t" * 32, FROM_REPLICA)

    play(act)
    assert caplog.text.count("a connection was refused") == 1


def test_a_frame_that_announces_more_than_the_limit_is_not_waited_for(play):
    async def act(world):
        bad = await world.api_server()
        bad._writer.write(b"CW\x02" + (2).to_bytes(4, "big") + (MAX_BYTES + 1).to_bytes(4, "big"))  # noqa: SLF001
        with pytest.raises(PeerRefused, match="FrameTooLarge"):
            while await bad.read() is not None:
                pass

    play(act)


def test_a_report_comes_through_as_it_was_sent(play):
    async def act(world):
        api_server = await world.api_server()
        report = Report.from_wire((await frames(api_server, "stats"))[1][0])
        assert report.stats == world.engine.stats() and report.num_yours == 0

    play(act)


def test_reports_go_on_after_one_that_failed(play, caplog):
    async def act(world):
        store, failed = world.engine.store, asyncio.Event()
        api_server, cached, loop = await world.api_server(), store.cached, asyncio.get_running_loop()

        def broken():
            store.cached = cached
            loop.call_soon_threadsafe(failed.set)
            raise LookupError("an adapter")

        store.cached = broken
        await failed.wait()
        await frames(api_server, "stats")
        await frames(api_server, "stats")
        assert "LookupError: an adapter" in caplog.text

    play(act)


def test_an_identity_is_of_all_that_draws_tokens():
    assert ModelIdentity.from_wire(HELLO.identity.to_wire()) == HELLO.identity
    limited = replace(HELLO, limits=EngineLimits(8, 1024, 64))
    assert Hello.from_wire(limited.to_wire()) == limited
    older = {name: value for name, value in HELLO.to_wire().items() if name != "limits"}
    assert Hello.from_wire(older).limits is None
    with pytest.raises(WireError):
        ModelIdentity.from_wire({"model": "m"})
    with pytest.raises(WireError):
        Hello.from_wire({"identity": SimpleNamespace()})
