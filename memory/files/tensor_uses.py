"""What an adapter's tensors are used for, and the form that its files were recognised as, in words.

Tests: tests/memory/files/test_tensor_uses.py
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence

from .adapter_weights import AdapterWeights
from .format import open_weights
from .manifest import AdapterManifest
from .module_paths import ExpertForm
from .score_head import TENSORS
from .tensor_info import TensorInfo
from .vectors import INPUT_SCALE, OUTPUT_SCALE

_MOST_NAMED = 4
_NAME = re.compile(r"base_model\.model\.(?:model\.)?(.+?)\.(lora_.+|bias|output_scale|input_scale)")
_SIDES = {
    "lora_A.weight": "A",
    "lora_B.weight": "B",
    "lora_embedding_A": "A",
    "lora_embedding_B": "B",
    "lora_magnitude_vector": "magnitudes",
    "lora_B.bias": "the bias of B",
    "bias": "the bias",
    OUTPUT_SCALE: "scales of outputs",
    INPUT_SCALE: "scales of inputs",
}
_UNUSED = "not used: outside the text model, of a module that its layer never calls, or without values"


def form_in_words(manifest: AdapterManifest) -> str:
    """The form of an adapter's files, with the trainer whose it is."""
    modules, found = manifest.modules, [manifest.form]
    if modules is not None:
        if modules.given_slices:
            sliced = sorted({modules.slices[path].projection for path in modules.given_slices})
            found.append(f"slices of {', '.join(sliced)}, as Tinker has them")
        if modules.experts is ExpertForm.TOGETHER:
            found.append("all experts in a tensor of three dimensions, as Tinker and llama.cpp have them")
        elif modules.experts is ExpertForm.STACKED:
            swapped = ", A and B swapped" if modules.are_swapped else ""
            found.append(f"all experts in one parameter, as PEFT has them{swapped}")
    return "; ".join(found)


def uses_of(manifest: AdapterManifest) -> dict[str, str]:
    """What each tensor is used for, by the file's own name of it. Raises AdapterFormatError if it can't be read."""
    if manifest.modules is None:
        return {}
    with open_weights(manifest.path, manifest.modules) as file:
        names = _Names(file)
        uses: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        for what, module, info in _all(file, manifest):
            for name in names.of(info):
                if module not in uses[name][what]:
                    uses[name][what].append(module)
        return {name: _text(uses[name]) if name in uses else _UNUSED for name in names.all}


class _Names:
    """Names of a file's tensors by their places."""

    def __init__(self, file: AdapterWeights) -> None:
        entries = file.given_entries()
        self.all = tuple(entries)
        ordered = sorted((info.offset, name) for name, info in entries.items() if info.num_bytes)
        self._offsets, self._names = [offset for offset, _ in ordered], [name for _, name in ordered]

    def of(self, info: TensorInfo) -> Iterator[str]:
        """Names of the tensors that one is read from."""
        for part in info.stored:
            if part.num_bytes:
                yield self._names[bisect_right(self._offsets, part.offset) - 1]


def _all(file: AdapterWeights, manifest: AdapterManifest) -> Iterator[tuple[str, str, TensorInfo]]:
    """All that is used: what it is, of which module, and where it is."""
    for name, info in file.tensors.items():
        if name in TENSORS:
            yield "the score head", "", info
            continue
        match = _NAME.fullmatch(name)
        what = _SIDES.get(match[2], "a tensor") if match else "a tensor"
        if info.computed is not None:
            what = f"a part of {what}, which is computed ({info.computed.method}),"
        yield what, match[1] if match else name, info
    for module, copies in file.copies.items():
        for copy in copies:
            is_dropped = copy.name in manifest.dropped
            yield "a copy of the base model's, dropped," if is_dropped else "rows", module, copy.info
    for module, (_, info) in file.trained.items():
        yield "trained rows", module, info
    for copy in file.vectors.values():
        yield f"a copy of the base model's {copy.title}, dropped,", copy.module, copy.info


def _text(uses: dict[str, list[str]]) -> str:
    return "; ".join(f"{what} of {_listed(modules)}" if modules != [""] else what for what, modules in uses.items())


def _listed(modules: Sequence[str]) -> str:
    if len(modules) <= _MOST_NAMED:
        return ", ".join(modules)
    return f"{len(modules)} modules, {modules[0]} to {modules[-1]}"
