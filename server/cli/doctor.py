"""`chorus doctor`: prints the hardware and kernels that this machine will use, and how to make it faster."""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import TextIO

import torch

from ...core.cpus import FAST_GEMMS, available_cpus, features, has_fast_gemms, processor_name
from ...core.executors.choice import uses_gpu
from ...core.executors.host_memory import available_bytes, total_bytes
from ...core.media.lacking import why_lacking
from ...memory.files.tokens.torchvision import matching, mend_torchvision
from ...memory.host.bandwidth import Bandwidth
from ...memory.pages import hugepages
from ...ops.attention.attention_backend import flashinfer_obstacle
from ...ops.library import native_library
from ..version import VERSION

# Larger than a processor's last-level cache, part of which other processes use.
BUFFER_BYTES = 512 << 20
SECONDS = 0.3

# Attention heads of most models: query heads per KV head, and elements per head.
GROUP, HEAD_DIM = 4, 128

# Processor features to print: they decide which kernels run.
_NAMED = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "asimd", "sve", "bf16", "i8mm")


def run(out: TextIO) -> None:
    """Print the findings, one per line, then how to make the machine faster."""
    fixes: list[str] = []
    rows = [
        ("chorus", f"{VERSION}, Python {platform.python_version()}, torch {torch.__version__}"),
        ("system", f"{platform.system()} {platform.machine()}"),
        ("processor", _processor()),
        ("threads", str(available_cpus())),
        ("memory", f"{_gib(total_bytes())}, {_gib(available_bytes())} available; {_bandwidth()}"),
        ("CPU kernels", _kernels(fixes)),
        ("compiler", _compiler() or "none"),
        ("GPU", _gpu(fixes)),
        ("FlashInfer", _flashinfer(fixes)),
        ("images", _images()),
    ]
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:{width}}  {value}", file=out)
    print("\nfaster with:" if fixes else "\nnothing is missing that would make it faster", file=out)
    for fix in fixes:
        print(f"  - {fix}", file=out)


def _processor() -> str:
    named = [name for name in _NAMED if name in features()]
    return processor_name() + (f" ({', '.join(named)})" if named else "")


def _bandwidth() -> str:
    num_bytes = min(BUFFER_BYTES, available_bytes() // 4) & ~0xFFF
    before = torch.get_num_threads()
    torch.set_num_threads(available_cpus())
    try:
        rate = Bandwidth(hugepages.zeros((num_bytes,), torch.uint8).zero_(), available_cpus(), SECONDS).read()
    finally:
        torch.set_num_threads(before)
    return f"reads {rate:.1f} GB/s"


def _kernels(fixes: list[str]) -> str:
    try:
        level = native_library.level()
    except ValueError as error:
        fixes.append(f"another {native_library.ISA}: {error}")
        return "none: the environment asks for an unavailable ISA level"
    here = native_library.levels()
    if level is not None:
        if here and level != here[0]:
            fixes.append(f"{native_library.ISA} unset: this processor has {here[0]}")
        if not FAST_GEMMS["bfloat16"] & features():
            fixes.append("a processor with bfloat16 products (AVX-512-BF16, AMX-BF16 or ARM's BF16)")
        return f"the native decoder, {level}" + (f" (of {', '.join(here)})" if len(here) > 1 else "")
    reason = native_library.why_unavailable(torch.float32)
    if platform.system() == "Linux" and not here and _compiler() is None:
        fixes.append("a C++ compiler (g++ or clang++), then Chorus installed again")
    else:
        fixes.append(f"the native decoder: {reason}")
    dtypes = [name for name in FAST_GEMMS if has_fast_gemms(name)]
    computes = f"fast in {' and '.join(dtypes)}" if dtypes else "weights in 16 bits are kept as float32 too"
    return f"torch's operators ({torch.backends.cpu.get_cpu_capability()}; {computes}): {reason}"


def _compiler() -> str | None:
    """The C++ compiler that a build would find: $CXX, $CC or one by its usual name."""
    for command in (os.environ.get("CXX"), os.environ.get("CC"), "c++", "g++", "clang++"):
        words = shlex.split(command or "")
        if words and (path := shutil.which(words[0])) is not None:
            return None if os.path.basename(path) == "false" else path
    return None


def _gpu(fixes: list[str]) -> str:
    if not torch.cuda.is_available():
        built = f"torch is built for CUDA {torch.version.cuda}" if torch.version.cuda else "torch is built without CUDA"
        return f"none; {built}"
    if not uses_gpu("auto"):
        fixes.append("Triton, which the GPU needs: " + _extra())
    free, total = torch.cuda.mem_get_info()
    capability = ".".join(map(str, torch.cuda.get_device_capability()))
    name = f"{torch.cuda.get_device_name()}, compute capability {capability}, {_gib(free)} of {_gib(total)} free"
    return name if uses_gpu("auto") else f"{name}; not used: Triton is not installed"


def _flashinfer(fixes: list[str]) -> str:
    try:
        found = version("flashinfer-python")
    except PackageNotFoundError:
        found = "not installed"
    if not torch.cuda.is_available():
        return f"{found}; it needs a GPU"
    obstacle = flashinfer_obstacle(GROUP, HEAD_DIM, torch.bfloat16, torch.device("cuda"))
    if obstacle is not None:
        fixes.append(f"FlashInfer for attention: {obstacle}")
        return f"{found}; our decode kernel and torch serve attention"
    float8 = flashinfer_obstacle(GROUP, HEAD_DIM, torch.bfloat16, torch.device("cuda"), float8_kv=True)
    also = ", also with a KV cache in FP8" if float8 is None else "; with a KV cache in FP8 our decode kernel serves"
    return f"{found}, its modules for heads of {HEAD_DIM} elements in bfloat16 are there or can be built{also}"


def _images() -> str:
    if (lacking := why_lacking()) is not None:
        return lacking
    if mend_torchvision():
        return f"served; torchvision is of another build than torch, so programs can't import peft: {matching()}"
    return "served"


def _extra() -> str:
    major = (torch.version.cuda or "13").partition(".")[0]
    return f"pip install 'chorus-lora[cuda{major}]'"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.1f} GiB"


if __name__ == "__main__":
    run(sys.stdout)
