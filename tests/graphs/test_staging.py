"""Pinned blocks are not written while they are copied, and nothing is read before it is there."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from chorus.graphs.device import DeviceUpload, Download

from .late_device import LateDevice


@given(st.lists(st.lists(st.integers(-9, 9), max_size=6), max_size=8))
def test_uploads_follow_each_other(sequence):
    device = LateDevice()
    upload, target = DeviceUpload(device, 6 * 8), torch.zeros(6, dtype=torch.long)
    for values in sequence:
        source = torch.tensor(values, dtype=torch.long)
        upload(target[: len(values)], source)
        source.fill_(99)
        assert target[: len(values)].tolist() == values
    device.synchronize()


def test_two_uploads_are_under_way_at_once():
    device = LateDevice()
    upload, targets = DeviceUpload(device, 8), [torch.zeros(1, dtype=torch.long) for _ in range(3)]
    for index, target in enumerate(targets):
        upload(target, torch.tensor([index]))
    assert device.num_copies - device.num_ended == 2
    assert [target.item() for target in targets] == [0, 1, 2]


def test_the_late_device_notices_a_block_that_is_written_too_early():
    device = LateDevice()
    block, event = device.pinned(8), device.event()
    device.copy(torch.zeros(8, dtype=torch.uint8), block.zero_())
    event.record()
    block.fill_(1)
    with pytest.raises(AssertionError, match="while it was being copied"):
        event.synchronize()


def test_downloads_wait_for_their_values():
    download = Download(LateDevice(), 3 * 8)
    assert download(torch.tensor([[1], [2], [3]]))().tolist() == [[1], [2], [3]]
    assert download(torch.tensor([4.5]))().tolist() == [4.5]


def test_the_next_download_may_begin_before_one_is_waited_for():
    device = LateDevice()
    download = Download(device, 8)
    first, second = download(torch.tensor([1])), download(torch.tensor([2]))
    assert first().tolist() == [1]
    assert device.num_ended == 1
    third = download(torch.tensor([3]))
    assert (second().tolist(), third().tolist()) == ([2], [3])


@pytest.mark.parametrize("kind", [DeviceUpload, Download])
def test_more_than_a_block_is_refused(kind):
    transfer = kind(LateDevice(), 8)
    values = torch.zeros(2, dtype=torch.long)
    with pytest.raises(ValueError, match="a copy of 16 bytes does not fit in a block of 8"):
        transfer(values, values) if kind is DeviceUpload else transfer(values)
