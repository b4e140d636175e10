"""A sign of a trainer that loads adapters and asks the base model."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from chorus.server.engine.base_after_load import BaseAfterLoad

COUNT = "chorus_base_requests_after_load_total"


@pytest.fixture
def sign():
    registry = CollectorRegistry()
    return SimpleNamespace(it=BaseAfterLoad(registry), text=lambda: generate_latest(registry).decode())


def test_a_tenant_that_has_loaded_an_adapter_is_counted_and_told_of_once_a_minute(sign, caplog):
    sign.it.asked("acme")
    assert f"{COUNT} 0.0" in sign.text() and not caplog.text
    sign.it.loaded("acme", "policy")
    for _ in range(3):
        sign.it.asked("acme")
        sign.it.asked("beta")
    assert f"{COUNT} 3.0" in sign.text()
    assert caplog.text.count("asks for the base model") == 1 and "policy" in caplog.text
