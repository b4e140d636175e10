"""Sums over ranks that are GPUs, one process each, by NCCL.

A sum is launched on the current stream like a kernel and may be captured with it. Nothing but `lose` ends one that a
rank does not come to.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

#: Its name since torch 2.13, and before.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class RanksUnavailable(RuntimeError):
    """These ranks can't be joined by this torch, or in this process; the text names the reason."""


class GroupSums:
    """See `Sums`, of this process's group; NCCL's on GPUs."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._group: dist.ProcessGroup | None = group
        self._lock = threading.Lock()

    def add_up(self, part: torch.Tensor) -> torch.Tensor:
        """See `Sums.add_up`; in part's dtype, in its place."""
        part = part.contiguous()
        dist.all_reduce(part, group=self._now())
        return part

    def gather(self, part: torch.Tensor, width: int) -> torch.Tensor:
        """See `Sums.gather`. Shares differ by a column at most, and are sent as if they were all of the widest."""
        rows, most = len(part), -(-width // self.size)
        sent = part.new_zeros(rows, most, dtype=torch.float32)
        sent[:, : part.shape[1]] = part
        found = sent.new_empty(self.size * rows, most)
        _all_gather(found, sent, group=self._now())
        if self.rank:
            return found[:0, :0]
        shares = found.view(self.size, rows, most).unbind(0)
        ends = [width * rank // self.size for rank in range(self.size + 1)]
        return torch.cat([share[:, : ends[rank + 1] - ends[rank]] for rank, share in enumerate(shares)], 1)

    def lead(self, values: torch.Tensor) -> None:
        """See `Sums.lead`."""
        dist.broadcast(values, 0, group=self._now())

    def lose(self) -> None:
        """Abort the group: its kernels end, wherever they wait; from any thread."""
        with self._lock:
            group, self._group = self._group, None
        if group is not None:
            with suppress(Exception):  # of a group that failed by itself, or a backend that has no abort
                group.abort()

    def close(self) -> None:
        """End the group, which lets this process have another one."""
        self.lose()
        with suppress(Exception):
            dist.destroy_process_group()

    def _now(self) -> dist.ProcessGroup:
        if (group := self._group) is None:
            raise RuntimeError("the ranks have been given up")
        return group


def check_nccl() -> None:
    """Raise RanksUnavailable where GPUs can't be joined."""
    if not (dist.is_available() and dist.is_nccl_available()):
        raise RanksUnavailable("this PyTorch was built without NCCL; install one for Linux that has CUDA")
    if dist.is_initialized():
        raise RanksUnavailable("this process has a torch.distributed group already; end it first")


def open_group(backend: str, rank: int, size: int, device: torch.device, store: str, seconds: float) -> GroupSums:
    """Join the ranks whose processes name the same file, `store`, which does not exist before and stays for as long.

    seconds: to wait for them.
    """
    # a rank that ends is the executor's to notice: torch would end the process
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    meeting = dist.FileStore(store, size)  # pyright: ignore[reportPrivateImportUsage]  # it is documented there
    dist.init_process_group(
        backend, store=meeting, rank=rank, world_size=size, timeout=timedelta(seconds=seconds),
        device_id=device if device.type == "cuda" else None,
    )  # fmt: skip
    group = dist.group.WORLD
    assert group is not None
    return GroupSums(group)
