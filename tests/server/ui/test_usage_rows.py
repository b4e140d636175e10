"""Rows of the operator's page of what models and tenants have used."""

from __future__ import annotations

import json

import pytest

from chorus.memory.adapters.adapter_costs import REST, AdapterCost
from chorus.server.engine.request_metrics import Ended
from chorus.server.engine.usage import Usage
from chorus.server.ui import usage_rows
from chorus.server.ui.usage_rows import usage_tables


def ask(account, model, tenant):
    spent = account.accepted(model, tenant, 1, 5)
    account.began(spent, 1.5)
    account.generated(spent, 3)
    account.ended(spent, model, "stop", Ended(3.0, 1.0, 1.5, 2.5, 5, 2, 3, 16, page_seconds=8.0))


def test_rows_have_what_the_columns_say():
    account = Usage()
    ask(account, "alice", "acme")
    costs = [
        AdapterCost("alice", 12.0, 0.5, (1, 1)),
        AdapterCost("bob", 3.0, 0.0, (0, 0)),
        AdapterCost(REST, 0, 0, (0, 0)),
    ]
    tables = usage_tables(account, lambda: {"acme": 990.0, "beta": 5.0}, costs)
    assert tables["models"]["alice"] == ("alice", 1, 0, 5, 2, 3, 1.0, 1.5, 0.5, 8.0, 12.0, 0.25)
    assert tables["models"]["bob"] == ("bob", 0, 0, 0, 0, 0, None, None, None, 0.0, 3.0, None)
    assert tables["tenants"] == {"acme": ("acme", 1, 0, 5, 2, 3, 1.0, 1.5, 0.5, 8.0, 990.0)}


def test_tenants_with_most_tokens_have_rows(monkeypatch):
    monkeypatch.setattr(usage_rows, "MAX_TENANTS", 1)
    account = Usage()
    for tenant in ("acme", "beta", "beta"):
        ask(account, "alice", tenant)
    assert list(usage_tables(account, dict, [])["tenants"]) == ["beta"]


@pytest.mark.parametrize("count", [1000])
def test_the_page_gets_all_adapters_and_then_only_changes(start, make_engine, count):
    live = start(make_engine([f"adapter-{index}" for index in range(count)]))
    account = live.app.state.watchers.metrics.usage
    for index in range(count):
        ask(account, f"adapter-{index}", "acme")
    with live.client.stream("GET", "/ui/events") as response:
        found = []
        for line in response.iter_lines():
            if line.startswith("data: "):
                found.append(json.loads(line[6:]))
                if len(found) == 1:
                    ask(account, "adapter-7", "acme")
                if any(row[0] == "adapter-7" and row[1] == 2 for row in found[-1].get("models", ())):
                    break
    assert len(found[0]["models"]) == count and found[0]["tenants"][0][1] == count
    assert [row[0] for row in found[-1]["models"]] == ["adapter-7"]
