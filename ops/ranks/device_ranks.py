"""Collectives over TP ranks that are GPUs, one process each, by NCCL.

A collective is launched on the current stream like a kernel and may be captured with it. If a rank does not join it,
only `lose` ends it.
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

from .ranks import RanksLost

#: Seconds that `close` waits for the group to end: NCCL takes milliseconds once no captured step refers to it.
ABORT_SECONDS = 5.0

#: The name since torch 2.13, and the one before.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class RanksUnavailable(RuntimeError):
    """This torch or this process can't join the ranks; the message names the reason."""


class GroupCollectives:
    """The collectives of this process's group; NCCL on GPUs. A failed launch raises RanksLost. See `Collectives`."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._group: dist.ProcessGroup | None = group
        self._lock = threading.Lock()
        self._abort: threading.Thread | None = None

    def add_up(self, part: torch.Tensor) -> torch.Tensor:
        """See `Collectives.add_up`; computed in part's dtype, in place."""
        part = part.contiguous()
        self._launch(dist.all_reduce, part)
        return part

    def gather(self, part: torch.Tensor, width: int) -> torch.Tensor:
        """See `Collectives.gather`. Shares differ by at most one column, and are sent padded to the widest."""
        rows, most = len(part), -(-width // self.size)
        sent = part.new_zeros(rows, most)
        sent[:, : part.shape[1]] = part
        found = sent.new_empty(self.size * rows, most)
        self._launch(_all_gather, found, sent)
        if self.rank:
            return found[:0, :0]
        shares = found.view(self.size, rows, most).unbind(0)
        ends = [width * rank // self.size for rank in range(self.size + 1)]
        return torch.cat([share[:, : ends[rank + 1] - ends[rank]] for rank, share in enumerate(shares)], 1)

    def lead(self, values: torch.Tensor) -> None:
        """See `Collectives.lead`."""
        self._launch(dist.broadcast, values, 0)

    def lose(self) -> None:
        """Abort the group: its kernels end, wherever they wait; thread-safe.

        The abort itself returns only when all captured steps with its collectives are gone. The caller may own those,
        so the abort has its own thread.
        """
        with self._lock:
            if self._group is None:
                return
            group, self._group = self._group, None
            self._abort = threading.Thread(target=_abort, args=[group], name="chorus-abort", daemon=True)
            self._abort.start()

    def close(self) -> None:
        """End the group; no captured step may use it any more. Then this process may join another one."""
        self.lose()
        assert self._abort is not None
        self._abort.join(ABORT_SECONDS)
        if not self._abort.is_alive():
            with suppress(Exception):
                dist.destroy_process_group()

    def _launch(self, collective: Callable[..., Any], *arguments: Any) -> None:
        """Launch a collective. Raises RanksLost."""
        if (group := self._group) is None:
            raise RanksLost("the ranks were aborted")
        try:
            collective(*arguments, group=group)
        except RuntimeError as error:
            raise RanksLost(f"a collective with the other ranks failed: {error}") from error


def _abort(group: dist.ProcessGroup) -> None:
    with suppress(Exception):  # a group that failed by itself, or a backend without abort
        group.abort()


def check_nccl() -> None:
    """Raise RanksUnavailable if GPUs can't be joined."""
    if not (dist.is_available() and dist.is_nccl_available()):
        raise RanksUnavailable("this PyTorch was built without NCCL; install one for Linux that has CUDA")
    if dist.is_initialized():
        raise RanksUnavailable("this process has a torch.distributed group already; end it first")


def open_group(
    backend: str, rank: int, size: int, device: torch.device, store: str, seconds: float
) -> GroupCollectives:
    """Join the ranks whose processes name the same file, `store`, which must not exist before and is kept.

    seconds: how long to wait for them.
    """
    # the executor handles ranks that end: torch would end the process
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    meeting = dist.FileStore(store, size)  # pyright: ignore[reportPrivateImportUsage]  # documented there
    dist.init_process_group(
        backend,
        store=meeting,
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=seconds),
        device_id=device if device.type == "cuda" else None,
    )
    group = dist.group.WORLD
    assert group is not None
    return GroupCollectives(group)
