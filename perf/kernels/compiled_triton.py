"""Triton kernels compiled for a GPU that need not be there.

A process that interprets kernels cannot compile them. Import this module lazily: it needs triton.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from .ptx import Ptx

_MATRIX = re.compile(r"\b(wgmma\.mma_async\S*?\.m\d+n\d+k\d+|mma\.sync\S*?\.m\d+n\d+k\d+|tcgen05\.mma)")
_WIDE_LOAD = re.compile(r"ld\.global\S*\.v4\.b32|ld\.global\S*\.v2\.b64|cp\.async\.cg")


@dataclass(frozen=True, slots=True)
class Compiled:
    """Resources of a compiled kernel. matrix: its matrix instruction, if it has one. wide_loads: of 16 bytes.

    loads_before: length of the longest chain of loads that a load through `pointer` waits for; 0 without a pointer.
    barriers: places where the warps of a program wait for each other. bytes_in_flight: most bytes that the programs on
    one multiprocessor load in one basic block each. is_early: it may touch what the launch before it writes while that
    launch still runs.
    """

    registers: int
    spill_bytes: int
    shared_bytes: int
    matrix: str
    wide_loads: int
    loads_before: int
    barriers: int
    bytes_in_flight: int
    is_early: bool


def compile_kernel(
    kernel: Any,
    signature: Mapping[str, str],
    constants: Mapping[str, int],
    capability: int,
    options: Mapping[str, int | bool],
    pointer: str = "",
    ready: Collection[str] = (),
) -> Compiled:
    """Compile for `capability` (90: Hopper) as a launch would with pointers and strides that 16 divides.

    signature: Triton's type per argument that is no constant, `*bf16`, `i32`; names ending in `_stride` are strides.
    pointer: the argument that `loads_before` is for. ready: pointers to what no launch before this one writes.
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
    code, shared = Ptx.parse(ptx), compiled.metadata.shared
    threads = 32 * compiled.metadata.num_warps
    given = [name for name in names if types[name] != "constexpr"]
    return Compiled(
        registers=registers,
        spill_bytes=spilled,
        shared_bytes=shared,
        matrix=matrix[1].replace("mma_async.sync.aligned.", "").replace("mma.sync.aligned.", "mma.") if matrix else "",
        wide_loads=len(_WIDE_LOAD.findall(ptx)),
        loads_before=(code.loads_before(given.index(pointer)) or 0) if pointer else 0,
        barriers=code.barriers,
        bytes_in_flight=code.bytes_at_once * threads * _resident(capability, threads, registers, shared),
        is_early=code.is_early(
            index for index, name in enumerate(given) if types[name].startswith("*") and name not in ready
        ),
    )


def _resident(capability: int, threads: int, registers: int, shared_bytes: int) -> int:
    """Programs that a multiprocessor holds at once (CUDA C++ Programming Guide, "Compute Capabilities")."""
    shared = 228 if capability >= 90 else 164  # KiB of a multiprocessor; each program takes one more
    by_registers = (1 << 16) // (-(-registers // 8) * 8 * threads)
    return min(32, 2048 // threads, by_registers, (shared << 10) // (shared_bytes + 1024))


def _usage(log: str) -> tuple[int, int]:
    """Registers and bytes of spills in what ptxas said."""
    registers = re.search(r"Used (\d+) registers", log)
    if registers is None:
        raise RuntimeError(f"the assembler reported no registers: {log.strip()}")
    return int(registers[1]), sum(int(count) for count in re.findall(r"(\d+) bytes spill (?:stores|loads)", log))
