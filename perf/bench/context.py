"""The context that the benchmark passes to its sections.

Tests: tests/perf/bench/test_sections.py
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, cast

import torch

from ...core.model.checkpoints.quantization.round_to_nearest import Name, RoundToNearest
from ..report.command import say
from .models.random_model import RandomModel
from .models.random_model import adapters as random_adapters
from .models.sizes import ModelSize, is_smoke
from .store import ResultStore
from .timer import Timer, WallTimer

RANKS = (8, 16, 32, 64)
"""Ranks of mixed adapters."""


class Floors(NamedTuple):
    """The least possible seconds of a step at the measured limits."""

    prefill: float
    decode: float
    adapters: float
    """The part of `decode` that reading the adapters takes."""
    prefill_flops: float
    step_bytes: float


@dataclass(frozen=True)
class Context:
    """device: `cuda` or `cpu`. quick: few cases. smoke: the tiny model on a CPU, whose times mean nothing.

    work_dir: where adapters and configurations are written; kept from call to call. save: keeps a section's results so
    far, even if its process fails. engine: fields of EngineConfig for every engine. beside: baselines for sections
    `peers` and `levels`, by name.
    """

    device: str
    size: ModelSize
    quick: bool
    timer: Timer
    store: ResultStore
    work_dir: Path
    seed: int = 0
    save: Callable[[dict[str, Any]], None] = lambda found: None
    engine: Mapping[str, str] = field(default_factory=dict)
    beside: Mapping[str, Path] = field(default_factory=dict)

    @property
    def smoke(self) -> bool:
        return is_smoke(self.device, self.size.name)

    @property
    def dtype(self) -> torch.dtype:
        """bf16; float32 in a smoke run, because Triton's interpreter is only right for float32."""
        return torch.float32 if self.smoke else torch.bfloat16

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def float8_kv(self) -> bool:
        """True if engines keep KV in FP8."""
        return self.engine.get("kv_cache_dtype") in ("fp8", "fp8_e4m3")

    @property
    def kv_itemsize(self) -> int:
        """Bytes of an element of KV."""
        return 1 if self.float8_kv else self.dtype.itemsize

    def pick(self, smoke: Any, quick: Any, full: Any, *, cpu: Any = None) -> Any:
        """The value for this kind of run. cpu: the value for a CPU, if it differs."""
        if self.smoke:
            return smoke
        if self.device == "cpu" and cpu is not None:
            return cpu
        return quick if self.quick else full

    @property
    def prompt(self) -> int:
        """Tokens before a measured decode step."""
        return self.pick(8, 256, 512, cpu=64)

    def engine_size(self, most: int) -> dict[str, Any]:
        """Limits of an engine for decode steps of up to so many sequences."""
        return {"max_seqs": most, "max_batched": self.pick(64, 8192, 8192), "max_len": self.pick(64, 512, 1024)}

    @contextmanager
    def row(self, found: dict[str, Any], case: str, clear: Callable[[], object] = lambda: None) -> Iterator[None]:
        """Measure a row of a section; at its end all results so far are saved.

        An error affects only this row: it goes into `found["not_measured"]`, and `clear` prepares the engine for the
        next row. An error of `clear` ends the section, and so does a device that no longer works.
        """
        say(case)
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            found.setdefault("not_measured", []).append({"case": case, "why": f"{type(error).__name__}: {error}"})
            self.save(found)
            self.timer.synchronize()
            clear()
        else:
            self.save(found)

    @property
    def quantiser(self) -> RoundToNearest | None:
        """The quantiser of the engines' weights, if they have one."""
        name = cast("Name | None", self.engine.get("quantization"))
        return None if name is None else RoundToNearest(name)

    def limits(self) -> dict[str, Any]:
        """Results of section `limits`, as far as there are any. Raises LookupError if it has not been run."""
        return self.store.values("limits", partial=True)

    def bandwidth(self) -> float:
        """Bytes per second of device memory: the better of copying (read and written) and reading."""
        limits = self.limits()
        rates = [limits[name]["bytes_per_s"] for name in ("copy", "read") if name in limits]
        if not rates:
            raise LookupError("section limits has no rate of the device's memory; remove its file and run it again")
        return max(rates)

    def l2_bytes(self) -> int:
        """Size of the last cache before memory; 0 if unknown."""
        return torch.cuda.get_device_properties(0).L2_cache_size if self.device == "cuda" else 0

    def adapters(self, rank: int, count: int) -> dict[str, Path]:
        """`count` adapters of one rank, by name; made on first use.

        They are links to the same random weights: the engine treats them as separate adapters, but the disk holds them
        once.
        """
        model = RandomModel(self.size.geometry, (rank,), self.dtype_name)
        (source,) = random_adapters(model, self.work_dir).values()
        return self.links(source, f"r{rank}", count)

    def mixed_adapters(self, per_rank: int = 2) -> dict[str, Path]:
        """So many adapters of each of `RANKS`."""
        return {name: path for rank in RANKS for name, path in self.adapters(rank, per_rank).items()}

    def links(self, source: Path, kind: str, count: int) -> dict[str, Path]:
        """`count` adapters that are links to one, by name."""
        named = self.work_dir / "linked" / self.dtype_name
        named.mkdir(parents=True, exist_ok=True)
        made = {name: named / name for name in (f"{kind}-{index:03d}" for index in range(count))}
        for link in made.values():
            link.unlink(missing_ok=True)  # for a model of another size
            link.symlink_to(source.resolve())
        return made

    def floors(self, requests: int, tokens: int, ranks: tuple[int, ...] = ()) -> Floors:
        """Floor of `requests` requests with `tokens` tokens each. ranks: of their adapters, in rotation; none: the base
        model.

        A decode step reads weights (as the engine's `quantization` keeps them), KV and every adapter once, at the
        measured bandwidth. A prefill multiplies at the
        measured rate, or reads the weights if that takes longer.
        """
        bandwidth, flops = self.bandwidth(), self.limits()["matmul"]["flops_per_s"]
        geometry, kv_itemsize = self.size.geometry, self.kv_itemsize
        step = partial(geometry.step, self.dtype.itemsize, requests, kv_itemsize=kv_itemsize)
        narrower = self.dtype.itemsize * geometry.layer_params
        narrower -= geometry.layer_bytes(self.dtype.itemsize, self.quantiser)
        prefill_bytes, prefill_flops = step(tokens, 0, ranks)
        prefill_bytes -= requests * tokens * geometry.kv_elems_per_token * kv_itemsize + narrower  # KV is written
        base_bytes, _ = step(1, tokens)
        step_bytes = step(1, tokens, ranks)[0] - narrower
        base_bytes -= narrower
        return Floors(
            max(prefill_flops / flops, prefill_bytes / bandwidth),
            step_bytes / bandwidth,
            (step_bytes - base_bytes) / bandwidth,
            prefill_flops,
            step_bytes,
        )


@contextmanager
def on_cpu(size: ModelSize, **more: Any) -> Iterator[Context]:
    """A context of its own for a measurement on the CPU, in a folder that is removed at the end."""
    with TemporaryDirectory(prefix="chorus-bench-") as name:
        work = Path(name)
        yield Context("cpu", size, quick=True, timer=WallTimer(), store=ResultStore(work, {}), work_dir=work, **more)
