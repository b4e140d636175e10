"""Rows go from a device to processes of the host and back, in any order of their work, and the host waits for none."""

from __future__ import annotations

import ctypes
import random
from types import SimpleNamespace

import numpy as np
import pytest

from chorus.memory.transfers import cuda_driver
from chorus.memory.transfers.cuda_driver import CupyDriver
from chorus.memory.transfers.cuda_handover import CudaHandover, HandoverLayout, HandoverMemory

from ..fake_cuda import FakeDriver

ROWS, INPUTS, OUTPUTS, LAYERS, RANK = 5, 6, 4, 7, 2


class Driver(FakeDriver):
    """The host's side of a copy changes after the call: products are written then."""

    def memcpy_async(self, target, source, num_bytes, to_device, stream):
        super().memcpy_async(target, source, num_bytes, to_device, stream)
        self.queues[stream][-1].source_then = None


class Process:
    """Computes its share of the rows of each hand-over, as an assistant does."""

    def __init__(self, memory: HandoverMemory, number: int, weights: np.ndarray) -> None:
        self.memory, self.number, self.weights = memory, number, weights
        self.done, self.count = int(memory.given[0]), 0

    def look(self) -> bool:
        """Do the next hand-over, if it is there."""
        memory = self.memory
        if int(memory.given[0]) == self.done:
            return False
        layer, begin, end, _ = memory.heads[self.count]
        share = slice(*(begin + (end - begin) * (self.number + i) // memory.layout.processes for i in range(2)))
        x = memory.x[share].copy().view(np.float64)
        a, b = np.split(self.weights[layer], [INPUTS])
        memory.y[share] = (x @ a @ b.T).view(np.uint8)
        self.done, self.count = (self.done + 1) % 2**32, self.count + 1
        memory.returned[self.number] = self.done
        return True


class Step:
    """A device with the rows of a step, of which each layer's depend on the last one's products."""

    def __init__(self, processes: int, given: int = 0) -> None:
        self.rng = random.Random(processes)
        layout = HandoverLayout(processes, ROWS, 8 * INPUTS, 8 * OUTPUTS, LAYERS)
        self.memory = HandoverMemory(np.zeros(layout.num_bytes, np.uint8), layout)
        self.memory.given[:] = self.memory.returned[:] = given
        self.driver = Driver()
        self.handover = CudaHandover(self.memory, self.driver)
        self.weights = np.random.default_rng(1).normal(size=(LAYERS, INPUTS + OUTPUTS, RANK))
        self.processes = [Process(self.memory, number, self.weights) for number in range(processes)]
        self.x, self.y = np.ones((ROWS, INPUTS)), np.zeros((ROWS, OUTPUTS))
        self.base = 0

    def launch(self, rows: int = ROWS) -> np.ndarray:
        """Launch all layers; the products that the last one has to give."""
        x, y = np.ones((rows, INPUTS)), np.zeros((rows, OUTPUTS))
        self.driver.launch(lambda: self.x.fill(1.0))
        self.handover.begin_step()
        for layer in range(LAYERS):
            self.handover.lend((layer, 0, rows, 0), self.x.ctypes.data, rows)
            self.driver.launch(self._base_product)
            self.handover.collect(self.y.ctypes.data, rows)
            self.driver.launch(lambda: self._next(rows))
            a, b = np.split(self.weights[layer], [INPUTS])
            y = x @ a @ b.T
            x = _next_x(y)
        return y

    def run(self) -> None:
        """Let the stream and the processes work in a random order until nothing is left."""
        actors = [lambda: self.driver.run(self.driver.compute, 1) > 0, *(each.look for each in self.processes)]
        while any(self.driver.queues.values()):
            chosen = self.rng.sample(actors, self.rng.randint(1, len(actors)))
            worked = [actor() for actor in chosen]
            assert any(worked) or any(actor() for actor in actors), "all wait for each other"

    def _base_product(self) -> None:
        self.base += 1

    def _next(self, rows: int) -> None:
        self.x[:rows] = _next_x(self.y[:rows])


def _next_x(y: np.ndarray) -> np.ndarray:
    return np.tanh(np.concatenate([y, y[:, : INPUTS - OUTPUTS]], axis=1))


@pytest.mark.parametrize("processes", [1, 2, 3])
@pytest.mark.parametrize("given", [0, 2**32 - 3])
def test_all_layers_products_come_back(processes, given):
    """Counts may wrap around, and steps with fewer rows follow."""
    step = Step(processes, given)
    for rows in (ROWS, 2, ROWS):
        want = step.launch(rows)
        assert step.base % LAYERS == 0, "the host has waited for the device"
        step.run()
        assert np.allclose(step.y[:rows], want, rtol=1e-9)
        for process in step.processes:
            process.count = 0
    assert step.base == 3 * LAYERS


def test_the_device_goes_on_without_processes_that_have_ended():
    step = Step(2)
    step.launch()
    while step.driver.run(step.driver.compute, 1) or step.processes[0].look():
        pass  # the second one never looks
    assert step.driver.queues[step.driver.compute], "it waits for the second one"
    step.handover.give_up()
    step.processes.clear()
    step.run()
    assert step.base == LAYERS
    assert step.handover.is_given_up
    step.launch()
    step.run()
    assert step.base == 2 * LAYERS, "what is launched afterwards is released, too"


def test_a_step_has_room_for_its_hand_overs_only():
    step = Step(1)
    step.launch()
    with pytest.raises(RuntimeError, match=f"hands rows over {LAYERS + 1} times; its memory has room for {LAYERS}"):
        step.handover.lend((0, 0, 1, 0), step.x.ctypes.data, 1)


def test_values_in_a_stream_are_the_drivers_calls(monkeypatch):
    """The library is opened when a value is first asked for; its errors are raised by their names."""
    calls, status = [], [0]

    class Library:
        def __getattr__(self, name):
            return lambda *arguments: calls.append((name, *(each.value for each in arguments))) or status[0]

    class CUDADriverError(RuntimeError):
        pass

    opened = []
    cuda = SimpleNamespace(
        runtime=None, driver=SimpleNamespace(CUDADriverError=CUDADriverError), Device=lambda index: _Nothing()
    )
    monkeypatch.setattr(cuda_driver, "cupy_module", lambda: SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(ctypes, "CDLL", lambda name: opened.append(name) or Library())
    driver = CupyDriver(0)
    assert not opened
    driver.write_value(7, 4096, 3)
    driver.wait_value(7, 4160, 4)
    assert opened[0] == "libcuda.so.1"
    assert calls == [("cuStreamWriteValue32_v2", 7, 4096, 3, 0), ("cuStreamWaitValue32_v2", 7, 4160, 4, 0)]
    status[0] = 719
    with pytest.raises(CUDADriverError, match="719"):
        driver.write_value(7, 4096, 5)


class _Nothing:
    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None
