"""What models and tenants use: sums, series and who sees them."""

from __future__ import annotations

import math
from collections import defaultdict

import pytest
from prometheus_client.parser import text_string_to_metric_families

from chorus.server.engine import usage
from chorus.server.engine.request_metrics import Ended
from chorus.server.engine.top_names import OTHER
from chorus.server.engine.usage import CACHED, GENERATED, PAGE_SECONDS, PROMPT, QUEUE, TPOT, TTFT, Usage
from tests.server.conftest import FakeEngine

ENDED = Ended(3.0, 1.0, 1.5, 2.5, 5, 2, 3, 16, page_seconds=8.0)


def ask(account, model, tenant, tokens=3, reason="stop", one=ENDED):
    spent = account.accepted(model, tenant, 1, 5)
    account.began(spent, 1.5)
    account.generated(spent, tokens)
    account.ended(spent, model, reason, one)


def test_a_request_is_counted_for_its_model_and_its_tenant():
    account = Usage()
    ask(account, "alice", "acme")
    ask(account, "alice", "beta", reason="error")
    ask(account, "base", "acme", tokens=7)
    models, tenants = account.by_model(), account.by_tenant()
    assert {name: row[GENERATED] for name, row in models.items()} == {"alice": 6, "base": 7}
    assert {name: row[GENERATED] for name, row in tenants.items()} == {"acme": 10, "beta": 3}
    alice = models["alice"]
    assert (alice[PROMPT], alice[CACHED], alice[PAGE_SECONDS]) == (10, 4, 16)
    assert (usage.num_requests(alice), usage.num_errors(alice)) == (2, 1)
    assert [times.mean(alice) for times in (QUEUE, TTFT, TPOT)] == [1.0, 1.5, 0.5]
    assert sum(models.values()).tolist() == sum(tenants.values()).tolist()


def test_the_prompt_of_several_choices_counts_once():
    account = Usage()
    spent = account.accepted("alice", "acme", 2, 5)
    for is_first in (True, False):
        one = Ended(3.0, 1.0, 1.5, 2.5, 5, 2, 3, 16, is_first_choice=is_first)
        account.ended(spent, "alice", "stop", one)
    assert (row := account.by_model()["alice"])[PROMPT] == 5 and row[CACHED] == 2


def test_a_model_that_is_gone_is_counted_as_other_when_its_last_request_has_ended():
    account = Usage()
    spent = account.accepted("alice", "acme", 1, 5)
    account.forget_all_but(["base"])
    account.generated(spent, 3)
    assert account.by_model()["alice"][GENERATED] == 3
    account.ended(spent, "alice", "abort", ENDED)
    account.forget_all_but(["base"])
    assert account.by_model()[OTHER][GENERATED] == 3 and "alice" not in account.by_model()
    assert account.by_tenant()["acme"][GENERATED] == 3


def test_the_number_of_rows_is_bounded_and_models_are_told_apart_the_longest(monkeypatch):
    monkeypatch.setattr(usage, "MAX_ROWS", 4)
    account = Usage()
    for index in range(20):
        ask(account, "alice" if index % 2 else "bob", f"tenant-{index}")
    assert {name: row[PROMPT] for name, row in account.by_model().items()} == {"alice": 50, "bob": 50}
    assert len(account.by_tenant()) == 5 and account.by_tenant()[OTHER][PROMPT] == 16 * 5
    for index in range(20):
        ask(account, f"adapter-{index}", "acme")
    assert len(account.by_model()) <= 8 + 1


def series(text):
    """Values by name of a sample, and by its labels."""
    found = defaultdict(dict)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name][tuple(sorted(sample.labels.items()))] = sample.value
    return found


NAMES = [f"adapter-{index}" for index in range(12)]


def test_the_series_of_models_and_of_tenants_add_up_to_what_clients_were_told(start):
    engine = FakeEngine(NAMES)
    engine.num_cached_tokens = 2
    live = start(engine, settings={"metric_series": 3, "tenant_header": "x-tenant"})
    told, cached, requests = defaultdict(lambda: defaultdict(int)), 0, 0
    for index in range(40):
        name, tenant = ["base", *NAMES][index * index % 13], f"t{index % 7}"
        body = {"model": name, "prompt": "x" * (1 + index % 5), "n": 1 + index % 2}
        answer = live.client.post("/v1/completions", json=body, headers={"x-tenant": tenant}).json()
        used = answer["usage"]
        for who in (name, tenant):
            told[who]["prompt_tokens"] += used["prompt_tokens"]
            told[who]["generated_tokens"] += used["completion_tokens"]
        cached += used["prompt_tokens_details"]["cached_tokens"]
        requests += body["n"]
        if index % 10 == 9:
            live.client.get("/metrics")  # series are chosen, and change their owners
    found = series(live.client.get("/metrics").text)
    for prefix, label, most in (("", "model", 3 + 1), ("tenant_", "tenant", 3)):
        for noun in ("prompt_tokens", "generated_tokens"):
            values = found[f"chorus_{prefix}{noun}_total"]
            assert len(values) <= most + 1 and ((label, OTHER),) in values
            whose = ["base", *NAMES] if label == "model" else [f"t{index}" for index in range(7)]
            assert sum(values.values()) == sum(told[who][noun] for who in whose)
        assert sum(found[f"chorus_{prefix}cached_tokens_total"].values()) == cached > 0
        assert sum(found[f"chorus_{prefix}requests_total"].values()) == requests
        for times in ("time_to_first_token", "time_per_output_token", "queue_time"):
            assert sum(found[f"chorus_{label}_{times}_seconds_count"].values()) == requests
    whole = (("engine", "0"), ("model_name", "base"))
    for ours, theirs in (
        ("chorus_prompt_tokens_total", "vllm:prompt_tokens_total"),
        ("chorus_generated_tokens_total", "vllm:generation_tokens_total"),
        ("chorus_model_time_to_first_token_seconds_sum", "vllm:time_to_first_token_seconds_sum"),
    ):
        assert math.isclose(sum(found[ours].values()), found[theirs][whole]), ours
    assert sum(found["chorus_model_time_to_first_token_seconds_bucket"].values()) == sum(
        found["chorus_time_to_first_token_seconds_bucket"].values()
    )


def test_a_tenant_sees_its_own_use_and_budget_an_admin_all(start, fake_engine, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("sk-acme1 acme tokens_per_minute=20\nsk-beta1 beta\nsk-root1 root admin=yes\n")
    live = start(fake_engine, settings={"api_key_file": keys})

    def get(key):
        return series(live.client.get("/metrics", headers={"authorization": f"Bearer {key}"}).text)

    for key in ("sk-acme1", "sk-beta1"):
        headers = {"authorization": f"Bearer {key}"}
        body = {"model": "alice", "prompt": "abc"}
        assert live.client.post("/v1/completions", json=body, headers=headers).status_code == 200
    tokens = "chorus_tenant_generated_tokens_total"
    assert list(get("sk-acme1")[tokens]) == [(("tenant", "acme"),)]
    assert list(get("sk-beta1")[tokens]) == [(("tenant", "beta"),)]
    assert list(get("sk-root1")[tokens]) == [(("tenant", "acme"),), (("tenant", "beta"),)]
    left = "chorus_tenant_budget_left_tokens"
    ((labels, value),) = get("sk-root1")[left].items()
    assert labels == (("tenant", "acme"),) and 20 - 8 <= value < 20, "one comes back in 3 s"
    assert left not in get("sk-beta1")


@pytest.mark.parametrize("name", ["other", "odd\udcff", "a,b"])
def test_odd_names_have_valid_series(start, name):
    engine = FakeEngine([name])
    live = start(engine)
    account = live.app.state.watchers.metrics
    spent = account.accepted(name, name, 1, 5)
    account.ended(spent, name, "stop", ENDED)
    found = series(live.client.get("/metrics").text)
    assert sum(found["chorus_prompt_tokens_total"].values()) == 5
