"""PEFT LoRA checkpoints as they lie on disk: `adapter_config.json` and `adapter_model.safetensors`.

`inspect_adapter` reads the configuration and the safetensors header only, so that thousands of adapters can be
registered for the price of their headers; `read_image` reads the weights into the very layout of the device pages.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .layout import MODULES, ModuleDims, SlabLayout

if TYPE_CHECKING:
    import torch

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"

_TENSOR_NAME = re.compile(
    r"^base_model\.model\.model\.layers\.(?P<layer>\d+)\."
    r"(?:self_attn\.(?=[qkvo]_)|mlp\.(?=(?:gate|up|down)_))(?P<module>\w+)"
    r"\.lora_(?P<side>[AB])\.weight$"
)


class AdapterFormatError(ValueError):
    """An adapter directory that can't be served; the message names the file and the field or tensor at fault."""


@dataclass(frozen=True)
class AdapterManifest:
    """What an adapter is, without its weights.

    tensors: (layer, module name) → names of its A `[rank, in]` and B `[out, rank]` in the file.
    """

    path: Path
    rank: int
    scale: float
    targets: tuple[str, ...]
    tensors: dict[tuple[int, str], tuple[str, str]] = field(repr=False)
    fingerprint: tuple[int, ...] = field(default=(), repr=False, compare=False)

    def num_params(self, dims: ModuleDims) -> int:
        return sum(self.rank * sum(dims[module]) for _, module in self.tensors)


def is_adapter_dir(path: Path) -> bool:
    return (path / CONFIG_FILE).is_file()


def inspect_adapter(path: Path, dims: ModuleDims, num_layers: int) -> AdapterManifest:
    """Read and check an adapter directory's configuration and tensor shapes against the base model.

    Raises AdapterFormatError for anything that would not be served exactly as PEFT would apply it.
    """
    config = _read_config(path)
    rank, scale = _rank_and_scale(config, path)
    fingerprint = _fingerprint(path)
    shapes = _read_shapes(path)
    tensors = _pair_tensors(shapes, path)
    for (layer, module), names in tensors.items():
        _check_shapes(path, layer, module, rank, [shapes[name] for name in names], names, dims, num_layers)
    targets = tuple(name for name in MODULES if any(module == name for _, module in tensors))
    for layer in range(num_layers):
        for module in targets:
            if (layer, module) not in tensors:
                raise AdapterFormatError(f"{path / WEIGHTS_FILE}: {module} of layer {layer} has no lora_A and lora_B")
    return AdapterManifest(path=path, rank=rank, scale=scale, targets=targets, tensors=tensors, fingerprint=fingerprint)


def read_image(
    manifest: AdapterManifest, slabs: SlabLayout, dims: ModuleDims, num_layers: int, dtype: torch.dtype
) -> torch.Tensor:
    """The adapter's weights in page layout: `[pages, page_elems]` on the host, cast to the model's dtype.

    AdapterFormatError when a tensor can't be read or holds NaN or infinity, before or after the cast.
    """
    import torch
    from safetensors import SafetensorError, safe_open

    rank = manifest.rank
    spp = slabs.slabs_per_page
    image = torch.zeros(slabs.pages_for(num_layers * rank), slabs.page_elems, dtype=dtype)
    rows = image[:, : spp * slabs.slab_elems].view(-1, spp, slabs.slab_elems)
    slab = torch.arange(num_layers * rank)
    page_of, place_of = slab // spp, slab % spp
    try:
        if _fingerprint(manifest.path) != manifest.fingerprint:
            raise AdapterFormatError(
                f"{manifest.path / WEIGHTS_FILE}: changed since the adapter was registered; register it again"
            )
        with safe_open(manifest.path / WEIGHTS_FILE, framework="pt") as file:
            for (layer, module), names in manifest.tensors.items():
                m = MODULES.index(module)
                own = slice(layer * rank, (layer + 1) * rank)
                sides = zip(names, (slabs.a_offset[m], slabs.b_offset[m]), dims[module], strict=True)
                for side, (name, offset, width) in enumerate(sides):
                    tensor = file.get_tensor(name).to(dtype)
                    if not torch.isfinite(tensor).all():
                        raise AdapterFormatError(
                            f"{manifest.path / WEIGHTS_FILE}: tensor {name} holds NaN or infinity in {dtype}"
                        )
                    rows[page_of[own], place_of[own], offset : offset + width] = tensor.T if side else tensor
    except (SafetensorError, OSError) as error:
        raise AdapterFormatError(f"{manifest.path / WEIGHTS_FILE}: cannot be read: {error}") from error
    return image


def _fingerprint(path: Path) -> tuple[int, ...]:
    """Tells whether the weights file is still the one that was inspected; `()` when there is none."""
    try:
        stat = (path / WEIGHTS_FILE).stat()
    except OSError:
        return ()
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_dir():
        raise AdapterFormatError(f"{path}: no such directory")
    file = path / CONFIG_FILE
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise AdapterFormatError(f"{file}: not found; a PEFT adapter directory is needed") from None
    except (OSError, ValueError) as error:
        raise AdapterFormatError(f"{file}: cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise AdapterFormatError(f"{file}: a JSON object is needed, found {type(config).__name__}")
    return config


def _rank_and_scale(config: dict[str, Any], path: Path) -> tuple[int, float]:
    """Rank and scaling (`lora_alpha / r`, or `/ sqrt(r)` for rsLoRA); refuses what would change the arithmetic."""
    file = path / CONFIG_FILE

    def refuse(name: str, why: str) -> AdapterFormatError:
        return AdapterFormatError(f"{file}: {name} is {config.get(name)!r}: {why}")

    if config.get("peft_type", "LORA") != "LORA":
        raise refuse("peft_type", "only LORA is served")
    if config.get("use_dora"):
        raise refuse("use_dora", "DoRA is not supported; merge it into the base or train plain LoRA")
    if config.get("bias", "none") != "none":
        raise refuse("bias", "adapters that train biases are not supported; use bias='none'")
    for name in (
        "modules_to_save", "rank_pattern", "alpha_pattern", "layer_replication", "trainable_token_indices", "lora_bias",
        "fan_in_fan_out", "layers_to_transform", "target_parameters", "use_qalora", "use_bdlora", "arrow_config",
        "alora_invocation_tokens",
    ):  # fmt: skip
        if config.get(name):
            raise refuse(name, "not supported; remove it and train again")
    init = config.get("init_lora_weights")
    if isinstance(init, str) and init.startswith(("pissa", "olora", "corda", "loftq", "lora_ga")):
        raise refuse("init_lora_weights", "it changes the base weights; convert the adapter to plain LoRA with peft")
    rank, alpha = config.get("r"), config.get("lora_alpha", 8)
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise refuse("r", "a rank of at least 1 is needed")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not math.isfinite(alpha):
        raise refuse("lora_alpha", "a finite number is needed")
    return rank, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _read_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    from safetensors import SafetensorError, safe_open

    file = path / WEIGHTS_FILE
    if not file.is_file():
        pickled = path / "adapter_model.bin"
        hint = "; pickle files are never read: convert adapter_model.bin to safetensors" if pickled.exists() else ""
        raise AdapterFormatError(f"{file}: not found{hint}")
    try:
        with safe_open(file, framework="numpy") as handle:
            return {name: tuple(handle.get_slice(name).get_shape()) for name in handle.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise AdapterFormatError(f"{file}: cannot be read: {error}") from error


def _pair_tensors(shapes: dict[str, tuple[int, ...]], path: Path) -> dict[tuple[int, str], tuple[str, str]]:
    file = path / WEIGHTS_FILE
    found: dict[tuple[int, str], dict[str, str]] = {}
    for name in shapes:
        match = _TENSOR_NAME.match(name)
        if match is None or match["module"] not in MODULES:
            raise AdapterFormatError(
                f"{file}: tensor {name} is not LoRA on one of {', '.join(MODULES)}; such adapters are not supported"
            )
        found.setdefault((int(match["layer"]), match["module"]), {})[match["side"]] = name
    if not found:
        raise AdapterFormatError(f"{file}: holds no tensor")
    for (layer, module), sides in found.items():
        for side in "AB":
            if side not in sides:
                raise AdapterFormatError(f"{file}: {module} of layer {layer} has no lora_{side}")
    return {key: (sides["A"], sides["B"]) for key, sides in sorted(found.items())}


def _check_shapes(
    path: Path,
    layer: int,
    module: str,
    rank: int,
    shapes: list[tuple[int, ...]],
    names: tuple[str, str],
    dims: ModuleDims,
    num_layers: int,
) -> None:
    if layer >= num_layers:
        raise AdapterFormatError(
            f"{path / WEIGHTS_FILE}: tensor {names[0]} is for layer {layer}, the base model has {num_layers} layers"
        )
    d_in, d_out = dims[module]
    for name, shape, want in zip(names, shapes, ((rank, d_in), (d_out, rank)), strict=True):
        if shape != want:
            raise AdapterFormatError(
                f"{path / WEIGHTS_FILE}: tensor {name} has shape {list(shape)}, the base model and r={rank} "
                f"need {list(want)}"
            )
