"""No thread keeps the others from the interpreter for long."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from chorus.server.settings import Settings
from chorus.server.start import launch
from chorus.server.start.full_collections import LEAST_SECONDS
from chorus.server.start.launch import SWITCH_SECONDS

LOADED = """
import atexit, gc, json, sys
atexit.register(lambda: print(gc.get_freeze_count()))
from chorus.server.start.launch import take_short_turns
class Loaded: pass
kept = [Loaded() for _ in range(50_000)]
kept[0].itself = kept[0]
take_short_turns()
seen = sum(isinstance(one, Loaded) for one in gc.get_objects())
cycle = Loaded()
cycle.itself = cycle
del cycle
print(json.dumps([seen, gc.collect(), sys.getswitchinterval()]))
"""


@pytest.mark.wide
def test_what_was_loaded_is_looked_at_by_no_garbage_collection():
    done = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True, timeout=120)
    told, frozen_at_exit = done.stdout.splitlines()
    seen, collected, interval = json.loads(told)
    assert seen == 0
    assert collected == 1, "what becomes garbage later is still found"
    assert interval == SWITCH_SECONDS
    assert frozen_at_exit == "0", "the interpreter's end destroys it, or libraries complain of leaks"


FULL = """
import gc, json, sys, threading
from chorus.server.start import full_collections
pauses, collected = [], threading.Event()
class Loaded: pass
def sleep(seconds):
    pauses.append(seconds)
    if len(pauses) == 2:
        collected.set()
        threading.Event().wait()
    made.wait()
made = threading.Event()
full_collections.collect_seldom(sleep)
full = []
def note(phase, info):
    if info["generation"] == 2:
        full.append(threading.current_thread().name)
gc.callbacks.append(note)
cycle = Loaded()
cycle.itself = cycle
kept = [[] for _ in range(400_000)]
del cycle
before = len(full)
made.set()
assert collected.wait(60)
gc.callbacks.clear()
print(json.dumps([before, full[before:], pauses[0]]))
"""


def test_full_collections_are_made_by_a_thread_that_is_seldom_up():
    """As thousands of requests came in, each further one began another, which held all threads."""
    done = subprocess.run([sys.executable, "-c", FULL], capture_output=True, text=True, check=True, timeout=120)
    before, by, pause = json.loads(done.stdout)
    assert before == 0 and set(by) == {"chorus-garbage"}
    assert pause == LEAST_SECONDS


def test_a_server_takes_short_turns_once_it_is_loaded(monkeypatch):
    order = []
    bound = SimpleNamespace(listen=lambda _: order.append("listens"), getsockname=lambda: ("127.0.0.1", 1))
    monkeypatch.setattr(launch, "check_model", lambda _: None)
    monkeypatch.setattr(launch, "check_access", lambda _: None)
    monkeypatch.setattr(launch, "bind", lambda *_, **__: nullcontext(bound))
    monkeypatch.setattr(launch, "build_app", lambda *_: order.append("loaded"))
    monkeypatch.setattr(launch, "take_short_turns", lambda: order.append("short turns"))
    monkeypatch.setattr(launch, "ExitDeadline", lambda _: SimpleNamespace(start=lambda: None))
    monkeypatch.setattr(launch, "http_server", lambda *_: SimpleNamespace(run=lambda sockets: None, exit_code=0))
    assert launch.serve(Settings(port=0, grace_seconds=1)) == 0
    assert order == ["loaded", "short turns", "listens"]
