"""The registry's process and the API servers' copies of it."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import subprocess
import sys
import threading
from contextlib import asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chorus.memory.adapters.registry_store import Entry, RegistryStore
from chorus.server.cluster import registry as registries
from chorus.server.cluster.address import UnixSocket
from chorus.server.cluster.registry import FROM_REGISTRY, TO_REGISTRY, serve
from chorus.server.cluster.registry_client import RegistryAway, RegistryClient, RegistryCopy, RegistryRefusal
from chorus.server.cluster.stream import PeerRefused, accept, connect, new_secret
from chorus.server.cluster.wire import Frame, Malformed

SECRET = b"s" * 32
SECONDS = 150
"""A deadline, not an expectation."""


def entry(name, digit="a", **about):
    return Entry(name, digit * 64, f"/adapters/{name}", 0, 8, 1 << 20, False)._replace(**about)


def run(test):
    """A coroutine to its end, or the deadline."""
    return asyncio.run(asyncio.wait_for(test, SECONDS))


@asynccontextmanager
async def registry(directory):
    """A registry on this loop."""
    ready = asyncio.Event()
    address = UnixSocket(directory / "socket")
    task = asyncio.create_task(serve(directory / "registry.db", address, SECRET, lambda _: ready.set(), 0.0))
    begun = asyncio.create_task(ready.wait())
    await asyncio.wait((task, begun), return_when=asyncio.FIRST_COMPLETED)
    begun.cancel()
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def api_server(directory, adopt=None, secret=SECRET):
    client = RegistryClient(UnixSocket(directory / "socket"), secret, adopt)
    client.start()
    try:
        yield client
    finally:
        await client.stop()


async def until(condition):
    while not condition():
        await asyncio.sleep(0.005)


def names(client):
    return {name: one.content_hash[0] for name, one in client.copy.entries.items()}


def test_copies_converge_and_a_write_is_done_when_all_have_seen_it(tmp_path):
    async def test():
        changes = []

        async def adopt(name, now):
            changes.append((name, now and now.generation))

        async with registry(tmp_path), api_server(tmp_path) as one, api_server(tmp_path, adopt) as two:
            await asyncio.gather(one.wait_for_copy(), two.wait_for_copy())
            assert await one.put(entry("alice")) == (1, False)
            assert names(two) == {"alice": "a"}, "no wait: the other API server knew when the write was done"
            assert await two.put(entry("alice", "b")) == (2, True)
            assert names(one) == names(two) == {"alice": "b"} and one.copy.entries["alice"].generation == 2
            assert await one.remove("alice") == 3
            assert names(two) == {} and two.copy.generation == one.copy.generation == 3
            await asyncio.gather(*(client.put(entry(f"n{i}")) for i, client in enumerate([one, two] * 20)))
            assert names(one) == names(two) and len(names(one)) == 40
            assert sorted(it.generation for it in one.copy.entries.values()) == list(range(4, 44))
            async with api_server(tmp_path) as late:
                await late.wait_for_copy()
                assert names(late) == names(one) and late.copy.generation == 43
        assert changes[:3] == [("alice", 1), ("alice", 2), ("alice", None)] and len(changes) == 43

    run(test())


def test_a_write_waits_for_a_front_that_has_not_seen_it(tmp_path, monkeypatch):
    async def test():
        async with registry(tmp_path), api_server(tmp_path) as one:
            await one.wait_for_copy()
            lazy = await connect(UnixSocket(tmp_path / "socket"), SECRET, FROM_REGISTRY)
            lazy.send("subscribe")
            assert (await lazy.read()).kind == "copy"
            write = asyncio.create_task(one.put(entry("alice")))
            assert (await lazy.read()).kind == "changed"
            await until(lambda: one.copy.generation == 1)
            await asyncio.sleep(0.05)
            assert not write.done()
            lazy.send("seen", 1)
            assert await write == (1, False)
            monkeypatch.setattr(registries, "SEEN_SECONDS", 0.05)
            assert await one.put(entry("bob")) == (2, False), "one that never answers is left behind"
            with pytest.raises(PeerRefused, match="has not seen generation 2"):
                while await lazy.read() is not None:
                    pass

    run(test())


def test_a_write_is_done_when_every_front_has_acted_on_it(tmp_path):
    """Not when it has only heard of it: until then it may begin requests with the old content."""

    async def test():
        acting, may_go_on = asyncio.Event(), asyncio.Event()

        async def adopt(name, now):
            acting.set()
            await may_go_on.wait()
            raise ValueError("its files can't be read here")  # the API server then serves nothing under the name

        async with registry(tmp_path), api_server(tmp_path) as one, api_server(tmp_path, adopt) as two:
            await asyncio.gather(one.wait_for_copy(), two.wait_for_copy())
            write = asyncio.create_task(one.put(entry("alice")))
            await acting.wait()
            await until(lambda: one.copy.generation == 1)
            await asyncio.sleep(0.05)
            assert not write.done()
            may_go_on.set()
            assert await write == (1, False) and names(two) == {"alice": "a"}

    run(test())


def test_refusals_say_why(tmp_path):
    async def test():
        async with registry(tmp_path), api_server(tmp_path) as one:
            await one.wait_for_copy()
            await one.put(entry("alice"))
            for call, status, code, text in (
                (one.put(entry("alice"), replace=False), 409, "registry_exists", "'alice' is registered already"),
                (one.remove("nobody"), 404, "registry_unknown", "'nobody' is not registered"),
                (one.put(entry("../up")), 400, "registry_invalid", "can't be a name"),
                (one.put(entry("bob", rank=-1)), 400, "registry_invalid", "rank"),
            ):
                with pytest.raises(RegistryRefusal, match=text) as refusal:
                    await call
                assert (refusal.value.status, refusal.value.code) == (status, code)
            assert one.copy.generation == 1 and names(one) == {"alice": "a"}

    run(test())


def test_while_it_is_away_names_stay_and_writes_are_refused(tmp_path):
    async def test():
        async with api_server(tmp_path) as one:
            with pytest.raises(RegistryAway, match="registry does not answer") as away:
                await one.put(entry("alice"))
            assert (away.value.status, away.value.code) == (503, "registry_unavailable")
            async with registry(tmp_path):
                await one.wait_for_copy()
                await one.put(entry("alice"))
            await until(lambda: one._stream is None)  # noqa: SLF001
            assert names(one) == {"alice": "a"}
            for write in (one.put(entry("bob")), one.remove("alice")):
                with pytest.raises(RegistryAway):
                    await write
            async with registry(tmp_path):
                await until(lambda: one._stream is not None)  # noqa: SLF001
                assert names(one) == {"alice": "a"}
                assert await one.put(entry("bob")) == (2, False)

    run(test())


def test_a_write_under_way_when_it_goes_away_is_an_error_that_says_so(tmp_path):
    async def test():
        heard = asyncio.Event()

        async def half_a_registry(reader, writer):
            stream = await accept(reader, writer, SECRET, TO_REGISTRY)
            assert (await stream.read()).kind == "subscribe"
            stream.send("copy", "id", 0, [], True)
            while (await stream.read()).kind != "put":
                pass
            heard.set()
            stream.close()

        server = await asyncio.start_unix_server(half_a_registry, tmp_path / "socket")
        async with api_server(tmp_path) as one:
            await one.wait_for_copy()
            with pytest.raises(RegistryAway, match="check whether the change was made"):
                await one.put(entry("alice"))
            assert heard.is_set()
        server.close()

    run(test())


@pytest.mark.parametrize(
    "frames",
    [
        [("seen", 0)],
        [("subscribe",), ("subscribe",)],
        [("subscribe", 1)],
        [("subscribe",), ("seen", 7)],
        [("subscribe",), ("seen", "x")],
        [("put",)],
        [("put", "one", [])],
        [("remove", None, "x")],
        [("copy", 1)],
    ],
)
def test_a_peer_that_breaks_the_protocol_loses_its_connection_and_nothing_else(tmp_path, frames):
    async def test():
        async with registry(tmp_path), api_server(tmp_path) as one:
            await one.wait_for_copy()
            hostile = await connect(UnixSocket(tmp_path / "socket"), SECRET, FROM_REGISTRY)
            for frame in frames:
                hostile.send(*frame)
            with pytest.raises(PeerRefused):
                while await hostile.read() is not None:
                    pass
            assert await one.put(entry("alice")) == (1, False)

    run(test())


@pytest.mark.parametrize(
    "data", [b"GET / HTTP/1.1\r\n\r\n", b"CW\x02" + b"\0" * 8, b"CW\x02" + b"\0" * 4 + b"\xff" * 4, b"CW", b""]
)
def test_bytes_that_are_no_frames(tmp_path, data):
    async def test():
        async with registry(tmp_path), api_server(tmp_path) as one:
            await one.wait_for_copy()
            reader, writer = await asyncio.open_unix_connection(tmp_path / "socket")
            writer.write(data)
            writer.write_eof()
            await reader.read()
            writer.close()
            async with api_server(tmp_path, secret=b"w" * 32) as stranger:
                await asyncio.sleep(0.05)
                assert stranger._stream is None  # noqa: SLF001
            assert await one.put(entry("alice")) == (1, False)

    run(test())


@given(st.lists(st.tuples(st.sampled_from(["put", "remove"]), st.integers(0, 3)), max_size=30), st.data())
def test_a_copy_follows_whatever_is_changed(changes, data):
    """Whenever the copy begins, and though it begins anew."""
    entries, generation = {}, 0
    copy = RegistryCopy()

    def begin():
        copy.begin()
        rows = [list(it) for it in entries.values()]
        cut = data.draw(st.integers(0, len(rows)))
        assert not copy.apply(Frame("copy", ["id", generation, rows[:cut], False]))
        assert copy.apply(Frame("copy", ["id", generation, rows[cut:], True]))

    begin()
    for kind, number in changes:
        name = f"n{number}"
        if kind == "remove" and name not in entries:
            continue
        generation += 1
        if kind == "put":
            entries[name] = entry(name, generation=generation)
            frame = Frame("changed", [list(entries[name])])
        else:
            del entries[name]
            frame = Frame("removed", [generation, name])
        if data.draw(st.booleans()):
            assert copy.apply(frame)
        else:
            begin()
        assert (dict(copy.entries), copy.generation) == (entries, generation)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("changed", [list(entry("bob", generation=3))]),
        ("changed", [list(entry("bob", generation=1))]),
        ("changed", [["bob"]]),
        ("changed", []),
        ("changed", [None]),
        ("removed", [2, "nobody"]),
        ("removed", [1, "alice"]),
        ("removed", [2]),
        ("removed", [2, ["alice"]]),
        ("copy", ["id", 1, [], True]),
    ],
)
def test_a_copy_takes_nothing_that_does_not_follow(kind, fields):
    copy = RegistryCopy()
    copy.begin()
    with pytest.raises(Malformed):
        copy.apply(Frame("changed", [list(entry("alice", generation=1))]))
    copy.apply(Frame("copy", ["id", 1, [list(entry("alice", generation=1))], True]))
    with pytest.raises(Malformed):
        copy.apply(Frame(kind, fields))
    assert copy.generation == 1 and list(copy.entries) == ["alice"]


def test_a_copy_of_itself_that_contradicts_itself_is_refused():
    row = list(entry("alice", generation=2))
    for fields in (
        ["id", 1, [row], True],
        ["id", 2, [row, row], True],
        [7, 2, [], True],
        ["id", "2", [], True],
        ["id", 2, None, True],
        ["id", 2, [None], True],
        ["id", 2, []],
    ):
        copy = RegistryCopy()
        copy.begin()
        with pytest.raises(Malformed):
            copy.apply(Frame("copy", fields))
        assert not copy.entries


# --- as a process ---


@pytest.fixture
def begin(tmp_path):
    """Starts the registry's process; gives it once API servers may connect."""
    processes = []
    new_secret(tmp_path / "secret")

    def run_process():
        command = [
            sys.executable,
            "-m",
            "chorus.server",
            "cluster",
            "registry",
            "--file",
            str(tmp_path / "registry.db"),
            "--listen",
            f"unix:{tmp_path / 'socket'}",
            "--secret-file",
            str(tmp_path / "secret"),
            "--first-write-seconds",
            "0",
        ]
        with (tmp_path / "log").open("ab") as log:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        processes.append(process)
        assert process.stdout.readline() == "ready\n", (tmp_path / "log").read_text()
        return process

    yield run_process
    for process in processes:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.wide
def test_kill_9_in_the_middle_of_writes_loses_none_that_was_acknowledged(begin, tmp_path):
    rounds, acknowledged, attempted = 4, {}, {}
    numbers = itertools.count()

    async def write(client, process):
        """Writes, many at a time, until the process is gone."""

        async def one():
            while True:
                number = next(numbers)
                name = f"n{number % 50}"
                attempted.setdefault(name, set()).add(number)
                generation, _ = await client.put(entry(name, path=f"/adapters/{number}"))
                acknowledged[name] = max(acknowledged.get(name, (0, -1)), (generation, number))

        writers = [asyncio.create_task(one()) for _ in range(4)]
        await until(lambda: len(acknowledged) > 10)
        threading.Timer(random.uniform(0, 0.1), process.send_signal, (signal.SIGKILL,)).start()
        for ended in await asyncio.gather(*writers, return_exceptions=True):
            assert isinstance(ended, RegistryAway), ended

    async def test():
        secret = bytes.fromhex((tmp_path / "secret").read_text())
        async with api_server(tmp_path, secret=secret) as client:
            for _ in range(rounds):
                process = begin()
                await until(lambda: client._stream is not None)  # noqa: SLF001
                check(client.copy.entries, client.copy.generation)
                await write(client, process)
                process.wait()
                await until(lambda: client._stream is None)  # noqa: SLF001

    def check(entries, generation):
        for name, (least, number) in acknowledged.items():
            found = entries[name]
            assert found.generation >= least and int(found.path.rpartition("/")[2]) in attempted[name]
            assert found.generation > least or found.path == f"/adapters/{number}"
        generations = [it.generation for it in entries.values()]
        assert len(set(generations)) == len(generations) and generation >= max(generations, default=0)

    run(test())
    store = RegistryStore(tmp_path / "registry.db")
    check({it.name: it for it in store.entries()}, store.generation)
    assert len(acknowledged) > 10 and store.generation >= max(generation for generation, _ in acknowledged.values())
    store.close()


@pytest.mark.wide
def test_it_ends_by_sigterm_and_says_what_is_wrong_with_its_file(begin, tmp_path):
    process = begin()
    second = subprocess.run(
        [*process.args], capture_output=True, text=True, check=False, env={**os.environ}, timeout=SECONDS
    )
    assert second.returncode == 1 and "registry.db is held by another registry" in second.stderr
    process.terminate()
    assert process.wait(SECONDS) == 0
    assert begin().poll() is None
