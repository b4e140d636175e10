"""Devices: the CPU as one, and what is said where there is no GPU."""

from __future__ import annotations

import pytest
import torch

from chorus.graphs.device import CudaDevice, DeviceError, HostDevice


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
    assert device.run(lambda: 7) == 7
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
