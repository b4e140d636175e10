"""Makes one op of two neighbours, where one kernel computes both.

Tests: tests/core/model/program/test_peepholes.py
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from ....memory.pages.projections import Group
from ..specs.feed_forward import Activation
from .op import Op
from .ops.linear import Gemm
from .ops.logits import Select
from .ops.norm import Norm
from .ops.residual import Add
from .ops.rows import Activate
from .ops.spans import Begin


def fused(ops: Iterable[Op]) -> list[Op]:
    """A list of ops with neighbours made one."""
    found: list[Op] = []
    for op in ops:
        if found and (one := _one_of(found[-1], op)) is not None:
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


def _one_of(first: Op, second: Op) -> Op | None:
    """Both in one; None if no kernel computes both."""
    if isinstance(first, Add) and isinstance(second, Norm) and second.x == first.x:
        return replace(second, added=first.y)
    if isinstance(first, Gemm) and isinstance(second, Activate) and second.x == first.out:
        is_fused = first.group is Group.GATE_UP and second.activation is Activation.SILU
        return replace(first, out=second.out, silu=True) if is_fused else None
    return None
