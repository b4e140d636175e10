"""Compiles Triton kernels for a GPU that need not be present.

A process that interprets kernels can't compile them. Import this module lazily: it needs triton.

Tests: tests/perf/kernels/test_kernels.py
"""

from __future__ import annotations

import hashlib
import re
from collections import namedtuple
from collections.abc import Collection, Iterator, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import triton
from triton import knobs
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.compiler.compiler import get_cache_invalidating_env_vars, get_cache_key

from . import ptx as reader
from .ptx import Ptx

_MATRIX = re.compile(r"\b(wgmma\.mma_async\S*?\.m\d+n\d+k\d+|mma\.sync\S*?\.m\d+n\d+k\d+|tcgen05\.mma)")
_WIDE_LOAD = re.compile(r"ld\.global\S*\.v4\.b32|ld\.global\S*\.v2\.b64|cp\.async\.cg")


@dataclass(frozen=True, slots=True)
class Compiled:
    """Resources of a compiled kernel."""

    registers: int
    spill_bytes: int
    shared_bytes: int
    matrix: str
    """The matrix instruction, if the kernel has one."""
    wide_loads: int
    """The kernel loads 16 bytes at once."""
    loads_before: int
    """Length of the longest chain of loads that a load through `pointer` waits for; 0 without a pointer."""
    barriers: int
    """Barriers at which the warps of a program wait for each other."""
    bytes_in_flight: int
    """Most bytes that the programs on one multiprocessor load in one basic block each."""
    is_early: bool
    """The kernel may touch memory that the previous launch writes while that launch still runs."""


@dataclass(frozen=True, slots=True)
class Job:
    """A kernel compiled for `capability` (90: Hopper), as for a launch with pointers and strides divisible by 16."""

    kernel: Any
    signature: Mapping[str, str | tuple[tuple[str, str], ...]]
    """Triton's type per argument that is not constant, `*bf16`, `i32`; names ending in `_stride` are strides. An
    argument that is a named tuple: its fields' names and types.
    """
    constants: Mapping[str, Any]
    capability: int
    options: Mapping[str, int | bool]
    pointer: str = ""
    """The argument that `loads_before` refers to."""
    ready: Collection[str] = ()
    """Pointers to memory that no previous launch writes."""

    @property
    def _types(self) -> dict[str, Any]:
        return {name: _type(name, self.signature.get(name, "constexpr")) for name in self.kernel.arg_names}

    def _arguments(self) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        """Name, type and place of each argument, and of each field of those that are tuples."""
        for index, name in enumerate(self.kernel.arg_names):
            kind = self.signature.get(name, "constexpr")
            if isinstance(kind, str):
                yield name, kind, (index,)
            else:
                yield from ((field, of_field, (index, at)) for at, (field, of_field) in enumerate(kind))

    @property
    def _source(self) -> ASTSource:
        names = self.kernel.arg_names
        aligned = [at for name, kind, at in self._arguments() if kind.startswith("*") or name.endswith("_stride")]
        return ASTSource(
            self.kernel,
            self._types,
            {(names.index(name),): value for name, value in self.constants.items()},
            attrs={at: [["tt.divisibility", 16]] for at in aligned},
        )

    @property
    def _target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def key(self) -> str:
        """Hash of all inputs of the result: Triton's key of a compiled kernel, which includes the compiler's own bytes,
        and the code that reads the assembly.
        """
        source, backend = self._source, make_backend(self._target)
        options = backend.parse_options(dict(self.options, **source.parse_options()))
        read = [Path(module).read_text("utf-8") for module in (__file__, reader.__file__)]
        parts = get_cache_key(source, backend, options, get_cache_invalidating_env_vars()), self.pointer, *read
        return hashlib.sha256("\0".join((*parts, *sorted(self.ready))).encode()).hexdigest()[:20]

    def translate(self) -> None:
        """Take the kernel through Triton's front end alone, which differs most between versions: a tenth of a second.

        Raises what it raises.
        """
        source, backend, context = self._source, make_backend(self._target), ir.context()
        options = backend.parse_options(dict(self.options, **source.parse_options()))
        ir.load_dialects(context)
        backend.load_dialects(context)
        functions = backend.get_codegen_implementation(options)  # pyright: ignore[reportAttributeAccessIssue]
        source.make_ir(self._target, options, functions, backend.get_module_map(), context)

    def compile(self) -> Compiled:
        log = StringIO()
        with knobs.nvidia.scope(), knobs.compilation.scope(), redirect_stdout(log):
            knobs.nvidia.dump_ptxas_log = True  # of exactly the assembly that a launch would load
            knobs.compilation.always_compile = True
            compiled = triton.compile(self._source, target=self._target, options=dict(self.options))
        registers, spilled = _usage(log.getvalue())
        ptx = compiled.asm["ptx"]
        matrix = _MATRIX.search(ptx)
        named = matrix[1].replace("mma_async.sync.aligned.", "").replace("mma.sync.aligned.", "mma.") if matrix else ""
        code, shared = Ptx.parse(ptx), compiled.metadata.shared
        threads = 32 * compiled.metadata.num_warps
        given = {name: kind for name, kind, _ in self._arguments() if kind != "constexpr"}
        written = [kind.startswith("*") and name not in self.ready for name, kind in given.items()]
        return Compiled(
            registers=registers,
            spill_bytes=spilled,
            shared_bytes=shared,
            matrix=named,
            wide_loads=len(_WIDE_LOAD.findall(ptx)),
            loads_before=(code.loads_before([*given].index(self.pointer)) or 0) if self.pointer else 0,
            barriers=code.barriers,
            bytes_in_flight=code.bytes_at_once * threads * _resident(self.capability, threads, registers, shared),
            is_early=code.is_early(index for index, writes in enumerate(written) if writes),
        )


def _type(name: str, kind: str | tuple[tuple[str, str], ...]) -> Any:
    """A type of the signature in Triton's form."""
    return kind if isinstance(kind, str) else namedtuple(name, [field for field, _ in kind])(*dict(kind).values())


#: KiB of shared memory, threads and programs of a multiprocessor (CUDA C++ Programming Guide, "Compute Capabilities").
_LIMITS = {80: (164, 2048, 32), 90: (228, 2048, 32), 100: (228, 2048, 32)}


def _resident(capability: int, threads: int, registers: int, shared_bytes: int) -> int:
    """Programs that a multiprocessor holds at once; each takes 1 KiB of shared memory more than it requests."""
    shared, most_threads, most = _LIMITS.get(capability, (100, 1536, 24))  # of 8.9 and 12.0
    registers = -(-registers // 8) * 8 * threads
    return min(most, most_threads // threads, (1 << 16) // registers, (shared << 10) // (shared_bytes + 1024))


def _usage(log: str) -> tuple[int, int]:
    """Registers and bytes of spills from ptxas' output."""
    registers = re.search(r"Used (\d+) registers", log)
    if registers is None:
        raise RuntimeError(f"the assembler reported no registers: {log.strip()}")
    return int(registers[1]), sum(int(count) for count in re.findall(r"(\d+) bytes spill (?:stores|loads)", log))
