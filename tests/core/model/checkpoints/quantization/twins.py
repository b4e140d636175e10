"""A quantised checkpoint and its twin, a plain one that holds the dequantised values."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from chorus.core.model.checkpoints.quantization.group_scaled import GroupScaled
from chorus.core.model.read_config import read_model_config
from chorus.core.model.weights.tensor_parts import LM_HEAD, sources, tensor_shapes
from chorus.core.model.weights.weight_loader import WeightLoader
from chorus.core.model.weights.weight_plan import Way, WeightPlan
from chorus.ops.gemm.packed_gemm import unpack

CONFIG = {
    "vocab_size": 56,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}

#: A module that is quantised in every test.
MODULE = "model.layers.1.self_attn.o_proj"

Tensors = dict[str, torch.Tensor]

#: Takes a module's name and its weight's shape; returns its tensors by the ends of their names, and the float32 weight.
Quantise = Callable[[str, tuple[int, int]], tuple[Tensors, torch.Tensor]]


@dataclass(frozen=True)
class Form:
    """A form of quantised weights: how the tests write it, and what `quantization_config` says of it."""

    quantise: Quantise
    how: dict[str, Any]

    plain: Sequence[str] = ()
    """Ends of names of modules that are not quantised; `how` names them, too."""

    has_head: bool = False
    """The output projection is quantised, too."""

    config: dict[str, Any] = field(default_factory=dict)
    """Changes of config.json."""

    file: str = ""
    """The file that has `how`, where config.json has not."""


def write(path: Path, tensors: Tensors, **config: Any) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({**CONFIG, **config}))
    if tensors:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")
    return path


def write_twins(
    root: Path, form: Form, architecture: str = "LlamaForCausalLM", spoil: Callable[[Tensors], object] = lambda _: None
) -> tuple[Path, Path]:
    """The quantised checkpoint, which `spoil` may change, and its twin."""
    config = {"architectures": [architecture], **form.config}
    model = read_model_config(write(root / "twin", {}, **config))
    names, stacked = sources(model, ()), {}
    torch.manual_seed(0)
    for part, shape in tensor_shapes(model).items():
        stacked.setdefault(names[part].name, []).append(torch.randn(shape))
    twin: Tensors = {name: torch.cat(parts) for name, parts in stacked.items()}
    quantised = dict(twin)
    for name, weight in list(twin.items()):
        module = name.removesuffix(".weight")
        is_projection = ".layers." in name or (form.has_head and name == LM_HEAD)
        if is_projection and weight.ndim == 2 and not module.endswith(tuple(form.plain)):
            del quantised[name]
            tensors, twin[name] = form.quantise(module, (weight.shape[0], weight.shape[1]))
            quantised |= {f"{module}.{end}": tensor for end, tensor in tensors.items()}
    spoil(quantised)
    write(root / "twin", twin, **config)
    write(root / "quantised", quantised, **config, **({} if form.file else {"quantization_config": form.how}))
    if form.file:
        (root / "quantised" / form.file).write_text(json.dumps(form.how))
    return root / "quantised", root / "twin"


class AsStored(WeightPlan):
    """Every matrix is read as the narrow values that it is stored in."""

    def reads(self, matrix: GroupScaled) -> bool:
        return True


AS_STORED = AsStored(Way.PACK, Way.PACK)


def weights(path: Path, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Iterator[torch.Tensor | None]:
    """Everything that a rank keeps of a checkpoint."""
    loader = WeightLoader(path, read_model_config(path), dtype, **options)
    for layer in loader.layers():
        yield from _parts(layer)
    yield loader.lm_head(loader.embed())


def _parts(part: Any) -> Iterator[torch.Tensor | None]:
    """The tensors of a layer, and of its experts."""
    if isinstance(part, dict):
        part = list(part.values())
    if not (isinstance(part, list) or is_dataclass(part)):
        yield unpack(part) if isinstance(part, torch.Tensor) else None
    else:
        for each in part if isinstance(part, list) else [getattr(part, it.name) for it in fields(part)]:
            yield from _parts(each)
