"""Gated activations in kernels. Import this module lazily: it needs triton.

Tests: tests/ops/elementwise/test_elementwise_triton.py, tests/ops/moe/test_expert_tiles_interpreted.py
"""

# A kernel is Triton's language in Python's syntax, so type checkers misread its arguments and loops.

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gated(gate, up, dtype: tl.constexpr, C: tl.constexpr):
    """f(gate) · up of float32 values, in `dtype`, rounded to it wherever PyTorch rounds.

    f: silu, or gelu by its approximation with tanh. A clamped SwiGLU is `elementwise.clamped_swiglu`. C: constants with
    `gating`, `alpha` and `limit`, see `GatedConstants`.
    """
    if C.gating == "silu":
        value = gate / (1.0 + tl.exp(-gate))
    elif C.gating == "gelu":
        # (1 + tanh(u)) / 2 = sigmoid(2 u)
        value = gate / (1.0 + tl.exp(-1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)))
    else:
        gate = tl.where(gate > C.limit, C.limit, gate)  # unlike tl.minimum, this keeps NaN
        up = tl.where(up > C.limit, C.limit, tl.where(up < -C.limit, -C.limit, up))
        sigmoid = (1.0 / (1.0 + tl.exp(-(gate * C.alpha).to(dtype).to(tl.float32)))).to(dtype)
        value = gate * sigmoid.to(tl.float32)
        up = (up + 1.0).to(dtype).to(tl.float32)
    return (value.to(dtype).to(tl.float32) * up).to(dtype)


# Rules for type checkers are at the end, so that kernels keep their lines.
# pyright: reportAttributeAccessIssue=false
