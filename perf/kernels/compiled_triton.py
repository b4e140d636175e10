"""Triton kernels compiled for a GPU that need not be there.

A process that interprets kernels cannot compile them. Import this module lazily: it needs triton.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

_MATRIX = re.compile(r"\b(wgmma\.mma_async\S*?\.m\d+n\d+k\d+|mma\.sync\S*?\.m\d+n\d+k\d+|tcgen05\.mma)")
_WIDE_LOAD = re.compile(r"ld\.global\S*\.v4\.b32|ld\.global\S*\.v2\.b64|cp\.async\.cg")


@dataclass(frozen=True, slots=True)
class Compiled:
    """Resources of a compiled kernel. matrix: its matrix instruction, if it has one. wide_loads: of 16 bytes."""

    registers: int
    spill_bytes: int
    shared_bytes: int
    matrix: str
    wide_loads: int


def compile_kernel(
    kernel: Any,
    signature: Mapping[str, str],
    constants: Mapping[str, int],
    capability: int,
    options: Mapping[str, int | bool],
) -> Compiled:
    """Compile for `capability` (90: Hopper) as a launch would with pointers and strides that 16 divides.

    signature: Triton's type per argument that is no constant, `*bf16`, `i32`; strides are those named `…_stride`.
    """
    names = kernel.arg_names
    types = {name: signature.get(name, "constexpr") for name in names}
    aligned = [name for name, kind in signature.items() if kind.startswith("*") or name.endswith("_stride")]
    source = ASTSource(
        kernel,
        types,
        {(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    target = GPUTarget("cuda", capability, 32)
    log = StringIO()
    with knobs.nvidia.scope(), knobs.compilation.scope(), redirect_stdout(log):
        knobs.nvidia.dump_ptxas_log = True  # of the very assembly that a launch would load
        knobs.compilation.always_compile = True
        compiled = triton.compile(source, target=target, options=dict(options))
    registers, spilled = _usage(log.getvalue())
    ptx = compiled.asm["ptx"]
    matrix = _MATRIX.search(ptx)
    return Compiled(
        registers=registers,
        spill_bytes=spilled,
        shared_bytes=compiled.metadata.shared,
        matrix=matrix[1].replace("mma_async.sync.aligned.", "").replace("mma.sync.aligned.", "mma.") if matrix else "",
        wide_loads=len(_WIDE_LOAD.findall(ptx)),
    )


def _usage(log: str) -> tuple[int, int]:
    """Registers and bytes of spills in what ptxas said."""
    registers = re.search(r"Used (\d+) registers", log)
    if registers is None:
        raise RuntimeError(f"the assembler reported no registers: {log.strip()}")
    return int(registers[1]), sum(int(count) for count in re.findall(r"(\d+) bytes spill (?:stores|loads)", log))
