"""How a real cluster and its simulation are judged."""

from __future__ import annotations

import pytest

from chorus.perf.simulate.agreement.__main__ import judged_orders, judged_times, order, quiet_rounds, sign


def rounds(real, simulated=None, *, foreign=0.0, changed=0):
    """Mean latencies of a policy, in seconds, by round; first tokens take half of them."""
    return [
        {
            "real": {"ttft": a / 2, "e2e": a},
            "simulated": {"ttft": b / 2, "e2e": b},
            "moved": 1,
            "simulated_moved": 2,
            "full_speed": {"ttft": b / 2, "e2e": b},
            "requests": 5,
            "changed": changed,
            "foreign": foreign,
            "speed": 0.99,
        }
        for a, b in zip(real, simulated or real, strict=True)
    ]


def wrong(found):
    (goal,) = judged_orders(found)
    return goal.value


def test_two_policies_are_equal_where_the_interval_holds_no_difference():
    found = {"a": rounds([1.0, 2.0, 3.0]), "b": rounds([1.1, 2.2, 3.3]), "c": rounds([1.1, 1.9, 3.2])}
    signs = {(one, other): sign(real) for one, other, real, _ in order(found)}
    assert signs == {("a", "b"): 1, ("a", "c"): 0, ("b", "c"): 0}


@pytest.mark.parametrize(
    ("real", "simulated", "value"),
    [
        ([1.2, 2.4, 3.6], [1.1, 2.2, 3.3], 0),  # both have b slower
        ([1.2, 2.4, 3.6], [0.9, 1.8, 2.7], 1),  # the other way round
        ([1.2, 2.4, 3.6], [1.1, 1.9, 3.1], 1),  # the simulator does not tell them apart
        ([1.2, 1.9, 3.1], [1.1, 2.2, 3.3], 0),  # the cluster does not
        ([1.02, 2.04, 3.06], [0.9, 1.8, 2.7], 0),  # by less than 5 %
    ],
)
def test_an_order_is_wrong_where_the_cluster_has_one_and_the_simulator_has_not(real, simulated, value):
    assert wrong({"a": rounds([1.0, 2.0, 3.0]), "b": rounds(real, simulated)}) == value


def test_one_round_tells_no_order():
    assert wrong({"a": rounds([1.0]), "b": rounds([2.0], [0.5])}) == 0


def test_times_are_off_by_the_median_of_the_rounds():
    goals = {goal.name: goal for goal in judged_times({"a": rounds([1.0, 1.0, 1.0], [1.1, 1.2, 3.0], changed=2)})}
    assert goals["a: TTFT off by"].value == goals["a: latency off by"].value == pytest.approx(0.2)
    assert goals["a: answers changed"].value == 6 and not goals["a: answers changed"].met


def test_disturbed_rounds_are_left_out_unless_they_are_half_of_them(capsys):
    calm, loud = rounds([1.0]), rounds([9.0], foreign=0.5)
    found, is_quiet = quiet_rounds({"a": [*calm, *loud, *calm], "b": [*calm, *calm, *calm]})
    assert is_quiet and found == {"a": [*calm, *calm], "b": [*calm, *calm]}
    every = {"a": [*calm, *loud], "b": [*calm, *calm]}
    assert quiet_rounds(every) == (every, False)
    assert "1 of 2 rounds were quiet" in capsys.readouterr().out
