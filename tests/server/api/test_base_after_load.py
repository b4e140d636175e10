"""A sign of a trainer that loads adapters and asks the base model."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from chorus.server.access.grants import ALL, Grant
from chorus.server.engine import loaded_names
from chorus.server.engine.base_after_load import BaseAfterLoad
from chorus.server.engine.loaded_names import LoadedNames

COUNT = "chorus_base_requests_after_load_total"


@pytest.fixture
def sign():
    registry = CollectorRegistry()
    return SimpleNamespace(it=BaseAfterLoad(registry), text=lambda: generate_latest(registry).decode())


def test_requests_that_could_use_a_loaded_adapter_are_counted_and_told_of_once_a_minute(sign, caplog):
    sign.it.asked("acme", None)
    assert f"{COUNT} 0.0" in sign.text() and not caplog.text
    for _ in range(3):
        sign.it.asked("acme", "policy@1")
    assert f"{COUNT} 3.0" in sign.text()
    assert caplog.text.count("asks for the base model") == 1 and "policy@1" in caplog.text


def test_the_latest_adapter_is_one_that_the_key_may_use_and_that_is_loaded_still():
    names, own = LoadedNames(), Grant(adapters=("acme/*",))
    assert names.latest(ALL) is names.latest(own) is None
    names.add("acme/a", "1")
    assert names.latest(ALL) == names.latest(own) == "acme/a@1"
    names.add("policy", "step-2")
    names.add("acme/a", "2")
    assert names.latest(ALL) == "acme/a@2"
    assert names.latest(Grant(adapters=("policy@step-2",))) == "policy@step-2", "rights to one version"
    names.discard("acme/a")
    assert names.latest(ALL) == "policy@step-2" and names.latest(own) is None


def test_what_is_remembered_is_bounded(monkeypatch):
    monkeypatch.setattr(loaded_names, "MAX_NAMES", 2)
    monkeypatch.setattr(loaded_names, "MAX_RIGHTS", 2)
    names = LoadedNames()
    for name in "abc":
        names.add(name, "1")
    found = [names.latest(Grant(adapters=(name,))) for name in "abc"]
    assert found == [None, "b@1", "c@1"]
