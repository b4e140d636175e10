"""Limits of this machine with a number of threads: memory bandwidth and matrix products."""

from __future__ import annotations

from typing import Any

import torch

from ...memory.host.bandwidth import Bandwidth, shortest
from ...memory.pages import hugepages

PRODUCT = "product"


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
        self._seconds = seconds
        self._rows, self._products, self._dtype = rows, products, getattr(torch, dtype)
        self._bandwidth = Bandwidth(hugepages.zeros((buffer_bytes,), torch.uint8).zero_(), threads, seconds)
        return {"version": f"torch {torch.__version__}"}

    def measure(self) -> dict[str, float]:
        """GB/s (10⁹ bytes) and GFLOP/s.

        read: the best of three reductions. copy: bytes read plus bytes written. product_K_N: a model's product, the
        better of the two layouts of its weight.
        """
        found = {"read": self._bandwidth.read(), "copy": self._bandwidth.copy()}
        for features_in, features_out in self._products:
            found[product_name(features_in, features_out)] = self._product_rate(features_in, features_out)
        return found

    def close(self) -> None:
        pass

    def _product_rate(self, features_in: int, features_out: int) -> float:
        x = torch.randn(self._rows, features_in).to(self._dtype)
        weight = torch.randn(features_out, features_in).to(self._dtype)
        other = weight.t().contiguous()
        with torch.inference_mode():
            best = min(
                shortest(lambda: torch.nn.functional.linear(x, weight), self._seconds),
                shortest(lambda: x @ other, self._seconds),
            )
        return 2 * self._rows * features_in * features_out / best / 1e9
