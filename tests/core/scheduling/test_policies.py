"""Virtual token counters."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from chorus.core.requests.request import Request
from chorus.core.requests.request_params import RequestParams
from chorus.core.scheduling.service import OUTPUT_COST, TokenCounters


def request(tenant, prompt=10):
    made = Request("x", [5] * prompt, RequestParams())
    made.fairness_key = tenant
    return made


def serve(policy, tenant, prompt=10, length=10, actual=None):
    """Charge a request for its expected tokens, and once it has ended for the actual ones."""
    made = request(tenant, prompt)
    policy.charge(made, length)
    if actual is not None:
        made.num_computed_tokens = actual
        policy.settle(made)
    return made


def first(policy, *tenants):
    return min(tenants, key=policy.standing)


def test_a_generated_token_costs_more_than_a_prompt_token():
    policy = TokenCounters()
    serve(policy, "reads", prompt=100, length=100)
    serve(policy, "writes", prompt=10, length=60)
    assert policy.counters == {"reads": 100, "writes": 10 + OUTPUT_COST * 50}


def test_who_comes_anew_is_next_but_has_saved_nothing_up():
    policy = TokenCounters()
    for _ in range(5):
        serve(policy, "many", prompt=100, length=100)
    policy.arrive("new", (), None)
    assert first(policy, "many", "new") == "new"
    serve(policy, "new", prompt=150, length=150)
    assert first(policy, "many", "new") == "many", "it has no claim to the time before it came"


def test_who_comes_anew_is_lifted_to_the_least_of_those_that_wait():
    policy = TokenCounters()
    for tenant, cost in (("a", 500), ("b", 300), ("c", 100)):
        policy.arrive(tenant, (), None)
        serve(policy, tenant, prompt=cost, length=cost)
    policy.arrive("new", ("a", "b"), policy.standing("b"))
    assert policy.standing("new") == policy.standing("b")
    policy.arrive("c", ("a", "b"), policy.standing("b"))
    assert policy.standing("c") == policy.standing("b"), "it had left, and comes back"
    policy.arrive("a", ("b",), policy.standing("b"))
    assert policy.standing("a") > policy.standing("b"), "nobody is let off"


def test_what_was_charged_and_not_done_is_given_back():
    policy = TokenCounters()
    one = serve(policy, "one", prompt=50, length=100)
    serve(policy, "other", prompt=60, length=60)
    assert first(policy, "one", "other") == "other"
    one.num_computed_tokens = 20
    policy.settle(one)
    assert policy.counters == {"one": 20, "other": 60}


def test_nobody_pays_twice_for_a_preemption_or_at_all_for_cached_tokens():
    policy = TokenCounters()
    made = serve(policy, "one", prompt=50, length=80, actual=70)
    paid = 50 + OUTPUT_COST * 20
    assert policy.counters["one"] == paid
    made.num_computed_tokens = 0
    policy.charge(made, 80)
    assert policy.counters["one"] == paid + OUTPUT_COST * 10
    made.num_computed_tokens = 30
    policy.settle(made)
    assert policy.counters["one"] == paid, "preempted again before it got as far as before"
    cached = request("cached", 50)
    cached.began_at = 48
    policy.charge(cached, 50)
    assert policy.counters["cached"] - policy.counters["one"] <= 2


def test_weights_are_shares():
    policy, served = TokenCounters({"double": 2.0, "half": 0.5}), {"double": 0, "half": 0, "plain": 0}
    for tenant in served:
        policy.arrive(tenant, (), None)
    for _ in range(700):
        tenant = first(policy, *served)
        served[tenant] += 1
        serve(policy, tenant)
    assert served == {"double": 400, "plain": 200, "half": 100}


@settings(max_examples=50)
@given(st.integers(0, 1 << 30))
def test_two_that_always_wait_get_the_same_within_what_they_have_running(seed):
    """The bound of VTC, with lengths that are guessed wrongly: each has up to `slots` requests under way."""
    draw, policy = random.Random(seed), TokenCounters()
    tenants, most, slots = ("a", "b", "c"), 200, draw.randint(1, 6)
    for tenant in tenants:
        policy.arrive(tenant, (), None)
    served, running = dict.fromkeys(tenants, 0.0), []
    for _ in range(400):
        if len(running) < slots:
            tenant = first(policy, *tenants)
            made = request(tenant, draw.randint(1, most // 2))
            made_end = made.num_prompt_tokens + draw.randint(0, most // 2)
            policy.charge(made, draw.randint(1, most))
            running.append((made, made_end))
        else:
            made, made_end = running.pop(draw.randrange(len(running)))
            made.num_computed_tokens = made_end
            policy.settle(made)
            outputs = made_end - made.num_prompt_tokens
            served[made.fairness_key] += made.num_prompt_tokens + OUTPUT_COST * outputs
        assert max(served.values()) - min(served.values()) <= (2 * slots + 1) * OUTPUT_COST * most


def test_counters_of_tenants_that_were_not_served_for_long_are_forgotten():
    policy = TokenCounters()
    for index in range(20_000):
        policy.arrive(str(index), (), None)
        serve(policy, str(index))
    assert len(policy.counters) < 5000
    assert "19999" in policy.counters


def test_the_counter_of_an_tenant_that_waits_is_never_forgotten():
    policy = TokenCounters()
    serve(policy, "waits", prompt=700, length=700)
    for index in range(20_000):
        policy.arrive(str(index), ("waits",), policy.standing("waits"))
        serve(policy, str(index))
    assert policy.standing("waits") == 700
    assert len(policy.counters) < 5000
