"""The n-th open, read, allocation and thread start fails, for every n: right tokens or a clean error, nothing lost."""

from __future__ import annotations

import errno
import gc
import logging
import os
import threading
import time

import pytest

from chorus.core.requests.request import Request
from chorus.core.requests.request_params import RequestParams
from chorus.core.requests.types import FinishReason
from chorus.memory.files.error import AdapterFormatError
from chorus.memory.host.buffers import HostBuffers
from chorus.ops.cpu import native_reader

TOKENS = 4
"""Of each answer: two come before its adapter is reloaded, two after."""

CLEAN = (AdapterFormatError, OSError, MemoryError, RuntimeError)


class Faults:
    """Counts calls that may fail, and fails the one at `turn`."""

    def __init__(self, monkeypatch, directory):
        self.count, self.turn, self.fired = 0, 0, ""
        self.leased = self.returned = 0
        open_, preadv, start = os.open, os.preadv, threading.Thread.start
        take, give_back = HostBuffers.take, HostBuffers._give_back  # noqa: SLF001 - lost buffers never come by there

        def open_file(path, *args, **kwargs):
            if str(path).startswith(str(directory)):
                self.point("open", OSError(errno.EIO, "Input/output error"))
            return open_(path, *args, **kwargs)

        def read(*args):
            self.point("read", OSError(errno.EIO, "Input/output error"))
            return preadv(*args)

        def start_thread(thread):
            if thread.name.startswith("chorus-adapter-read"):
                self.point("thread", RuntimeError("can't start new thread"))
            start(thread)

        def take_buffer(*args):
            self.point("allocation", MemoryError("no memory"))
            taken = take(*args)
            self.leased += 1
            return taken

        def take_back(*args):
            self.returned += 1
            give_back(*args)

        monkeypatch.setattr(os, "open", open_file)
        monkeypatch.setattr(os, "preadv", read)
        monkeypatch.setattr(threading.Thread, "start", start_thread)
        monkeypatch.setattr(HostBuffers, "take", take_buffer)
        monkeypatch.setattr(HostBuffers, "_give_back", take_back)

    def point(self, kind, error):
        self.count += 1
        if self.count == self.turn:
            self.fired = kind
            try:
                raise error
            finally:
                del error  # else its own frame refers to it

    def begin(self, turn):
        self.count, self.turn, self.fired = 0, turn, ""


class Life:
    """Registers, loads, streams, reloads in place and evicts; records the outcome of each request."""

    def __init__(self, engine, directories):
        self.engine, self.directories = engine, directories
        self.answers: dict[str, tuple[list[int], FinishReason | None, str | None]] = {}

    def run(self):
        self.register("a", "first")
        self.register("b", "second")
        self.ask("a1", "a")
        self.ask("b1", "b")
        self.step(2)
        self.register("a", "third")
        self.ask("a2", "a")
        self.drain()
        self.engine.reclaimer.reclaim_all()
        self.ask("b2", "b")
        self.ask("base", None)
        self.drain()

    def register(self, name, directory):
        try:
            self.engine.store.register(name, self.directories[directory])
        except CLEAN as error:
            assert str(error)

    def ask(self, id, name):
        if name is not None and name not in self.engine.store:
            return
        params = RequestParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
        request = Request(id, [3, 5, 7], params, name)
        self.engine.add_request(request)
        version = "" if request.adapter is None else request.adapter.manifest.path.name
        self.answers[f"{id} {version}"] = ([], None, None)

    def step(self, count=1):
        for _ in range(count):
            for output in self.engine.step():
                key = next(key for key in self.answers if key.split()[0] == output.request_id)
                self.answers[key] = (self.answers[key][0] + list(output.token_ids), output.finish_reason, output.error)
            self.engine.check_integrity()

    def drain(self):
        deadline = time.monotonic() + 60
        while self.engine.has_work():
            assert time.monotonic() < deadline, "requests never end"
            self.step()

    def close(self):
        """Nothing is lost: every page is free, and so is every buffer, without any help by the collector."""
        for name in self.engine.store.names():
            self.engine.store.unregister(name)
        self.engine.reclaimer.reclaim_all()
        self.engine.check_integrity()
        stats = self.engine.stats()
        assert stats.num_free_pages == stats.num_pages


@pytest.mark.slow
@pytest.mark.parametrize("by_torch", [False, True], ids=["native", "torch"])
def test_every_point_may_fail(tiny_engine, adapter_draft, tmp_path, monkeypatch, by_torch):
    directories = {
        name: adapter_draft(("q_proj", "down_proj"), seed=seed).write(tmp_path / "adapters" / name)
        for seed, name in enumerate(["first", "second", "third"])
    }
    faults = Faults(monkeypatch, tmp_path / "adapters")
    if by_torch:
        monkeypatch.setattr(native_reader, "available", lambda dtype: False)
    want, kinds, turn = {}, set(), 0
    logging.disable(logging.CRITICAL)  # pytest keeps the records, and with a traceback all that its frames refer to
    gc.collect()
    gc.disable()
    try:
        while True:
            life = Life(tiny_engine(host_cache_bytes=0, memory_bytes=1 << 18), directories)
            faults.begin(turn)
            life.run()
            fired = faults.fired
            life.close()
            life.engine.close()
            answers = life.answers
            del life
            deadline = time.monotonic() + 60
            while faults.leased != faults.returned:
                assert time.monotonic() < deadline, f"fault {turn} ({fired}): a buffer was lost"
                time.sleep(0.001)
            if turn == 0:
                want = {key: tokens for key, (tokens, _, _) in answers.items()}
                assert all(len(tokens) == TOKENS for tokens in want.values())
                assert len(want) == 5
            elif not fired:
                break
            for key, (tokens, reason, error) in answers.items():
                if key not in want:  # it got an earlier version, since the later one could not be registered
                    same = [one for name, one in want.items() if name.split()[1:] == key.split()[1:]]
                    assert same
                    want[key] = same[0]
                assert tokens == want[key][: len(tokens)], f"fault {turn} ({fired}): {key} is wrong"
                assert (reason is FinishReason.LENGTH) == (len(tokens) == TOKENS)
                assert reason is FinishReason.LENGTH or (reason is FinishReason.ERROR and error)
            kinds.add(fired)
            turn += 1
    finally:
        gc.enable()
        logging.disable(logging.NOTSET)
    assert kinds >= {"open", "allocation", "thread"} | ({"read"} if by_torch else set())
    assert turn > 10
