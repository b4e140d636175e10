"""PEFT LoRA checkpoints as they lie on disk: `adapter_config.json` and `adapter_model.safetensors`.

`inspect_adapter` reads the configuration and the safetensors header only, so that thousands of adapters can be
registered for the price of their headers. The configuration must target exactly the tensors of the file.

Tests: tests/memory/files/test_adapter_format.py.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from ..pages.adapter_layout import AdapterPart, VectorTarget
from ..pages.projections import Group, Projection, Projections
from .added_tokens import OwnTokens, own_tokens
from .config import CONFIG_FILE, AdapterConfig
from .directory import AdapterDirectory
from .error import AdapterFormatError, shown
from .form import WEIGHTS_FILE, AdapterForm, form_of
from .gguf_form import GGUF_SUFFIX, GgufForm
from .module_names import ModuleNames
from .module_paths import ExpertForm, ModulePaths, without_nesting
from .score_head import TENSORS, ScoreHead, read_score_head
from .tensor_file import Arrangement, FileIdentity, TensorFile, TensorInfo, TensorPlaces, digest_of
from .trained_rows import find_rows, module_of
from .unserved import why_not_lora
from .vectors import ENDS, PATTERN, vector_targets, why_no_vector
from .vectors import vector_names as names_of_vectors
from .whole_copies import RowsFile

if TYPE_CHECKING:
    import torch

__all__ = ["CONFIG_FILE", "WEIGHTS_FILE", "AdapterFormatError", "AdapterManifest", "inspect_adapter", "is_adapter_dir"]

_TENSORS_PER_MATRIX = 4  # A, B, and vectors; what is left is room for modules of the model

_PREFIX = "base_model.model."
_LAYER = re.compile(r"\.layers\.([0-9]{1,6})\.")

#: The base model's own name for its layers' parent. A model around it (one that sees, say) may have changed it, and a
#: model without a head (`AutoModel`) has none.
STEM = "model"
HEAD = "lm_head"
_WRAPPED = re.compile(
    r"(?:base_model\.model\.)?((?:(?:model|language_model|text_model)\.){0,4})"
    r"(?=layers\.[0-9]|embed_tokens\.|unembed_tokens\.)"
)
#: What trainers leave in names: modules around PEFT's, and the adapter's own name.
_AROUND = re.compile(r"^(?:(?:module|_orig_mod|_fsdp_wrapped_module)\.)*")
_ADAPTER_NAME = re.compile(
    r"\.(lora_(?:embedding_)?[AB]|lora_magnitude_vector)\.(?!(?:weight|bias)$)([^.]+)(?=\.weight$|\.bias$|$)"
)
#: Other names of the output projection (Tinker's), among the modules of the model's parent and beside it.
_UNEMBED = "unembed_tokens"
_IN_LAYER = re.compile(rf"(base_model\.model\.model\.layers\.[0-9]+)\.(.+?)\.(lora_[AB]\.weight|{PATTERN})")


@dataclass(frozen=True, slots=True)
class AdapterManifest:
    """Manifest of an adapter: everything but its weights.

    file_size, mtime_ns, identity: the state of the weights file that was inspected. places: of each part's layers'
    targets' A and B, in this order; None where there is no file. stem: where the file has the model's layers, if not in
    `model`; empty for a model without a head. content_hash: of what it computes, whatever the files look like, and
    no_effect: whether that is nothing; None until its weights have been read for it. base_model: what it says it was
    trained on, and names_other_base: whether that is not the model that is served. modules: where its base model has
    the projections; None where there is no file.
    """

    path: Path
    parts: tuple[AdapterPart, ...]
    file_size: int = 0
    mtime_ns: int = 0
    places: TensorPlaces | None = None
    identity: FileIdentity | None = None
    stem: str = STEM
    content_hash: str | None = None
    no_effect: bool | None = None
    base_model: str | None = None
    names_other_base: bool = False
    modules: ModulePaths | None = None

    num_left_out: int = 0
    """Tensors of the file that have no effect on text."""

    dropped: tuple[str, ...] = ()
    """Tensors of the file that are whole modules of the base model, as they are in it."""

    head: ScoreHead | None = field(default=None, compare=False)
    """Its score head."""

    invocation_tokens: tuple[int, ...] = ()
    """See `AdapterConfig.invocation_tokens`."""

    vectors: tuple[VectorTarget, ...] = ()
    """The modules whose outputs it scales and shifts, in the order of layers and projections."""

    tokens: OwnTokens | None = None
    """Its tokenizer, if that has tokens that the base model's lacks."""

    num_tokens: int = 0
    """One more than the last token of its head, if it adds tokens to the base model's vocabulary; 0: it adds none."""

    added: frozenset[int] = frozenset()
    """Tokens beyond the base model's vocabulary that a prompt of it may have."""

    sources: tuple[tuple[AdapterManifest, float], ...] = ()
    """The adapters that it is composed of, each with a scale; empty: it has files of its own."""

    @property
    def why_alone(self) -> str | None:
        """Why it can't be one of several adapters of a request; None if it can."""
        if self.invocation_tokens:
            return "is an activated LoRA (alora_invocation_tokens), which can't be composed with others"
        if self.vectors:
            return "scales or shifts outputs (DoRA or biases), which can't be composed with others"
        if self.head is not None:
            return "has a score head, which can't be composed with others"
        if self.tokens is not None:
            return "has a tokenizer with tokens of its own, which can't be composed with others"
        if any(part.token_ids for part in self.parts):
            return "has trained token rows, which can't be composed with others"
        if any(part.experts for part in self.parts):
            return "changes experts, which can't be composed with others"
        return None

    @property
    def rank(self) -> int:
        """The largest rank of any module."""
        return max(part.rank for part in self.parts if not part.token_ids)

    @property
    def targets(self) -> tuple[str, ...]:
        """Names of the modules that it changes in any layer."""
        found = dict.fromkeys(name for part in self.parts for name in part.targets)
        found |= dict.fromkeys(target.module for target in self.vectors)
        return tuple(found if self.modules is None else sorted(found, key=self.modules.projections.id))

    @property
    def mixture_targets(self) -> tuple[str, ...]:
        """Those of `targets` that are of a mixture of experts."""
        if self.modules is None or not self.modules.projections.mixture:
            return ()
        return tuple(name for name in self.targets if name in self.modules.projections.mixture)

    def num_params(self, projections: Projections) -> int:
        rows = sum(part.num_slabs * sum(sum(projections[name].dims) for name in part.targets) for part in self.parts)
        return rows + sum(sum(target[2:]) * projections[target.module].outputs for target in self.vectors)


def is_adapter_dir(path: Path) -> bool:
    """True if a directory means to be an adapter's: anything at all is in its configuration's place, or it has one GGUF
    file. Such a file is an adapter by itself, too.
    """
    if os.path.lexists(path / CONFIG_FILE):  # unlike Path's methods this one never raises
        return True
    return weights_path(path).suffix == GGUF_SUFFIX


def is_one_file(path: Path) -> bool:
    """True if a path is a file that holds a whole adapter."""
    return path.suffix == GGUF_SUFFIX and os.path.isfile(path)


def weights_path(path: Path) -> Path:
    """The file with an adapter's weights; where PEFT has it if the adapter is of no form that is read."""
    try:
        with _opened(path) as directory:
            return directory.path / _form(path, directory).weights_file
    except AdapterFormatError:
        return path / WEIGHTS_FILE


def _opened(path: Path, roots: Sequence[Path] = ()) -> AdapterDirectory:
    """The directory of an adapter, which may be given as its one file."""
    return AdapterDirectory(path.parent if is_one_file(path) else path, roots)


def _form(path: Path, directory: AdapterDirectory) -> AdapterForm:
    return GgufForm(path.name) if directory.path != path else form_of(directory)


def inspect_adapter(path: Path, modules: ModulePaths, roots: Sequence[Path] = ()) -> AdapterManifest:
    """Read and check an adapter directory's configuration and tensor shapes against the base model.

    modules: the base model's projections, and where it has them. roots: as in `AdapterDirectory`. Raises
    AdapterFormatError for anything that would not be served exactly as PEFT would apply it.
    """
    with _opened(path, roots) as directory:
        form = _form(path, directory)
        config = form.config(directory, ()) if form.is_plain else None
        with AdapterWeights(directory, form, modules) as file:
            stem, modules = file.stem, file.modules
            config = config or form.config(directory, file.given_modules)
            _check_invocation(config, modules.vocab_size)
            rows, dropped, num_tokens, added = find_rows(file, config, directory, modules)
            tokens = _own_tokens(path, directory, modules, added)
            targets, projections = _targets(config, stem, modules, file.head_names), modules.projections
            _check_experts(config, targets, projections)
            if added:
                _check_no_lora_on_added(config, targets, projections)
            head = read_score_head(file, modules.hidden_size, CONFIG_FILE) if config.has_head else None
            vectors = vector_targets(file, _module_keys(projections), config, targets, modules)
            others = {name for target in vectors for name in vector_names(target, projections)}
            others.update(TENSORS if config.has_head else ())
            _check_names(file, targets, config, projections, others)
            for (layer, module), (rank, _) in targets.items():
                for name, shape in tensor_shapes(layer, projections[module], rank):
                    if file.tensors[name].shape != shape:
                        raise _wrong_shape(file, name, shape, rank, config)
            parts = parts_of(targets, projections) + rows
            # of stacked experts, B is read in another order
            is_plain = form.is_plain and modules.experts is not ExpertForm.STACKED
            places = _places(file, parts) if is_plain else None
            parts, places = _shared(parts, places)
            return AdapterManifest(
                path,
                parts,
                file_size=file.size,
                mtime_ns=file.mtime_ns,
                places=places,
                identity=file.identity,
                stem=stem,
                base_model=config.base_model,
                modules=modules,
                num_left_out=file.num_left_out,
                dropped=dropped,
                invocation_tokens=config.invocation_tokens,
                head=head,
                vectors=_same_vectors(vectors),
                tokens=tokens,
                num_tokens=num_tokens,
                added=added,
            )


def _own_tokens(
    path: Path, directory: AdapterDirectory, modules: ModulePaths, added: Collection[int]
) -> OwnTokens | None:
    """The adapter's own tokenizer; an adapter of one file has none beside it. added: tokens beyond the base model's
    that have embeddings.
    """
    base = modules.base_tokens
    if base is None or not base.is_there or directory.path != path:
        return None
    return own_tokens(directory, base, modules.vocab_size, added)


def _check_no_lora_on_added(
    config: AdapterConfig, targets: Mapping[tuple[int, str], object], projections: Projections
) -> None:
    """Refuse LoRA on embeddings or a head with more tokens than the base model's."""
    for _, module in targets:
        if projections[module].is_of_model:
            raise config.refuse(
                "target_modules",
                f"LoRA on {module} of a vocabulary with added tokens is not served; train {module} by modules_to_save "
                "or trainable_token_indices",
            )


class AdapterWeights(RowsFile):
    """The tensors of an adapter under Llama's names for them, whatever model was around the base in training.

    A tensor of several projections is there as one of each; those of `ModulePaths.left_out` are not there.
    """

    def __init__(self, directory: AdapterDirectory, form: AdapterForm, modules: ModulePaths) -> None:
        name = form.weights_file
        super().__init__(directory.path / name, directory.open(name, form.kind), self._plain)
        self._form = form
        self._stems: set[str] = set()
        self._paths: set[str] = set()
        self._adapters: set[str] = set()
        self.given_modules: set[str] = set()
        """Modules of layers that have tensors, by the names that the file gives them, where no configuration says so;
        once `tensors` was read.
        """
        self.max_tensors = max(self.max_tensors, _TENSORS_PER_MATRIX * modules.num_matrices)
        self.modules = modules
        """Where the file has the base model's projections; once `tensors` was read."""
        self.num_left_out = 0
        """Tensors of `ModulePaths.left_out`, once `tensors` was read."""
        self._head_names: set[str] = set()

    @cached_property
    def tensors(self) -> dict[str, TensorInfo]:
        found: dict[str, TensorInfo] = {}
        left_out = tuple(f"{_PREFIX}{name}" for name in self.modules.left_out)
        listed = self._form.listed(self, self.modules.projections)
        self._check_adapters()
        self.modules = self.modules.as_given(self._paths)
        if self.modules.experts is ExpertForm.STACKED:
            listed = self._of_projections(listed)
        elif self.modules.experts is ExpertForm.TOGETHER:
            listed = self._of_each_expert(listed)
        for name, info in listed.items():
            if name.startswith(left_out):
                self.num_left_out += 1
                continue
            if self._is_of_rows(name, info, compares=self.modules.base_rows is not None):
                continue
            for own_name, own in self._shares(name, info):
                if own_name in found:
                    raise _twice(self.path, name, own_name)
                found[own_name] = own
        return found

    def _shares(self, name: str, info: TensorInfo) -> Iterator[tuple[str, TensorInfo]]:
        """A tensor, or the share in it of each projection that it is of."""
        match = _IN_LAYER.fullmatch(name)
        if match is None or match[2] not in self.modules.stacked:
            yield name, info
            return
        layer, path, kind = match.groups()
        for part, own in self._split(name, info, path, kind):
            yield f"{layer}.{part}.{kind}", own

    def _of_projections(self, listed: dict[str, TensorInfo]) -> dict[str, TensorInfo]:
        """The tensors, those of a parameter of all experts as of each projection whose rows it has.

        Which parameter of a module a tensor is of is told by the shapes of A and B, since its name doesn't tell.
        """
        found: dict[str, TensorInfo] = {}
        for name, info in listed.items():
            match = _IN_LAYER.fullmatch(name)
            stacked = () if match is None else self.modules.stacked_modules.get(without_nesting(match[2]), ())
            if match is None or not stacked or not match[3].startswith("lora_"):
                found[name] = info
                continue
            layer, path, kind = match.groups()
            a, b = (listed.get(f"{layer}.{path}.lora_{side}.weight") for side in "AB")
            for own, first in self._stacked_in(name, stacked, a, b):
                rows = info if kind == "lora_A.weight" else self._rows(info, own, first)
                self.add(found, f"{layer}.{own.path}.{kind}", rows)
        return found

    def _of_each_expert(self, listed: dict[str, TensorInfo]) -> dict[str, TensorInfo]:
        """The tensors, those of all experts as of each one; what they share is of each, too."""
        found: dict[str, TensorInfo] = {}
        for name, info in listed.items():
            match = _IN_LAYER.fullmatch(name)
            own = None if match is None else self.modules.together.get(match[2])
            if match is None or own is None or not match[3].startswith("lora_"):
                found[name] = info
                continue
            if len(info.shape) != 3 or info.shape[0] not in (1, own.experts):
                raise AdapterFormatError(
                    f"{self.path}: tensor {shown(name)} has shape {shown(list(info.shape))}, three dimensions are "
                    f"needed, the first 1 or {own.experts} of the experts; serve it with the base model that it was "
                    "trained on"
                )
            for expert in range(own.experts):
                each = f"{match[1]}.{own.of_expert(expert).path}.{match[3]}"
                if each in found:
                    raise _twice(self.path, name, each)
                found[each] = info.matrix(min(expert, info.shape[0] - 1))
        return found

    def _rows(self, b: TensorInfo, own: Projection, first: int) -> TensorInfo:
        """A projection's rows of the B of a parameter of experts."""
        rows, columns = b.shape
        if self.modules.stacked_alternate and rows > own.outputs:
            b = replace(b, arrangement=Arrangement((rows, columns), interleaved_heads=1))
        return b.rows(first, own.outputs)

    def _stacked_in(
        self,
        name: str,
        stacked: tuple[tuple[Projection, ...], ...],
        a: TensorInfo | None,
        b: TensorInfo | None,
    ) -> list[tuple[Projection, int]]:
        """The projections of the parameter that A and B are of, and the first row of each in B."""
        dims = _dim(a, 1), _dim(b, 0)
        for parts in stacked:
            if dims == _dims_of(parts):
                begins = accumulate((each.outputs for each in parts), initial=0)
                return list(zip(parts, begins, strict=False))
        wanted = " or ".join(
            f"[experts · rank, {inputs}] and [{outputs}, rank · experts]" for inputs, outputs in map(_dims_of, stacked)
        )
        shapes = " and ".join("missing" if each is None else str(list(each.shape)) for each in (a, b))
        raise AdapterFormatError(
            f"{self.path}: tensor {shown(name)} is of experts whose A and B are {shapes}, {wanted} are needed; serve "
            "it with the base model that it was trained on"
        )

    def _check_adapters(self) -> None:
        if len(self._adapters) > 1:
            found = ", ".join(shown(name) for name in sorted(self._adapters))
            raise AdapterFormatError(f"{self.path}: has tensors of several adapters ({found}); save each on its own")

    def _split(self, name: str, info: TensorInfo, path: str, kind: str) -> Iterator[tuple[str, TensorInfo]]:
        """The share of each projection in a tensor of several: all of A, or its rows of B or of a vector."""
        parts = self.modules.stacked[path]
        if kind == "lora_A.weight":
            yield from ((part, info) for part, _ in parts)
            return
        total = sum(rows for _, rows in parts)
        if len(info.shape) != (2 if kind == "lora_B.weight" else 1) or info.shape[0] != total:
            raise AdapterFormatError(
                f"{self.path}: tensor {shown(name)} has shape {shown(list(info.shape))}, {total} rows are needed; "
                "serve it with the base model that it was trained on"
            )
        first = 0
        for part, rows in parts:
            yield part, info.rows(first, rows)
            first += rows

    @property
    def stem(self) -> str:
        """Prefix under which the file has the model's layers; AdapterFormatError if in several places."""
        if self.tensors and len(self._stems) > 1:
            found = ", ".join(stem or "no module" for stem in sorted(self._stems))
            raise AdapterFormatError(f"{self.path}: has layers in {found}; save it from one model")
        return next(iter(self._stems), STEM)

    @property
    def head_names(self) -> set[str]:
        """Names that the file has for the output projection."""
        return self._head_names if self.tensors else set()

    def tensor(self, name: str) -> TensorInfo:
        """A tensor that was there when the adapter was registered; AdapterChanged if it is not now."""
        info = self.tensors.get(name)
        if info is None:
            raise self.changed()
        return info

    def matrix(self, name: str, shape: tuple[int, int], buffer: torch.Tensor) -> torch.Tensor:
        """A tensor `[rows, columns]` in the file's element type, which may be a view of `buffer`, bytes. Raises
        AdapterChanged if it is not of this shape.
        """
        import torch

        info = self.tensor(name)
        if info.shape != shape:
            raise self.changed()
        if info.num_bytes > len(buffer):  # of a matrix that several projections share
            buffer = torch.empty(info.num_bytes, dtype=torch.uint8)
        data = buffer[: info.num_bytes]
        self.read_into(data.numpy().data, info.offset)
        values = data.view({"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[info.dtype])
        return values.view(shape) if info.arrangement is None else info.arrangement.of(values, shape[0])

    def _plain(self, name: str) -> str:
        name = self._form.peft_name(name)
        if not name.startswith(_PREFIX):
            name = _AROUND.sub("", name, 1)
        if not name.endswith((".lora_A.weight", ".lora_B.weight")) and (named := _ADAPTER_NAME.search(name)):
            self._adapters.add(named[2])
            name = f"{name[: named.end(1)]}{name[named.end() :]}"
        found = _WRAPPED.match(name)
        if found is None:
            if "lora_" in name and not name.startswith(_PREFIX):
                name = f"{_PREFIX}{name}"
            if name.startswith(f"{_PREFIX}{HEAD}."):
                self._head_names.add(HEAD)
            return name
        rest = name[found.end() :]
        if rest.startswith(f"{_UNEMBED}."):
            self._head_names.add(_UNEMBED)
            return f"{_PREFIX}{HEAD}{rest.removeprefix(_UNEMBED)}"
        self._stems.add(found[1][:-1])
        plain = f"{_PREFIX}{STEM}.{rest}"
        match = _IN_LAYER.fullmatch(plain)
        if match is None:
            return plain
        self._paths.add(match[2])
        if not self._form.is_plain:
            self.given_modules.add(f"{found[1]}{name[found.end() :].removesuffix(f'.{match[3]}')}")
        return f"{match[1]}.{self.modules.usual.get(match[2], match[2])}.{ENDS.get(match[3], match[3])}"


def open_weights(path: Path, modules: ModulePaths) -> AdapterWeights:
    """The weights of an adapter directory. AdapterFormatError when there are none that may be read."""
    with _opened(path) as directory:
        return AdapterWeights(directory, _form(path, directory), modules)


def _twice(path: Path, name: str, own_name: str) -> AdapterFormatError:
    return AdapterFormatError(f"{path}: tensor {shown(name)} holds {own_name}, which is there a second time; keep one")


def _dim(info: TensorInfo | None, at: int) -> int:
    """A dimension of a matrix; 0 if it is none."""
    return info.shape[at] if info is not None and len(info.shape) == 2 else 0


def _dims_of(parts: Sequence[Projection]) -> tuple[int, int]:
    """Inputs and outputs of a parameter in which these projections' rows are stacked."""
    return parts[0].inputs, sum(each.outputs for each in parts)


def tensor_shapes(
    layer: int, projection: Projection, rank: int
) -> tuple[tuple[str, tuple[int, int]], tuple[str, tuple[int, int]]]:
    """Name and shape of a target's A `[rank, in]` and B `[out, rank]`; with all experts' ranks if it is of them all."""
    rank *= max(1, projection.experts)
    a, b = tensor_names(layer, projection)
    return (a, (rank, projection.inputs)), (b, (projection.outputs, rank))


@lru_cache(16)
def _keys(stem: str, modules: ModulePaths) -> tuple[ModuleNames, dict[str, tuple[int, tuple[str, ...]]]]:
    """All modules that a pattern may match, and the layer and projections of those that can be targeted here.

    The rest are most of the modules that can't be targeted, by PEFT neither.
    """
    level = f"{stem}." if stem else ""
    keys, inner = {}, []
    for layer in range(modules.projections.num_layers):
        own = modules.in_layer(layer)
        keys |= {f"{level}layers.{layer}.{path}": (layer, parts) for path, parts in own.items()}
        parents = sorted({f".{path.rpartition('.')[0]}" for path in own})
        names = ["", ".mlp.act_fn", ".input_layernorm", ".post_attention_layernorm", *parents]
        inner += [f"{level}layers.{layer}{name}" for name in names]
    keys |= _model_keys(stem, modules)
    others = [f"{level}{name}" for name in ("embed_tokens", "layers", "norm", "rotary_emb")]
    others += [HEAD, stem] if stem else []  # without a module around the layers there is no head
    return ModuleNames([*dict.fromkeys((*keys, *others, *inner))]), keys


def _model_keys(stem: str, modules: ModulePaths) -> dict[str, tuple[int, tuple[str, ...]]]:
    """As those of `_keys`, of the model's own modules."""
    keys, projections, level = {}, modules.projections, f"{stem}." if stem else ""
    for projection in projections.model:
        if projection.is_rows:
            continue
        found = projections.layers_of(projection.name)[0], (projection.name,)
        if projection.group is Group.EMBEDDING:
            keys[f"{level}{projection.name}"] = found
        elif stem:
            keys |= dict.fromkeys((projection.name, _UNEMBED, f"{level}{_UNEMBED}"), found)
    return keys


def _targets(
    config: AdapterConfig, stem: str, modules: ModulePaths, head_names: Collection[str]
) -> dict[tuple[int, str], tuple[int, float]]:
    """(layer, module) → rank and scale of all that the configuration targets.

    "all-linear" leaves the model's own modules out, as PEFT does; not a head by Tinker's name, as Tinker does.
    head_names: see `AdapterWeights.head_names`.
    """
    file = config.file
    names, keys = _keys(stem, modules)
    targets = {}
    for name, rank_and_scale in config.targets(names).items():
        if name in keys:
            layer, parts = keys[name]
            is_of_model = modules.projections[parts[0]].is_of_model
            if is_of_model and _is_passed_over(name, head_names, all_linear=config.targets_all_linear):
                continue
            for module in parts:  # of several paths to a projection the first is the adapter's own
                targets.setdefault((layer, module), rank_and_scale)
        elif not config.targets_all_linear:
            raise AdapterFormatError(
                f"{file}: target_modules matches {name}; only {modules.names} are served: "
                "train on these, or exclude the others with exclude_modules"
            )
    targets |= _parameter_targets(config, stem, modules, targets)
    if config.ties_weights and modules.is_tied:
        targets |= _tied_targets(targets, modules)
    if not targets:
        raise AdapterFormatError(
            f"{file}: target_modules, exclude_modules and layers_to_transform match none of {modules.names} "
            f"in the base model's {modules.projections.num_layers} layers{_elsewhere(config, stem, modules)}"
        )
    return targets


@lru_cache(16)
def _parameter_keys(stem: str, modules: ModulePaths) -> tuple[ModuleNames, dict[str, tuple[int, tuple[str, ...]]]]:
    """As `_keys`, of the parameters that PEFT may target as matrices."""
    _, keys = _keys(stem, modules)
    model = set(_model_keys(stem, modules))
    found = {f"{key}.weight": its for key, its in keys.items() if key not in model}
    if modules.experts is ExpertForm.STACKED:
        level = f"{stem}." if stem else ""
        for path, parts in modules.stacked_experts:
            layers = modules.projections.layers_of(parts[0])
            found |= {f"{level}layers.{layer}.{path}": (layer, parts) for layer in layers}
    return ModuleNames([*found]), found


def _parameter_targets(
    config: AdapterConfig, stem: str, modules: ModulePaths, targets: Collection[tuple[int, str]]
) -> dict[tuple[int, str], tuple[int, float]]:
    """The targets that the configuration names as parameters. targets: those that it names as modules."""
    if not config.parameters:
        return {}
    names, keys = _parameter_keys(stem, modules)
    for each in config.parameters:
        if not names.with_tail(each):
            served = ", ".join(dict.fromkeys(_LAYER.split(key)[-1] for key in keys))
            raise AdapterFormatError(
                f"{config.file}: target_parameters has {shown(each)}, which is none of the parameters that are served "
                f"and that the file has tensors of: {served}; train on these"
            )
    found = {}
    for name, rank_and_scale in config.parameter_targets(names).items():
        layer, parts = keys[name]
        for module in parts:
            if (layer, module) in targets:
                raise AdapterFormatError(
                    f"{config.file}: target_parameters matches {name}, and target_modules its module; "
                    "PEFT takes one of them"
                )
            found[layer, module] = rank_and_scale
    return found


def _check_experts(config: AdapterConfig, targets: Collection[tuple[int, str]], projections: Projections) -> None:
    """Refuse vectors on experts."""
    if not (config.uses_dora or config.lora_bias):
        return
    for layer, module in targets:
        if projections[module].expert is not None:
            raise AdapterFormatError(
                f"{config.file}: DoRA or a bias is on {module} of layer {layer}, a part of a mixture of experts, where "
                "plain LoRA alone is served; train with use_dora=False and lora_bias=False"
            )


def _is_passed_over(name: str, head_names: Collection[str], *, all_linear: bool) -> bool:
    """True for a module of the model that a configuration matches and does not mean: a head's other name where the
    file has no head, and what "all-linear" leaves out.
    """
    if name.endswith(_UNEMBED):
        return _UNEMBED not in head_names if all_linear else not head_names
    return all_linear


def _tied_targets(
    targets: dict[tuple[int, str], tuple[int, float]], modules: ModulePaths
) -> dict[tuple[int, str], tuple[int, float]]:
    """The head, if the embeddings are targeted: PEFT saves it as a target of its own."""
    projections = modules.projections
    embedding, head = (projections.of_group(each) for each in (Group.EMBEDDING, Group.HEAD))
    if embedding is None or head is None:
        return {}
    found, name = targets.get((0, projections.name_of(embedding))), projections.name_of(head)
    return {} if found is None else {(projections.layers_of(name)[0], name): found}


def _check_invocation(config: AdapterConfig, vocab_size: int | None) -> None:
    """An invocation that no prompt can have would make the adapter a copy of the base model."""
    unknown = [token for token in config.invocation_tokens if vocab_size is not None and token >= vocab_size]
    if unknown:
        raise AdapterFormatError(
            f"{config.file}: alora_invocation_tokens has {unknown[0]}, the base model's tokens end at "
            f"{vocab_size}; serve it with the base model that it was trained on"
        )


def _elsewhere(config: AdapterConfig, stem: str, modules: ModulePaths) -> str:
    """The targets that a configuration without any would have if every layer had every projection."""
    level, projections = f"{stem}." if stem else "", modules.projections
    parts_of = {
        f"{level}layers.{layer}.{path}": (layer, parts[0])
        for layer in range(projections.num_layers)
        for path, parts in modules.by_path.items()
    }
    found = config.targets(ModuleNames([*parts_of]))
    if not found:
        return ""
    layer, name = parts_of[next(iter(found))]
    return f": {name} is not in layer {layer}, but in {_layers(projections, name)}"


def _layers(projections: Projections, name: str) -> str:
    """The layers that have a projection, as ranges."""
    runs: list[list[int]] = []
    for layer in projections.layers_of(name):
        if runs and runs[-1][-1] == layer - 1:
            runs[-1][1:] = [layer]
        else:
            runs.append([layer])
    return f"layer{'s' if runs[1:] or runs[0][1:] else ''} {', '.join('-'.join(map(str, run)) for run in runs)}"


def parts_of(targets: dict[tuple[int, str], tuple[int, float]], projections: Projections) -> tuple[AdapterPart, ...]:
    """Group targets by rank, scale and set of layers, which thus have all of them; in the order of their first
    layers.
    """
    experts: dict[tuple[int, str, int, float], list[int]] = defaultdict(list)
    layers: dict[tuple[int, float, str, tuple[int, ...]], list[int]] = defaultdict(list)
    for (layer, module), (rank, scale) in targets.items():
        projection = projections[module]
        if projection.expert is None:
            layers[rank, scale, module, tuple(range(projection.experts))].append(layer)
        else:
            experts[layer, projections.name_of_all(module), rank, scale].append(projection.expert)
    for (layer, module, rank, scale), numbers in experts.items():
        layers[rank, scale, module, tuple(sorted(numbers))].append(layer)
    modules: dict[tuple[int, float, tuple[int, ...], tuple[int, ...], bool], list[str]] = defaultdict(list)
    for (rank, scale, module, own), numbers in layers.items():
        modules[rank, scale, tuple(numbers), own, projections[module].is_of_model].append(module)
    parts = (
        AdapterPart(rank, scale, numbers, tuple(sorted(names, key=projections.id)), experts=own)
        for (rank, scale, numbers, own, _), names in modules.items()
    )
    return tuple(sorted(parts, key=lambda part: (part.layers, projections.id(part.targets[0]), part.experts)))


def matrices_of(
    part: AdapterPart, layer: int, target: str, modules: ModulePaths
) -> Iterator[tuple[tuple[str, tuple[int, int]], tuple[str, tuple[int, int]]]]:
    """Name and shape of A and of B of a part's target in a layer; of each expert, unless the file has them stacked."""
    projection = modules.projections[target]
    if part.experts and modules.experts is not ExpertForm.STACKED:
        return (tensor_shapes(layer, projection.of_expert(expert), part.rank) for expert in part.experts)
    return iter((tensor_shapes(layer, projection, part.rank),))


def tensors_of(file: AdapterWeights, part: AdapterPart, layer: int, target: str) -> Iterator[TensorInfo]:
    """A target's A and B, of each expert where they are so; of whole rows the tensor that has them, twice."""
    if part.token_ids:
        return iter((file.rows_tensor(module_of(part))[1],) * 2)
    return (file.tensor(name) for pair in matrices_of(part, layer, target, file.modules) for name, _ in pair)


def _places(file: AdapterWeights, parts: tuple[AdapterPart, ...]) -> TensorPlaces:
    tensors = (
        info
        for part in parts
        for layer in part.layers
        for target in part.targets
        for info in tensors_of(file, part, layer, target)
    )
    return TensorPlaces.pack(len(file.header), digest_of(file.header), tensors)


@lru_cache(1024)
def _same_vectors(vectors: tuple[VectorTarget, ...]) -> tuple[VectorTarget, ...]:
    """Equal ones as one object; see `_shared`."""
    return vectors


@lru_cache(1024)
def _shared(
    parts: tuple[AdapterPart, ...], places: TensorPlaces | None
) -> tuple[tuple[AdapterPart, ...], TensorPlaces | None]:
    """Equal ones as one object: most of thousands of adapters have the shapes of another and were saved alike."""
    return parts, places


def _check_names(
    file: TensorFile,
    targets: dict[tuple[int, str], tuple[int, float]],
    config: AdapterConfig,
    projections: Projections,
    others: Collection[str],
) -> None:
    """others: names that may be there beside those of the targets."""
    wanted = {name for layer, module in targets for name in tensor_names(layer, projections[module])}
    keys = _module_keys(projections)
    for name in file.tensors:
        if name not in wanted and name not in others:
            why = why_no_vector(name, config, keys.values())
            why = why or _why_not(name, file.tensors[name].shape, projections)
            raise AdapterFormatError(f"{file.path}: tensor {shown(name)} {why}")
    for layer, module in targets:
        for name in tensor_names(layer, projections[module]):
            if name not in file.tensors:
                raise AdapterFormatError(
                    f"{file.path}: tensor {name} is missing, but {CONFIG_FILE} targets "
                    f"{module if projections[module].is_of_model else f'{module} of layer {layer}'}; "
                    "narrow target_modules or save the adapter again"
                )


def tensor_names(layer: int, projection: Projection) -> Iterator[str]:
    """Of a target's A and B."""
    key = _module_key(layer, projection)
    if projection.group is Group.EMBEDDING:
        return (f"{key}.lora_embedding_{side}" for side in "AB")
    return (f"{key}.lora_{side}.weight" for side in "AB")


def vector_names(target: VectorTarget, projections: Projections) -> Iterator[str]:
    """Of a module's magnitudes, bias and bias of B, those that there are."""
    return names_of_vectors(_module_key(target.layer, projections[target.module]), target)


def _module_key(layer: int, projection: Projection) -> str:
    """What the names of a module's tensors begin with."""
    path = projection.path if projection.is_of_model else f"{STEM}.layers.{layer}.{projection.path}"
    return f"{_PREFIX}{path}"


def _module_keys(projections: Projections) -> dict[tuple[int, str], str]:
    """`_module_key` of every module of every layer, in the order of layers and projections."""
    return {
        (layer, name): _module_key(layer, projections[name])
        for layer in range(projections.num_layers)
        for name in projections.names_in(layer)
    }


def _why_not(name: str, shape: tuple[int, ...], projections: Projections) -> str:
    """Return what is wrong with a tensor that the configuration doesn't account for."""
    if "lora_magnitude_vector" in name:
        return (
            "belongs to DoRA on a module other than a projection of a layer, which is not supported; leave it out of "
            "target_modules, or name it in exclude_modules"
        )
    if "modules_to_save" in name or not ("lora_" in name or name.endswith(".bias")):
        return why_not_lora(name, shape)
    if not name.startswith(_PREFIX):
        return f"is not named as PEFT does, beginning with {_PREFIX}; save it with PEFT's save_pretrained"
    if any(name in tensor_names(-1, each) for each in projections.model if not each.is_rows):
        return f"is not targeted by {CONFIG_FILE} (target_modules, exclude_modules); mend either"
    return _why_not_in_layer(name, projections)


def _why_not_in_layer(name: str, projections: Projections) -> str:
    """As `_why_not`, of a tensor that may be LoRA's on a layer."""
    match, num_layers = _LAYER.search(name), projections.num_layers
    layer = int(match[1]) if match else -1
    if layer >= num_layers:
        return f"is for layer {layer}, the base model has {num_layers} layers; serve it with its own base"
    every = (each for whole in projections for each in (whole, *map(whole.of_expert, range(whole.experts))))
    module = next((projections.name_of_all(each.name) for each in every if name in tensor_names(layer, each)), None)
    if module is None:
        names = ", ".join(each.name for each in projections if not each.is_rows)
        return f"is not lora_A.weight or lora_B.weight of one of {names}; others are not supported"
    if layer not in projections.layers_of(module):
        where = _layers(projections, module)
        return f"is for {module} of layer {layer}, which the base model has in {where} only; serve it with its own base"
    return f"is not targeted by {CONFIG_FILE} (target_modules, exclude_modules, layers_to_transform); mend either"


def _wrong_shape(
    file: TensorFile, name: str, want: tuple[int, int], rank: int, config: AdapterConfig
) -> AdapterFormatError:
    info: TensorInfo = file.tensors[name]
    axis = 0 if name.endswith((".lora_A.weight", ".lora_embedding_A")) else 1
    if len(info.shape) == 2 and info.shape[1 - axis] == want[1 - axis]:
        mend = f"its rank is {info.shape[axis]}, by {CONFIG_FILE} (r, rank_pattern) it is {rank}: mend the wrong one"
    else:
        trained = f"it was trained on {shown(config.base_model)}; " if config.base_model else ""
        mend = f"{trained}serve it with the base model that it was trained on"
    return AdapterFormatError(
        f"{file.path}: tensor {name} has shape {shown(list(info.shape))}, {list(want)} is needed; {mend}"
    )
