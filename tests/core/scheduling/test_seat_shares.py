"""Shares of the seats: who begins though every seat is taken, and who sits out for it."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chorus.core.requests.request import Request
from chorus.core.requests.sampling_params import SamplingParams
from chorus.core.scheduling.running import Running
from chorus.core.scheduling.seat_shares import SeatShares

from .test_scheduling import HeldReads, House


def flooded(**config):
    """A house in which every seat is taken by one tenant, with more of its requests behind them."""
    house = House(**config)
    for index in range(8):
        house.add(f"many {index}", prompt=[5] * 4, max_tokens=30, tenant="many")
    for _ in range(3):
        house.step()
    return house


def rows(house):
    return [name for name, _ in house.plans[-1]]


class TestNewcomer:
    def test_begins_at_once_beside_a_tenant_that_has_every_seat(self):
        house = flooded()
        house.add("new", tenant="few")
        house.step()
        assert sorted(rows(house)) == ["many 0", "many 1", "many 2", "new"], "the newest sits out"
        house.step()
        house.step()
        assert house.expected["new"].reason is not None
        house.step()
        assert sorted(rows(house)) == [f"many {index}" for index in range(4)]
        house.drain()
        assert house.computed == 8 * 33 + 5, "nothing is computed twice"
        assert house.engine.stats().num_preemptions == 0

    def test_begins_though_decode_rows_take_all_tokens_of_a_step(self):
        house = flooded(max_num_batched_tokens=4)
        while len(house.engine.scheduler.running) < 4:
            house.step()
        house.add("new", tenant="few")
        house.step()
        assert "new" in rows(house)
        house.drain()

    def test_begins_beside_a_prompt_that_takes_all_tokens_of_a_step(self):
        house = House(max_num_batched_tokens=8, max_num_seqs=2)
        for index in range(2):
            house.add(f"long {index}", prompt=[5] * 36, tenant="many")
        while len(house.engine.scheduler.running) < 2:
            house.step()
        house.add("new", tenant="few")
        house.step()
        assert "new" in rows(house)
        house.drain()

    def test_whose_adapter_is_not_here_takes_nobodys_row(self):
        reads = HeldReads()
        house = flooded(reads=reads, adapters=["cold"], max_load_stall_seconds=0)
        house.add("new", "cold", tenant="few")
        house.step()
        assert sorted(rows(house)) == [f"many {index}" for index in range(4)]
        reads.finish()
        for _ in range(2):
            house.step()
        assert "new" in rows(house)
        house.drain()

    def test_gets_as_many_rows_as_anybody_and_no_more(self):
        house = flooded()
        for tenant, index in itertools.product(("a", "b"), range(3)):
            house.add(f"{tenant} {index}", max_tokens=30, tenant=tenant)
        tenants = Counter()
        for _ in range(4):
            house.step()
            tenants = Counter(name.split()[0] for name in rows(house))
            assert sum(tenants.values()) == 4
            assert max(tenants.values()) == 2
        assert tenants.keys() == {"many", "a", "b"}
        house.drain()

    def test_of_more_weight_gets_more_rows(self):
        house = flooded(weights={"heavy": 3.0})
        for index in range(4):
            house.add(f"heavy {index}", max_tokens=30, tenant="heavy")
        for _ in range(4):
            house.step()
        assert Counter(name.split()[0] for name in rows(house)) == {"heavy": 3, "many": 1}
        house.drain()

    def test_waits_for_an_end_where_each_row_is_another_tenants(self):
        house = House(max_num_seqs=2)
        for tenant in "abc":
            house.add(tenant, max_tokens=9, tenant=tenant)
        for _ in range(9):
            house.step()
            assert sorted(rows(house)) == ["a", "b"]
        house.step()
        assert rows(house) == ["c"]
        house.drain()


class TestRoom:
    def test_who_sits_out_yields_its_pages(self):
        """An arena for the flood and one newcomer: the second one takes the pages of who sits out for the first."""
        house = flooded(num_pages=1 + 4 * 9 + 4)
        for _ in range(20):
            house.step()
        house.add("new", max_tokens=12, tenant="few")
        house.step()
        assert "new" in rows(house)
        house.add("newer", prompt=[7] * 30, max_tokens=9, tenant="fewer")
        for _ in range(3):
            house.step()
        assert "newer" in rows(house)
        assert house.engine.stats().num_preemptions > 0
        house.drain()

    @pytest.mark.parametrize("limit", [{"max_turn_steps": 10}, {"max_turn_seconds": 0.015}])
    def test_who_is_late_for_its_turn_gets_pages_of_who_has_more(self, limit):
        house = House(num_pages=1 + 20, max_num_seqs=8, **limit)
        for index in range(2):
            house.add(f"many {index}", prompt=[5] * 20, max_tokens=16, tenant="many")
        house.step()
        house.add("new", prompt=[6] * 30, max_tokens=9, tenant="few")
        for _ in range(12):
            house.step()
        assert house.engine.stats().num_preemptions == 1
        assert house.expected["new"].output, "it began long before the others' ends"
        house.drain()

    def test_no_more_sit_out_than_there_are_seats(self):
        house = House(max_num_seqs=4)
        for wave in range(6):
            for index in range(4):
                house.add(f"{wave} {index}", max_tokens=37, tenant=f"{wave}")
            for _ in range(3):
                house.step()
                assert len(house.engine.scheduler.running) < 8
        assert len({name.split()[0] for name in rows(house)}) == 4
        house.drain(20_000)


def made(account, index, decodes=True):
    request = Request(f"{account} {index}", [5] * (1 if decodes else 9), SamplingParams())
    request.account = account
    return request


@given(
    st.lists(st.sampled_from("abcd"), min_size=1, max_size=24),
    st.integers(4, 12),
    st.sampled_from([{}, {"a": 3.0, "b": 0.25}]),
)
def test_rows_are_dealt_max_min_fair_and_to_the_oldest(accounts, seats, weights):
    requests = [made(account, index) for index, account in enumerate(accounts)]
    dealt = SeatShares(seats, weights).deal(requests)
    assert len(dealt) == min(seats, len(requests))
    had, have = Counter(accounts), Counter(request.account for request in dealt)
    left = {account: (have[account] - 1) / weights.get(account, 1.0) for account in have}
    assert have.keys() == had.keys(), "each keeps a row"
    for account in had:
        own = [request for request in requests if request.account == account]
        assert [request for request in dealt if request.account == account] == own[: have[account]]
        if have[account] < had[account]:
            assert max(left.values()) <= have[account] / weights.get(account, 1.0)


def test_a_prompt_that_has_begun_is_computed_to_its_end():
    requests = [made("a", 0), made("a", 1), made("a", 2, decodes=False)]
    assert [request.id for request in SeatShares(2, {}).deal(requests)] == ["a 0", "a 2"]


@given(st.lists(st.sampled_from("abcdef"), min_size=4, max_size=4), st.lists(st.sampled_from("abcdef"), max_size=30))
def test_nobody_gives_a_row_and_takes_it_back(holders, comers):
    """Who may begin takes from one who is left with no less; so in the end nobody may."""
    shares, running = SeatShares(4, {}), Running()
    for index, account in enumerate(holders):
        running.append(made(account, index))
    shares.begin_step(running, list(running))
    for index, account in enumerate(comers):
        if len(running) < 7 and shares.may_begin(account, False):
            request = made(account, 10 + index)
            running.append(request)
            shares.take(request)
    assert len(running) <= 4 + 3
    assert len(running.accounts) <= 4
