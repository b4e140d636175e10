"""Uploads of a step's values from the host to the device."""

from __future__ import annotations

import torch


def on_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a host tensor to the device, in stream order, without the host waiting, as it may for other ways.

    The values go through torch's page-locked memory; torch knows when they have been read.
    """
    if device.type == "cpu":
        return values
    # torch copies a tensor with gaps through memory that is not page-locked, and waits
    return values.contiguous().pin_memory().to(device, non_blocking=True)
