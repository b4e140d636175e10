"""The smallest kernel that begins early, which tests whether a compiler can build one."""

from __future__ import annotations

import triton
from triton.language.extra import cuda


@triton.jit
def wait_alone():
    """Only the instructions that a kernel that begins early needs from the compiler."""
    cuda.gdc_launch_dependents()
    cuda.gdc_wait()
