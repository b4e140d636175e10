"""This machine: its processor's name, and processes with their descendants.

Processes are read through psutil: `pip install 'chorus-lora[bench]'`.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from psutil import Process


def need_psutil() -> ModuleType:
    """psutil. Ends the command if it is missing."""
    try:
        import psutil
    except ImportError:
        raise SystemExit("measuring processes needs psutil: pip install 'chorus-lora[bench]'") from None
    return psutil


def family(pids: Iterable[int]) -> set[Process]:
    """The processes and all their descendants."""
    psutil, found = need_psutil(), set()
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            found |= {process, *process.children(recursive=True)}
    return found


def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name, with its family and model: a hypervisor's name may hide which generation it is."""
    lines = (line.partition(":") for line in cpuinfo.read_text("utf-8").splitlines()) if cpuinfo.exists() else ()
    fields: dict[str, str] = {}
    for name, _, value in lines:
        fields.setdefault(name.strip(), value.strip())
    if "model name" not in fields:
        return platform.machine()
    told = [f"{name} {value}" for name in ("family", "model") if (value := fields.get(f"cpu {name}", fields.get(name)))]
    return ", ".join([fields["model name"], *told])
