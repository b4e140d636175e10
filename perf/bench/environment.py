"""The environment of results: device, driver, versions, commit, date."""

from __future__ import annotations

import os
import platform
import subprocess
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

#: Names the commit if the tree was copied without its repository.
COMMIT_VARIABLE = "CHORUS_COMMIT"
_DIRTY = "-dirty"

_ROOT = Path(__file__).resolve().parents[2]
_OF_GPUS = ("flashinfer-python", "apache-tvm-ffi", "cupy-cuda13x", "cupy-cuda12x")
_PACKAGES = ("torch", "triton", *_OF_GPUS, "transformers", "numpy", "vllm")


def describe(device: str, *, opened: bool = True) -> dict[str, Any]:
    """Device, driver, versions, commit and the current time.

    device: `cuda` or `cpu`. opened: False limits the device's entry to facts known without opening it.
    """
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return {
        "device": _cuda_device() if opened and device == "cuda" else {"type": device, "name": device},
        "driver": driver_version() if device == "cuda" else None,
        "versions": versions,
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def commit() -> dict[str, Any]:
    """The commit's hash, and whether tracked files differ from it; None if unknown. A note written when the tree was
    copied takes precedence: a copied repository may be at another commit.
    """
    if carried := os.environ.get(COMMIT_VARIABLE):
        return {"hash": carried.removesuffix(_DIRTY), "dirty": carried.endswith(_DIRTY)}
    if (_ROOT / ".git").exists() and (found := _output("git", "rev-parse", "HEAD")):
        status = _output("git", "status", "--porcelain", "--untracked-files=no")
        return {"hash": found, "dirty": None if status is None else bool(status)}
    return {"hash": None, "dirty": None}


def interpreter_obstacle() -> str | None:
    """The reason why kernels can't be interpreted here, with the remedy; None if they can, or Triton is not installed.

    Triton's interpreter up to 3.6 converts one-element arrays to integers, which NumPy 2.4 and later refuse.
    """
    try:
        triton, numpy = (tuple(map(int, version(name).split(".")[:2])) for name in ("triton", "numpy"))
    except PackageNotFoundError:
        return None
    if triton >= (3, 7) or numpy < (2, 4):
        return None
    return (
        f"Triton {version('triton')} can't interpret kernels with NumPy {version('numpy')}: for --device cpu "
        "install 'numpy<2.4' or 'triton>=3.7'; on a GPU they go together"
    )


def driver_version() -> str | None:
    """The driver's version from nvidia-smi; None if it is not installed."""
    found = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return found.splitlines()[0].strip() if found else None


def _cuda_device() -> dict[str, Any]:
    import torch

    found = torch.cuda.get_device_properties(0)
    return {
        "type": "cuda",
        "name": found.name,
        "capability": f"{found.major}.{found.minor}",
        "multiprocessors": found.multi_processor_count,
        "memory_bytes": found.total_memory,
        "l2_bytes": found.L2_cache_size,
    }


def _output(*command: str) -> str | None:
    """Output of a command in this tree; None if it fails or is not installed."""
    try:
        done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
