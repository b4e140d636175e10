"""Rewrites an adapter of experts that Unsloth trained before unsloth-zoo of 17 September 2026.

PEFT's B of a parameter of all experts, `[out, rank · experts]`, has expert after expert for each rank. Unsloth trained
it as rank after rank for each expert. Nothing in the file tells, so a user must.

Tests: tests/server/cli/test_convert_experts.py
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...memory.files.config import CONFIG_FILE
from ...memory.files.peft_form import WEIGHTS_FILE
from ...memory.files.tokens.added_tokens import TEXT_FILES
from .adapters import CommandError

if TYPE_CHECKING:
    import torch

NAME = "unsloth-experts"

_B = re.compile(r".*\.experts(?:\.base_layer)*\.lora_B(?:\.[^.]+)?\.weight")
_MARK = "chorus_converted_from"


def convert(source: Path, target: Path, experts: int | None) -> int:
    """Write the adapter in `source` to the directory `target` in PEFT's order; return how many tensors that changed.

    experts: of the base model; None: as the configuration's rank tells. Raises CommandError, and OSError.
    """
    from safetensors.torch import save_file

    weights = target / WEIGHTS_FILE
    if weights.exists():
        raise CommandError(f"{weights} exists already; name a new directory by --out, to keep the original")
    config = _config(source / CONFIG_FILE)
    tensors, metadata = _read(source / WEIGHTS_FILE)
    if metadata.get(_MARK) == NAME:
        raise CommandError(f"{source}: was converted already, and a second time would make it wrong; serve it as it is")
    names = [name for name, tensor in tensors.items() if _B.fullmatch(name) and tensor.ndim == 2]
    if not names:
        raise CommandError(
            f"{source / WEIGHTS_FILE}: has no lora_B of all experts in one parameter (target_parameters), so there is "
            "nothing to convert"
        )
    count = experts or _experts(config, source, [tensors[name] for name in names])
    for name in names:
        tensors[name] = _in_order(tensors[name], count, f"{source / WEIGHTS_FILE}: tensor {name}")
    target.mkdir(parents=True, exist_ok=True)
    save_file(tensors, weights, metadata={**metadata, _MARK: NAME})
    for other in (CONFIG_FILE, *TEXT_FILES):
        if (source / other).is_file():
            shutil.copyfile(source / other, target / other)
    return len(names)


def _read(weights: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Tensors and metadata of a file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(weights, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except FileNotFoundError:
        raise CommandError(f"{weights}: not found; name the directory of a PEFT adapter") from None
    except SafetensorError as error:
        raise CommandError(f"{weights}: can't be read: {error}") from None


def _config(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise CommandError(f"{file}: not found; name the directory of a PEFT adapter") from None
    except (ValueError, RecursionError) as error:
        raise CommandError(f"{file}: not JSON: {error}") from None
    if not isinstance(found, dict):
        raise CommandError(f"{file}: a JSON object is needed")
    return found


def _experts(config: dict[str, Any], source: Path, matrices: list[torch.Tensor]) -> int:
    """The number of experts, by the one rank of all."""
    rank = config.get("r")
    columns = {matrix.shape[1] for matrix in matrices}
    if config.get("rank_pattern") or type(rank) is not int or rank < 1 or len(columns) > 1 or max(columns) % rank:
        raise CommandError(
            f"{source / CONFIG_FILE}: r and rank_pattern do not tell one rank of all experts; name their number by "
            "--experts N (num_experts in the base model's config.json)"
        )
    return max(columns) // rank


def _in_order(b: torch.Tensor, experts: int, what: str) -> torch.Tensor:
    if b.shape[1] % experts:
        raise CommandError(
            f"{what} has {b.shape[1]} columns, not a multiple of {experts} experts; name their number by --experts N "
            "(num_experts in the base model's config.json)"
        )
    return b.unflatten(1, (experts, -1)).transpose(1, 2).flatten(1).contiguous()
