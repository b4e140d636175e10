"""PEFT LoRA checkpoints as they lie on disk: `adapter_config.json` and `adapter_model.safetensors`.

`inspect_adapter` reads the configuration and the safetensors header only, so that thousands of adapters can be
registered for the price of their headers. The configuration must target exactly the tensors of the file.

Tests: tests/memory/files/test_adapter_format.py.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain, product, repeat
from pathlib import Path

from ..pages.adapter_layout import AdapterPart, VectorTarget
from ..pages.projections import Projections, Role
from .adapter_weights import AdapterWeights
from .bypassed import find_bypassed, refuse_nothing
from .computed_ranks import take_computed_ranks
from .config import CONFIG_FILE, AdapterConfig
from .directory import AdapterDirectory
from .error import AdapterFormatError, shown
from .form import WEIGHTS_FILE, AdapterForm, form_of
from .gguf_form import GGUF_SUFFIX, GgufForm
from .manifest import AdapterManifest
from .module_paths import ExpertForm, ModulePaths
from .peft_names import LAYER, PREFIX, is_of_a, matrix_shapes, module_keys, tensor_names, vector_names
from .score_head import TENSORS, read_score_head
from .targets import Targets, layers_with, parts_of, targets_of
from .tensor_file import TensorFile, TensorSpans, digest_of
from .tensor_info import TensorInfo
from .tokens.added_tokens import OwnTokens, own_tokens
from .tower_tensors import tower_tensors
from .trained_rows import find_rows, module_of
from .unserved import mend_of, refuse_no_lora, why_not_lora
from .vectors import LORA_BIAS, vector_targets, why_no_vector

Names = dict[tuple[int, str], tuple[str, str]]
"""The names of A and B by layer and projection."""


def is_adapter_dir(path: Path) -> bool:
    """True if a directory means to be an adapter's: anything at all is in its configuration's place, or it has one file
    of a form that needs none. A GGUF file is an adapter by itself, too.
    """
    if os.path.lexists(path / CONFIG_FILE):  # unlike Path's methods this one never raises
        return True
    try:
        with _opened(path) as directory:
            _form(path, directory)
    except AdapterFormatError:
        return False
    return True


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
        config = form.config(directory, (), modules) if form.is_plain else None
        with AdapterWeights(directory, form, modules, config and config.peft_version) as file:
            stem, modules = file.stem, file.modules
            config = config or form.config(directory, file.given_modules, modules)
            if not config.has_head and not config.trained_tokens:
                refuse_no_lora(file.path, file.tensors, file.given_name)
            tower = tower_tensors(file, file.tower, config, modules.tower)
            _check_invocation(config, modules.vocab_size)
            rows, dropped, num_tokens, added = find_rows(file, config, directory, modules)
            tokens = _own_tokens(path, directory, modules, added)
            targets, factors = targets_of(
                config, stem, modules, file.head_names, file.slices, may_be_none=bool(tower) and not file.tensors
            )
            file.scale_slices(factors)
            modules = file.modules
            projections = modules.projections
            names = {target: tensor_names(target[0], projections[target[1]]) for target in targets}
            untrained = _untrained(file, names, config, projections)
            _leave_out(untrained, targets, names, projections)
            _leave_out_experts(file, targets, names, config, projections)
            _check_experts(config, targets, projections)
            _check_latents(config, targets, projections)
            _check_biases(config, targets, projections)
            if added:
                _check_no_lora_on_added(config, targets, projections)
                _check_no_inputs(config, added, projections)
            head = read_score_head(file, modules.hidden_size, CONFIG_FILE) if config.has_head else None
            vectors = vector_targets(file, module_keys(projections), config, targets, modules)
            others = {name for target in vectors for name in vector_names(target, projections)}
            others.update(TENSORS if config.has_head else ())
            _check_names(file, names, config, projections, others)
            is_larger = take_computed_ranks(file, targets, names, modules)
            _check_shapes(file, targets, names, config, projections)
            if bypassed := find_bypassed(file, names, vectors, projections):
                _leave_out(bypassed, targets, names, projections)
                refuse_nothing(file.path, bypassed, (*targets, *vectors, *rows, *tower, *filter(None, [head])))
            parts = parts_of(targets, projections) + rows
            # of stacked experts, and of rows by unit, B is read in another order; slices are joined, columns cut off
            is_plain = form.is_plain and modules.experts is not ExpertForm.STACKED
            is_plain = is_plain and not modules.units and not modules.given_slices and not file.has_cut_columns
            tensor_spans = _tensor_spans(file, parts, names, projections) if is_plain else None
            parts, tensor_spans = _shared(parts, tensor_spans)
            return AdapterManifest(
                path,
                parts,
                file_size=file.size,
                mtime_ns=file.mtime_ns,
                tensor_spans=tensor_spans,
                identity=file.identity,
                stem=stem,
                base_model=config.base_model,
                modules=modules,
                num_left_out=file.num_left_out,
                untrained=(*untrained, *bypassed),
                dropped=dropped,
                invocation_tokens=config.invocation_tokens,
                head=head,
                vectors=_same_vectors(vectors),
                tokens=tokens,
                num_tokens=num_tokens,
                added=added,
                form=form.title,
                is_larger=is_larger,
                tower=tower,
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


def _check_no_inputs(config: AdapterConfig, added: Collection[int], projections: Projections) -> None:
    """Refuse added tokens where layers have embeddings: the base model has a row of each of its tokens for them."""
    if projections.of_role(Role.PER_LAYER) is not None:
        raise AdapterFormatError(
            f"{config.file}: the adapter adds token {min(added)} to the vocabulary, for which the base model has no "
            "inputs of its layers (embed_tokens_per_layer); train without added tokens"
        )


def open_weights(path: Path, modules: ModulePaths) -> AdapterWeights:
    """The weights of an adapter directory. AdapterFormatError when there are none that may be read."""
    with _opened(path) as directory:
        return AdapterWeights(directory, _form(path, directory), modules)


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


def _check_biases(config: AdapterConfig, targets: Targets, projections: Projections) -> None:
    """Refuse biases where they would not do what PEFT's do."""
    if config.lora_bias and (found := next((name for _, name in targets if projections[name].why_no_bias), None)):
        raise config.refuse(
            "lora_bias",
            f"the adapter is on {found}, which {projections[found].why_no_bias}; train with lora_bias=False, or on "
            "other modules",
        )


def _check_latents(config: AdapterConfig, targets: Targets, projections: Projections) -> None:
    """Keys and values of latents are made, if at all, for the adapter of those who attend to them."""
    found = next((name for _, name in targets if projections[name].product == Role.KV_UP), None)
    if found is not None and config.invocation_tokens:
        raise config.refuse(
            "alora_invocation_tokens",
            f"the adapter is on {found}, which makes keys and values of the tokens before these, too; train without "
            f"{found} in target_modules",
        )


def _check_invocation(config: AdapterConfig, vocab_size: int | None) -> None:
    """An invocation that no prompt can have would make the adapter a copy of the base model."""
    unknown = [token for token in config.invocation_tokens if vocab_size is not None and token >= vocab_size]
    if unknown:
        raise AdapterFormatError(
            f"{config.file}: alora_invocation_tokens has {unknown[0]}, the base model's tokens end at "
            f"{vocab_size}; serve it with the base model that it was trained on"
        )


def _tensor_spans(
    file: AdapterWeights, parts: tuple[AdapterPart, ...], names: Names, projections: Projections
) -> TensorSpans:
    """Of A and B, of each expert where they are so; of whole rows the tensor that has them, twice."""

    def tensors() -> Iterator[TensorInfo]:
        tensor = file.tensors.__getitem__
        for part in parts:
            for layer, target in product(part.layers, part.targets):
                if part.token_ids:
                    yield from (file.rows_tensor(module_of(part))[1],) * 2
                    continue
                own = [projections.experts_of(target)[expert].name for expert in part.experts] or [target]
                for pair in map(names.__getitem__, zip(repeat(layer), own, strict=False)):
                    yield from map(tensor, pair)

    return TensorSpans.pack(len(file.header), digest_of(file.header), tensors())


@lru_cache(1024)
def _same_vectors(vectors: tuple[VectorTarget, ...]) -> tuple[VectorTarget, ...]:
    """Equal ones as one object; see `_shared`."""
    return vectors


@lru_cache(1024)
def _shared(
    parts: tuple[AdapterPart, ...], tensor_spans: TensorSpans | None
) -> tuple[tuple[AdapterPart, ...], TensorSpans | None]:
    """Equal ones as one object: most of thousands of adapters have the shapes of another and were saved alike."""
    return parts, tensor_spans


def _leave_out(modules: Collection[str], targets: Targets, names: Names, projections: Projections) -> None:
    """Take projections off the targets, and their names off the names."""
    for target in [each for each in targets if projections.name_of_all(each[1]) in modules]:
        del targets[target], names[target]


def _leave_out_experts(
    file: AdapterWeights, targets: Targets, names: Names, config: AdapterConfig, projections: Projections
) -> None:
    """Take experts without tensors off the targets of "all-linear" and PEFT's default: they stay the base model's."""
    if config.names_targets:
        return
    for target, pair in list(names.items()):
        if projections[target[1]].expert is not None and not any(map(file.tensors.__contains__, pair)):
            del targets[target], names[target]


def _check_shapes(
    file: AdapterWeights, targets: Targets, names: Names, config: AdapterConfig, projections: Projections
) -> None:
    for target, (rank, _) in targets.items():
        for name, shape in zip(names[target], matrix_shapes(projections[target[1]], rank), strict=True):
            if file.tensors[name].shape != shape and not file.tensors[name].fits(shape):
                raise _wrong_shape(file, name, shape, rank, config, _elsewhere(file, target, names, shape))


def _untrained(file: AdapterWeights, names: Names, config: AdapterConfig, projections: Projections) -> tuple[str, ...]:
    """Of "all-linear" and PEFT's default, the projections of which the file has no tensor in any layer. Trainers write
    "all-linear" of what they were told not to train, too, and PEFT leaves these as the base model has them. None if the
    file has nothing.
    """
    if config.names_targets:
        return ()
    found = {projections.name_of_all(target[1]): False for target in names}
    for (_, module), pair in names.items():
        if any(map(file.tensors.__contains__, pair)):
            found[projections.name_of_all(module)] = True
    without = [name for name, has_tensors in found.items() if not has_tensors]
    return tuple(sorted(without, key=projections.id)) if len(without) < len(found) else ()


def _check_names(
    file: TensorFile,
    names: Names,
    config: AdapterConfig,
    projections: Projections,
    others: Collection[str],
) -> None:
    """names: of all targets. others: further names that may be there."""
    wanted = {name for pair in names.values() for name in pair}
    for name in file.tensors:
        if name not in wanted and name not in others:
            why = why_no_vector(name, config, module_keys(projections).values())
            why = why or _why_not(name, file.tensors[name].shape, projections)
            raise AdapterFormatError(f"{file.path}: tensor {shown(file.given_name(name))} {why}")
    for (layer, module), pair in names.items():
        for name in pair:
            if name not in file.tensors:
                raise AdapterFormatError(
                    f"{file.path}: tensor {name} is missing, but {CONFIG_FILE} targets "
                    f"{module if projections[module].is_of_model else f'{module} of layer {layer}'}; "
                    "narrow target_modules or save the adapter again"
                )


def _why_not(name: str, shape: tuple[int, ...], projections: Projections) -> str:
    """Return what is wrong with a tensor that the configuration doesn't account for."""
    if "lora_magnitude_vector" in name or name.endswith(f".{LORA_BIAS}"):
        return (
            f"belongs to {'lora_bias' if name.endswith(LORA_BIAS) else 'DoRA'} on a module other than a projection of "
            "a layer, which is not supported; leave it out of target_modules, or name it in exclude_modules"
        )
    if "modules_to_save" in name or not ("lora_" in name or name.endswith(".bias")):
        return why_not_lora(name, shape)
    if not name.startswith(PREFIX):
        return f"is not named as PEFT does, beginning with {PREFIX}; save it with PEFT's save_pretrained"
    if any(name in tensor_names(-1, each) for each in projections.model if not each.is_rows):
        return f"is not targeted by {CONFIG_FILE} (target_modules, exclude_modules); mend either"
    return _why_not_in_layer(name, projections)


def _why_not_in_layer(name: str, projections: Projections) -> str:
    """As `_why_not`, of a tensor that may be LoRA's on a layer."""
    match, num_layers = LAYER.search(name), projections.num_layers
    layer = int(match[1]) if match else -1
    if layer >= num_layers:
        return f"is for layer {layer}, the base model has {num_layers} layers; serve it with its own base"
    every = chain(projections, *(projections.experts_of(each.name) for each in projections if each.experts))
    module = next((projections.name_of_all(each.name) for each in every if name in tensor_names(layer, each)), None)
    if module is None:
        names = ", ".join(each.name for each in projections if not each.is_rows)
        return f"is not lora_A.weight or lora_B.weight of one of {names}; others are not supported"
    if layer not in projections.layers_of(module):
        where = layers_with(projections, module)
        return f"is for {module} of layer {layer}, which the base model has in {where} only; serve it with its own base"
    return f"is not targeted by {CONFIG_FILE} (target_modules, exclude_modules, layers_to_transform); mend either"


def _elsewhere(file: TensorFile, target: tuple[int, str], names: Names, want: tuple[int, int]) -> str | None:
    """A tensor of the same module in another layer that has the wanted shape; None without one."""
    others = (pair for (_, module), pair in names.items() if module == target[1])
    return next((name for name in chain(*others) if file.tensors[name].shape == want), None)


def _wrong_shape(
    file: TensorFile, name: str, want: tuple[int, int], rank: int, config: AdapterConfig, elsewhere: str | None
) -> AdapterFormatError:
    """elsewhere: a tensor of the same module that has the wanted shape, so that the base model is the right one."""
    info: TensorInfo = file.tensors[name]
    axis = 0 if is_of_a(name) else 1
    if len(info.shape) == 2 and info.shape[1 - axis] == want[1 - axis]:
        mend = f"its rank is {info.shape[axis]}, by {CONFIG_FILE} (r, rank_pattern) it is {rank}: mend the wrong one"
    elif 0 in info.shape or elsewhere is None:
        trained = f"it was trained on {shown(config.base_model)}; " if config.base_model and 0 not in info.shape else ""
        mend = f"{trained}{mend_of(info.shape)}"
    else:
        mend = f"that of {elsewhere} is right, so this one is damaged: save the adapter again"
    found = f"tensor {file.given_name(name)} has shape {shown(list(info.shape))}"
    return AdapterFormatError(f"{file.path}: {found}, {list(want)} is needed; {mend}")
