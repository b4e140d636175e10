"""TP ranks on GPUs, without a GPU: refusals; `test_cuda_ranks_interpreted.py` tests their steps."""

from __future__ import annotations

import os
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from chorus.core.config import EngineConfig
from chorus.core.executors import choice, cuda_rank_copies
from chorus.core.executors.cuda import CudaExecutor, watched
from chorus.core.executors.cuda_rank_copies import CudaRankAdapters, TpWorkerCopies
from chorus.core.executors.rank_adapters import RankAdapters
from chorus.core.executors.shared_memory import MemoryLayout, SharedMemory
from chorus.graphs.device import CudaDevice, DeviceError
from chorus.memory.transfers.transfer import ExecutorLost
from chorus.ops.ranks import device_ranks

from ...graphs.late_device import LateDevice
from ...memory.fake_cuda import FakeDriver


def opened(model, **config):
    return choice.open_executor(EngineConfig(model=model, **{"device": "cuda", "tensor_parallel_size": 2, **config}))


@pytest.fixture
def gpus(monkeypatch):
    """`gpus(count)`: PyTorch finds so many, and NCCL."""

    def have(count):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    monkeypatch.setattr(device_ranks.dist, "is_nccl_available", lambda: True)
    return have


@pytest.mark.parametrize(("count", "less"), [(0, "1"), (1, "1"), (2, "2")])
def test_each_rank_takes_a_gpu(subject, gpus, count, less):
    gpus(count)
    said = f"tensor_parallel_size is 4, but each rank needs a GPU and PyTorch finds {count}; set it to {less} "
    with pytest.raises(DeviceError, match=said):
        opened(subject("gqa").model, tensor_parallel_size=4)


def test_ranks_take_the_gpus_from_0_on(subject, gpus):
    gpus(4)
    with pytest.raises(DeviceError, match="and device cuda:1, but ranks use the GPUs from 0 on"):
        opened(subject("gqa").model, device="cuda:1")


def test_offload_workers_and_ranks_are_refused_together(subject, gpus):
    gpus(4)
    with pytest.raises(DeviceError, match="offload_workers is 1 and tensor_parallel_size is 2: use one of them"):
        opened(subject("gqa").model, offload_workers=1)


def test_a_torch_without_nccl_is_refused(subject, gpus, monkeypatch):
    gpus(2)
    monkeypatch.setattr(device_ranks.dist, "is_nccl_available", lambda: False)
    with pytest.raises(DeviceError, match="ranks on GPUs need NCCL: this PyTorch was built without NCCL"):
        opened(subject("gqa").model)


@pytest.mark.parametrize(("device", "size", "want"), [("cuda", 2, 0.0), ("cuda", 1, 0.02), ("cpu", 2, 0.02)])
def test_ranks_on_gpus_begin_no_request_before_its_adapter_is_read(monkeypatch, device, size, want):
    monkeypatch.setattr(choice, "gpu_bytes", lambda device: 0)
    config = choice.completed(EngineConfig(model=".", device=device, tensor_parallel_size=size))
    assert config.max_load_stall_seconds == want


class Busy(LateDevice):
    """It has work that waits for another rank."""

    failure = CudaDevice.failure
    is_failed = False

    def is_done(self):
        if self.is_failed:
            raise RuntimeError("an illegal address")
        return False

    def synchronize(self):
        assert self.is_failed, "the host waits for the device"
        raise RuntimeError("an illegal address")


def test_a_rank_waits_for_no_device_between_two_messages():
    """The next step reaches it while the device runs the last one, and so does the first rank's end."""
    executor = CudaExecutor.__new__(CudaExecutor)
    executor._device = Busy()  # noqa: SLF001
    executor._watched = partial(watched, executor._device)  # noqa: SLF001
    executor.adapters = SimpleNamespace(dma=SimpleNamespace(copies=SimpleNamespace(advance=lambda: None)))
    executor.advance()
    executor._device.is_failed = True  # noqa: SLF001
    with pytest.raises(ExecutorLost, match="the device failed: an illegal address"):
        executor.advance()


def refused(address, num_bytes):
    raise MemoryError("no more")


def test_ranks_pin_memory_for_the_first_images_before_any_step(monkeypatch):
    """A rank that pinned a chunk when it gets the first copy from it would keep the others' steps waiting."""
    layout = MemoryLayout(2, 1 << 10, 64, 1 << 20)
    fd, drivers, sent = SharedMemory.create(layout), [FakeDriver(), FakeDriver()], []
    first, other = (SharedMemory(fd, layout, driver) for driver in (drivers[0], None))
    os.close(fd)
    pages = SimpleNamespace(pages=torch.zeros(4, 16), layout=SimpleNamespace(page_elems=16))
    arena = SimpleNamespace(layout=pages.layout, pages=pages.pages)
    copies = SimpleNamespace(first=SimpleNamespace(arena=arena), send=lambda *message: sent.append(message))
    shapes = SimpleNamespace(base_weights=None, whole=None, config=None)
    monkeypatch.setattr(cuda_rank_copies, "Arena", lambda *_: None)
    monkeypatch.setattr(RankAdapters, "__init__", lambda self, *_, buffers, **__: setattr(self, "kept", buffers))
    adapters = CudaRankAdapters(shapes, copies, first, 8)
    image = adapters.kept.take((3, 16), torch.float32)

    started = []
    executor = SimpleNamespace(
        layout=pages.layout,
        arena=pages,
        adapters=SimpleNamespace(copy_pages=lambda *copy, to_device: started.append(copy)),
    )
    rank = SimpleNamespace(shard=SimpleNamespace(rank=1), states=np.zeros((2, 1), np.int32), memory=other)
    worker = TpWorkerCopies(rank, executor, drivers[1])
    for name, *arguments in sent:
        getattr(worker, name)(*arguments)
    pinned = dict(drivers[1].pinned)
    assert sum(pinned.values()) == 1 << 20
    offset = first.offset(image)
    worker.copy(0, [offset, offset + image.stride(0) * 4], next(iter(first.chunks.items())), [1, 2, 3], True)
    assert len(started) == 1
    assert drivers[1].pinned == pinned, "pinned for the copy"
    monkeypatch.setattr(drivers[1], "pin", refused)
    worker.copy(1, [offset, offset + image.stride(0) * 4], (layout.first_room + (1 << 30), 4096), [1, 2, 3], True)
    assert len(started) == 2, "a rank that may pin no more copies slower"


def test_images_alone_are_pinned():
    """Devices add up among themselves."""
    layout, driver = MemoryLayout(2, 1 << 10, 64, 1 << 16), FakeDriver()
    fd = SharedMemory.create(layout)
    memory = SharedMemory(fd, layout, driver)
    os.close(fd)
    assert not driver.pinned
    chunk = memory.allocate(4096)
    assert driver.pinned == {memory.address(layout.first_room): 4096}
    del chunk
    assert not driver.pinned
