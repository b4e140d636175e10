"""Origin of results: device, driver, versions, commit, date."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

#: Names the commit where the tree was copied without its repository.
COMMIT_VARIABLE = "CHORUS_COMMIT"

_ROOT = Path(__file__).resolve().parents[2]
_PACKAGES = (
    "torch", "triton", "flashinfer-python", "apache-tvm-ffi", "cupy-cuda13x", "cupy-cuda12x", "transformers", "numpy",
    "vllm",
)  # fmt: skip


def describe(device: str) -> dict[str, Any]:
    """Device, driver, versions, commit and the time now. device: `cuda`, which is opened, or `cpu`."""
    return {**describe_host(device), **({"device": _cuda_device()} if device == "cuda" else {})}


def describe_host(device: str) -> dict[str, Any]:
    """As `describe`, of the device only what is known without opening it."""
    return {
        "device": {"type": device, "name": device},
        "driver": driver_version() if device == "cuda" else None,
        "versions": {"python": platform.python_version(), **_versions()},
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def commit() -> dict[str, Any]:
    """The commit's hash, and whether tracked files differ from it; None where neither can be known."""
    if found := _git("rev-parse", "HEAD"):
        status = _git("status", "--porcelain", "--untracked-files=no")
        return {"hash": found, "dirty": None if status is None else bool(status)}
    return {"hash": os.environ.get(COMMIT_VARIABLE) or None, "dirty": None}


def driver_version() -> str | None:
    """Device as nvidia-smi describes it; None where it is not installed."""
    if (tool := shutil.which("nvidia-smi")) is None:
        return None
    command = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    return done.stdout.splitlines()[0].strip() if done.returncode == 0 and done.stdout.strip() else None


def _cuda_device() -> dict[str, Any]:
    import torch

    found = torch.cuda.get_device_properties(0)
    return {
        "type": "cuda", "name": found.name, "capability": f"{found.major}.{found.minor}",
        "multiprocessors": found.multi_processor_count, "memory_bytes": found.total_memory,
        "l2_bytes": found.L2_cache_size,
    }  # fmt: skip


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _git(*arguments: str) -> str | None:
    """Output of a git command in this tree; None without git, or where the tree is no repository of its own."""
    if shutil.which("git") is None or not (_ROOT / ".git").exists():
        return None
    done = subprocess.run(["git", *arguments], cwd=_ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None
