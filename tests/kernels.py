"""CPU operators that tests run on: torch's, and those of the native library where it is built and the processor has the
instructions. `CHORUS_CPU_ISA` chooses the library's instruction set for the whole process.
"""

from __future__ import annotations

import pytest
import torch

from chorus.ops import native_library


def needs_native(dtype: torch.dtype = torch.float32) -> pytest.MarkDecorator:
    """Skip without the library, by what it says of itself."""
    reason = native_library.why_unavailable(dtype)
    return pytest.mark.skipif(reason is not None, reason=f"no native library: {reason}")


NATIVE = pytest.param("native", marks=[needs_native(), pytest.mark.native])
KERNELS = ["torch", NATIVE]
