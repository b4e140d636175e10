"""Catalogs of several API servers over one registry."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from chorus.core.requests.request_params import AdapterPaused, InvalidRequest, NotServed
from chorus.memory.adapters.adapter import Tier
from chorus.memory.adapters.store import UnknownAdapter
from chorus.memory.files.error import AdapterFormatError, LoadFailure
from chorus.memory.files.manifest import AdapterManifest
from chorus.memory.pages.adapter_layout import AdapterPart
from chorus.server.access.grants import ALL, Grant
from chorus.server.cluster.address import UnixSocket
from chorus.server.cluster.catalog import Cluster, done, failed
from chorus.server.cluster.registered_catalog import RegisteredCatalog
from chorus.server.cluster.registry_client import RegistryAway

from .test_registry import SECRET, registry, run, until


def manifest(path, digit):
    parts = (AdapterPart(4, 1.0, (0,), ("q_proj",)),)
    return AdapterManifest(Path(path), parts, file_size=100, content_hash=digit * 64)


class ApiServer:
    """A catalog with replicas that load whatever is on the disk: `disk`, by path."""

    def __init__(self, disk):
        self.retired, self.revived, self.ended, self.checked = [], [], [], []
        self.disk = disk
        self.pins, self.failure = {}, None
        fleet = SimpleNamespace(
            pin=lambda pins: setattr(self, "pins", pins),
            is_pinned=lambda content: content in self.pins,
            pin_failure=lambda _: self.failure,
            tier_of=lambda _: Tier.DISK,
            overflowing=set,
        )
        dispatcher = SimpleNamespace(
            fleet=fleet, end_users=self.end_users, retire=self.retired.append, revive=self.revived.append
        )
        cluster = Cluster(
            dispatcher,
            lambda function, *given: function(*given),
            lambda function, *given, otherwise: done(function(*given)),
            lambda _: done(False),
            lambda: None,
        )
        self.catalog = RegisteredCatalog(cluster, self.check)

    def end_users(self, name, reason, failure):
        self.ended.append(name)
        return 3

    def check(self, path):
        self.checked.append(str(path))
        if str(path) not in self.disk:
            raise AdapterFormatError(f"{path}: no such directory")
        return self.disk[str(path)]

    async def follow(self, directory):
        self.client = self.catalog.follow(UnixSocket(directory / "socket"), SECRET)
        await self.client.wait_for_copy()

    async def put(self, one, name, *, replace=True):
        return await asyncio.wrap_future(self.catalog.put(name, one, None, replace=replace))

    async def remove(self, name, *, force=False):
        return await asyncio.wrap_future(self.catalog.remove(name, force=force))

    def content(self, name):
        content_hash = self.catalog.find(name).manifest.content_hash
        assert content_hash is not None
        return content_hash[0]


def api_servers_of(test, count=2, disk=None):
    """Run `test(directory, api_servers)` with API servers that follow one registry; they read the same disk unless
    given one.
    """

    async def with_api_servers(directory):
        api_servers = [ApiServer({} if disk is None else disk) for _ in range(count)]
        async with registry(directory):
            await asyncio.gather(*(one.follow(directory) for one in api_servers))
            try:
                await test(directory, *api_servers)
            finally:
                await asyncio.gather(*(one.client.stop() for one in api_servers))

    return with_api_servers


def test_a_name_means_the_same_at_every_front_once_it_is_registered(tmp_path):
    disk = {"/a/1": manifest("/a/1", "1"), "/a/2": manifest("/a/2", "2")}

    async def test(_, one, two):
        state, replaced = await one.put(disk["/a/1"], "alice")
        assert (state.name, state.manifest.content_hash, replaced) == ("alice", "1" * 64, False)
        assert two.content("alice") == "1", "no wait"
        assert one.checked == [] and two.checked == ["/a/1"], "its own it has checked before"
        state, replaced = await two.put(disk["/a/2"], "alice")
        assert replaced and one.content("alice") == two.content("alice") == "2"
        assert one.retired == two.retired == ["1" * 64]
        with pytest.raises(FileExistsError):
            await one.put(disk["/a/1"], "alice", replace=False)
        assert (await one.remove("alice", force=True))[1] == 3 and one.ended == ["alice"]
        with pytest.raises(InvalidRequest):
            two.catalog.find("alice")
        with pytest.raises(UnknownAdapter):
            await two.remove("alice")

    run(api_servers_of(test, disk=disk)(tmp_path))


def test_what_a_front_can_not_read_it_does_not_serve_and_never_stale(tmp_path):
    old, new = manifest("/a/1", "1"), manifest("/a/2", "2")

    async def test(_, one, two):
        two.disk = {"/a/1": old, "/a/2": manifest("/a/2", "3")}  # its disk has other files by now
        await one.put(old, "alice")
        await one.put(new, "alice")
        assert one.content("alice") == "2"
        with pytest.raises(NotServed, match="have changed since"):
            two.catalog.find("alice")
        two.disk = {}
        await one.put(manifest("/a/3", "4"), "bob")
        with pytest.raises(NotServed, match="no such directory"):
            two.catalog.find("bob")
        two.disk = {"/a/2": new}
        await one.put(new, "alice")
        assert two.content("alice") == "2", "it is served again"

    run(api_servers_of(test)(tmp_path))


def test_a_pinned_adapter_is_pinned_at_every_front_with_its_next_version_until_one_has_no_room(tmp_path):
    one, two = manifest("/adapters/one", "1"), manifest("/adapters/two", "2")

    async def test(_, a, b):
        async def pin():
            return await asyncio.wrap_future(a.catalog.pin("alice"))

        with pytest.raises(UnknownAdapter):
            await pin()
        await a.put(one, "alice")
        assert [await pin(), await pin()] == [False, True]  # told, and seen
        assert a.pins == b.pins == {"1" * 64: Path("/adapters/one")} and b.catalog.state("alice").result().pinned
        await b.put(two, "alice")
        assert a.pins == b.pins == {"2" * 64: Path("/adapters/two")}
        a.failure = AdapterFormatError("r1 has no room")
        a.failure.failure = LoadFailure.NO_ROOM
        with pytest.raises(InvalidRequest, match="r1 has no room"):
            await pin()
        await until(lambda: not a.pins and not b.pins)

    run(api_servers_of(test, disk={one.path.as_posix(): one for one in (one, two)})(tmp_path))


def test_adapters_of_the_start_are_removed_everywhere(tmp_path):
    disk = {"/start/a": manifest("/start/a", "5")}

    async def test(_, one, two):
        for each in (one, two):
            each.catalog.register("a", disk["/start/a"])
        with pytest.raises(FileExistsError):
            await one.put(manifest("/a/1", "1"), "a", replace=False)
        await one.remove("a")
        assert "a" not in one.catalog and "a" not in two.catalog

    run(api_servers_of(test, disk=disk)(tmp_path))


def test_versions_and_pauses_are_the_same_at_every_front(tmp_path):
    disk = {f"/a/{digit}": manifest(f"/a/{digit}", str(digit)) for digit in range(1, 6)}

    def versions(api_server):
        return {name: one.manifest.content_hash[0] for name, one in api_server.catalog.registered()}

    async def test(directory, one, two):
        await asyncio.wrap_future(one.catalog.put("policy", disk["/a/1"], None, replace=True, label="first", keep=3))
        for digit, api_server in ((2, one), (3, two)):
            await asyncio.wrap_future(api_server.catalog.put("policy", disk[f"/a/{digit}"], None, replace=True, keep=3))
        second = next(each.label for _, each in one.catalog.registered() if each.manifest.content_hash[0] == "2")
        kept = {"policy": "3", "policy@first": "1", f"policy@{second}": "2"}
        assert versions(one) == versions(two) == kept
        newest = one.catalog.find("policy").label
        assert two.content(f"policy@{newest}") == "3" and int(newest) > int(second)
        assert [each.catalog.find("policy@first").name for each in (one, two)] == ["policy"] * 2
        with pytest.raises(FileExistsError):
            await asyncio.wrap_future(two.catalog.put("policy", disk["/a/4"], None, replace=True, label="first"))
        await asyncio.wrap_future(two.catalog.pause("policy", paused=True))
        for name in ("policy", "policy@first"):
            with pytest.raises(AdapterPaused):
                one.catalog.find(name)
        assert versions(one) == kept and one.catalog.state("policy").result().label == newest
        await asyncio.wrap_future(one.catalog.put("policy", disk["/a/4"], None, replace=True, keep=2))
        with pytest.raises(AdapterPaused):
            two.catalog.find("policy")
        await asyncio.wrap_future(one.catalog.pause("policy", paused=False))
        assert versions(two) == {"policy": "4", f"policy@{newest}": "3"}
        three = ApiServer(disk)  # as after a restart
        await three.follow(directory)
        assert versions(three) == versions(two) and three.content(f"policy@{newest}") == "3"
        await three.client.stop()
        await two.remove("policy")
        assert versions(one) == versions(two) == {}

    run(api_servers_of(test, disk=disk)(tmp_path))


def test_labels_of_other_servers_are_names_of_their_own_at_every_front(tmp_path):
    disk = {f"/a/{digit}": manifest(f"/a/{digit}", str(digit)) for digit in range(1, 6)}

    def versions(api_server):
        return {name: one.manifest.content_hash[0] for name, one in api_server.catalog.registered()}

    async def test(directory, one, two):
        async def put(api_server, digit, name, label=None):
            put = api_server.catalog.put(name, disk[f"/a/{digit}"], None, replace=True, label=label, keep=None)
            return await asyncio.wrap_future(put)

        async def pin(name):
            return await asyncio.wrap_future(one.catalog.pin(name))

        for digit, label in ((1, "5"), (2, "3")):
            state, existed = await put(one, digit, f"m@{label}", label)
            assert (state.label, state.name, existed) == (label, f"m@{label}", False)
        assert versions(one) == versions(two) == {"m@5": "1", "m@3": "2"}
        assert two.content("m") == "2", "no version of its own: the label that came last"
        with pytest.raises(UnknownAdapter):
            await two.remove("m")
        await asyncio.wrap_future(two.catalog.pause("m", paused=True))
        await put(one, 3, "m@x", "x")
        for name in ("m", "m@5", "m@x"):
            with pytest.raises(AdapterPaused):
                one.catalog.find(name)
        three = ApiServer(disk)  # as after a restart
        await three.follow(directory)
        with pytest.raises(AdapterPaused):
            three.catalog.find("m@5")
        await three.client.stop()
        await asyncio.wrap_future(one.catalog.pause("m", paused=False))
        assert [await pin("m@5"), await pin("m@5")] == [False, True]
        for digit in (3, 4):
            await put(two, digit, "m")
        assert versions(one) == versions(two) == {"m": "4", "m@5": "1", "m@3": "2", "m@x": "3"}
        assert one.pins == two.pins == {"1" * 64: Path("/a/1")}, "the pin stays with its label"
        await asyncio.wrap_future(one.catalog.unpin("m@5"))
        await until(lambda: not one.pins and not two.pins)
        await asyncio.wrap_future(one.catalog.pause("m", paused=True))
        await two.remove("m@3")
        for name in ("m", "m@x"):
            with pytest.raises(AdapterPaused):
                one.catalog.find(name)
        await two.remove("m")
        assert versions(one) == versions(two) == {} and not one.catalog.paused and not two.catalog.paused

    run(api_servers_of(test, disk=disk)(tmp_path))


def test_each_front_knows_what_clients_have_loaded_at_any(tmp_path):
    disk = {f"/a/{digit}": manifest(f"/a/{digit}", str(digit)) for digit in range(1, 4)}

    async def test(directory, one, two):
        def latest():
            return [each.catalog.loaded_names.latest(ALL) for each in (one, two)]

        for each in (one, two):
            each.catalog.register("start", disk["/a/3"])
        await asyncio.wrap_future(one.catalog.pause("start", paused=True))
        assert latest() == [None, None], "no client has loaded it"
        await one.put(disk["/a/1"], "policy")
        await two.put(disk["/a/2"], "policy")
        assert latest() == ["policy@2"] * 2
        two.catalog._is_sourced = lambda name: name == "stored/x"  # noqa: SLF001
        await one.put(disk["/a/1"], "stored/x")
        assert latest() == ["stored/x@1", "policy@2"], "requests load these"
        three = ApiServer(disk)  # as after a restart
        await three.follow(directory)
        assert three.catalog.loaded_names.latest(Grant(adapters=("policy",))) == "policy@2"
        await three.client.stop()
        for name in ("policy", "stored/x"):
            await one.remove(name)
        assert latest() == [None, None]

    run(api_servers_of(test, disk=disk)(tmp_path))


def test_without_the_registry_names_stay_and_changes_are_503(tmp_path):
    disk = {"/a/1": manifest("/a/1", "1")}

    async def test():
        one = ApiServer(disk)
        async with registry(tmp_path):
            await one.follow(tmp_path)
            await one.put(disk["/a/1"], "alice")
        await until(lambda: one.client._stream is None)  # noqa: SLF001
        assert one.content("alice") == "1"
        for change in (one.put(disk["/a/1"], "bob"), one.remove("alice")):
            with pytest.raises(RegistryAway) as away:
                await change
            assert away.value.status == 503
        assert one.content("alice") == "1" and "bob" not in one.catalog
        two = ApiServer(disk)
        async with registry(tmp_path):  # an API server that starts now has the adapters that were registered before
            await two.follow(tmp_path)
            assert two.content("alice") == "1"
            await until(lambda: one.client._stream is not None)  # noqa: SLF001
        for each in (one, two):
            await each.client.stop()

    run(test())


def test_a_change_is_503_over_http_while_the_registry_is_away(start, fake_engine, monkeypatch):
    live = start(fake_engine, adapter_roots=(Path("/adapters"),))

    def away(*_, **__):
        return failed(RegistryAway("the cluster's registry does not answer"))

    monkeypatch.setattr(live.worker.adapters, "remove", away)
    answer = live.client.delete("/v1/adapters/alice")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "registry_unavailable")
    assert "registry" in answer.json()["error"]["message"] and answer.headers["retry-after"] == "1"
