"""KV events over ZMQ, as subscribers of vLLM read them."""

from __future__ import annotations

from types import SimpleNamespace

import msgpack
import pytest

from chorus.core.kv_events import Found, Gone, InFile, KvEvents, Removed, Stored
from chorus.memory.disk.keys import BlockKeys
from chorus.memory.pages.block import Medium
from chorus.server.cluster.cluster_worker import ClusterWorker
from chorus.server.engine.kv_publisher import END, KvBatches, KvPublisher, is_local, kv_publisher_of
from chorus.server.settings import Settings

zmq = pytest.importorskip("zmq")

NOWHERE = SimpleNamespace(versions=lambda: ())


ALICE = {"adapter": "alice", "version": 9, "content_hash": "c0"}


def stored(number, parent=None, tokens=(1, 2), adapter=None, version=0, content_hash=None, scope=("", "")):
    return Stored(number, parent, tuple(tokens), adapter, version, content_hash, scope)


def block(number, tokens=(1, 2), parent=None):
    """A block as the prefix cache has it."""
    return SimpleNamespace(number=number, branch=None, tokens=tuple(tokens), parent=parent)


def batches():
    return KvBatches("base", 2)


def test_blocks_that_follow_each_other_are_one_event():
    first, second, third = batches().events([stored(5), stored(6, 5, (3, 4)), stored(7, **ALICE), Removed(6)])
    hashes = first.pop("block_hashes") + second.pop("block_hashes")
    common = {"type": "BlockStored", "parent_block_hash": None, "block_size": 2, "medium": "GPU"}
    assert first == {**common, "token_ids": [1, 2, 3, 4], "lora_id": None, "lora_name": None}
    assert second == {**common, "token_ids": [1, 2], "lora_id": 9, "lora_name": "alice"}
    assert third == {"type": "BlockRemoved", "block_hashes": hashes[1:2], "medium": "GPU"}
    assert len(set(hashes)) == 3 and all(0 <= one < 1 << 64 for one in hashes)


def test_a_block_in_a_later_batch_names_its_parent():
    made = batches()
    (parent,) = made.events([stored(5)])[0]["block_hashes"]
    assert made.events([stored(6, 5, (3, 4))])[0]["parent_block_hash"] == parent
    assert made.events([Removed(6), Removed(5)])[0]["block_hashes"][1] == parent and len(made) == 0


def test_an_adapter_that_begins_after_blocks_of_the_base_model():
    """Its blocks are an event of their own; their hashes cover where it begins, and which it is."""

    def events(content_hash, changed_from):
        alice = ALICE | {"content_hash": content_hash}
        one = stored(6, 5, (3, 4), **alice)._replace(changed_from=changed_from)
        return batches().events([stored(5), one, stored(7, 6, (5, 6), **alice)])

    base, alices = events("c0", 1)
    assert (base["lora_name"], alices["lora_name"]) == (None, "alice")
    assert alices["parent_block_hash"] == base["block_hashes"][0] and len(alices["block_hashes"]) == 2
    assert events("c0", 1) == [base, alices]
    for other in (events("c0", 0), events("c1", 1)):
        assert other[0] == base and not set(other[1]["block_hashes"]) & set(alices["block_hashes"])


def test_hashes_agree_between_servers_and_differ_where_the_kv_or_its_owner_does():
    def hashes(**about):
        made = batches().events([stored(3, **about), stored(4, 3, (3, 4))])
        return [one for event in made for one in event["block_hashes"]]

    alice = {"adapter": "alice", "version": 2, "content_hash": "c0"}
    assert hashes(**alice) == hashes(**{**alice, "version": 7})
    for other in (
        {},
        {"scope": ("acme", "")},
        {"scope": ("", "acme")},
        {"tokens": (1, 3)},
        {**alice, "content_hash": "c1"},
        {**alice, "content_hash": "c2", "scope": ("acme", "")},
    ):
        assert not set(hashes(**other)) & set(hashes(**alice)), other
    assert not set(hashes(tokens=(1, 2))) & set(hashes(tokens=(12,)))


def test_events_name_the_medium_of_each_place_of_a_block():
    made = batches()
    events = made.events([stored(5), stored(5)._replace(medium=Medium.HOST), Removed(5), Removed(5, Medium.HOST)])
    assert [(event["type"], event["medium"]) for event in events] == [
        ("BlockStored", "GPU"),
        ("BlockStored", "CPU"),
        ("BlockRemoved", "GPU"),
        ("BlockRemoved", "CPU"),
    ]
    assert {digest for event in events for digest in event["block_hashes"]} == set(events[0]["block_hashes"])
    assert len(made) == 0


def test_a_child_in_host_memory_has_its_parent_s_hash_from_the_pool():
    made = batches()
    (parent,) = made.events([stored(5), stored(6, 5, (3, 4))])[0]["block_hashes"][:1]
    (event,) = made.events([stored(6, 5, (3, 4))._replace(medium=Medium.HOST)])
    assert (event["parent_block_hash"], event["medium"]) == (parent, "CPU")


KEYS = BlockKeys({"model": "base", "dtype": "bfloat16"})
FIRST = KEYS.after(KEYS.root("base", ("", "")), (1, 2))
SECOND = KEYS.after(FIRST, (3, 4))


def test_a_block_in_a_file_has_the_hash_that_it_has_in_the_pool():
    made = KvBatches("base", 2, KEYS)
    (pool,) = made.events([stored(5), stored(6, 5, (3, 4))])
    told = InFile(SECOND, FIRST, (3, 4), None, 0)
    of_file, removed = made.events([told, told, Gone(FIRST), Gone(SECOND), Gone(SECOND)])
    assert of_file == {
        "type": "BlockStored",
        "block_hashes": pool["block_hashes"][1:],
        "parent_block_hash": pool["block_hashes"][0],
        "token_ids": [3, 4],
        "block_size": 2,
        "lora_id": None,
        "medium": "STORAGE",
        "lora_name": None,
    }, "it is told of once, and what was not told of is not removed"
    assert removed == {"type": "BlockRemoved", "block_hashes": pool["block_hashes"][1:], "medium": "STORAGE"}


def test_blocks_of_adapters_have_the_keys_of_their_files():
    """Also where an adapter begins to act after blocks of the base model."""
    made = KvBatches("base", 2, KEYS)
    (alices,) = made.events([stored(5, **ALICE)])
    changed = KEYS.after(FIRST, (3, 4), "c0", 1)
    _, later = made.events([stored(6), stored(7, 6, (3, 4), **ALICE)._replace(changed_from=1)])
    for event, key in ((alices, KEYS.after(KEYS.root("c0", ("", "")), (1, 2))), (later, changed)):
        (told,) = made.events([InFile(key, None, (1, 2), "alice", 9)])
        assert told["block_hashes"] == event["block_hashes"] and told["lora_name"] == "alice"


def test_files_that_were_there_before_are_told_of_by_hash_and_in_full_once_they_are_read():
    """vLLM's offloading tells of blocks without their tokens, too; llm-d adds the tier to the hashes that it knows."""
    made = KvBatches("base", 2, KEYS)
    (found,) = made.events([Found((FIRST, SECOND))])
    (pool,) = KvBatches("base", 2, KEYS).events([stored(5), stored(6, 5, (3, 4))])
    assert (found["block_hashes"], found["token_ids"]) == (pool["block_hashes"], [])
    assert (found["parent_block_hash"], found["medium"], found["block_size"]) == (None, "STORAGE", 2)
    (read,) = made.events([InFile(FIRST, None, (1, 2), None, 0), Found((FIRST, SECOND))])
    assert (read["block_hashes"], read["token_ids"]) == (pool["block_hashes"][:1], [1, 2])
    made.clear()
    assert made.events([Gone(FIRST), Gone(SECOND)]) == [], "subscribers have cleared all"


def test_a_block_that_two_versions_of_the_same_content_have_is_removed_with_the_last():
    made = batches()
    (event,) = made.events([stored(5, **ALICE)])
    made.events([stored(6, **{**ALICE, "version": 10})])
    assert made.events([Removed(5)]) == [], "the other version's is there"
    assert made.events([Removed(6)]) == [
        {"type": "BlockRemoved", "block_hashes": event["block_hashes"], "medium": "GPU"}
    ]


def test_what_follows_a_lost_block_is_left_out():
    made = batches()
    made.events([stored(5)])
    assert made.clear() == [{"type": "AllBlocksCleared"}]
    assert made.events([stored(6, 5), Removed(5), Removed(6)]) == []
    assert len(made.events([stored(6), stored(7, 6)])[0]["block_hashes"]) == 2


@pytest.fixture
def events():
    return KvEvents(NOWHERE, most=4)


@pytest.fixture
def publish(events, tmp_path):
    """Starts a publisher; yields its subscriber and a socket to ask for missed events."""
    begun, sockets = [], []

    def run(topic=""):
        here, replay = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"
        publisher = KvPublisher(events, batches(), here, replay, topic)
        subscriber, asker = zmq.Context.instance().socket(zmq.SUB), zmq.Context.instance().socket(zmq.DEALER)
        sockets.extend((subscriber, asker))
        for socket, address in ((subscriber, here), (asker, replay)):
            socket.rcvtimeo = 20_000
            socket.connect(address)
        subscriber.subscribe(topic)
        begun.append(publisher)
        publisher.start()
        return subscriber, asker

    yield run
    for publisher in begun:
        publisher.stop()
    for socket in sockets:
        socket.close(linger=0)


def replayed(asker, start):
    """Batches that are kept from a sequence on, by sequence."""
    asker.send_multipart((b"", start.to_bytes(8, "big")))
    found = {}
    while (message := asker.recv_multipart())[1] != END:
        delimiter, sequence, payload = message
        assert delimiter == b""
        found[int.from_bytes(sequence, "big")] = msgpack.unpackb(payload)
    assert message[2] == b""
    return found


def batches_until(asker, count):
    """Batches once there are `count` of them; a subscriber may have come too late for the first."""
    while len(found := replayed(asker, 0)) < count:
        pass
    return found


def test_a_subscriber_reads_batches_and_asks_for_what_it_missed(events, publish):
    subscriber, asker = publish("kv@here@base")
    (begin,) = batches_until(asker, 1).values()
    assert begin[1:] == [[{"type": "AllBlocksCleared"}], 0], "what an earlier process told of is gone"
    events.stored(0, ("", ""), first := block(5), Medium.POOL)
    events.stored(0, ("", ""), block(6, (3, 4), first), Medium.POOL)
    while True:
        topic, sequence, payload = subscriber.recv_multipart()
        seconds, told, rank = msgpack.unpackb(payload)
        if told[0]["type"] == "BlockStored":
            break
    assert topic == b"kv@here@base" and int.from_bytes(sequence, "big") == 1 and rank == 0 and seconds > 0
    assert replayed(asker, 1) == {1: [seconds, told, rank]} and sorted(replayed(asker, 0)) == [0, 1]
    for request in ((b"", b"12345"), (b"12345678",), (b"x", b"12345678"), (b"", b"", b"12345678")):
        asker.send_multipart(request)
    assert sorted(replayed(asker, 1)) == [1], "what is no request is left out"


def test_blocks_in_files_are_told_of_to_subscribers(events, publish):
    """What a thread of the disk tier records is on the wire as vLLM's `BlockStored`, `BlockRemoved`."""
    _, asker = publish()
    batches_until(asker, 1)
    events.found([FIRST, SECOND])
    events.in_file(InFile(SECOND, FIRST, (3, 4), "alice", 9))
    events.gone(SECOND)
    told = []
    while len(told) < 3:
        told = [event for _, batch, _ in list(replayed(asker, 1).values()) for event in batch]
    assert [(each["type"], each["medium"], len(each["block_hashes"])) for each in told] == [
        ("BlockStored", "STORAGE", 2),
        ("BlockStored", "STORAGE", 1),
        ("BlockRemoved", "STORAGE", 1),
    ]
    assert (told[1]["token_ids"], told[1]["lora_name"], told[1]["lora_id"]) == ([3, 4], "alice", 9)


def test_more_files_than_may_wait_are_a_loss(events):
    """The limit is 4, and a thread of the disk tier never waits."""
    for _ in range(6):
        events.gone(FIRST)
    told, lost = events.drain()
    assert len(told) == 4 and lost and events.num_dropped == 2
    events.found([FIRST] * 3000)
    told, lost = events.drain()
    assert [len(each.keys) for each in told] == [1024, 1024, 952] and not lost


def test_after_a_loss_subscribers_begin_anew(events, publish):
    _, asker = publish()
    batches_until(asker, 1)
    for number in range(5, 12):  # no more than 4 wait
        events.stored(0, ("", ""), block(number), Medium.POOL)
    kinds = [event["type"] for _, told, _ in batches_until(asker, 3).values() for event in told]
    assert kinds[0] == "AllBlocksCleared" and kinds[-1] == "AllBlocksCleared" and events.num_dropped > 0
    assert kinds.count("BlockStored") == events.num_recorded >= 4


def test_an_address_that_is_taken_is_an_error_that_names_it(events, tmp_path):
    address = f"ipc://{tmp_path}/nowhere/events"
    with pytest.raises(RuntimeError, match=r"can't be published on ipc://.*nowhere"):
        KvPublisher(events, batches(), address)


def test_addresses(caplog):
    assert all(map(is_local, ("ipc:///run/kv", "tcp://127.0.0.1:5557", "tcp://[::1]:5557", "tcp://localhost:5557")))
    assert not any(map(is_local, ("tcp://*:5557", "tcp://10.0.0.7:5557", "tcp://collector.svc:5557")))
    with pytest.raises(ValueError, match="kv_events_endpoint"):
        Settings(model="/models/base", kv_events_endpoint="http://127.0.0.1:5557")


def test_replicas_behind_one_address_publish_nothing():
    settings = Settings(model="/models/base", kv_events_endpoint="tcp://127.0.0.1:5557")
    with pytest.raises(RuntimeError, match="a cluster routes by itself"):
        kv_publisher_of(ClusterWorker.__new__(ClusterWorker), settings)
    assert kv_publisher_of(SimpleNamespace(), Settings(model="/models/base")) is None


def test_a_server_publishes_what_its_engine_caches(start, fake_engine, tmp_path):
    fake_engine.record_kv_events = lambda: events
    events = KvEvents(NOWHERE)
    here, replay = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"
    start(fake_engine, settings={"kv_events_endpoint": here, "kv_events_replay_endpoint": replay})
    asker = zmq.Context.instance().socket(zmq.DEALER)
    asker.rcvtimeo = 20_000
    asker.connect(replay)
    events.stored(0, ("", ""), block(5, range(16)), Medium.POOL)
    (told,) = batches_until(asker, 2)[1][1]
    assert (told["type"], told["token_ids"], told["block_size"]) == ("BlockStored", list(range(16)), 16)
    asker.close(linger=0)
