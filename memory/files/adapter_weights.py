"""The weights file of an adapter, opened: its tensors under Llama's names for them.

Tests: tests/memory/files/test_adapter_format.py, tests/core/adapters/test_expert_adapters.py.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from ..pages.adapter_layout import AdapterPart
from ..pages.projections import Projection
from .arrangement import Arrangement
from .config import CONFIG_FILE
from .directory import AdapterDirectory
from .error import AdapterFormatError, shown
from .form import AdapterForm
from .further_rows import cut_further
from .module_paths import ExpertForm, ModulePaths, StackedSides, without_nesting
from .peft_names import EMBEDDINGS, HEAD, IN_LAYERS, LAYERS, PREFIX, STEM, UNEMBED, tensor_names, tensor_shapes
from .slices import SlicedTarget, SliceFactors, Target, by_target
from .tensor_info import TensorInfo
from .unserved import mend_of
from .values import read_values
from .vectors import ENDS, INPUT_SCALE, NO_INPUT_SCALE, PATTERN
from .whole_copies import RowsFile

if TYPE_CHECKING:
    import torch

_TENSORS_PER_MATRIX = 4  # A, B, and vectors; the rest is room for modules of the model

#: Left in names by trainers: modules around PEFT's, and the adapter's own name.
_AROUND = re.compile(r"^(?:(?:module|_orig_mod|_fsdp_wrapped_module)\.)*")
_ADAPTER_NAME = re.compile(
    r"\.(lora_(?:embedding_)?[AB]|lora_magnitude_vector)\.(?!(?:weight|bias)$)([^.]+)(?=\.weight$|\.bias$|$)"
)
#: Its major and minor number, and what a version between releases has.
_VERSION = re.compile(r"([0-9]{1,6})\.([0-9]{1,6})(?:\.[0-9]{1,6})?(\.?dev)?")

_IN_LAYER = re.compile(rf"({re.escape(IN_LAYERS)}[0-9]+)\.(.+?)\.(lora_[AB]\.weight|{PATTERN})")

_SIDES = {"lora_A.weight": "A", "lora_B.weight": "B"}

#: Digits of a layer's number that are read: no model has as many layers.
_DIGITS = 7


@lru_cache(16)
def _wrapped(around: tuple[str, ...], layers: str, embeddings: str) -> re.Pattern[str]:
    """A pattern of the prefix that a tensor's name may have. around, layers, embeddings: see `ModulePaths`."""
    return re.compile(
        rf"(?:base_model\.model\.)?((?:(?:{'|'.join(map(re.escape, around))})\.){{0,4}})"
        rf"(?={re.escape(layers)}\.[0-9]|{re.escape(embeddings)}\.|embed_tokens\.|unembed_tokens\.|lm_head\.)"
    )


class AdapterWeights(RowsFile):
    """The tensors of an adapter under Llama's names for them, whatever model was around the base in training.

    A tensor of several projections is there as one of each; those of `ModulePaths.left_out`, and of modules that their
    layers never call, are not there.
    """

    def __init__(
        self, directory: AdapterDirectory, form: AdapterForm, modules: ModulePaths, peft_version: str | None = None
    ) -> None:
        """peft_version: of the PEFT that saved it; None: not known, or not needed, as `modules` say what it tells."""
        name = form.weights_file
        self._peft_version = peft_version
        super().__init__(directory.path / name, directory.open(name, form.kind))
        self._form = form
        self._stems: set[str] = set()
        self._paths: set[str] = set()
        self._adapters: set[str] = set()
        self._of_layer: dict[str, str] = {}  # plain names within a layer, by PEFT's: most layers have the same ones
        self._never_called: set[str] = set()  # plain names of tensors of modules that their layers never call
        self.given_modules: set[str] = set()
        """Modules of layers that have tensors, by the names that the file gives them, where no configuration says so;
        once `tensors` was read.
        """
        self.max_tensors = max(self.max_tensors, _TENSORS_PER_MATRIX * modules.num_matrices)
        self.modules = modules
        """Where the file has the base model's projections; once `tensors` was read."""
        self.num_left_out = 0
        """Tensors of `ModulePaths.left_out`, once `tensors` was read."""
        self.tower: dict[str, TensorInfo] = {}
        """Those of them in a vision tower that is served, by name; once `tensors` was read."""
        self.has_cut_columns = False
        """True if only the first columns of some tensor are used, once `tensors` was read."""
        self._head_names: set[str] = set()
        self.slices: dict[Target, SlicedTarget] = {}
        """The projections that it has in slices, once `tensors` was read."""

    @cached_property
    def tensors(self) -> dict[str, TensorInfo]:
        found: dict[str, TensorInfo] = {}
        left_out = tuple(f"{PREFIX}{name}" for name in self.modules.left_out)
        in_layers = tuple(name for name in left_out if name.startswith(IN_LAYERS))
        listed = self._form.listed(self, self.modules)
        self._check_adapters()
        self.modules = self.modules.as_given(self._paths, self._stems)
        for name, info in self._of_own_projections(listed).items():
            is_in_layer = name.startswith(IN_LAYERS)
            if self.modules.tower is not None and self.modules.tower.has(name):
                self.tower[name] = info
                continue
            if self._is_unused(name, in_layers) if is_in_layer else self._is_of_model(name, info, left_out):
                continue
            for own_name, own in self._shares(name, info) if self.modules.stacked else ((name, info),):
                self._put(found, own_name, own, name)
        self.has_cut_columns = cut_further(found, self.modules)
        return found

    def given_entries(self) -> dict[str, TensorInfo]:
        """The file's tensors by its own names, as they lie in it."""
        return self._form.entries(self)

    def _of_own_projections(self, listed: dict[str, TensorInfo]) -> dict[str, TensorInfo]:
        """The tensors, those of several experts and of slices as of the base model's projections."""
        listed = self._without_empty(listed) if self.modules.empty else listed
        if self.modules.experts is ExpertForm.STACKED:
            listed = self._of_projections(listed)
        elif self.modules.experts is ExpertForm.TOGETHER:
            listed = self._of_each_expert(listed)
        return self._joined(listed) if self.modules.given_slices else listed

    def _without_empty(self, listed: dict[str, TensorInfo]) -> dict[str, TensorInfo]:
        """The tensors but those without values of projections that experts do not have."""

        def is_empty(name: str, info: TensorInfo) -> bool:
            match = _IN_LAYER.fullmatch(name) if 0 in info.shape else None
            return match is not None and match[2] in self.modules.empty

        return {name: info for name, info in listed.items() if not is_empty(name, info)}

    def _joined(self, listed: dict[str, TensorInfo]) -> dict[str, TensorInfo]:
        """The tensors, those of slices as of their projections."""
        names = {}
        for name in listed:
            match = _IN_LAYER.fullmatch(name)
            side = match and _SIDES.get(match[3])
            if match and side and match[2] in self.modules.given_slices:
                names[name] = int(match[1].rpartition(".")[2]), match[2], side
        projections, factors = self.modules.projections, defaultdict[Target, dict[str, float]](dict)
        for layer, module, path, factor in self.modules.slice_factors:
            factors[layer, module][path] = factor
        self.slices = by_target(self.path, listed, names, self.modules.slices, projections)
        found = {name: info for name, info in listed.items() if name not in names}
        for (layer, module), target in self.slices.items():
            own_names = tensor_names(layer, projections[module])
            for own_name, (info, given) in zip(own_names, target.joined(factors[layer, module]), strict=True):
                self._put(found, own_name, info, given)
                self._given[own_name] = given
        return found

    def scale_slices(self, factors: SliceFactors) -> None:
        """Multiply B of slices, by target and path. Nothing may have been read of them."""
        if not factors:
            return
        told = [(*target, path, factor) for target, own in factors.items() for path, factor in own.items()]
        self.modules = replace(self.modules, slice_factors=tuple(told))
        for (layer, module), own in factors.items():
            names = tensor_names(layer, self.modules.projections[module])
            for name, (info, _) in zip(names, self.slices[layer, module].joined(own), strict=True):
                self.tensors[name] = info

    def _is_unused(self, name: str, left_out: tuple[str, ...]) -> bool:
        """Note a tensor of a module that a layer has and does not use; False for any other."""
        is_outside = name.startswith(left_out)
        self.num_left_out += is_outside
        return is_outside or name in self._never_called

    def _is_of_model(self, name: str, info: TensorInfo, left_out: tuple[str, ...]) -> bool:
        """Note a tensor of the model's own modules that `tensors` does not have; False for any other."""
        if name.startswith(left_out):
            self.num_left_out += 1
            return True
        return self._is_of_rows(name, info, compares=self.modules.base_rows is not None)

    def _shares(self, name: str, info: TensorInfo) -> Iterator[tuple[str, TensorInfo]]:
        """A tensor, or the share in it of each projection that it is of."""
        match = _IN_LAYER.fullmatch(name)
        if match is None or match[2] not in self.modules.stacked:
            yield name, info
            return
        layer, path, kind = match.groups()
        if kind == INPUT_SCALE:
            raise AdapterFormatError(f"{self.path}: tensor {shown(self.given_name(name))} {NO_INPUT_SCALE}")
        for part, own in self._split(name, info, path, kind):
            own_name = f"{layer}.{part}.{kind}"
            self._given[own_name] = self.given_name(name)
            yield own_name, own

    def _of_projections(self, listed: dict[str, TensorInfo]) -> dict[str, TensorInfo]:
        """The tensors, those of a parameter of all experts as of each projection whose rows it has.

        Which parameter of a module a tensor is of is told by the shapes of A and B, since its name doesn't tell.
        """
        found: dict[str, TensorInfo] = {}
        self.modules = self.modules.with_sides(are_swapped=self._are_swapped(listed))
        listed = self._unswapped(listed) if self.modules.are_swapped else listed
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
                self._put(found, f"{layer}.{own.path}.{kind}", rows, name)
        return found

    def _are_swapped(self, listed: dict[str, TensorInfo]) -> bool:
        """True if A and B of parameters of experts are swapped. If both readings fit all shapes, the version of PEFT
        decides.
        """
        if self.modules.are_swapped is not None:
            return self.modules.are_swapped
        pairs = [(name, _dim(a, 1), _dim(b, 0), stacked) for name, _, a, b, stacked in self._stacked_pairs(listed)]
        if not pairs or self.modules.stacked_sides is StackedSides.NEVER:
            return False
        fits = all((inputs, outputs) in map(_dims_of, stacked) for _, inputs, outputs, stacked in pairs)
        fits_swapped = all((outputs, inputs) in map(_dims_of, stacked) for _, inputs, outputs, stacked in pairs)
        if not (fits and fits_swapped):
            return fits_swapped
        found = are_swapped(self.modules.stacked_sides, self._peft_version)
        if found is None:
            raise AdapterFormatError(
                f"{self.path}: tensor {shown(pairs[0][0])} and its B are of experts and fit what PEFT saved before "
                f"0.19 as well as what it saves since then, with A and B swapped; peft_version in "
                f"{CONFIG_FILE} is {shown(self._peft_version)}, which does not tell which; set peft_version to the "
                "release of PEFT that trained it"
            )
        return found

    def _stacked_pairs(
        self, listed: dict[str, TensorInfo]
    ) -> Iterator[tuple[str, str, TensorInfo, TensorInfo, tuple[tuple[Projection, ...], ...]]]:
        """A and B of each parameter of experts: their names, themselves, and the parameters of their module."""
        for name, a in listed.items():
            match = _IN_LAYER.fullmatch(name)
            if match is None or match[3] != "lora_A.weight":
                continue
            stacked = self.modules.stacked_modules.get(without_nesting(match[2]), ())
            other = f"{match[1]}.{match[2]}.lora_B.weight"
            if stacked and (b := listed.get(other)) is not None:
                yield name, other, a, b, stacked

    def _unswapped(self, listed: dict[str, TensorInfo]) -> dict[str, TensorInfo]:
        """Return the tensors with swapped A and B of parameters of experts swapped back."""
        found = dict(listed)
        for name, other, a, b, stacked in self._stacked_pairs(listed):
            dims = _dim(b, 0), _dim(a, 1)
            experts = next((parts[0].experts for parts in stacked if _dims_of(parts) == dims), stacked[0][0].experts)
            if len(a.shape) == len(b.shape) == 2 and not a.shape[0] % experts and not b.shape[1] % experts:
                found[name] = _as_other_side(b, experts, is_a=True)
                found[other] = _as_other_side(a, experts, is_a=False)
        return found

    def _of_each_expert(self, listed: dict[str, TensorInfo]) -> dict[str, TensorInfo]:
        """The tensors, those of all experts as of each one; shared ones are of each, too."""
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
                self._put(found, each, info.matrix(min(expert, info.shape[0] - 1)), name)
        return found

    def _put(self, found: dict[str, TensorInfo], name: str, info: TensorInfo, given: str) -> None:
        """Add a share of a tensor. given: the tensor's name."""
        if name in found:
            raise _twice(self.path, given, name)
        found[name] = info

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
                f"{mend_of(info.shape)}"
            )
        first, units = 0, dict(self.modules.units)
        for part, rows in parts:
            yield part, info.rows(first, rows) if part not in units else info.by_unit(units[part])
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
        """A tensor `[rows, columns]` in the file's element type, or in float32 if it is computed. It may be a view of
        `buffer`, bytes. Raises AdapterChanged if it is not of this shape.
        """
        info = self.tensor(name)
        if not info.fits(shape):
            raise self.changed()
        return read_values(self, info, buffer)[: shape[0], : shape[1]]

    def _plain(self, name: str) -> str:
        if not name.startswith(IN_LAYERS) or not self._form.is_plain:
            return self._plain_of_any(name)
        layer, _, rest = name.removeprefix(IN_LAYERS).partition(".")
        if (own := self._of_layer.get(rest)) is None or not (layer.isdecimal() and layer.isascii()):
            return self._plain_of_any(name)
        return f"{IN_LAYERS}{layer}.{own}"

    def _plain_of_any(self, name: str) -> str:
        given, name = name, self._form.peft_name(name)
        name = name if name.startswith(PREFIX) else self._without_outer(name)
        if not name.endswith((".lora_A.weight", ".lora_B.weight")) and (named := _ADAPTER_NAME.search(name)):
            self._adapters.add(named[2])
            name = f"{name[: named.end(1)]}{name[named.end() :]}"
        modules = self.modules
        wrapped = _wrapped(modules.around, modules.layers, modules.embeddings)
        if (found := wrapped.match(name)) is None:
            return self._plain_of_no_layer(name, wrapped)
        rest = name[found.end() :]
        if rest.startswith(f"{HEAD}.") and self._is_usual_head(name, found[1]):
            return self._plain_of_head(name)
        if rest.startswith((f"{UNEMBED}.", f"{HEAD}.")):
            self._head_names.add(UNEMBED)
            return f"{PREFIX}{HEAD}{rest.removeprefix(UNEMBED).removeprefix(HEAD)}"
        own, is_there, kind = rest.partition(".")
        usual = {modules.embeddings: EMBEDDINGS, modules.layers: LAYERS}
        rest = f"{usual.get(own, own)}.{kind}" if is_there else rest
        self._stems.add(found[1][:-1])
        plain = f"{PREFIX}{STEM}.{rest}"
        plain = plain if modules.numbers is None else modules.numbers.own(plain)
        match = _IN_LAYER.fullmatch(plain)
        if match is None:
            return plain
        self._paths.add(match[2])
        if not self._form.is_plain:
            self.given_modules.add(f"{found[1]}{name[found.end() :].removesuffix(f'.{match[3]}')}")
        path = modules.without_number(int(match[1].removeprefix(IN_LAYERS)[:_DIGITS]), match[2])
        if path is None:
            self._never_called.add(plain)
            return plain
        own = f"{modules.usual.get(path, path)}.{ENDS.get(match[3], match[3])}"
        if given.startswith(IN_LAYERS) and path == match[2] and modules.numbers is None:
            self._of_layer[given.removeprefix(IN_LAYERS).partition(".")[2]] = own
        return f"{match[1]}.{own}"

    def _plain_of_no_layer(self, name: str, wrapped: re.Pattern[str]) -> str:
        """Of a module behind all layers that has the last one's number here, or of a head."""
        numbers = self.modules.numbers
        own = name if numbers is None else numbers.own(name)
        return self._plain_of_head(own) if wrapped.match(own) is None else self._plain_of_any(own)

    def _without_outer(self, name: str) -> str:
        """A name without the modules that are around PEFT's own: those of trainers, and of the model."""
        name = _AROUND.sub("", name, 1)
        outer, prefix, rest = name.partition(PREFIX)
        is_of_model = prefix and all(each in self.modules.around for each in outer[:-1].split("."))
        return f"{prefix}{rest}" if is_of_model else name

    def _is_usual_head(self, name: str, around: str) -> bool:
        """True if a head's name is that of a module of the model. around: the modules that the name has around it."""
        name = name if name.startswith(PREFIX) else f"{PREFIX}{name}"
        return not around or name.startswith(tuple(f"{PREFIX}{head}." for head in self.modules.heads))

    def _plain_of_head(self, name: str) -> str:
        """The usual name of a tensor of the output projection; any other name as it is, with PEFT's prefix."""
        name = f"{PREFIX}{name}" if "lora_" in name and not name.startswith(PREFIX) else name
        head = next((head for head in self.modules.heads if name.startswith(f"{PREFIX}{head}.")), None)
        if head is None:
            return name
        self._head_names.add(HEAD)
        return f"{PREFIX}{HEAD}{name.removeprefix(PREFIX + head)}"


def matrices_of(
    part: AdapterPart, layer: int, target: str, modules: ModulePaths
) -> Iterator[tuple[tuple[str, tuple[int, int]], tuple[str, tuple[int, int]]]]:
    """Name and shape of A and of B of a part's target in a layer; of each expert, unless the file has them stacked."""
    projection = modules.projections[target]
    if part.experts and modules.experts is not ExpertForm.STACKED:
        own = modules.projections.experts_of(target)
        return (tensor_shapes(layer, own[expert], part.rank) for expert in part.experts)
    return iter((tensor_shapes(layer, projection, part.rank),))


def are_swapped(sides: StackedSides, peft_version: str | None) -> bool | None:
    """True if a version of PEFT saves A and B of such parameters swapped; None if it doesn't tell.

    Before 0.19, PEFT's main branch called itself 0.18.1.dev0, both before and after the change.
    """
    match = _VERSION.match(peft_version or "")
    if sides is StackedSides.NEVER:
        return False
    if match is None or (match[3] and match[1] == "0" and int(match[2]) in (18, 19)):
        return None
    is_before = (int(match[1]), int(match[2])) < (0, 19)
    if sides is StackedSides.SINCE:
        return not is_before
    return None if is_before and sides is StackedSides.BY_TRANSFORMERS else is_before


def _twice(path: Path, name: str, own_name: str) -> AdapterFormatError:
    return AdapterFormatError(f"{path}: tensor {shown(name)} holds {own_name}, which is there a second time; keep one")


def _as_other_side(info: TensorInfo, experts: int, *, is_a: bool) -> TensorInfo:
    """A of a parameter of experts from the tensor that the file has as B, or B from A."""
    rows, columns = info.shape
    arrangement = Arrangement((rows, columns), is_transposed=True, experts=experts, is_a=is_a)
    return replace(info, shape=(columns, rows), arrangement=arrangement)


def _dim(info: TensorInfo | None, at: int) -> int:
    """A dimension of a matrix; 0 if it is none."""
    return info.shape[at] if info is not None and len(info.shape) == 2 else 0


def _dims_of(parts: Sequence[Projection]) -> tuple[int, int]:
    """Inputs and outputs of a parameter in which these projections' rows are stacked."""
    return parts[0].inputs, sum(each.outputs for each in parts)
