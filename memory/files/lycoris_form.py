"""Adapters of LyCORIS: one safetensors file without a configuration, as `save_weights` writes it of a language model.

A module's name is the model's own with underscores for dots, after a prefix: `lycoris_model_layers_0_self_attn_q_proj`.
Each has an alpha of its own. The factor is alpha / rank, or 1 for a LoKr of two whole matrices: that is what LyCORIS
makes of the file. Its LoRA (LoCon), LoHa and LoKr have the parts that PEFT's have, and with `dora_wd` magnitudes, too.

Tests: tests/memory/files/test_lycoris_form.py
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from itertools import chain

from .config import AdapterConfig
from .directory import AdapterDirectory
from .error import AdapterFormatError, shown
from .methods.loha import LoHa
from .methods.lokr import LoKr
from .methods.method import Method, Pair, WrongParts, matrix_of
from .module_paths import ModulePaths
from .tensor_file import TensorFile
from .tensor_info import TensorInfo
from .unserved import SERVE_WITH_ITS_BASE
from .values import read_values
from .vectors import MAGNITUDE

SUFFIX = ".safetensors"

_PREFIX = "base_model.model."
_MERGE = (
    "merge it into its base with LyCORIS, under torch.no_grad() (create_lycoris_from_weights(1.0, FILE, model)[0]"
    ".merge_to(), then model.save_pretrained(DIR)) and serve the result as the MODEL of chorus serve"
)
_TRAIN = "train it with algo lora, loha or lokr"

_LORA = ("lora_up.weight", "lora_down.weight")
_METHODS: tuple[Method, ...] = (LoHa({}), LoKr({}))
_SERVED = frozenset(chain(_LORA, *(method.parts for method in _METHODS)))

#: Parts that no A and B of a bounded rank have, by what LyCORIS calls the algorithm, and what to do about it.
_UNSERVED = {
    **dict.fromkeys(("diff", "diff_b"), f"the whole difference of algo full; {_MERGE}"),
    **dict.fromkeys(("oft_blocks", "oft_diag", "rescale"), f"a rotation of algo diag-oft or boft; {_MERGE}"),
    **dict.fromkeys(("a1.weight", "a2.weight", "b1.weight", "b2.weight"), f"of algo glora; {_MERGE}"),
    **dict.fromkeys(("p_layer.weight", "q_layer.weight", "lambda_layer"), f"of algo tlora; {_MERGE}"),
    **dict.fromkeys(("w_norm", "b_norm"), f"of a norm (train_norm); {_MERGE}"),
    **dict.fromkeys(("weight", "on_input"), f"of algo ia3, whose files LyCORIS does not read back; {_TRAIN}"),
    **dict.fromkeys(("hada_t1", "hada_t2", "lokr_t2", "lora_mid.weight"), "of a convolution; train without it"),
}
_PARTS = _SERVED | _UNSERVED.keys() | {"alpha", "dora_scale"}
_NAME = re.compile(rf"(.+?)\.({'|'.join(map(re.escape, sorted(_PARTS, key=len, reverse=True)))})")
_LAYER = re.compile(r"(?:^|_)layers_([0-9]{1,6})_(.+)")


def has_lycoris_names(names: Iterable[str]) -> bool:
    """True if a file's tensors are named as LyCORIS does: some part that only its files have, and no other tensor."""
    found = [_NAME.fullmatch(name) for name in names]
    return bool(found) and all(found) and any(each is not None and each[2] not in ("weight", "alpha") for each in found)


class LycorisForm:
    """See the module. name: of the file."""

    kind = "a safetensors file"
    title = "LyCORIS"
    is_plain = False

    def __init__(self, name: str) -> None:
        self.weights_file = name
        self._ranks: dict[str, tuple[int, float]] = {}
        self._has_magnitudes = False

    def peft_name(self, name: str) -> str:
        return name

    def entries(self, file: TensorFile) -> dict[str, TensorInfo]:
        return file.entries()

    def listed(self, file: TensorFile, modules: ModulePaths) -> dict[str, TensorInfo]:
        self._ranks = {}
        by_name: dict[str, dict[str, TensorInfo]] = defaultdict(dict)
        for name, info in file.entries().items():
            match = _NAME.fullmatch(name)
            if match is None:
                raise AdapterFormatError(f"{file.path}: tensor {shown(name)} is none that LyCORIS writes; {_TRAIN}")
            if match[2] in _UNSERVED:
                raise AdapterFormatError(f"{file.path}: tensor {shown(name)} is {_UNSERVED[match[2]]}")
            by_name[match[1]][match[2]] = info
        self._has_magnitudes = any("dora_scale" in parts for parts in by_name.values())
        paths, tensors = _Paths(modules), dict[str, TensorInfo]()
        for given, parts in by_name.items():
            module = paths.of(given)
            if module is None:
                raise AdapterFormatError(
                    f"{file.path}: tensors of {shown(given)} are of no projection of the base model; only "
                    f"{modules.names} are served: train on these, or {SERVE_WITH_ITS_BASE}"
                )
            self._add(file, tensors, (given, module), parts)
        return tensors

    def _add(
        self,
        file: TensorFile,
        tensors: dict[str, TensorInfo],
        named: tuple[str, str],
        parts: Mapping[str, TensorInfo],
    ) -> None:
        """Add A and B of a module, and magnitudes. named: it in the file, and in the model."""
        given, module = named
        try:
            pair, rank = _pair(given, parts)
            alpha = _alpha(file, parts, rank)
            magnitude = _magnitude(module, parts)
        except WrongParts as error:
            raise AdapterFormatError(f"{file.path}: {shown(given)}: {error}") from None
        self._ranks[module] = rank, alpha
        told = f"{given}.{' and '.join(sorted(_SERVED.intersection(parts)))}"
        for side, info in zip("AB", pair, strict=True):
            file.add(tensors, f"{_PREFIX}{module}.lora_{side}.weight", info, told)
        if magnitude is not None:
            file.add(tensors, f"{_PREFIX}{module}.{MAGNITUDE}", magnitude, f"{given}.dora_scale")

    def config(self, directory: AdapterDirectory, given: Collection[str], base: ModulePaths) -> AdapterConfig:
        usual = Counter(self._ranks.values()).most_common(1)[0][0] if self._ranks else (1, 1.0)
        others = {re.escape(module): own for module, own in self._ranks.items() if own != usual}
        peft = {
            "peft_type": "LORA",
            "r": usual[0],
            "lora_alpha": usual[1],
            "rank_pattern": {name: rank for name, (rank, _) in others.items()},
            "alpha_pattern": {name: alpha for name, (_, alpha) in others.items()},
            "target_modules": sorted(self._ranks),
            "use_dora": self._has_magnitudes,
        }
        return AdapterConfig.of(directory.path / self.weights_file, peft, base.usual_names, base.model_type)


class _Paths:
    """The modules of a base model by LyCORIS's names for them."""

    def __init__(self, modules: ModulePaths) -> None:
        own = (modules.by_path, modules.usual, modules.stacked, modules.each_expert)
        self._in_layer = {path.replace(".", "_"): path for path in chain(*own)}
        self._num_layers = modules.projections.num_layers
        self._heads = {head.replace(".", "_"): head for head in modules.heads}

    def of(self, name: str) -> str | None:
        """The name in a model of a module by its name in the file, which may have dots, too."""
        name = name.replace(".", "_")
        if (match := _LAYER.search(name)) is not None:
            path = self._in_layer.get(match[2])
            return f"model.layers.{int(match[1])}.{path}" if path and int(match[1]) < self._num_layers else None
        return next((head for plain, head in self._heads.items() if name.endswith(f"_{plain}")), None)


def _pair(given: str, parts: Mapping[str, TensorInfo]) -> tuple[Pair, int]:
    """A and B of a module, and what its alpha is divided by: the rank, as LyCORIS has it."""
    if not parts.keys().isdisjoint(_LORA):
        up, down = (matrix_of(parts, name) for name in _LORA)
        return Pair(down, up), down.shape[0]
    method = next((each for each in _METHODS if not each.parts.isdisjoint(parts)), None)
    if method is None:
        raise WrongParts("only alpha or dora_scale is there", "save it again with LyCORIS's save_weights")
    pair = method.pair(given, parts, 0)
    return pair, next((info.computed.rank for info in pair if info.computed and info.computed.rank), 1)


def _alpha(file: TensorFile, parts: Mapping[str, TensorInfo], rank: int) -> float:
    """Alpha of a module; as the rank, as which LyCORIS reads 0, and of a LoKr of two whole matrices."""
    info = parts.get("alpha")
    if info is None or math.prod(info.shape) != 1:
        raise WrongParts("alpha is missing, or not one number", "save it again with LyCORIS's save_weights")
    value = float(read_values(file, info).float())
    if not math.isfinite(value):
        raise WrongParts(f"alpha is {value}", "the file is corrupt: save it again with LyCORIS's save_weights")
    return value if value and not parts.keys() >= {"lokr_w1", "lokr_w2"} else float(rank)


def _magnitude(module: str, parts: Mapping[str, TensorInfo]) -> TensorInfo | None:
    """Magnitudes of outputs; those of inputs are not DoRA's."""
    info = parts.get("dora_scale")
    if info is None:
        return None
    if not module.startswith("model.layers."):
        raise WrongParts("dora_scale is served of projections of layers", "train without it (exclude_name of a preset)")
    if len(info.shape) != 2 or info.shape[1] != 1:
        raise WrongParts(
            f"dora_scale has shape {list(info.shape)}, one column of outputs is needed", "train with wd_on_output=True"
        )
    return replace(info, shape=info.shape[:1])
