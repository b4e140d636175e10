"""One budget for all that is in host memory: who gives way to whom, and that nothing is dropped in vain."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from chorus.memory.host.budget import HostBudget


class HealthChecker:
    """Keeps things of some bytes, the first of which may be dropped."""

    def __init__(self, budget, *sizes, fixed=0):
        self.sizes = list(sizes)
        self.fixed = fixed
        budget.join(self)

    @property
    def num_bytes(self):
        return sum(self.sizes) + self.fixed

    def can_spare(self, num_bytes):
        return sum(self.sizes) >= num_bytes

    def spare(self, num_bytes):
        left = self.num_bytes - num_bytes
        while self.sizes and self.num_bytes > left:
            self.sizes.pop(0)


def test_the_first_gives_way_first():
    budget = HostBudget(100)
    first, second = HealthChecker(budget, 30, 10), HealthChecker(budget, 60)
    budget.make_room(0)
    assert (first.sizes, second.sizes) == ([30, 10], [60])
    budget.make_room(20)
    assert (first.sizes, second.sizes) == ([10], [60])
    budget.make_room(50)
    assert (first.sizes, second.sizes) == ([], [])


def test_what_may_not_be_dropped_stays():
    budget = HostBudget(100)
    health_checker = HealthChecker(budget, 10, fixed=95)
    budget.make_room(50)
    assert (health_checker.num_bytes, budget.excess(50)) == (95, 45)


sizes = st.lists(st.integers(1, 20), max_size=6)


@given(sizes, sizes, st.integers(0, 50), st.integers(0, 120), st.integers(0, 150))
def test_a_claim_takes_from_others_or_nothing_at_all(mine, others, fixed, wanted, capacity):
    budget = HostBudget(capacity)
    other, health_checker = HealthChecker(budget, *others, fixed=fixed), HealthChecker(budget, *mine)
    granted = budget.claim(wanted, health_checker)
    assert health_checker.sizes == mine
    assert granted == (sum(mine) + fixed + wanted <= capacity)
    if granted:
        assert budget.num_bytes + wanted <= capacity
    else:
        assert other.sizes == others
