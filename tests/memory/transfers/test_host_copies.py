"""A layer is in its pages once it is read, whatever the layout; and nothing is written after a cancel."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from chorus.memory.host.image import HostImage
from chorus.memory.pages.adapter_layout import AdapterLayout, AdapterPart
from chorus.memory.transfers.host_copies import HostCopies

from ...tables import llama_table

DIMS = {"q_proj": (8, 8), "down_proj": (24, 8)}
LAYERS = 4

parts_of_an_adapter = st.lists(
    st.builds(
        AdapterPart,
        st.integers(1, 5),
        st.just(1.0),
        st.sets(st.integers(0, LAYERS - 1), min_size=1).map(lambda it: tuple(sorted(it))),
        st.sampled_from([("q_proj",), ("q_proj", "down_proj")]),
    ),
    min_size=1,
    max_size=3,
)


class Case:
    def __init__(self, parts, page_elems):
        self.layout = AdapterLayout.build(parts, llama_table(LAYERS, DIMS), page_elems, 4)
        count = self.layout.num_pages
        self.arena = torch.full((2 * count + 1, page_elems), -1.0)
        self.pages = list(range(2 * count, count, -1))  # not in order
        self.image = HostImage()
        self.image.data = torch.arange(count * page_elems, dtype=torch.float32).view(count, page_elems)

    def start(self):
        return HostCopies(self.arena).start(self.image, self.layout, self.pages)

    def placed(self, layer):
        flat = torch.cat([self.arena[page] for page in self.pages])
        return [bool((flat[b:e] == torch.arange(b, e)).all()) for b, e in self.layout.layer_ranges(layer)]


cases = st.builds(Case, parts_of_an_adapter, st.integers(20, 300))


@given(cases, st.integers(0, LAYERS))
def test_layers_arrive_as_they_are_read(case, before):
    if before:
        case.image.publish(before)
    copy = case.start()
    assert copy.arrived.num_ready == before
    for count in range(before, LAYERS + 1):
        if count > before:
            case.image.publish(count)
        for layer in range(LAYERS):
            assert copy.wait_layer(layer, 0) == (layer < count)
            if layer < count:
                assert all(case.placed(layer))
    assert copy.is_done()
    assert (case.arena[: len(case.pages)] == -1).all(), "a page of somebody else was written"


@given(cases, st.integers(1, LAYERS - 1))
def test_nothing_is_written_after_a_cancel(case, before):
    copy = case.start()
    case.image.publish(before)
    copy.cancel()
    case.arena.fill_(5)
    case.image.publish(LAYERS)
    assert (case.arena == 5).all()
    assert copy.is_quiet()
    assert not copy.is_done()


def test_a_failed_read_is_told_to_who_waits():
    case = Case([AdapterPart(2, 1.0, (0, 1, 2, 3), ("q_proj",))], 64)
    copy = case.start()
    case.image.publish(1)
    case.image.fail(OSError("gone"))
    assert copy.has_failed()
    assert not copy.wait_layer(1, 60)


def test_a_finished_copy_lets_the_image_go():
    case = Case([AdapterPart(2, 1.0, (0,), ("q_proj",))], 64)
    copy = case.start()
    case.image.publish(LAYERS)
    case.image.data = None
    case.image.publish(LAYERS)
    assert copy.is_done()


def test_a_copy_that_fails_at_once_follows_no_more():
    case = Case([AdapterPart(2, 1.0, (0,), ("q_proj",))], 64)
    case.image.publish(1)
    case.pages[0] = 10**6
    with pytest.raises(ValueError, match="page 1000000 is not one of"):
        case.start()
    case.image.publish(LAYERS)
