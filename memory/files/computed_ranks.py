"""Ranks of computed A and B, which may be larger than the rank in the configuration.

Tests: tests/memory/files/methods/test_methods.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..pages.projections import Projections
from .config import CONFIG_FILE, MAX_RANK
from .error import AdapterFormatError
from .methods.registry import CONVERT
from .module_paths import ModulePaths
from .targets import Targets
from .tensor_file import TensorFile
from .tensor_info import TensorInfo
from .unserved import SERVE_WITH_ITS_BASE

#: Share of the smaller side of a weight up to which a rank is served that is larger than the configuration's.
_SHARE = 4


def take_computed_ranks(
    file: TensorFile, targets: Targets, names: Mapping[tuple[int, str], tuple[str, str]], modules: ModulePaths
) -> bool:
    """Give targets with a computed A the rank that it has, and take off those of rank 0. Return True if any may be
    larger than the file's tensors.

    names: of A and B. Raises AdapterFormatError for a rank that is not the configuration's, or too large.
    """
    if not targets:  # it changes a vision tower alone
        return False
    projections, matrices = modules.projections, modules.matrices
    is_larger, most_dim = False, _largest(targets, projections)
    for (layer, module), (rank, scale) in list(targets.items()):
        info = file.tensors[names[layer, module][0]]
        computed = info.computed
        if computed is None:
            continue
        is_larger |= computed.is_larger
        name, outputs = matrices.get(module, (module, projections[module].outputs))
        where = f"{file.path}: {computed.method} of {name} in layer {layer}"
        _check_parts(where, [file.tensors[name] for name in names[layer, module]], most_dim)
        if computed.rank not in (None, rank):
            raise AdapterFormatError(
                f"{where} has rank {computed.rank}, by {CONFIG_FILE} (r, rank_pattern) it is {rank}: mend the wrong one"
            )
        most = min(projections[module].inputs, outputs) // _SHARE if computed.is_larger else MAX_RANK
        if info.shape[0] > min(most, MAX_RANK):
            raise AdapterFormatError(
                f"{where} is LoRA of rank {info.shape[0]}, and at most {most} are served there, a quarter of the "
                f"smaller side of the weight; {CONVERT}"
            )
        targets[layer, module] = info.shape[0], scale
        if not info.shape[0]:
            del targets[layer, module]
    if not targets:
        raise AdapterFormatError(f"{file.path}: no module has a rank above 0, so it changes nothing; train again")
    return is_larger


def _largest(targets: Targets, projections: Projections) -> int:
    """The most inputs or outputs of a module of layers or of a target, or the largest rank if that is more."""
    named = {name for _, name in targets}
    found = (each for each in projections if not each.is_of_model or each.name in named)
    return max(MAX_RANK, *(size for each in found for size in (each.inputs, each.outputs)))


def _check_parts(where: str, matrices: Sequence[TensorInfo], most: int) -> None:
    """Refuse A or B of tensors that are larger than those of any module: a load would take memory for them."""
    for info in matrices:
        for part in info.stored:
            if max(part.shape, default=0) > most:
                raise AdapterFormatError(
                    f"{where} is computed from a tensor of shape {list(part.shape)}, more than any module of the base "
                    f"model has; {SERVE_WITH_ITS_BASE}"
                )
