"""`chorus quantize`: writes a checkpoint with weights of 8 or 4 bits, rounded to the nearest."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError

from ..checkpoints.pull import resolve_model
from ..machine_faults import fault_of, reason_of, size_text
from .adapters import CommandError

if TYPE_CHECKING:
    import torch

    from ...core.model.checkpoints.checkpoint import Checkpoint
    from ...core.model.checkpoints.quantization.round_to_nearest import RoundToNearest
    from ...core.model.weights.tensor_parts import StoredProjections

_CONFIG = "config.json"
_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".gguf", ".pth")


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, metavar="MODEL", help="directory or name of a model that is not quantised")
    parser.add_argument("out", type=Path, metavar="OUT", help="a new directory")
    parser.add_argument(
        "--quantization",
        choices=("int8", "int4", "w8a8", "w4a8", "fp8"),
        default="int4",
        help="int8: one scale per row; int4: one per row and group of 128 inputs, or of 64 or 32 where 128 does not "
        "divide the row; w8a8 and w4a8: the same weights, and activations of 8 bits; fp8: E4M3, one scale per row",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command; return the exit code. Raises CommandError."""
    from ...core.model.specs.config import UnsupportedModel

    try:
        return _quantise(arguments)
    except UnsupportedModel as error:
        raise CommandError(reason_of(error)) from None


def _quantise(arguments: argparse.Namespace) -> int:
    from ...core.model.checkpoints.checkpoint import INDEX, Checkpoint
    from ...core.model.checkpoints.quantization.pack_quantized import quantization_config
    from ...core.model.checkpoints.quantization.round_to_nearest import quantiser_of
    from ...core.model.read_config import read_model_config
    from ...core.model.weights.tensor_parts import stored_projections

    source, out = resolve_model(arguments.model), arguments.out
    if out.exists():
        raise CommandError(f"{out} exists already; name a new directory")
    model = read_model_config(source)
    quantiser = quantiser_of(arguments.quantization, False, model.weight_format)
    assert quantiser is not None
    checkpoint = Checkpoint(source)
    stored = stored_projections(model, checkpoint.names())
    inputs = {name: checkpoint[name].shape[1] for name in stored.matrices}
    inputs |= {each.name: checkpoint[name].shape[2] for name, pieces in stored.stacks.items() for each in pieces}
    modules = {name.removesuffix(".weight"): count for name, count in inputs.items()}
    section = quantization_config(quantiser, modules, _other_linear(checkpoint, stored.matrices))
    part = out.with_name(f".{out.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        part.mkdir(parents=True)
        index = _write_weights(checkpoint, stored, quantiser, part)
        if len(set(index.values())) > 1:
            size = sum(file.stat().st_size for file in part.iterdir())
            (part / INDEX).write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": index}, indent=1))
        for file in source.iterdir():
            if file.is_file() and not file.name.endswith(_WEIGHTS) and file.name != _CONFIG:
                shutil.copyfile(file, part / file.name)
        config = json.loads((source / _CONFIG).read_text(encoding="utf-8"))
        (part / _CONFIG).write_text(json.dumps({**config, "quantization_config": section}, indent=1), encoding="utf-8")
        part.rename(out)
    except (OSError, SafetensorError) as error:
        raise CommandError(_unwritten(error, out, part, source)) from None
    finally:
        shutil.rmtree(part, ignore_errors=True)
    print(f"wrote {out}: {len(inputs)} matrices as {arguments.quantization}")
    return 0


def _unwritten(error: Exception, out: Path, part: Path, source: Path) -> str:
    """Why the checkpoint could not be written, and for a full disk how much it may take."""
    fault = fault_of(error, out)
    if fault is None:
        return f"{out}: can't be written: {error}"
    written = sum(file.stat().st_size for file in part.glob("*"))
    whole = sum(file.stat().st_size for file in source.iterdir() if file.is_file())
    return f"{fault} ({size_text(written)} were written; {source} has {size_text(whole)}, and the copy takes no more)"


def _other_linear(checkpoint: Checkpoint, names: set[str]) -> list[str]:
    """Modules with a matrix of their own that stays as it is, such as a score head; embeddings are none."""
    matrices = [name for name in checkpoint.names() if name.endswith(".weight") and len(checkpoint[name].shape) == 2]
    modules = [name.removesuffix(".weight") for name in matrices if name not in names]
    return [module for module in modules if not _is_embedding(module.rpartition(".")[2])]


def _is_embedding(name: str) -> bool:
    """True for the last part of a table's name, not for that of a projection of its rows."""
    return "embed" in name and "proj" not in name


def _write_weights(
    checkpoint: Checkpoint, stored: StoredProjections, quantiser: RoundToNearest, out: Path
) -> dict[str, str]:
    """Write each file of the checkpoint with its matrices quantised; return each tensor's file."""
    from safetensors.torch import save_file

    by_file: dict[Path, list[str]] = {}
    for name in checkpoint.names():
        by_file.setdefault(checkpoint[name].path, []).append(name)
    index: dict[str, str] = {}
    for path, own in sorted(by_file.items()):
        tensors = dict(_tensors(checkpoint, own, stored, quantiser))
        save_file(tensors, out / path.name, {"format": "pt"})
        index |= dict.fromkeys(tensors, path.name)
    return index


def _tensors(
    checkpoint: Checkpoint, own: list[str], stored: StoredProjections, quantiser: RoundToNearest
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a file, by name; each matrix of a stack becomes one of its own."""
    from ...core.model.checkpoints.quantization.pack_quantized import packed_tensors

    def packed(name: str, matrix: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        module = name.removesuffix("weight")
        return ((module + end, each) for end, each in packed_tensors(name, matrix, quantiser).items())

    for name in own:
        if name in stored.matrices:
            yield from packed(name, checkpoint.read(name))
        elif name not in stored.stacks:
            yield name, checkpoint.read(name)
        for piece in stored.stacks.get(name, ()):
            place = slice(piece.expert, piece.expert + 1), piece.rows
            yield from packed(piece.name, checkpoint.read(name, place)[0])
