"""Rows go from a device to offload workers and back, in any order of their work, and the host waits for none."""

from __future__ import annotations

import ctypes
import mmap
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from chorus.core.executors.cuda_exchange import CudaExchange
from chorus.memory.pages.layer_projections import dense_projections
from chorus.memory.transfers import cuda_driver
from chorus.memory.transfers.cuda_driver import CupyDriver
from chorus.ops.cpu.lora_offload import exchanges_at, exchanges_bytes, gemm_widths, row_elems
from chorus.ops.library import native_library
from chorus.ops.ranks.ranks import Ranks

from ...memory.fake_cuda import FakeDriver

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(not native_library.available(torch.float32), reason="words are the native library's"),
]

ROWS, LAYERS, RANK = 5, 3, 2
SHAPES = dense_projections(LAYERS, hidden=6, ffn=10, heads=2, kv_heads=1, head_dim=2).gemm_shapes
WIDTHS = gemm_widths(SHAPES)
EXCHANGES = [(layer, group) for layer in range(LAYERS) for group in range(len(WIDTHS))]


class Driver(FakeDriver):
    """The host's side of a copy changes after the call: products are written then."""

    def memcpy_async(self, target, source, num_bytes, to_device, stream):
        super().memcpy_async(target, source, num_bytes, to_device, stream)
        self.queues[stream][-1].source_then = None


class Process:
    """Computes its share of the rows of each exchange, as an offload worker does."""

    def __init__(self, ranks: Ranks, number: int, step: Step) -> None:
        self.ranks, self.number, self.step = ranks, number, step
        self.word = ctypes.c_int64.from_address(ranks.word(number))
        self.count, self.at = 0, 0

    def begin(self, step: int) -> None:
        self.ranks.begin(step)
        self.count = 0
        self.at = self.word.value = self.ranks.count()  # it is ready for the first

    def look(self) -> bool:
        """Do the next exchange, if it is there; every process must have written its word of the last one."""
        words = [ctypes.c_int64.from_address(self.ranks.word(rank)).value for rank in range(self.ranks.size)]
        if self.count == len(EXCHANGES) or min(words) < self.at:
            return False
        if self.at % 2:
            self._compute()
        self.at = self.word.value = self.ranks.count()
        return True

    def _compute(self) -> None:
        asked = exchanges_at(self.step.exchanges)[self.count]
        assert (asked["layer"], asked["shape"]) == EXCHANGES[self.count]
        assert asked["active"].tolist()[:3] == [1, 0, 1]
        inputs, outputs = WIDTHS[asked["shape"]]
        begin, end = self.step.share[self.number - 1 : self.number + 1]
        x = _floats(self.ranks.part(0), ROWS, inputs)[begin:end]
        a, b = self.step.weights[self.count]
        _floats(self.ranks.mine, end - begin, outputs)[:] = x @ a @ b.T
        self.count += 1


def _floats(address: int, rows: int, width: int) -> np.ndarray:
    elems = row_elems(torch.float32, width)
    memory = (ctypes.c_float * (rows * elems)).from_address(address)
    return np.frombuffer(memory, np.float32).reshape(rows, elems)[:, :width]


class Step:
    """A device with the rows of a step, of which each group's depend on the last one's products."""

    def __init__(self, processes: int) -> None:
        self.rng = random.Random(processes)
        size, floats = 1 + processes, ROWS * row_elems(torch.float32, max(map(max, WIDTHS)))
        self.memory = mmap.mmap(-1, Ranks.num_bytes(size, floats))
        self.ranks = [Ranks(self.memory, rank, size, floats, 5.0) for rank in range(size)]
        self._asked = np.zeros(exchanges_bytes(), np.uint8)
        self.exchanges = self._asked.ctypes.data
        self.driver = Driver()
        self.exchange = CudaExchange(
            self.ranks[0], self.exchanges, self.driver, SHAPES, torch.float32, ROWS, torch.device("cpu")
        )
        rng = np.random.default_rng(1)
        self.weights = [
            (rng.normal(size=(WIDTHS[group][0], RANK)), rng.normal(size=(WIDTHS[group][1], RANK)))
            for _, group in EXCHANGES
        ]
        self.processes = [Process(self.ranks[number], number, self) for number in range(1, size)]
        self.x: np.ndarray = np.zeros(0)
        self.base = 0

    def launch(self, number: int, rows: int = ROWS) -> np.ndarray:
        """Launch all layers; the input that the products of the last one have to make."""
        self.share = [rows * part // len(self.processes) for part in range(len(self.processes) + 1)]
        self.ranks[0].begin(number)
        for process in self.processes:
            process.begin(number)
        want = np.ones((rows, WIDTHS[0][0]))
        self.driver.launch(lambda: setattr(self, "x", np.ones((rows, WIDTHS[0][0]))))
        for index, (layer, group) in enumerate(EXCHANGES):
            given, width = self.exchange.input_rows(group, rows), WIDTHS[EXCHANGES[index + 1 - len(EXCHANGES)][1]][0]
            self.driver.launch(lambda given=given: given.copy_(torch.from_numpy(self.x)))
            self.exchange.offload(group, layer, [0, 2], rows)
            self.driver.launch(self._base_product)
            products = self.exchange.collect(group, self.share)
            self.driver.launch(lambda products=products, width=width: self._next(products, width))
            a, b = self.weights[index]
            want = _next_x(want @ a @ b.T, width)
        return want

    def run(self) -> None:
        """Let the stream and the processes work in a random order until nothing is left."""
        actors = [lambda: self.driver.run(self.driver.compute, 1) > 0, *(each.look for each in self.processes)]
        while any(self.driver.queues.values()):
            chosen = self.rng.sample(actors, self.rng.randint(1, len(actors)))
            worked = [actor() for actor in chosen]
            assert any(worked) or any(actor() for actor in actors), "all wait for each other"

    def _base_product(self) -> None:
        self.base += 1

    def _next(self, products: torch.Tensor, width: int) -> None:
        self.x = _next_x(products.numpy().astype(float), width)


def _next_x(y: np.ndarray, width: int) -> np.ndarray:
    return np.tanh(np.resize(y, (len(y), width)))


@pytest.mark.parametrize("processes", [1, 2, 3])
@pytest.mark.parametrize("first", [1, 2**12 - 1])
def test_all_products_come_back(processes, first):
    """The words' lower halves may wrap around, and steps with fewer rows follow."""
    step = Step(processes)
    for number, rows in enumerate((ROWS, 2, ROWS), first):
        want = step.launch(number, rows)
        assert step.base % len(EXCHANGES) == 0, "the host has waited for the device"
        step.run()
        assert np.allclose(step.x, want, atol=1e-5)
    assert step.base == 3 * len(EXCHANGES)


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
    assert opened == ["libcuda.so.1"]
    assert calls == [("cuStreamWriteValue32_v2", 7, 4096, 3, 0), ("cuStreamWaitValue32_v2", 7, 4160, 4, 0)]
    status[0] = 719
    with pytest.raises(CUDADriverError, match="719"):
        driver.write_value(7, 4096, 5)


def test_pinning_is_cudas_and_too_little_memory_is_a_memory_error(monkeypatch):
    calls, status = [], [0]

    class CUDARuntimeError(RuntimeError):
        status = 0

    def register(*arguments):
        calls.append(arguments)
        if status[0]:
            error = CUDARuntimeError(str(status[0]))
            error.status = status[0]
            raise error

    runtime = SimpleNamespace(CUDARuntimeError=CUDARuntimeError, hostRegister=register, hostUnregister=calls.append)
    cuda = SimpleNamespace(runtime=runtime, Device=lambda index: _Nothing())
    monkeypatch.setattr(cuda_driver, "cupy_module", lambda: SimpleNamespace(cuda=cuda))
    driver = CupyDriver(0)
    driver.pin(8192, 4096)
    driver.unpin(8192)
    assert calls == [(8192, 4096, 3), 8192], "for every context, and for the device's own accesses"
    status[0] = 2
    with pytest.raises(MemoryError):
        driver.pin(8192, 4096)
    status[0] = 719
    with pytest.raises(CUDARuntimeError):
        driver.pin(8192, 4096)


class _Nothing:
    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None
