"""Rows of the token embeddings and of the output projection that an adapter has of its own.

They are in whole copies of the module, of which some rows are not the base model's, or by themselves where PEFT was
given `trainable_token_indices`. A tied head has those of the embeddings, unless the file has others for it.

Tests: tests/core/test_whole_copies.py, tests/core/test_trained_rows.py
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ..pages.adapter_layout import AdapterPart
from ..pages.projections import Group
from .added_tokens import added_beyond
from .config import CONFIG_FILE, AdapterConfig
from .directory import AdapterDirectory
from .error import AdapterFormatError, shown
from .module_paths import ModulePaths
from .whole_copies import MAX_TRAINED_ROWS, RowsFile, WholeCopy, differing_rows, row_bytes

_GROUPS = {"embed_tokens": Group.EMBEDDING_ROWS, "lm_head": Group.HEAD_ROWS}


class FoundRows(NamedTuple):
    """What a file's whole modules come to."""

    parts: tuple[AdapterPart, ...]
    """Of rows that are not the base model's."""

    dropped: tuple[str, ...]
    """Tensors that equal the base model's modules."""


def find_rows(file: RowsFile, config: AdapterConfig, directory: AdapterDirectory, modules: ModulePaths) -> FoundRows:
    """Compare the file's whole copies with the base model. Raises AdapterFormatError for what would not be served as
    PEFT applies it.
    """
    _ = file.tensors
    _check_named(file, config, modules)
    dropped: list[str] = []
    rows: dict[str, tuple[int, ...]] = {}  # of whole copies, whose rows are numbered by token
    for module, copies in file.copies.items():
        for copy in copies:
            _check_added(directory, copy, modules)
        differing = _differing(file, module, modules)
        dropped += [copy.name for copy in copies if not differing[copy.name]]
        if changed := differing[copies[0].name]:
            rows[module] = changed
    found = {module: (tokens, tokens) for module, tokens in rows.items()}
    for module, tokens in config.trained_tokens.items():
        if module in found:
            raise config.refuse("trainable_token_indices", f"the file has another whole {module} too; save it again")
        found[module] = _ordered(file, module, tokens, config, modules)
    if modules.is_tied and "lm_head" not in found and "embed_tokens" in found and _is_shared(file, config):
        found["lm_head"] = found["embed_tokens"]
    projections, parts = modules.projections, []
    for module, (token_ids, file_rows) in sorted(found.items()):
        index = projections.of_group(_GROUPS[module])
        assert index is not None
        name = projections.name_of(index)
        parts.append(AdapterPart(len(token_ids), 1.0, projections.layers_of(name), (name,), token_ids, file_rows))
    return FoundRows(tuple(parts), tuple(dropped))


def module_of(part: AdapterPart) -> str:
    """The module of which a part has whole rows."""
    return part.targets[0].removesuffix("_rows")


def row_runs(part: AdapterPart) -> Iterator[tuple[int, int, int]]:
    """Rows of a part that are side by side in the file: the first of the part's, the first of the file's, and how
    many.
    """
    first = 0
    for index in range(1, len(part.file_rows) + 1):
        if index == len(part.file_rows) or part.file_rows[index] != part.file_rows[index - 1] + 1:
            yield first, part.file_rows[first], index - first
            first = index


def _check_named(file: RowsFile, config: AdapterConfig, modules: ModulePaths) -> None:
    """The configuration names exactly what the file has."""
    for module in config.saved_modules:
        if modules.base_rows is None:
            raise config.refuse("modules_to_save", f"{module} can't be compared with the base model's; train without")
        if module not in file.copies:
            raise AdapterFormatError(
                f"{file.path}: has no copy of {module}, which {CONFIG_FILE} names in modules_to_save; save it again"
            )
    for module in file.trained:
        if module not in config.trained_tokens:
            raise AdapterFormatError(
                f"{file.path}: tensor {shown(file.trained[module][0])} has trained rows, and {CONFIG_FILE} names no "
                f"tokens of {module} in trainable_token_indices; save it again"
            )


def _differing(file: RowsFile, module: str, modules: ModulePaths) -> dict[str, tuple[int, ...]]:
    """By tensor, the rows of each copy of a module that are not the base model's: of all trained ones the same."""
    assert modules.base_rows is not None
    found = {}
    first, *others = file.copies[module]
    for copy in (first, *others):
        rows = tuple(differing_rows(file, copy, module, modules.base_rows))
        if rows and copy.is_original:
            raise AdapterFormatError(
                f"{file.path}: tensor {shown(copy.name)}, from before the training, differs from the base model's "
                f"{module} in {len(rows)} rows; serve it with the base model that it was trained on"
            )
        if len(rows) > MAX_TRAINED_ROWS:
            raise AdapterFormatError(
                f"{file.path}: tensor {shown(copy.name)} is a copy of the whole {module}, and {len(rows)} of its rows "
                f"differ from the base model's; at most {MAX_TRAINED_ROWS} are served: train LoRA on it"
            )
        found[copy.name] = rows
    for copy in others:
        if copy.is_original:
            continue
        if found[copy.name] != found[first.name] or any(
            row_bytes(file, copy.info, row) != row_bytes(file, first.info, row) for row in found[first.name]
        ):
            raise AdapterFormatError(
                f"{file.path}: tensors {shown(first.name)} and {shown(copy.name)} are both {module}, and differ; save "
                "it again"
            )
    return found


def _ordered(
    file: RowsFile, module: str, tokens: tuple[int, ...], config: AdapterConfig, modules: ModulePaths
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The tokens in rising order, and the file's row of each."""
    if module not in file.trained and not (modules.is_tied and "embed_tokens" in file.trained):
        raise AdapterFormatError(
            f"{file.path}: has no trained rows of {module}, which {CONFIG_FILE} names in trainable_token_indices; save "
            "it again"
        )
    name, info = file.rows_tensor(module)
    index = modules.projections.of_group(_GROUPS[module])
    if index is None:
        raise config.refuse("trainable_token_indices", f"the base model's {module} is not known; train without them")
    want = [len(tokens), modules.projections.dims_of(index)[0]]
    if list(info.shape) != want:
        raise AdapterFormatError(
            f"{file.path}: tensor {shown(name)} has shape {shown(list(info.shape))}, {want} is needed for the tokens "
            f"in {CONFIG_FILE} (trainable_token_indices); mend the wrong one"
        )
    if modules.vocab_size is not None and max(tokens) >= modules.vocab_size:
        raise config.refuse(
            "trainable_token_indices",
            f"the base model's tokens end at {modules.vocab_size}; added tokens are not supported: resize the base "
            "model's vocabulary and serve that",
        )
    order = sorted(range(len(tokens)), key=tokens.__getitem__)
    return tuple(tokens[row] for row in order), tuple(order)


def _is_shared(file: RowsFile, config: AdapterConfig) -> bool:
    """True if a tied head has the embeddings' rows: not if they were saved as a module of their own."""
    if "embed_tokens" in config.trained_tokens:
        return True
    return "lm_head" not in file.copies and "embed_tokens" not in config.saved_modules


def _check_added(directory: AdapterDirectory, copy: WholeCopy, modules: ModulePaths) -> None:
    """Refuse an adapter that has tokens of its own beyond the base model's vocabulary."""
    vocab, num_rows = modules.vocab_size, copy.info.shape[0] if copy.info.shape else 0
    if vocab is None or num_rows <= vocab:
        return
    if added := {token: text for token, text in added_beyond(directory, vocab).items() if token < num_rows}:
        token, text = next(iter(added.items()))
        raise AdapterFormatError(
            f"{directory.path}: its tensor {shown(copy.name)} has {num_rows} rows, and its tokenizer adds {len(added)} "
            f"tokens beyond the base model's {vocab}, the first {shown(text)} as {token}; added tokens are not "
            "supported: resize the base model's vocabulary and serve that"
        )
