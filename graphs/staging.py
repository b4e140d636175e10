"""Values on their way between the host and a device, through pinned memory."""

from __future__ import annotations

import torch

from .device import Device


class Upload:
    """Copies host values into device tensors, beside the host.

    Two pinned blocks take turns, each guarded by an event: neither is written again before its copy is done.
    """

    def __init__(self, device: Device, num_bytes: int) -> None:
        """num_bytes: of the largest copy."""
        self._device = device
        self._blocks = [(device.pinned(num_bytes), device.event()) for _ in range(2)]
        self._turn = 0

    def __call__(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """`target.copy_(source)`, in the device's turn; source may change as soon as this returns.

        target: contiguous, of source's shape and dtype. ValueError when source is larger than the blocks.
        """
        block, event = self._blocks[self._turn]
        self._turn = 1 - self._turn
        event.synchronize()
        staged = _part(block, source)
        staged.copy_(source)
        self._device.copy(target, staged)
        event.record()


class Download:
    """Fetches device values; the host sleeps until they are there."""

    def __init__(self, device: Device, num_bytes: int) -> None:
        """num_bytes: of the largest fetch."""
        self._device = device
        self._block = device.pinned(num_bytes)
        self._event = device.event()

    def __call__(self, source: torch.Tensor) -> torch.Tensor:
        """The contiguous source's values, in memory that the next call overwrites."""
        staged = _part(self._block, source)
        self._device.copy(staged, source)
        self._event.record()
        self._event.synchronize()
        return staged


def _part(block: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The beginning of `block` as a tensor like `values`."""
    num_bytes = values.numel() * values.itemsize
    if num_bytes > len(block):
        raise ValueError(f"{num_bytes} bytes are to be copied through a block of {len(block)}")
    return block[:num_bytes].view(values.dtype).view(values.shape)
