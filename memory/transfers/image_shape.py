"""Check of a host image's shape."""

from __future__ import annotations

import torch


def check_image_shape(image: torch.Tensor, num_pages: int, arena: torch.Tensor) -> None:
    """ValueError unless `image` is contiguous, on the host, `[num_pages, page_elems]` and of the arena's dtype."""
    want = (num_pages, arena.shape[1])
    is_host = image.device.type == "cpu"
    if not is_host or tuple(image.shape) != want or image.dtype != arena.dtype or not image.is_contiguous():
        raise ValueError(
            f"image must be {list(want)}, {arena.dtype}, contiguous and on the host, "
            f"not {list(image.shape)}, {image.dtype}, strides {image.stride()}, on {image.device}"
        )
