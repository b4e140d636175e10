"""Models with quantised weights, and transformers + peft with the dequantised values."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from ...kept import KeptAnswers, kept_files, name_of
from ..model.checkpoints.quantization.test_mxfp4 import HOW
from ..tiny_families import Tiny
from ..tiny_mixtures import make_mixture

PLAIN = (".gate.weight", ".router.weight", "bias", "conv1d.weight")
"""Ends of names of tensors that are not quantised."""


def rounded(weight: torch.Tensor, form: str) -> torch.Tensor:
    """A weight `[…, out, in]` quantised to the nearest and dequantised, from the definition."""
    if form == "fp8":
        scale = weight.abs().amax(-1, keepdim=True) / 448
        return (weight / scale).to(torch.float8_e4m3fn).float() * scale
    half, inputs = {"int8": 128, "int4": 8}[form], weight.shape[-1]
    group = inputs if form == "int8" else next((each for each in (128, 64, 32) if not inputs % each), 128)
    parts = []
    for part in weight.float().split(group, -1):
        scale = (part.abs().amax(-1, keepdim=True) / (half - 0.5)).bfloat16().float()
        parts.append((part * (1 / scale)).round().clamp(-half, half - 1) * scale)
    return torch.cat(parts, -1)


def write_rounded(source: Path, path: Path, form: str) -> None:
    """A checkpoint of the dequantised weights of `--quantization`."""
    shutil.copytree(source, path)
    for file in path.glob("*.safetensors"):
        tensors = load_file(file)
        for name, tensor in tensors.items():
            if ".layers." not in name or name.endswith(PLAIN):
                continue
            if tensor.ndim == 3:  # gpt-oss' experts: [experts, in, out]
                tensors[name] = rounded(tensor.transpose(1, 2), form).transpose(1, 2).contiguous()
            elif tensor.ndim == 2:
                tensors[name] = rounded(tensor, form)
        save_file(tensors, file, {"format": "pt"})


def write_packed(source: Path, quantised: Path, twin: Path) -> None:
    """gpt-oss with random MXFP4 experts about as large as before, and the dequantised twin."""
    for path in (quantised, twin):
        shutil.copytree(source, path)
    plain, packed = load_file(twin / "model.safetensors"), {}
    generator = torch.Generator().manual_seed(0)
    for name, tensor in plain.items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            packed[name] = tensor
            continue
        experts, inputs, outputs = tensor.shape
        shape = (experts, outputs, inputs // 32)
        packed[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
        packed[f"{name}_scales"] = torch.randint(122, 125, shape, dtype=torch.uint8, generator=generator)
        values = convert_moe_packed_tensors(packed[f"{name}_blocks"], packed[f"{name}_scales"])
        plain[name] = values.float().contiguous()
    save_file(packed, quantised / "model.safetensors")
    save_file(plain, twin / "model.safetensors")
    config = json.loads((quantised / "config.json").read_text())
    (quantised / "config.json").write_text(json.dumps({**config, "quantization_config": HOW}))


class Quantised:
    """A served model with adapters, and `transformers` + `peft` with its dequantised values.

    options: settings of its engines.
    """

    def __init__(self, base: Tiny, form: str) -> None:
        def write(root: Path) -> None:
            if form == "mxfp4":
                write_packed(base.model, root / "quantised", root / "twin")
            else:
                write_rounded(base.model, root / "twin", form)

        root = kept_files(f"quantised {name_of(base.model.parent)} {form}", write)
        self.options: dict[str, Any] = {} if form == "mxfp4" else {"quantization": form}
        self.model, self.adapters = root / "quantised" if form == "mxfp4" else base.model, base.adapters
        others = {"references": {}} if hasattr(base, "references") else {}
        self.twin = replace(base, model=root / "twin", kept=KeptAnswers(root), router_margins=[], **others)
        self.case = self.twin.case


def quantised_mixture(family: str, form: str) -> Quantised:
    """A family with adapters on all parts of its mixtures of experts."""
    return Quantised(make_mixture(family), form)
