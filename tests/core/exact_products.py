"""Products and attention of PyTorch that do not depend on the number of rows: in float64, and rounded once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

PRODUCTS = frozenset(
    ("mm", "bmm", "mv", "matmul", "linear", "_linear_pointwise", "addmm", "addmm_", "addmv", "baddbmm", "baddbmm_")
)

ATTENTION = frozenset(("scaled_dot_product_attention", "_scaled_dot_product_flash_attention_for_cpu"))


class ExactProducts(TorchDispatchMode):
    """Inside, `PRODUCTS` and `ATTENTION` are computed so; all other operators are PyTorch's own.

    Float64 has 29 bits more than float32, so the order of its sums changes a rounded element about once in 10⁸.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()
        """Operators that were computed so, by name."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name, kwargs = func._schema.name.rpartition("::")[2], kwargs or {}  # noqa: SLF001 - it has no public name
        first = args[0] if args else None
        if name not in PRODUCTS | ATTENTION or not isinstance(first, torch.Tensor) or first.dtype == torch.float64:
            return func(*args, **kwargs)
        self.counts[name] += 1
        wide = [_wide(each) for each in args]
        if name == "_linear_pointwise":
            return torch.nn.functional.linear(*wide[:3]).to(first.dtype)
        made = func(*wide, **{key: _wide(each) for key, each in kwargs.items()})
        if isinstance(made, tuple):  # attention's logarithms of sums, too
            return tuple(each.to(first.dtype) for each in made)
        return first.copy_(made) if name.endswith("_") else made.to(first.dtype)


def _wide(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    return (value.to_dense() if value.is_mkldnn else value).double()
