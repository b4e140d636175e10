"""Static decode inputs on a device, filled from host values with one copy a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .buffers import DecodeBuffers, DecodeViews
from .device import Device
from .staging import Upload

_COLUMNS = 4

#: Columns begin on 16 bytes, so that kernels which are compiled for that are right for every bucket.
_ALIGN = 2


class DeviceDecodeBuffers:
    """`DecodeBuffers` whose per-token tensors lie on `device`; block tables and lengths stay on the host, where
    `attention.plan` reads them.

    A bucket's four columns lie side by side, so that they are one copy. All buckets use the same memory: a bucket's
    views show its last `fill` until another bucket is filled.
    """

    def __init__(
        self, sizes: Sequence[int], max_pages_per_row: int, block_tokens: int, dummy_page: int, device: Device
    ) -> None:
        widths = {size: -(-size // _ALIGN) * _ALIGN for size in sizes}
        self._host = DecodeBuffers(sizes, max_pages_per_row, block_tokens, dummy_page)
        values = torch.zeros(_COLUMNS * max(widths.values()), dtype=torch.long, device=device.torch_device)
        self._columns = {size: values[: _COLUMNS * width].view(_COLUMNS, width) for size, width in widths.items()}
        self._upload = Upload(device, values.numel() * values.itemsize)
        self.views = {
            size: DecodeViews(
                *self._columns[size][:, :size].unbind(0), page_table=host.page_table, kv_lens=host.kv_lens
            )
            for size, host in self._host.views.items()
        }

    def fill(
        self, bucket: int, token_ids: Sequence[int], positions: Sequence[int], block_tables: Sequence[Sequence[int]]
    ) -> DecodeViews:
        """Write a step's rows into `bucket`'s views, in the device's turn, and make the rest padding."""
        host = self._host.fill(bucket, token_ids, positions, block_tables)
        target = self._columns[bucket]
        columns = torch.zeros(target.shape, dtype=torch.long)
        torch.stack((host.token_ids, host.positions, host.page, host.offset), out=columns[:, :bucket])
        self._upload(target, columns)
        return self.views[bucket]
