"""Rows of the token embeddings and of the output projection that an adapter has of its own.

They are in whole copies of the module, of which some rows are not the base model's, or by themselves where PEFT was
given `trainable_token_indices`. A tied head has those of the embeddings, unless the file has others for it.

Rows beyond the base model's are of tokens that the adapter adds. They are kept if a tokenizer file of the adapter or
`trainable_token_indices` names one of them; without any tokenizer file, if other rows were trained, or their number is
not a round one to which a vocabulary is padded.

Tests: tests/core/adapters/test_whole_copies.py, tests/core/adapters/test_trained_rows.py,
tests/core/adapters/test_added_tokens.py
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from ..pages.adapter_layout import AdapterPart
from ..pages.projections import Role
from .config import CONFIG_FILE, AdapterConfig
from .directory import AdapterDirectory
from .error import AdapterFormatError, shown
from .module_paths import ModulePaths
from .tokens.added_tokens import added_beyond, has_tokenizer_file
from .whole_copies import MAX_TRAINED_ROWS, RowsFile, WholeCopy, check_vectors, differing_rows, row_bytes

_PADDED_TO = 8
"""The least number to a multiple of which vocabularies are padded."""

_ROLES = {"embed_tokens": Role.EMBEDDING_ROWS, "lm_head": Role.HEAD_ROWS}


class FoundRows(NamedTuple):
    """What a file's whole modules come to."""

    parts: tuple[AdapterPart, ...]
    """Of rows that are not the base model's."""

    dropped: tuple[str, ...]
    """Tensors that equal the base model's modules."""

    num_tokens: int = 0
    """One more than the last token of its head; 0: it adds none to the base model's."""

    added: frozenset[int] = frozenset()
    """Tokens beyond the base model's that have embeddings."""


def find_rows(file: RowsFile, config: AdapterConfig, directory: AdapterDirectory, modules: ModulePaths) -> FoundRows:
    """Compare the file's whole copies with the base model. Raises AdapterFormatError for what would not be served as
    PEFT applies it.
    """
    _ = file.tensors
    if modules.base_rows is not None:
        check_vectors(file, modules.base_rows)
    _check_named(file, config, modules)
    rows, dropped = _of_copies(file, config, directory, modules)
    found = {module: (tokens, tokens) for module, tokens in rows.items()}  # a copy's rows are numbered by token
    for module, tokens in config.trained_tokens.items():
        if modules.head_has_bias and (module == "lm_head" or modules.ties_trained):
            raise config.refuse(
                "trainable_token_indices",
                "the base model's head has a bias, which PEFT leaves out where tokens of the head are trained; train "
                "LoRA on it, or name it in modules_to_save",
            )
        if module in found:
            raise config.refuse("trainable_token_indices", f"the file has another whole {module} too; save it again")
        found[module] = _ordered(file, module, tokens, config, modules)
    _check_normalised(config, modules, found)
    if modules.is_tied and "lm_head" not in found and "embed_tokens" in found and _is_shared(file, config, modules):
        found["lm_head"] = found["embed_tokens"]
    if found and config.invocation_tokens:
        raise config.refuse(
            "alora_invocation_tokens",
            f"the file has rows of {min(found)} of its own, which PEFT uses before these tokens, too; train without "
            "either",
        )
    projections, parts = modules.projections, []
    for module, (token_ids, file_rows) in sorted(found.items()):
        index = projections.of_role(_ROLES[module])
        assert index is not None
        name = projections.name_of(index)
        parts.append(
            AdapterPart(
                len(token_ids), 1.0, projections.layers_of(name), (name,), token_ids=token_ids, file_rows=file_rows
            )
        )
    return FoundRows(tuple(parts), (*dropped, *file.vectors), *_beyond(file, found, modules))


def _check_normalised(config: AdapterConfig, modules: ModulePaths, found: Collection[str]) -> None:
    if modules.norms_embeddings and "embed_tokens" in found:
        raise config.refuse(
            "trainable_token_indices" if "embed_tokens" in config.trained_tokens else "modules_to_save",
            "the base model normalises its embeddings, and other rows of them are not supported; train LoRA on them",
        )


def _of_copies(
    file: RowsFile, config: AdapterConfig, directory: AdapterDirectory, modules: ModulePaths
) -> tuple[dict[str, tuple[int, ...]], list[str]]:
    """The rows of whole copies that are kept, by module, and the copies of which none is."""
    rows: dict[str, tuple[int, ...]] = {}
    dropped: list[str] = []
    differing = {module: _differing(file, module, modules) for module in file.copies}
    changed = any(each for by_name in differing.values() for each in by_name.values())
    added = _added_rows(file, config, directory, modules, changed=changed)
    for module, copies in file.copies.items():
        served = () if module in file.trained else added
        kept = {copy.name: (*differing[module][copy.name], *_within(copy, served)) for copy in copies}
        dropped += [copy.name for copy in copies if not kept[copy.name]]
        if of_module := kept[copies[0].name]:
            _check_count(file, copies[0], of_module)
            _check_alike(file, module, copies, of_module)
            rows[module] = of_module
    return rows, dropped


def module_of(part: AdapterPart) -> str:
    """The module of which a part has whole rows."""
    return part.targets[0].removesuffix("_rows")


def row_runs(part: AdapterPart) -> Iterator[tuple[int, int, int]]:
    """Rows of a part that are side by side in the file: first row of the part, first of the file, count."""
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
        if module not in config.trained_tokens and not _is_twin(file, config, modules, module):
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
        if modules.further_rows(module) and modules.vocab_size is not None:
            rows = rows[: bisect_left(rows, modules.vocab_size)]
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
        if found[copy.name] != found[first.name]:
            raise AdapterFormatError(
                f"{file.path}: tensors {shown(first.name)} and {shown(copy.name)} are both {module}, and differ; save "
                "it again"
            )
    return found


def _ordered(
    file: RowsFile, module: str, tokens: tuple[int, ...], config: AdapterConfig, modules: ModulePaths
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The tokens in rising order, and the file's row of each."""
    if module not in file.trained and not (modules.ties_trained and "embed_tokens" in file.trained):
        raise AdapterFormatError(
            f"{file.path}: has no trained rows of {module}, which {CONFIG_FILE} names in trainable_token_indices; save "
            "it again"
        )
    name, info = file.rows_tensor(module)
    index = modules.projections.of_role(_ROLES[module])
    if index is None:
        raise config.refuse("trainable_token_indices", f"the base model's {module} is not known; train without them")
    want = [len(tokens), modules.projections.dims_of(index)[0]]
    if list(info.shape) != want:
        raise AdapterFormatError(
            f"{file.path}: tensor {shown(name)} has shape {shown(list(info.shape))}, {want} is needed for the tokens "
            f"in {CONFIG_FILE} (trainable_token_indices); mend the wrong one"
        )
    order = sorted(range(len(tokens)), key=tokens.__getitem__)
    return tuple(tokens[row] for row in order), tuple(order)


def _is_shared(file: RowsFile, config: AdapterConfig, modules: ModulePaths) -> bool:
    """True if a tied head has the embeddings' rows: not if they were saved as a module of their own."""
    if "embed_tokens" in config.trained_tokens:
        return modules.is_tie_known
    return "lm_head" not in file.copies and "embed_tokens" not in config.saved_modules


def _added_rows(
    file: RowsFile, config: AdapterConfig, directory: AdapterDirectory, modules: ModulePaths, *, changed: bool
) -> Sequence[int]:
    """The tokens beyond the base model's of which rows of whole copies are kept, in rising order. changed: other rows
    are not the base model's.
    """
    vocab = modules.vocab_size
    if vocab is None or not (end := _end_beyond(file, modules, vocab)):
        return ()
    named = {token for token in added_beyond(directory, vocab, modules.base_tokens) if token < end}
    _check_trained(config, named, vocab)
    trained = {token for token in chain(*config.trained_tokens.values()) if token >= vocab}
    if "embed_tokens" in config.trained_tokens:
        return sorted(trained)
    is_used = bool(named or trained)
    if not is_used and not has_tokenizer_file(directory):
        is_used = changed or bool(end % _PADDED_TO)
    return range(vocab, end) if is_used else ()


def _end_beyond(file: RowsFile, modules: ModulePaths, vocab: int) -> int:
    """The most rows of a copy that has more than the base model; 0: none has."""
    last = {module: vocab + modules.further_rows(module) for module in file.copies}
    rows = ((copy.info.shape[0], last[module]) for module, copies in file.copies.items() for copy in copies)
    return max((end for end, most in rows if end > most), default=0)


def _check_trained(config: AdapterConfig, named: Collection[int], vocab: int) -> None:
    """Refuse trained tokens that leave out some that the adapter's tokenizer adds."""
    for module, tokens in config.trained_tokens.items():
        if untrained := set(named).difference(tokens):
            raise config.refuse(
                "trainable_token_indices",
                f"the adapter's tokenizer adds token {min(untrained)} to the base model's {vocab}, which is not among "
                f"those of {module}; train all added tokens",
            )


def _within(copy: WholeCopy, tokens: Sequence[int]) -> Sequence[int]:
    """The tokens of which a copy has rows: not one from before the training."""
    return () if copy.is_original else tokens[: bisect_left(tokens, copy.info.shape[0])]


def _check_alike(file: RowsFile, module: str, copies: Sequence[WholeCopy], rows: Sequence[int]) -> None:
    """Refuse several trained copies of a module that differ in any of these rows."""
    first, *others = (copy for copy in copies if not copy.is_original)
    for copy in others:
        if any(
            row >= copy.info.shape[0] or row_bytes(file, copy.info, row) != row_bytes(file, first.info, row)
            for row in rows
        ):
            raise AdapterFormatError(
                f"{file.path}: tensors {shown(first.name)} and {shown(copy.name)} are both {module}, and differ; save "
                "it again"
            )


def _is_twin(file: RowsFile, config: AdapterConfig, modules: ModulePaths, module: str) -> bool:
    """True for trained rows of a tied head that are those of the embeddings once more, as PEFT saves them when the
    vocabulary was resized.
    """
    if module != "lm_head" or not modules.ties_trained or "embed_tokens" not in config.trained_tokens:
        return False
    (_, own), (_, other) = file.trained[module], file.trained.get("embed_tokens", file.trained[module])
    return own.shape == other.shape and all(
        row_bytes(file, own, row) == row_bytes(file, other, row) for row in range(own.shape[0])
    )


def _check_count(file: RowsFile, copy: WholeCopy, rows: tuple[int, ...]) -> None:
    if len(rows) > MAX_TRAINED_ROWS:
        raise AdapterFormatError(
            f"{file.path}: tensor {shown(copy.name)} has {len(rows)} rows that the base model has not; at most "
            f"{MAX_TRAINED_ROWS} are served: train LoRA on it"
        )


def _beyond(
    file: RowsFile,
    found: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]],
    modules: ModulePaths,
) -> tuple[int, frozenset[int]]:
    """`num_tokens` and `added` of `FoundRows`. Raises AdapterFormatError for a token that could be sampled, and has no
    embedding.
    """
    vocab = modules.vocab_size
    if vocab is None:
        return 0, frozenset()
    embedded, with_logits = (
        frozenset(token for token in found.get(module, ((), ()))[0] if token >= vocab) for module in _ROLES
    )
    if without := sorted(with_logits - embedded):
        raise AdapterFormatError(
            f"{file.path}: has a row of lm_head for token {without[0]}, beyond the base model's {vocab}, and none of "
            "embed_tokens; save the embeddings too (save_embedding_layers=True)"
        )
    return max(with_logits, default=-1) + 1, embedded
