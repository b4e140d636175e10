"""Context that sections of the benchmark are given."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .sizes import ModelSize
from .store import ResultStore
from .timer import Timer


@dataclass(frozen=True)
class Context:
    """device: `cuda` or `cpu`. quick: few cases. smoke: on a CPU, where shapes are small and times mean nothing.

    work_dir: where adapters and configurations are written; kept from call to call.
    """

    device: str
    size: ModelSize
    quick: bool
    timer: Timer
    store: ResultStore
    work_dir: Path
    seed: int = 0

    @property
    def smoke(self) -> bool:
        return self.device == "cpu"

    @property
    def dtype(self) -> torch.dtype:
        """bf16 on a GPU; float32 on a CPU, where Triton's interpreter is right only in that."""
        return torch.float32 if self.smoke else torch.bfloat16

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def pick(self, smoke: Any, quick: Any, full: Any) -> Any:
        """The value for this kind of run."""
        return smoke if self.smoke else quick if self.quick else full

    def limits(self) -> dict[str, Any]:
        """Results of section `limits`. LookupError when it has not been run."""
        return self.store.values("limits")

    def bandwidth(self) -> float:
        """Bytes per second of device memory: the better of copying (read and written) and reading."""
        limits = self.limits()
        return max(limits["copy"]["bytes_per_s"], limits["read"]["bytes_per_s"])

    def l2_bytes(self) -> int:
        """Size of the last cache before memory; 0 where it is not known."""
        return torch.cuda.get_device_properties(0).L2_cache_size if self.device == "cuda" else 0

    def say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)
