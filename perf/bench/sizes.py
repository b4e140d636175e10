"""The models that the benchmark builds from their configuration alone, with random weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...memory.pages.layout import MODULES
from ..cpu.workload import GEOMETRIES, Geometry

#: Projections that share an input, so that their LoRA products are one pair of launches.
GROUPS = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "o": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}


@dataclass(frozen=True)
class ModelSize:
    """A Llama-architecture model. rope: fields of config.json that the geometry does not give."""

    name: str
    geometry: Geometry
    rope: dict[str, Any]

    def groups(self) -> dict[str, tuple[int, tuple[tuple[int, int, int], ...]]]:
        """Per group: inputs, and (module id, first column, width) of its projections side by side."""
        dims, groups = self.geometry.dims, {}
        for group, names in GROUPS.items():
            modules, column = [], 0
            for name in names:
                modules.append((MODULES.index(name), column, dims[name][1]))
                column += dims[name][1]
            groups[group] = dims[names[0]][0], tuple(modules)
        return groups

    def write_config(self, directory: Path, dtype: str) -> Path:
        """Make `directory` a checkpoint without weights. Returns it."""
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text(
            json.dumps(self.geometry.config(dtype, eos_token_id=2, **self.rope), indent=1), encoding="utf-8"
        )
        return directory


_LLAMA3_ROPE = {
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}

TINY = "tiny"

_ROPE = {"rope_theta": 10000.0}

SIZES = {
    "llama-3.1-8b": ModelSize(
        "llama-3.1-8b",
        Geometry(hidden=4096, ffn=14336, layers=32, heads=32, kv_heads=8, vocab=128256, positions=131072),
        _LLAMA3_ROPE,
    ),
    TINY: ModelSize(
        TINY, Geometry(hidden=128, ffn=256, layers=2, heads=2, kv_heads=1, vocab=512, positions=2048), _ROPE
    ),
    **{name: ModelSize(name, geometry, _ROPE) for name, geometry in GEOMETRIES.items()},
}


def is_smoke(device: str, size: str) -> bool:
    """True for a run that tries the benchmark itself: a model that is too small to measure anything, on a CPU."""
    return device == "cpu" and size == TINY


def size_of(text: str) -> ModelSize:
    """A size by name, or of shapes as `Geometry.parse` takes them. Raises ValueError."""
    if text in SIZES:
        return SIZES[text]
    return ModelSize("".join(char if char.isalnum() else "-" for char in text), Geometry.parse(text), _ROPE)
