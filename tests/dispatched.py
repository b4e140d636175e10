"""Counts torch's operations that compute something: on a GPU each of them is a launch at least."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

#: Operations that only make views, or memory without values.
_VIEWS = {
    *("alias", "as_strided", "detach", "expand", "lift_fresh", "permute", "select", "slice", "split", "squeeze", "t"),
    *("split_with_sizes", "transpose", "unbind", "unsafe_split", "unsqueeze", "view", "_unsafe_view"),
    *("empty", "empty_like", "empty_strided", "new_empty"),
}


@contextmanager
def dispatched() -> Iterator[Counter[str]]:
    """The operations of this `with` block by name."""
    found: Counter[str] = Counter()

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = str(func.overloadpacket).split(".")[1]
            if name not in _VIEWS:
                found[name] += 1
            return func(*args, **(kwargs or {}))

    with Counting():
        yield found
