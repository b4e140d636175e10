"""One budget and one order for all that is in host memory: what is dropped first, and nothing in vain."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from chorus.memory.host.budget import HostBudget


class Lodger:
    """Keeps items of some bytes, all of them offered. fixed: bytes that can't be dropped."""

    def __init__(self, budget, sizes=(), *, fixed=0, costs=None, wanted=False):
        self.sizes = {f"{id(self)}-{index}": size for index, size in enumerate(sizes)}
        self.fixed = fixed
        self.held = set()
        self.dropped = []
        budget.join(self)
        for index, (item, size) in enumerate(self.sizes.items()):
            budget.offer(self, item, size, size if costs is None else costs[index], 1, wanted=wanted)

    @property
    def items(self):
        return list(self.sizes)

    @property
    def num_bytes(self):
        return sum(self.sizes.values()) + self.fixed

    def is_loose(self, item):
        return item not in self.held

    def drop(self, item):
        self.dropped.append(self.sizes.pop(item))


def test_of_several_lodgers_the_cheapest_loss_goes_first():
    budget = HostBudget(100)
    first = Lodger(budget, [30, 10], costs=[90, 10])
    second = Lodger(budget, [20, 40], costs=[40, 200])
    budget.make_room(0)
    assert (first.dropped, second.dropped) == ([], [])
    budget.make_room(5)  # a second per byte, two, three, five
    assert (first.dropped, second.dropped) == ([10], [])
    budget.make_room(40)
    assert (first.dropped, second.dropped) == ([10, 30], [20])


def test_what_is_used_often_stays_longer_than_what_costs_as_much():
    budget = HostBudget(40)
    lodger = Lodger(budget, [20, 20])
    popular, _ = lodger.items
    budget.offer(lodger, popular, 20, 20, 3)
    budget.make_room(10)
    assert lodger.items == [popular]


def test_the_least_recently_offered_goes_first_in_lru_order():
    budget = HostBudget(40, lru=True)
    lodger = Lodger(budget, [20, 20], costs=[1000, 1])
    budget.make_room(10)
    assert lodger.dropped == [20]
    assert len(lodger.items) == 1


def test_what_may_not_be_dropped_stays_and_keeps_its_place():
    budget = HostBudget(100)
    lodger = Lodger(budget, [10, 20], fixed=70, costs=[10, 40])
    lodger.held = {lodger.items[0]}
    budget.make_room(10)
    assert lodger.dropped == [20]
    lodger.held = set()
    budget.make_room(25)
    assert lodger.dropped == [20, 10]
    budget.make_room(50)
    assert budget.excess(50) == 20


def test_what_waiting_requests_need_goes_last_and_for_no_claim():
    budget = HostBudget(100)
    wanted = Lodger(budget, [50], costs=[0.001], wanted=True)
    other = Lodger(budget, [50], costs=[1000])
    assert not budget.claim(60)
    assert (wanted.dropped, other.dropped) == ([], [])
    assert budget.claim(50)
    assert (wanted.dropped, other.dropped) == ([], [50])
    budget.make_room(60)
    assert wanted.dropped == [50]


def test_a_new_item_displaces_only_what_comes_before_it_in_the_order():
    budget = HostBudget(100)
    cheap, dear = Lodger(budget, [50], costs=[50]), Lodger(budget, [50], costs=[500])
    new = Lodger(budget)
    assert not budget.admit(new, "poor", 30, 3, 1)
    assert (cheap.dropped, dear.dropped) == ([], [])
    assert budget.admit(new, "new", 30, 60, 1)
    assert (cheap.dropped, dear.dropped) == ([50], [])
    assert not budget.admit(new, "large", 101, 1e9, 1), "it never fits"
    assert dear.dropped == []


class Chain(Lodger):
    """Offers its last item alone: one may be dropped once those after it have been."""

    def __init__(self, budget, sizes, *, held=0):
        """held: the first items, which can't be dropped."""
        super().__init__(budget)
        self.budget, self.kept = budget, held
        self.sizes = {f"{id(self)}-{index}": size for index, size in enumerate(sizes)}
        budget.join(self, lambda: sum([*self.sizes.values()][self.kept : -1]))
        self.offer()

    def offer(self):
        for item in self.items[self.kept :][-1:]:
            self.budget.offer(self, item, self.sizes[item], 1, 1)

    def drop(self, item):
        super().drop(item)
        self.offer()


def test_a_claim_counts_what_can_be_dropped_after_other_items():
    """Else a long prompt finds no room among many prompts' blocks, each of which offers its last one."""
    budget = HostBudget(100)
    chain = Chain(budget, [10, 20, 30, 40], held=1)
    assert not budget.claim(95) and chain.dropped == []
    assert budget.claim(70) and chain.dropped == [40, 30]
    assert budget.claim(90) and chain.dropped == [40, 30, 20]


sizes = st.lists(st.integers(1, 20), max_size=6)


@given(sizes, sizes, st.integers(0, 50), st.integers(0, 120), st.integers(0, 150))
def test_a_claim_takes_what_is_not_wanted_or_nothing_at_all(mine, others, fixed, wanted, capacity):
    budget = HostBudget(capacity)
    other, lodger = Lodger(budget, others, fixed=fixed), Lodger(budget, mine, wanted=True)
    granted = budget.claim(wanted)
    assert lodger.dropped == []
    assert granted == (sum(mine) + fixed + wanted <= capacity)
    if granted:
        assert budget.num_bytes + wanted <= capacity
    else:
        assert other.dropped == []


@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 100), st.integers(1, 4), st.booleans()), max_size=12),
    st.integers(0, 150),
    st.integers(0, 200),
)
def test_the_order_is_of_cost_and_uses_per_byte_over_all_lodgers(offers, capacity, wanted):
    """What is kept is worth no less, per byte, than anything that was dropped."""
    budget = HostBudget(capacity)
    lodgers = [Lodger(budget), Lodger(budget)]
    worth = {}
    for index, (size, cost, uses, which) in enumerate(offers):
        lodgers[which].sizes[index] = size
        worth[index] = uses * cost / size
        budget.offer(lodgers[which], index, size, cost, uses)
    budget.make_room(wanted)
    kept = {item for lodger in lodgers for item in lodger.items}
    gone = worth.keys() - kept
    assert all(worth[lost] <= worth[item] for lost in gone for item in kept)
    assert budget.excess(wanted) <= 0 or not kept
