"""Places of recurrent states in pages, and the slots that a request's steps read and write in turn."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from chorus.memory.pages.states import FLOAT_BYTES, StateLayout, StateShape, StateSlots

sizes = st.integers(1, 40)


@given(st.integers(1, 6), sizes, st.integers(1, 9), sizes, st.integers(1, 200), sizes, st.integers(0, 8))
def test_parts_are_disjoint_and_whole_in_a_page(layers, conv, heads, head, floats, draft, drafts):
    assume(floats >= max(conv, head, draft))
    layout = StateLayout(StateShape(layers, conv, heads, head, draft, drafts), FLOAT_BYTES * floats)
    taken = set()
    for layer in range(layers):
        parts = [(layout.conv(layer), conv), *((layout.head(layer, each), head) for each in range(heads))]
        assert all(page < layout.first_draft_page for (page, _), _ in parts)
        parts += [(layout.draft(layer, each), draft) for each in range(drafts)]
        for (page, first), size in parts:
            own = {(page, at) for at in range(first, first + size)}
            assert page < layout.num_pages
            assert first + size <= floats
            assert not taken & own
            taken |= own


def test_further_states_have_pages_of_their_own():
    further = StateShape(2, 30, 1, 2, draft_elems=31, most_drafts=2)
    layout = StateLayout(StateShape(3, 10, 2, 20, draft_elems=12, most_drafts=2, further=further), FLOAT_BYTES * 40)
    assert layout.further is not None
    own = {
        page for layer in range(3) for page, _ in (layout.conv(layer), layout.head(layer, 1), layout.draft(layer, 1))
    }
    its = layout.further
    beside = {page for layer in range(2) for page, _ in (its.conv(layer), its.head(layer, 0), its.draft(layer, 1))}
    alone = StateLayout(StateShape(3, 10, 2, 20, draft_elems=12, most_drafts=2), FLOAT_BYTES * 40)
    assert max(own) < min(beside) == alone.num_pages
    assert max(beside) == layout.num_pages - 1
    assert layout.shape.page_bytes == 192
    assert layout.shape.of_ranks(2).further == further.of_ranks(2)


def test_qwen3_5_of_9b():
    """24 layers of 32 heads of 128 × 128 float32, in pages of 8 layers of attention."""
    layout = StateLayout(StateShape(24, 3 * 8192, 32, 128 * 128), 16 * 8 * 2 * 4 * 256 * 2)
    assert (layout.heads_per_page, layout.num_conv_pages, layout.num_pages) == (8, 5, 5 + 96)


def test_drafts_take_pages_only_with_speculation_and_less_than_a_state_each():
    shape, page = StateShape(24, 3 * 8192, 32, 128 * 128, draft_elems=8192 + 64), 16 * 8 * 2 * 4 * 256 * 2
    assert StateLayout(shape, page).num_pages == 5 + 96
    assert StateLayout(replace(shape, most_drafts=8), page).num_pages == 5 + 96 + 13


def test_a_page_without_room_for_a_drafts_inputs_is_refused():
    with pytest.raises(ValueError, match="a page has 40 bytes, and a part of a layer's state takes 44"):
        StateLayout(StateShape(1, 10, 1, 10, draft_elems=11, most_drafts=1), 40)
    assert StateLayout(StateShape(1, 10, 1, 10, draft_elems=11), 40).num_pages == 2


def test_the_next_step_takes_accepted_drafts_in():
    slots = StateSlots([[1], [2]])
    slots.advance()
    slots.accepted += 2
    assert (slots.current, slots.accepted) == ([2], 2)
    slots.advance()
    assert (slots.current, slots.accepted) == ([1], 0)


@pytest.mark.parametrize("count", [2, 3])
def test_a_step_never_writes_what_it_reads_or_what_the_one_before_it_reads(count):
    slots = StateSlots([[page] for page in range(count)])
    for step in range(7):
        assert slots.current == slots.read_by(step)
        assert slots.written_by(step) == slots.read_by(step + 1)
        assert len({slots.read_by(step + ahead)[0] for ahead in range(count)}) == count
        assert slots.advance() == []


def test_a_checkpoint_is_read_by_the_next_step_and_then_left():
    slots = StateSlots([[1], [2], [3]])
    slots.advance()
    slots.share([4])
    assert slots.current == [2]
    assert sorted(slots.pages()) == [1, 2, 3, 4]
    assert slots.advance() == [2]
    assert slots.slots == [[1], [4], [3]]
    assert slots.current == [3]


def test_a_request_that_begins_at_a_checkpoint_can_give_it_back_unread():
    slots = StateSlots([[9], [1]], spare=[2])
    assert slots.leave_checkpoint() == [9]
    assert slots.slots == [[2], [1]]
    assert slots.leave_checkpoint() == []
