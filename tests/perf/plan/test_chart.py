"""Charts: SVG that can be read, with what it is given in its frame."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chorus.perf.plan.chart import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Chart, log_ticks, ticks


def test_what_is_drawn_lies_in_the_frame_and_names_are_escaped():
    chart = Chart("a < b & c", "ms", "share", (1, 1000), (0, 1), log=True)
    chart.line("<policy>", [(1, 0), (30, 0.5), (5000, 2)])
    chart.band([(1, 0), (10, 0.2)], [(1, 0.1), (10, 0.4)])
    chart.whisker(10, 0.2, 0.4, 0.3, 1)
    chart.limit("SLO", x=100)
    chart.limit("asked", y=0.9)
    root = ElementTree.fromstring(chart.svg())
    for shape in root.iter():
        for pair in shape.get("points", "").split():
            x, y = map(float, pair.split(","))
            assert LEFT <= x <= WIDTH - RIGHT and TOP <= y <= HEIGHT - BOTTOM
    texts = [text.text for text in root.iter("text")]
    assert {"a < b & c", "<policy>", "SLO", "asked", "100"} <= set(texts)


@settings(max_examples=20)
@given(st.floats(0, 1e4), st.floats(1e-3, 1e5))
def test_ticks_are_few_and_round(first, width):
    found = ticks(first, first + width)
    assert 1 <= len(found) <= 8
    assert all(first - 1e-6 * width <= value <= (first + width) * (1 + 1e-6) for value in found)


@pytest.mark.parametrize(
    ("ends", "found"), [((1, 100), [1, 2, 5, 10, 20, 50, 100]), ((0.5, 6e4), [1, 10, 100, 1e3, 1e4])]
)
def test_ticks_of_a_log_axis(ends, found):
    assert log_ticks(*ends) == pytest.approx(found)
