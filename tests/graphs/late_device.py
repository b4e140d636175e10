"""A device on the CPU whose copies take as long as a GPU's may."""

from __future__ import annotations

from typing import Any

import torch

from .host_device import HostDevice


class LateDevice(HostDevice):
    """Copies end when an event recorded after them is waited for, and not before.

    Until then, the destination of a copy reads as garbage, and pinned memory that is its source must not change.
    """

    def __init__(self, memory_bytes: int = 1 << 30) -> None:
        super().__init__(memory_bytes)
        self.num_copies = 0
        self.num_captures = 0
        self.num_ended = 0
        self._pinned: set[int] = set()
        self._in_flight: list[tuple[torch.Tensor, torch.Tensor, bool]] = []  # pinned, values, to the device

    def pinned(self, num_bytes):
        block = super().pinned(num_bytes)
        self._pinned.add(block.untyped_storage().data_ptr())
        return block

    def event(self) -> Any:
        return _Event(self)

    def copy(self, target, source):
        assert target.is_contiguous()
        assert source.is_contiguous(), "a copy of anything else would not run beside the host"
        assert target.shape == source.shape
        assert target.dtype is source.dtype
        fetched, sent = (tensor.untyped_storage().data_ptr() in self._pinned for tensor in (target, source))
        assert fetched != sent, "one side is pinned"
        self.num_copies += 1
        if sent:
            self._in_flight.append((source, source.clone(), True))
            target.copy_(source)
        else:
            self._in_flight.append((target, source.clone(), False))
            target.view(torch.uint8).fill_(0xA5)

    def capture(self, work):
        self.num_captures += 1
        return super().capture(work)

    def is_done(self):
        return self.num_ended == self.num_copies

    def synchronize(self):
        self.end(self.num_copies)

    def end(self, count):
        """Let the first `count` copies end."""
        while self.num_ended < count:
            pinned, values, to_device = self._in_flight.pop(0)
            self.num_ended += 1
            if to_device:
                same = torch.equal(pinned.view(torch.uint8), values.view(torch.uint8))
                assert same, "pinned memory was written while it was being copied"
            else:
                with torch.inference_mode():  # as where the copy began
                    pinned.copy_(values)


class _Event:
    def __init__(self, device):
        self._device = device
        self._count = 0

    def record(self):
        self._count = self._device.num_copies

    def synchronize(self):
        self._device.end(self._count)
