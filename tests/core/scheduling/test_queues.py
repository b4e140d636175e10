"""Running requests by adapter: the same as grouping them anew, whoever comes and goes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from chorus.core.requests.request import Request
from chorus.core.requests.request_params import RequestParams
from chorus.core.scheduling.queues import Running, group_by_adapter


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 30), st.sampled_from([None, "a", "b", "c"])), max_size=60))
def test_groups_are_those_of_the_requests_in_order(changes):
    running = Running()
    for comes, index, adapter in changes:
        if comes:
            request = Request("r", [1], RequestParams())
            request.adapter = adapter
            running.append(request)
        elif running:
            running.remove(running[index % len(running)])
        groups = running.by_adapter()
        assert list(groups.items()) == list(group_by_adapter(running).items())
        assert all(groups.values())
