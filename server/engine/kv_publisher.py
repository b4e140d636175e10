"""KV events over ZMQ, in vLLM's format and with its sockets, for routers that look for cached prefixes.

A message is (topic, sequence number of 8 bytes, payload). The payload is msgpack, `[seconds, [event, …], rank]`, where
an event is a map with its name under `type`: vLLM's `KVEventBatch` of `BlockStored`, `BlockRemoved` and
`AllBlocksCleared` (vllm/distributed/kv_events.py; events were arrays until vllm-project/vllm#42892).
"""

from __future__ import annotations

import hashlib
import ipaddress
import logging
import time
from collections import Counter, deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import msgpack

from ...core.kv_events import Event as Recorded
from ...core.kv_events import Found, Gone, InFile, KvEvents, Removed, Stored
from ...memory.disk.keys import BASE, BlockKeys
from ...memory.pages.block import Key, Medium
from ..executors import Repeating

if TYPE_CHECKING:
    import zmq

    from ..settings import Settings
    from .backend import Backend

log = logging.getLogger(__name__)

TURN_SECONDS = 0.02
"""Seconds between two batches: the publisher polls, to spare the engine's thread from waking it."""

STOP_SECONDS = 1.0
"""Seconds that the end waits for the last batch."""

MAX_BATCH = 4096
"""Events in one message."""

MAX_REPLAYED = 10_000
"""Latest batches kept for replays, as in vLLM."""

MAX_REPLAYED_BYTES = 64 << 20
"""Most bytes of payloads kept for replays."""

MAX_UNSENT = 100_000
"""Messages that may wait for one subscriber; it misses further ones, which the sequence numbers show."""

END = (-1).to_bytes(8, "big", signed=True)
"""Sequence number of the message that ends a replay."""

MEDIUMS = {Medium.POOL: "GPU", Medium.HOST: "CPU", Medium.DISK: "STORAGE"}
"""vLLM's words for where KV is. GPU: a step can use it: the page pool's, also on a CPU. STORAGE: files."""

IMAGE_TOKENS = 1 << 31
"""Set in the numbers that stand for rows of images."""

Hash = int
Event = dict[str, Any]

_UNKNOWN = InFile(b"", None, (), None, 0)
"""A block of which no more than its key is known."""


class KvBatches:
    """Converts the engine's events to vLLM's; a block's hash is the beginning of its key in files.

    So two servers give the same block the same hash, and one server never gives different blocks the same hash.
    """

    def __init__(self, model: str, block_tokens: int, keys: BlockKeys | None = None) -> None:
        """keys: those of the engine's files; None if it has none: then they cover the model's name."""
        self._keys = BlockKeys({"model": model}) if keys is None else keys
        self._block_tokens = block_tokens
        self._by_number: dict[int, bytes] = {}  # keys of the published blocks
        self._in_files: dict[Hash, bool] = {}  # False: subscribers know no more than the hash
        self._mediums: dict[int, set[Medium]] = {}  # by number, of the published blocks
        self._num_blocks: Counter[tuple[Hash, Medium]] = Counter()
        # equal blocks of two versions with the same content have one hash

    def __len__(self) -> int:
        return len(self._by_number)

    def events(self, recorded: Iterable[Recorded]) -> list[Event]:
        """The events in order; consecutive stored blocks of one adapter in one medium, or blocks removed together, form
        one event.
        """
        made: list[Event] = []
        last: tuple[Hash, Medium] | None = None  # of a stored event that further blocks may be added to
        for event in recorded:
            if isinstance(event, Removed):
                if (gone := self._forget(event)) is not None:
                    _add_removed(made, gone, MEDIUMS[event.medium])
                    last = None
                continue
            if not isinstance(event, Stored):
                made += self._of_file(event)
                last = None
                continue
            if (found := self._add(event)) is None:
                continue  # the parent's event was lost, so this block's key is unknown
            digest, parent = found
            if last is not None and (parent, event.medium) == last and event.changed_from is None:
                made[-1]["block_hashes"].append(digest)
                made[-1]["token_ids"].extend(map(_token, event.tokens))
            else:
                made.append(self._stored(event, event.medium, digest, parent=parent))
            last = digest, event.medium
        return made

    def _add(self, event: Stored) -> tuple[Hash, Hash | None] | None:
        """Note a block; return its hash and its parent's, None if they are not known."""
        before = None if event.parent is None else self._by_number.get(event.parent)
        if before is None and event.parent is not None:
            return None
        key = self._by_number[event.number] = self._key(before, event)
        digest = hash_of(key)
        self._mediums.setdefault(event.number, set()).add(event.medium)
        self._num_blocks[digest, event.medium] += 1
        return digest, None if before is None else hash_of(before)

    def _forget(self, event: Removed) -> Hash | None:
        """Forget a block's medium; return its hash if no other block with this hash is there."""
        number, medium = event
        mediums = self._mediums.get(number, set())
        if medium not in mediums:
            return None
        mediums.discard(medium)
        gone = hash_of(self._by_number[number])
        if not mediums:
            del self._by_number[number], self._mediums[number]
        self._num_blocks[gone, medium] -= 1
        if self._num_blocks[gone, medium] > 0:
            return None
        del self._num_blocks[gone, medium]
        return gone

    def _of_file(self, event: InFile | Found | Gone) -> list[Event]:
        """What subscribers don't know yet; of blocks that were found no more than the hashes, as vLLM's offloading."""
        if isinstance(event, Gone):
            gone = hash_of(event.key)
            if self._in_files.pop(gone, None) is None:
                return []
            return [{"type": "BlockRemoved", "block_hashes": [gone], "medium": MEDIUMS[Medium.DISK]}]
        if isinstance(event, Found):
            hashes = [each for each in map(hash_of, event.keys) if each not in self._in_files]
            self._in_files.update(dict.fromkeys(hashes, False))
            return [self._stored(_UNKNOWN, Medium.DISK, *hashes)] if hashes else []
        digest, parent = hash_of(event.key), None if event.parent is None else hash_of(event.parent)
        if self._in_files.get(digest):
            return []
        self._in_files[digest] = True
        return [self._stored(event, Medium.DISK, digest, parent=parent)]

    def _stored(self, event: Stored | InFile, medium: Medium, *hashes: Hash, parent: Hash | None = None) -> Event:
        return {
            "type": "BlockStored",
            "block_hashes": list(hashes),
            "parent_block_hash": parent,
            "token_ids": list(map(_token, event.tokens)),
            "block_size": self._block_tokens,
            "lora_id": event.version or None,
            "medium": MEDIUMS[medium],
            "lora_name": event.adapter,
        }

    def clear(self) -> list[Event]:
        """The event that clears a subscriber's blocks; clears this object's, too."""
        self._by_number.clear()
        self._in_files.clear()
        self._mediums.clear()
        self._num_blocks.clear()
        return [{"type": "AllBlocksCleared"}]

    def _key(self, parent: bytes | None, event: Stored) -> bytes:
        owner, changed_from = event.content_hash or BASE, event.changed_from
        if parent is None:
            parent = self._keys.root(owner if changed_from is None else BASE, event.scope)
        if changed_from is None:
            return self._keys.after(parent, event.tokens)
        return self._keys.after(parent, event.tokens, owner, changed_from)


def hash_of(key: bytes) -> Hash:
    """The number by which subscribers know a block."""
    return int.from_bytes(key[:8], "big")


def _token(key: Key) -> int:
    """A position's token for subscribers: of a row of an image a number that no vocabulary has, made of its digest."""
    if isinstance(key, int):
        return key
    return IMAGE_TOKENS | int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:4], "big")


def _add_removed(made: list[Event], gone: Hash, medium: str) -> None:
    if made and made[-1]["type"] == "BlockRemoved" and made[-1]["medium"] == medium:
        made[-1]["block_hashes"].append(gone)
    else:
        made.append({"type": "BlockRemoved", "block_hashes": [gone], "medium": medium})


class KvPublisher(Repeating):
    """Publishes an engine's KV events and answers subscribers' replay requests."""

    def __init__(
        self, events: KvEvents, batches: KvBatches, endpoint: str, replay_endpoint: str | None = None, topic: str = ""
    ) -> None:
        """Opens the sockets. Raises RuntimeError if an address can't be used, or pyzmq is missing."""
        try:
            import zmq
        except ImportError:
            raise RuntimeError("kv_events_endpoint needs pyzmq: pip install 'chorus-lora[gateway]'") from None
        super().__init__("kv-events", TURN_SECONDS, STOP_SECONDS)
        self._events = events
        self._batches = batches
        self._topic = topic.encode()
        self._pack = msgpack.Packer(autoreset=True).pack
        self._sequence = 0
        self._kept: deque[tuple[bytes, bytes]] = deque()
        self._kept_bytes = 0
        context = zmq.Context.instance()
        try:
            self._pub = context.socket(zmq.PUB)
            self._pub.set_hwm(MAX_UNSENT)
            _open(self._pub, endpoint)
            self._replay = None if replay_endpoint is None else context.socket(zmq.ROUTER)
            if self._replay is not None and replay_endpoint is not None:
                self._replay.set_hwm(MAX_REPLAYED + 1)
                self._replay.bind(replay_endpoint)
        except zmq.ZMQError as error:
            self._close()
            raise RuntimeError(f"KV events can't be published on {endpoint}: {error}") from None
        if not is_local(endpoint):
            log.warning("any client that reaches %s can read prompts from the KV events", endpoint)

    def _run(self) -> None:
        self._publish(self._batches.clear())  # blocks of an earlier process that published at this address
        super()._run()
        self._close()

    def _turn(self) -> None:
        recorded, lost = self._events.drain()
        events = self._batches.events(recorded)
        for first in range(0, len(events), MAX_BATCH):
            self._publish(events[first : first + MAX_BATCH])
        if lost:
            log.warning("the publisher of KV events was too slow; subscribers start over")
            self._publish(self._batches.clear())
        if self._replay is not None and self._replay.poll(0):
            self._answer(self._replay)

    def _publish(self, events: list[Event]) -> None:
        payload = self._pack((time.time(), events, 0))
        sequence = self._sequence.to_bytes(8, "big")
        self._sequence += 1
        self._pub.send_multipart((self._topic, sequence, payload))  # a PUB socket never waits
        self._kept.append((sequence, payload))
        self._kept_bytes += len(payload)
        while len(self._kept) > MAX_REPLAYED or self._kept_bytes > MAX_REPLAYED_BYTES:
            self._kept_bytes -= len(self._kept.popleft()[1])

    def _answer(self, replay: zmq.Socket) -> None:
        """Send a subscriber the kept batches from the requested sequence number on, then `END`."""
        import zmq

        client, *asked = replay.recv_multipart()
        if len(asked) != 2 or asked[0] or len(asked[1]) != 8:
            log.warning("ignored a subscriber's replay request that has not 8 bytes")
            return
        kept = [one for one in self._kept if one[0] >= asked[1]]
        try:
            for sequence, payload in (*kept, (END, b"")):
                replay.send_multipart((client, b"", sequence, payload), zmq.NOBLOCK)
        except zmq.Again:
            log.warning("a subscriber's replay was stopped: it does not read")

    def _close(self) -> None:
        for socket in (getattr(self, "_pub", None), getattr(self, "_replay", None)):
            if socket is not None:
                socket.close(linger=200)


def kv_publisher_of(worker: Backend, settings: Settings) -> KvPublisher | None:
    """Return the publisher of an engine's KV events, or None if the settings name no address. Raises RuntimeError."""
    if settings.kv_events_endpoint is None:
        return None
    events, block_tokens = worker.record_kv_events().result()
    batches = KvBatches(settings.base_name, block_tokens, events.keys)
    return KvPublisher(
        events, batches, settings.kv_events_endpoint, settings.kv_events_replay_endpoint, settings.kv_events_topic
    )


def is_local(endpoint: str) -> bool:
    """True if only this machine can reach an address."""
    return not endpoint.startswith("tcp://") or _host(endpoint) in ("127.0.0.1", "[::1]", "localhost")


def _open(socket: zmq.Socket, endpoint: str) -> None:
    """Bind an address that can only be this machine's; otherwise connect to the subscriber that listens there."""
    host = _host(endpoint)
    socket.ipv6 = host.startswith("[")
    if not endpoint.startswith("tcp://") or host in ("*", "localhost") or _is_bindable(host):
        socket.bind(endpoint.replace("//localhost:", "//127.0.0.1:"))
    else:
        socket.connect(endpoint)


def _host(endpoint: str) -> str:
    return endpoint.removeprefix("tcp://").rpartition(":")[0]


def _is_bindable(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified
