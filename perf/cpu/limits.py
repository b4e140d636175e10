"""Limits of this machine with a number of threads: memory bandwidth and matrix products."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from ...memory.pages import hugepages

PRODUCT = "product"
GEMM_SIZE = 2048
GEMM_ROWS = (8, 512, 1024)
_STREAMED_BYTES = 400 << 20


def product_name(features_in: int, features_out: int) -> str:
    """The value of `Limits.measure` that is this product's rate."""
    return f"{PRODUCT}_{features_in}_{features_out}"


class Limits:
    """Measures over a buffer that no cache holds. Serve it through `contenders.process`, in a process of its own."""

    def open(
        self, threads: int, buffer_bytes: int, seconds: float, rows: int, products: list[list[int]], dtype: str
    ) -> dict[str, Any]:
        """seconds: how long each rate is measured; the best repetition counts.

        products: (in, out) features of a model's matrix products; they are measured with `rows` rows of `dtype`.
        """
        torch.set_num_threads(threads)
        self._threads = threads
        self._seconds = seconds
        self._rows, self._products, self._dtype = rows, products, getattr(torch, dtype)
        self._buffer = hugepages.zeros((buffer_bytes,), torch.uint8).zero_()
        self._streamed_bytes = min(_STREAMED_BYTES, 2 * buffer_bytes)
        self._libc = ctypes.CDLL(None)
        self._libc.memchr.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
        self._libc.memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
        return {"version": f"torch {torch.__version__}"}

    def measure(self) -> dict[str, float]:
        """GB/s (10⁹ bytes) and GFLOP/s.

        read: the best of three reductions. copy: bytes read plus bytes written. product_K_N: a model's product, the
        better of the two layouts of its weight.
        """
        found = {"read": self._read_rate(), "copy": self._copy_rate()}
        for dtype in (torch.bfloat16, torch.float32):
            name = str(dtype).removeprefix("torch.")
            for rows in GEMM_ROWS:
                found[f"gemm_{name}_{rows}"] = self._gemm_rate(rows, dtype)
            found[f"stream_{name}_8"] = self._stream_rate(8, dtype)
        for features_in, features_out in self._products:
            found[product_name(features_in, features_out)] = self._product_rate(features_in, features_out)
        return found

    def close(self) -> None:
        pass

    def _read_rate(self) -> float:
        size, start = self._buffer.numel(), self._buffer.data_ptr()
        integers, floats = self._buffer.view(torch.int64), self._buffer.view(torch.float32)
        part = size // self._threads

        def search(index: int) -> None:
            self._libc.memchr(start + index * part, 1, part)  # zeros: it never finds one

        times = [
            self._best(lambda: self._together(search)),
            self._best(integers.sum),
            self._best(lambda: torch.dot(floats, floats)),
        ]
        return size / min(times) / 1e9

    def _copy_rate(self) -> float:
        size, start = self._buffer.numel(), self._buffer.data_ptr()
        part = size // self._threads // 2

        def copy(index: int) -> None:
            at = start + 2 * index * part
            self._libc.memcpy(at, at + part, part)

        return size / self._best(lambda: self._together(copy)) / 1e9

    def _gemm_rate(self, rows: int, dtype: torch.dtype) -> float:
        x, weight = torch.randn(rows, GEMM_SIZE).to(dtype), torch.randn(GEMM_SIZE, GEMM_SIZE).to(dtype)
        with torch.inference_mode():
            best = self._best(lambda: torch.nn.functional.linear(x, weight))
        return 2 * rows * GEMM_SIZE**2 / best / 1e9

    def _product_rate(self, features_in: int, features_out: int) -> float:
        x = torch.randn(self._rows, features_in).to(self._dtype)
        weight = torch.randn(features_out, features_in).to(self._dtype)
        other = weight.t().contiguous()
        with torch.inference_mode():
            best = min(self._best(lambda: torch.nn.functional.linear(x, weight)), self._best(lambda: x @ other))
        return 2 * self._rows * features_in * features_out / best / 1e9

    def _stream_rate(self, rows: int, dtype: torch.dtype) -> float:
        """Bytes of weights per second in products whose weights come from memory."""
        count = max(2, self._streamed_bytes // (GEMM_SIZE**2 * dtype.itemsize))
        x = torch.randn(rows, GEMM_SIZE).to(dtype)
        weights = torch.zeros(count, GEMM_SIZE, GEMM_SIZE, dtype=dtype).add_(0.01)

        def run() -> None:
            for weight in weights:
                torch.nn.functional.linear(x, weight)

        with torch.inference_mode():
            return weights.numel() * dtype.itemsize / self._best(run) / 1e9

    def _together(self, work: Callable[[int], None]) -> None:
        """Run `work(i)` on every thread at once; foreign calls leave the interpreter's lock."""
        threads = [threading.Thread(target=work, args=(index,)) for index in range(1, self._threads)]
        for thread in threads:
            thread.start()
        work(0)
        for thread in threads:
            thread.join()

    def _best(self, work: Callable[[], Any]) -> float:
        """The shortest time of one call, over at least three calls and `seconds`."""
        work()
        best, deadline, calls = float("inf"), time.perf_counter() + self._seconds, 0
        while calls < 3 or time.perf_counter() < deadline:
            began = time.perf_counter()
            work()
            best = min(best, time.perf_counter() - began)
            calls += 1
        return best
