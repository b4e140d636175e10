"""`chorus check`: a dry run for CI that says whether adapters would be served, and if not, why."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import TextIO

from ...core.base_name import named_base, names_of, short_name, with_base
from ...core.model.compose.composed import composed
from ...core.model.compose.decoder_layer import DecoderLayer
from ...core.model.specs.attention import AttentionSpec
from ...core.model.specs.feed_forward import GatedSpec
from ...core.model.specs.norms import NormSpec
from ...core.model.specs.recurrent import GatedDeltaSpec, RecurrentSpec
from ...memory.files.error import AdapterFormatError, shown
from ...memory.files.format import inspect_adapter, open_weights
from ...memory.files.manifest import AdapterManifest
from ...memory.files.module_paths import ModulePaths
from ...memory.files.peft_names import tensor_names
from ...memory.files.tensor_uses import form_in_words, uses_of
from ...memory.files.tokens.added_tokens import TOKENIZER_FILES
from ...memory.pages.layer_projections import model_projections
from ...memory.pages.projections import Projection, Projections
from ..checkpoints.pull import resolve_model
from .adapters import CommandError

PAGE_ELEMENTS = 1 << 16
"""Elements of the pages that weights are read into and then discarded."""

EXIT_REFUSED, EXIT_DIFFERS = 1, 3


class Status(StrEnum):
    """A server's verdict on an adapter."""

    SERVED = "served"
    DIFFERS = "differs"  # served, with a warning in the log
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of checking one adapter."""

    path: str
    status: Status
    reasons: list[str] = field(default_factory=list)
    """Reason for a refusal, or a difference from what its author may expect."""
    rank: int | None = None
    target_modules: list[str] = field(default_factory=list)
    base_model: str | None = None
    content_hash: str | None = None
    dropped_tensors: list[str] = field(default_factory=list)
    """Whole modules in its file that equal the base model's."""
    form: str | None = None
    """The form that its files were recognised as."""
    tensors: dict[str, str] = field(default_factory=dict)
    """Names of its file's tensors, and what each is used for."""

    unchecked_files: list[str] = field(default_factory=list)
    """Files that a server compares with the base model's, which was not given."""


@dataclass(frozen=True, slots=True)
class _Base:
    """The base model to check against."""

    modules: ModulePaths
    dtype: str

    names: frozenset[str] | None
    """Names by which an adapter may refer to its base; None: any."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("adapters", nargs="+", type=Path, metavar="DIR", help="directory of an adapter")
    parser.add_argument(
        "--model",
        type=Path,
        metavar="MODEL",
        help="directory or name of the base model; of its weights only what an adapter has a whole copy of is read. "
        "Without it, an adapter is checked against its own shapes, and its tokenizer is not checked",
    )
    parser.add_argument("--served-model-name", metavar="NAME", help="a further name of the base model")
    parser.add_argument(
        "--tensors", action="store_true", help="also print what each tensor is used for; with --json it is always there"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace, out: TextIO | None = None) -> int:
    """Run the command; return 0 if all are served unchanged, 1 if one is refused, 3 if one differs."""
    base = None if arguments.model is None else _base_of(arguments.model, arguments.served_model_name)
    verdicts = [check(path, base) for path in arguments.adapters]
    if arguments.json:
        print(json.dumps({"adapters": [asdict(each) for each in verdicts]}, indent=2), file=out)
    else:
        for line in (line for each in verdicts for line in _lines(each, with_tensors=arguments.tensors)):
            print(line, file=out)
    found = {each.status for each in verdicts}
    if Status.REFUSED in found:
        return EXIT_REFUSED
    return EXIT_DIFFERS if Status.DIFFERS in found else 0


def check(path: Path, base: _Base | None) -> Verdict:
    """Return a server's verdict on an adapter for this base model; reads its weights. base: None: any."""
    from ...memory.files.identity import with_content

    unchecked = [name for name in TOKENIZER_FILES if base is None and path.is_dir() and (path / name).exists()]
    try:
        base = base or _own_base(path)
        manifest = inspect_adapter(path, base.modules)
        _read_weights(manifest, base)
        manifest = with_content(manifest)
        uses = uses_of(manifest)
    except AdapterFormatError as error:
        return Verdict(str(path), Status.REFUSED, [str(error), *_other_base(path, base, str(error))])
    if base.names is not None:
        manifest = with_base(manifest, base.names, strict=False)
    reasons = _differences(manifest)
    return Verdict(
        str(path),
        status=Status.DIFFERS if reasons else Status.SERVED,
        reasons=reasons,
        rank=manifest.rank,
        target_modules=list(manifest.targets),
        base_model=manifest.base_model,
        content_hash=manifest.content_hash,
        dropped_tensors=list(manifest.dropped),
        form=form_in_words(manifest),
        tensors=uses,
        unchecked_files=unchecked,
    )


def _other_base(path: Path, base: _Base | None, told: str) -> list[str]:
    """For a refused adapter of another model, that model's name, unless the reason tells it: it is likely the cause."""
    named = named_base(path)
    if base is None or base.names is None or named is None or short_name(named) in base.names or shown(named) in told:
        return []
    return [_trained_on(named)]


def _trained_on(named: str | None) -> str:
    return f"it was trained on {shown(named)}, which is not this model"


def _differences(manifest: AdapterManifest) -> list[str]:
    reasons = []
    if manifest.names_other_base:
        reasons.append(f"{_trained_on(manifest.base_model)}; --strict-base would refuse it")
    if manifest.num_left_out:
        reasons.append(
            f"{manifest.num_left_out} of its tensors are outside the text model, such as in a vision tower, "
            "and have no effect on text"
        )
    if manifest.untrained:
        reasons.append(f"it does not train {', '.join(manifest.untrained)}, which stay the base model's")
    if manifest.no_effect:
        reasons.append("it has no effect: all of its B, or all of its A, or its alpha is zero")
    return reasons


def _base_of(model: Path, served: str | None) -> _Base:
    from ...core.model.config_json import UnsupportedModel
    from ...core.model.read_config import read_model_config

    directory = resolve_model(model)
    try:
        config = read_model_config(directory)
    except UnsupportedModel as error:
        raise CommandError(str(error)) from None
    return _Base(config.module_paths, config.dtype, names_of(directory, served))


def _own_base(path: Path) -> _Base:
    """The shapes of an adapter's own tensors, with which it must be consistent.

    A layer has linear attention if the adapter has a tensor of it there.
    """
    attention, linear = map(_layer, (AttentionSpec(1, 1, 1, 1.0, None), GatedDeltaSpec(1, 1, 1, 1, 1.0)))
    usual = Projections((attention, linear), model_projections(1, 1, 1))
    dims, layers_of = _own_modules(path, usual)
    found = set[int]().union(*layers_of.values())
    with_linear = {layer for name, layers in layers_of.items() if name not in _names(attention) for layer in layers}
    attention, linear = (
        tuple(_with_dims(each, *dims.get(each.name, (1, 1))) for each in layer) for layer in usual.layers
    )
    own = (linear if layer in with_linear else attention for layer in range(max(found, default=0) + 1))
    of_model = tuple(_with_dims(each, *dims.get(each.name, (1, 1))) for each in usual.model)
    return _Base(ModulePaths(Projections(tuple(own), of_model)), "float32", None)


def _layer(mixer: AttentionSpec | RecurrentSpec) -> tuple[Projection, ...]:
    """The projections of a layer with this mixer, and a gated part."""
    return composed(DecoderLayer(mixer, GatedSpec(1)), NormSpec(1.0), 1).projections


def _own_modules(path: Path, usual: Projections) -> tuple[dict[str, tuple[int, int]], dict[str, set[int]]]:
    """Inputs and outputs of the projections that an adapter changes, and the layers where it does."""
    dims: dict[str, tuple[int, int]] = {}
    layers_of: dict[str, set[int]] = {}
    with open_weights(path, ModulePaths(usual)) as file:
        shapes = {name: info.shape for name, info in file.tensors.items()}
    dims |= _dims_of_model(shapes, usual)
    for end, num_dims in (("lora_A.weight", 2), ("bias", 1)):  # a module without LoRA may have a bias
        for name, shape in shapes.items():
            *parents, module = name.removesuffix(f".{end}").split(".")
            if len(shape) != num_dims or not name.endswith(f".{end}") or module not in usual.names:
                continue
            d_out = _size(shapes.get(name.replace("lora_A", "lora_B"), ()))
            dims.setdefault(module, (shape[-1] if num_dims > 1 else 1, d_out))
            layers_of.setdefault(module, set()).update(_numbers(parents))
    return dims, layers_of


def _numbers(parts: Sequence[str]) -> Iterator[int]:
    return (int(part) for part in parts if part.isdecimal() and len(part) <= 6)


def _dims_of_model(shapes: Mapping[str, tuple[int, ...]], usual: Projections) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of the model's own modules, such as the head, that an adapter changes."""
    found = {}
    for projection in usual.model:
        a, b = (shapes.get(name, ()) for name in tensor_names(0, projection))
        if len(a) == 2:
            found[projection.name] = a[1], _size(b)
    return found


def _names(layer: Sequence[Projection]) -> set[str]:
    return {projection.name for projection in layer}


def _with_dims(projection: Projection, inputs: int, outputs: int) -> Projection:
    return replace(projection, inputs=inputs, outputs=outputs)


def _size(shape: tuple[int, ...]) -> int:
    return shape[0] if shape else 1


def _read_weights(manifest: AdapterManifest, base: _Base) -> None:
    """Read the weights like a server, which refuses values that are not finite in the model's dtype."""
    import torch

    from ...memory.adapters.image import ImageForm, read_image
    from ...memory.host.buffers import HostBuffers
    from ...memory.host.image import HostImage
    from ...memory.pages.adapter_layout import AdapterLayout

    dtype: torch.dtype = getattr(torch, base.dtype)
    projections = base.modules.projections
    layout = AdapterLayout.build(manifest.parts, projections, PAGE_ELEMENTS, dtype.itemsize, vectors=manifest.vectors)
    read_image(manifest, ImageForm(layout, projections, PAGE_ELEMENTS, dtype), HostImage(), HostBuffers())


def _lines(verdict: Verdict, *, with_tensors: bool) -> Iterator[str]:
    yield _line(verdict)
    if with_tensors:
        yield from (f"  {shown(name)}: {use}" for name, use in verdict.tensors.items())


def _line(verdict: Verdict) -> str:
    about: dict[str, object] = {"form": verdict.form, "rank": verdict.rank, "modules": " ".join(verdict.target_modules)}
    if verdict.dropped_tensors:
        about["dropped"] = " ".join(verdict.dropped_tensors)
    if verdict.unchecked_files:
        about["not checked without --model"] = " ".join(verdict.unchecked_files)
    told = "; ".join(verdict.reasons) or ", ".join(f"{name} {value}" for name, value in about.items())
    return f"{verdict.status}: {shown(verdict.path)}: {told}"
