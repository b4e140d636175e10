"""Devices: the CPU as one, and the messages without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from chorus.graphs.device import CudaDevice, DeviceError

from .fake_graphs import fake_graphs
from .host_device import HostDevice


def test_the_cpu_is_a_device_that_is_always_done():
    device, calls = HostDevice(memory_bytes=123), []
    with device.scope():
        target, source = torch.zeros(2), torch.ones(2)
        device.copy(target, source)
        device.event().synchronize()
        assert target.tolist() == [1, 1]
        replay = device.capture(lambda: calls.append("step"))
        replay()
    assert calls == ["step", "step"]
    assert device.memory() == (123, 123)
    assert device.peak_bytes(lambda: calls.clear()) == 0
    assert calls == []
    device.synchronize()
    device.release()


def test_says_that_there_is_no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match=r"finds no GPU.*use device 'cpu' or 'auto'"):
        CudaDevice(0)


def test_says_how_many_gpus_there_are(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(DeviceError, match="'cuda:2', but there are 2 GPUs, the last is 'cuda:1'"):
        CudaDevice(2)


def capture_fails(device):
    calls = iter([None, ZeroDivisionError()])

    def work():
        if (error := next(calls)) is not None:
            raise error

    with pytest.raises(ZeroDivisionError):
        device.capture(work)


def pool_of(replay: Any) -> Any:
    """The memory pool of the graph whose bound `replay` this is."""
    return replay.__self__.pool


def test_graphs_share_a_pool_while_one_of_them_lives(monkeypatch):
    pools = fake_graphs(monkeypatch)
    device = CudaDevice(0)
    first, second = device.capture(lambda: None), device.capture(lambda: None)
    pool = pool_of(first)
    assert pool_of(second) == pool
    del first
    third = device.capture(lambda: None)
    assert pool_of(third) == pool
    del second, third
    assert pools.uses(pool) == 0
    assert pool_of(device.capture(lambda: None)) != pool, "a pool without graphs can't be captured into"


def test_seconds_are_the_median_of_replays_between_events(monkeypatch):
    """The work runs before it is captured, in the capture and in a replay to warm up; then replays are timed."""
    pools = fake_graphs(monkeypatch)
    ends = iter([0.0, 7.0, 8.0, 17.0])

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            pools.log.append("event")
            self.at = next(ends)

        def elapsed_time(self, later):
            return later.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    assert CudaDevice(0).seconds(lambda: pools.log.append("work"), count=3) == 7e-3
    assert pools.log == ["work", "begin", "work", "end", "replay", "event", *["replay", "event"] * 3]


def test_a_first_capture_that_fails_spoils_no_other(monkeypatch):
    fake_graphs(monkeypatch)
    device = CudaDevice(0)
    capture_fails(device)
    kept = device.capture(lambda: None)
    capture_fails(device)
    assert pool_of(device.capture(lambda: None)) == pool_of(kept)
    device.release()
    assert pool_of(device.capture(lambda: None)) != pool_of(kept)


@pytest.mark.parametrize(
    ("errors", "failure"),
    [
        ([], None),
        ([torch.AcceleratorError("CUDA error: out of memory")], None),  # an earlier call's error, reported once
        (
            [torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nSearch for …")] * 9,
            "CUDA error: an illegal memory access was encountered",
        ),
        ([RuntimeError("CUDA error: device-side assert triggered")] * 9, "CUDA error: device-side assert triggered"),
    ],
)
def test_a_device_that_only_repeats_its_error_has_failed(monkeypatch, errors, failure):
    """As CUDA does once a kernel has ended its context, whoever asks."""
    fake_graphs(monkeypatch)
    device = CudaDevice(0)
    told = iter(errors)

    def synchronize(_device):
        if (error := next(told, None)) is not None:
            raise error

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    assert device.failure() == failure
    assert HostDevice().failure() is None
