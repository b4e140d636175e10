"""The least kernel that begins early, by which a compiler shows that it can make one."""

from __future__ import annotations

import triton
from triton.language.extra import cuda


@triton.jit
def wait_alone():
    """Nothing but what a kernel that begins early needs of the compiler."""
    cuda.gdc_launch_dependents()
    cuda.gdc_wait()
