"""A layer is in its pages once it is read, whatever the layout; and nothing is written after a cancel."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from chorus.memory.host.image import HostImage
from chorus.memory.pages.adapter_layout import AdapterLayout, AdapterPart
from chorus.memory.transfers import host_copies
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


class Held:
    """Stands in for the background thread: runs what was handed to it when it is told to."""

    def __init__(self):
        self.calls = []

    def submit(self, call):
        self.calls.append(call)


def large(monkeypatch, step_bytes):
    """A whole image of four equal layers, of which a step's thread copies so many bytes, and the background."""
    held = Held()
    monkeypatch.setattr(host_copies, "_background", held)
    monkeypatch.setattr(host_copies, "STEP_BYTES", step_bytes)
    case = Case([AdapterPart(2, 1.0, (0, 1, 2, 3), ("q_proj",))], 64)
    case.image.publish(LAYERS)
    return case, held


LAYER_BYTES = 2 * 16 * 4


@pytest.mark.parametrize(("step_bytes", "here"), [(1, 1), (LAYER_BYTES, 1), (3 * LAYER_BYTES, 3), (4 * LAYER_BYTES, 4)])
def test_a_step_copies_only_so_many_bytes_of_a_large_adapter(monkeypatch, step_bytes, here):
    case, held = large(monkeypatch, step_bytes)
    copy = case.start()
    assert copy.arrived.num_ready == here
    assert [all(case.placed(layer)) for layer in range(LAYERS)] == [layer < here for layer in range(LAYERS)]
    assert copy.is_done() == (not held.calls) == (here == LAYERS)
    for call in held.calls:
        call()
    assert copy.is_done()
    assert copy.is_quiet()
    assert all(all(case.placed(layer)) for layer in range(LAYERS))


def test_a_cancelled_copy_does_not_go_on_in_the_background(monkeypatch):
    case, held = large(monkeypatch, LAYER_BYTES)
    copy = case.start()
    copy.cancel()
    case.arena.fill_(5)
    for call in held.calls:
        call()
    assert (case.arena == 5).all()
    assert copy.is_quiet()
    assert not copy.is_done()


def test_a_layer_that_has_been_read_is_waited_for(monkeypatch):
    """A step's patience is for reads: a copy is never so slow that the step should be lost."""
    case, held = large(monkeypatch, LAYER_BYTES)
    copy = case.start()
    threading.Timer(0.05, held.calls[0]).start()
    assert copy.wait_layer(3, 0.0)
    unread = Case([AdapterPart(2, 1.0, (0, 1, 2, 3), ("q_proj",))], 64)
    unread.image.publish(1)
    assert not unread.start().wait_layer(3, 0.0)


def test_the_background_copies_the_rest(monkeypatch):
    case = Case([AdapterPart(2, 1.0, (0, 1, 2, 3), ("q_proj",))], 64)
    monkeypatch.setattr(host_copies, "STEP_BYTES", LAYER_BYTES)
    case.image.publish(LAYERS)
    copy = case.start()
    assert all(copy.wait_layer(layer, 10) for layer in range(LAYERS))
    assert all(all(case.placed(layer)) for layer in range(LAYERS))


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
