"""The runs that are copied, their order and their events."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from chorus.memory.pages.adapter_layout import AdapterLayout
from chorus.memory.transfers.copy_plan import CopyPlan, CopyRun

from ..adapter_layouts import NUM_LAYERS, adapter_layouts

page_sizes = st.integers(4, 60).map(lambda n: 4 * n)


@given(st.data(), page_sizes, st.integers(0, 400))
def test_every_element_goes_where_its_page_is(data, page_elems, group_elems):
    layout = data.draw(adapter_layouts(page_elems))
    pages = data.draw(st.permutations(range(layout.num_pages + 3)))[: layout.num_pages]
    plan = CopyPlan.of_layers(layout, pages, page_elems, group_elems)
    seen = set()
    for group in plan.groups:
        moved = set()
        for run in group.runs:
            for i in range(run.num_elems):
                elem = run.image_elem + i
                assert run.arena_elem + i == pages[elem // page_elems] * page_elems + elem % page_elems
                assert elem not in moved
                moved.add(elem)
        layers = range(group.first_layer, group.last_layer + 1)
        ranges = [run for layer in layers for run in layout.layer_ranges(layer)]
        assert moved == {elem for begin, end in ranges for elem in range(begin, end)}, "a group is its layers"
        assert not seen & moved
        seen |= moved
    assert len(seen) == layout.num_elems


@given(st.data(), page_sizes, st.integers(0, 400))
def test_groups_go_by_layers_and_the_first_is_alone(data, page_elems, group_elems):
    layout = data.draw(adapter_layouts(page_elems))
    plan = CopyPlan.of_layers(layout, range(layout.num_pages), page_elems, group_elems)
    assert plan.groups[0].first_layer == plan.groups[0].last_layer
    assert all(before.last_layer < after.first_layer for before, after in itertools.pairwise(plan.groups))
    assert all(group.num_elems >= group_elems for group in plan.groups[1:-1])
    for group in plan.groups[1:]:
        last = sum(end - begin for begin, end in layout.layer_ranges(group.last_layer))
        assert group.num_elems - last < max(1, group_elems), "the group could have been closed a layer earlier"
    assert len(plan.group_of) == NUM_LAYERS
    for layer, index in enumerate(plan.group_of):
        if not layout.layer_ranges(layer):
            assert index == -1
        else:
            assert plan.groups[index].first_layer <= layer <= plan.groups[index].last_layer


@given(st.data(), page_sizes)
def test_runs_are_cut_only_where_pages_part(data, page_elems):
    layout = data.draw(adapter_layouts(page_elems))
    pages = data.draw(st.permutations(range(layout.num_pages)))
    for group in CopyPlan.of_layers(layout, pages, page_elems, 1 << 30).groups:
        for one, two in itertools.pairwise(group.runs):
            assert (one.image_elem + one.num_elems, one.arena_elem + one.num_elems) != (two.image_elem, two.arena_elem)


def test_consecutive_pages_are_one_copy():
    plan = CopyPlan.of_pages([4, 5, 6, 2, 3, 9], page_elems=10, group_elems=1 << 30)
    assert [group.runs for group in plan.groups] == [
        (CopyRun(0, 40, 10),),
        (CopyRun(10, 50, 20), CopyRun(30, 20, 20), CopyRun(50, 90, 10)),
    ]


def test_an_adapter_that_changes_nothing_has_no_groups():
    plan = CopyPlan.of_layers(AdapterLayout((), num_elems=0, num_pages=0, num_layers=3), [], page_elems=8)
    assert (plan.groups, plan.group_of) == ((), (-1, -1, -1))
