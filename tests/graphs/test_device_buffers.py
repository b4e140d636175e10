"""Decode inputs on a device are those of the host's buffers, whichever bucket was filled before."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from chorus.graphs.buffers import DecodeBuffers, DeviceDecodeBuffers, StaticColumns

from .late_device import LateDevice
from .test_buffers import BLOCK, DUMMY, MAX_PAGES, SIZES, fill, steps

COLUMNS = ("token_ids", "positions", "page", "offset")


def make():
    device = LateDevice()
    return device, DeviceDecodeBuffers(SIZES, MAX_PAGES, BLOCK, DUMMY, device)


@given(st.lists(steps(), min_size=1, max_size=6))
def test_views_equal_the_hosts(sequence):
    device, buffers = make()
    host = DecodeBuffers(SIZES, MAX_PAGES, BLOCK, DUMMY)
    for bucket, rows in sequence:
        views, want = fill(buffers, bucket, rows), fill(host, bucket, rows)
        assert views is buffers.views[bucket]
        for name in (*COLUMNS, "page_table"):
            assert torch.equal(getattr(views, name), getattr(want, name))
        assert views.kv_lens == want.kv_lens
    assert device.num_copies == len(sequence), "one copy a step"
    device.synchronize()


def test_views_never_move():
    _, buffers = make()
    places = [getattr(view, name).data_ptr() for view in buffers.views.values() for name in COLUMNS]
    for bucket in SIZES:
        fill(buffers, bucket, [(7, 3, [1, 2])])
    assert places == [getattr(view, name).data_ptr() for view in buffers.views.values() for name in COLUMNS]


def test_columns_begin_on_16_bytes():
    sizes = (1, 2, 3, 7)
    buffers = DeviceDecodeBuffers(sizes, MAX_PAGES, BLOCK, DUMMY, LateDevice())
    for size in sizes:
        views = buffers.fill(size, [5] * size, [1] * size, [[3]] * size)
        for name, value in zip(COLUMNS, (5, 1, 3, 1), strict=True):
            column = getattr(views, name)
            assert column.flatten().tolist() == [value] * size
            assert column.data_ptr() % 16 == 0


def test_padding_alone_is_a_step_too():
    _, buffers = make()
    views = buffers.fill(4, [], [], [])
    assert views.page.tolist() == [[DUMMY] * 4]
    assert views.kv_lens == [1] * 4


def test_static_columns_are_written_in_one_copy_and_padded():
    device = LateDevice()
    columns = StaticColumns(3, 7, device)
    for tokens, written in ((7, [[1] * 7, [2] * 3, [3] * 5]), (3, [[4, 5, 6], [7]])):
        copies = device.num_copies
        view = columns.write([torch.tensor(each) for each in written], tokens)
        device.synchronize()
        assert device.num_copies == copies + 1
        assert view.tolist() == [each + [0] * (view.shape[1] - len(each)) for each in written]
        assert view.data_ptr() == columns.values.data_ptr() == columns.view(*view.shape).data_ptr()
        assert all(column.data_ptr() % 16 == view.data_ptr() % 16 for column in view)
