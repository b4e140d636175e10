"""Values of a step on their way from the host to the device."""

from __future__ import annotations

import torch


def on_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A host tensor's values on the device, in its turn: the host does not wait, as it may for other ways to get a list
    there. The page-locked memory that they go through is torch's, which knows when it is read.
    """
    if device.type == "cpu":
        return values
    # torch copies what has gaps through memory that is not page-locked, and waits
    return values.contiguous().pin_memory().to(device, non_blocking=True)
