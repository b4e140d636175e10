"""GPUs on which launches begin while the one before them ends."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from chorus.ops import dependent_launch

pytest.importorskip("triton")


@dataclass(frozen=True)
class Device:
    """A GPU that is not there."""

    capability: int
    type: str = "cuda"


@pytest.fixture
def begins_early(monkeypatch):
    monkeypatch.setattr(dependent_launch, "_capability", lambda device: device.capability)
    dependent_launch.is_supported.cache_clear()
    dependent_launch.allow(True)
    yield dependent_launch.begins_early
    dependent_launch.is_supported.cache_clear()
    dependent_launch.allow(True)


@pytest.mark.wide
def test_on_a_gpu_that_can_where_triton_compiles_it(begins_early):
    assert not begins_early(torch.device("cpu"))
    assert not begins_early(Device(80))
    for capability in (90, 100, 120):
        assert begins_early(Device(capability)), capability
    dependent_launch.allow(False)
    assert not begins_early(Device(90))


def test_not_where_triton_does_not_compile_it(begins_early, monkeypatch, caplog):
    def compile(*args, **kwargs):
        raise KeyError("launch_pdl")

    monkeypatch.setattr("triton.compile", compile)
    assert not begins_early(Device(90))
    assert not begins_early(Device(90))
    assert ["KeyError" in record.message for record in caplog.records] == [True], "said once"


def test_within_a_context_they_begin_early_only_if_also_allowed(begins_early):
    with dependent_launch.only(False):
        assert not begins_early(Device(90))
    assert begins_early(Device(90))
    dependent_launch.allow(False)
    with dependent_launch.only(True):
        assert not begins_early(Device(90))
    assert not begins_early(Device(90))


def test_sizes_are_late_where_that_is_clearly_faster(begins_early, caplog):
    caplog.set_level("INFO")

    def seconds(size):
        return {1: (6e-3, 5.8e-3), 8: (6e-3, 5.9e-3), 32: (6e-3, 6.1e-3)}[size][not begins_early(Device(90))]

    assert dependent_launch.better_late((1, 8, 32), seconds) == {1}
    assert "no launch begins early, by rows: [1]" in caplog.text
    assert "(rows, and µs a step, early / late: 1 6000 / 5800, 8 6000 / 5900, 32 6000 / 6100)" in caplog.text
    assert begins_early(Device(90))
    dependent_launch.allow(False)
    assert dependent_launch.better_late((1,), lambda size: 6.0) == set()
