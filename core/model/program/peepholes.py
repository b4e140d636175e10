"""Makes one op of two neighbours, where one kernel computes both.

Tests: tests/core/model/program/test_peepholes.py
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from ..specs.feed_forward import Activation
from .op import Op, name_of
from .ops.linear import Gemm
from .ops.logits import Select
from .ops.norm import Norm
from .ops.residual import Add
from .ops.rows import Activate
from .ops.spans import Begin


def fused(ops: Sequence[Op], live: Collection[str] = ()) -> list[Op]:
    """A list of ops with neighbours made one. live: buffers that are read behind them."""
    found: list[Op] = []
    for at, op in enumerate(ops):
        if found and (one := _one_of(found[-1], op, ops[at + 1 :], live)) is not None:
            found[-1] = one
        elif isinstance(op, Begin) and found and isinstance(found[-1], Add):
            found.insert(-1, op)  # what it adds may be added by the norm that follows
        elif isinstance(op, Select) and found and isinstance(added := found[-1], Add) and op.parts == (added.x,):
            found.insert(-1, replace(op, parts=(added.x, added.y)))  # likewise
        else:
            found.append(op)
    return found


def fused_layers(layers: Sequence[Sequence[Op]]) -> tuple[list[list[Op]], Add | None]:
    """As `fused`, for all layers of a model: what one adds last, the first norm of the next one adds. Returns what the
    last one adds apart, which the model's own norm adds.
    """
    found: list[list[Op]] = []
    pending: Add | None = None
    for ops in layers:
        own = [*([] if pending is None else [pending]), *ops]
        pending = None
        if ops and isinstance(own[-1], Add):  # an empty layer only adds what the one before it left pending
            pending = own.pop()
        found.append(fused(own))
    return found, pending


def _is_read(name: str, ops: Sequence[Op], live: Collection[str]) -> bool:
    """True if ops, or what is behind them, read what a buffer has before them."""
    for op in ops:
        if name in map(name_of, op.reads):
            return True
        if name in op.writes:
            return False
    return name in live


def _one_of(first: Op, second: Op, later: Sequence[Op], live: Collection[str]) -> Op | None:
    """Both in one; None if no kernel computes both, or if others read what the first has written."""
    if isinstance(first, Add) and isinstance(second, Norm) and second.x == first.x:
        return replace(second, added=first.y)
    if isinstance(first, Gemm) and isinstance(second, Activate) and second.x == first.out:
        is_read = second.out != first.out and _is_read(first.out, later, live)
        is_fused = second.activation is Activation.SILU and not is_read
        return replace(first, out=second.out, silu=True) if is_fused else None
    return None
