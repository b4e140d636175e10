"""A cost model with its device, its base model and the origin of every number: small JSON files.

Every number is an object `{"value": …, "source": "where it is from"}`. A term that a file leaves out is 0.

Tests: tests/core/costs/test_costs.py.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import fields, replace
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from ...memory.files import strict_json
from ...memory.pages.adapter_layout import AdapterLayout, uniform_parts
from ...memory.pages.layer_projections import dense_projections
from ...memory.pages.layout import KvShape, PageLayout
from ...memory.pages.numbered_products import NUMBERED
from ...memory.pages.projections import MODEL_ROLES, Projection, Projections
from ..cold_start import CpuLoraCost
from .models import (
    AllReduceCost,
    CostModel,
    DiskCost,
    Kernel,
    MergeCost,
    OverheadCost,
    StepCost,
    TransferCost,
)

FORMAT = 2

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from ..model.specs.config import ModelConfig

T = TypeVar("T", bound="DataclassInstance")


class ProfileError(ValueError):
    """A profile that can't be used; the text names the file, the field and the fix."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Number(_Strict):
    """A number and its source."""

    value: float = Field(ge=0)
    source: str = Field(min_length=3)


class Whole(_Strict):
    """A positive whole number, and where it is from."""

    value: int = Field(ge=1)
    source: str = Field(min_length=3)


class FitReport(_Strict):
    """Goodness of a fit to the steps that were measured. samples: steps, each the mean of its repeats.

    decode_r2: that of the decode steps alone, where there are any.
    """

    r2: float = Field(le=1)
    decode_r2: float | None = Field(default=None, le=1)
    mean_error: float = Field(ge=0)
    samples: int = Field(ge=1)


class Terms(_Strict):
    """The terms of one cost model, which defines their names."""

    terms: dict[str, Number]
    fit: FitReport | None = None


def _checked_itemsize(itemsize: int) -> int:
    if itemsize not in (1, 2, 4):
        raise ValueError("it must be 1, 2 or 4")
    return itemsize


#: Products of `NUMBERED` whose inputs TP ranks share.
_ROW_PARALLEL = ("o", "down", "experts.shared_down", "experts.down", "mixer_out", "scan_in")


def _checked_product(product: str) -> str:
    if product in MODEL_ROLES:
        raise ValueError("it must be a product of layers")
    return product


class Module(_Strict):
    """A projection of some layers; see `memory.pages.projections.Projection`."""

    path: str
    product: Annotated[str, Field(min_length=1), AfterValidator(_checked_product)]
    row_parallel: bool = False
    inputs: int = Field(ge=1)
    outputs: int = Field(ge=1)
    units: int = Field(ge=1)
    sections: list[int] = []
    section_units: list[int] = []
    experts: int = Field(default=0, ge=0)
    form: str = ""
    id_of: str = ""
    """Files of earlier versions have it. It is not used: each module has an id of its own."""
    layers: list[int] = Field(min_length=1)

    @model_validator(mode="before")
    @classmethod
    def _named(cls, raw: Any) -> Any:
        """With the name of a product whose number the file has, as those of earlier versions do."""
        if not isinstance(raw, dict) or "group" not in raw:
            return raw
        own = {name: each for name, each in raw.items() if name != "group"}
        known = {number: name for number, name in enumerate(NUMBERED) if name}
        if type(number := raw["group"]) is not int or number not in known:
            raise ValueError(f"group is {number!r:.80}; it must be one of {', '.join(map(str, known))}")
        return {"product": known[number], "row_parallel": known[number] in _ROW_PARALLEL, **own}


class LayerKv(_Strict):
    """Keys of a token that pages keep of a layer: heads, and elements of each; see `memory.pages.layout.KvShape`."""

    heads: int = Field(ge=1)
    head_dim: int = Field(ge=1)


class Geometry(_Strict):
    """Shapes of the base model, for page and adapter sizes. itemsize: bytes per element of adapters, and of KV unless
    it is in FP8.
    """

    source: str = Field(min_length=3)
    num_layers: int = Field(ge=1)
    hidden_size: int = Field(ge=1)
    intermediate_size: int = Field(ge=1)
    num_heads: int = Field(ge=1)
    num_kv_heads: int = Field(ge=1)
    head_dim: int = Field(ge=1)
    vocab_size: int = Field(ge=2)
    max_model_len: int = Field(ge=2)
    itemsize: Annotated[int, AfterValidator(_checked_itemsize)]
    float8_kv: bool = False
    """KV is in FP8, one byte an element."""
    value_dim: int | None = Field(default=None, ge=1)
    """Elements of a key that are its value (latent attention); null: values are kept, too."""
    modules: list[Module] | None = None
    """The projections that adapters may change; by default those of a model shaped like Llama."""
    kv: list[LayerKv] | None = None
    """Heads and elements of a key in the KV cache, of each layer that has one. Null: they follow from `k_proj` or from
    latents; an indexer's keys, for example, do not.
    """

    @classmethod
    def of(
        cls, model: ModelConfig, max_model_len: int, itemsize: int, *, float8_kv: bool, value_dim: int | None
    ) -> Geometry:
        """The shapes of a model. itemsize: bytes of an element of the KV cache in the model's dtype."""
        found = cls(
            source="config.json of the model",
            num_layers=model.num_layers,
            hidden_size=model.hidden_size,
            intermediate_size=model.intermediate_size,
            num_heads=model.num_heads,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.kv_shape.head_dim,
            vocab_size=model.vocab_size,
            max_model_len=max_model_len,
            itemsize=itemsize,
            float8_kv=float8_kv,
            value_dim=value_dim,
        )
        return found.with_projections(model.projections).with_kv(layer.kv_shape for layer in model.kv_layers)

    @model_validator(mode="after")
    def _check_modules(self) -> Geometry:
        if self.modules is None:
            return self
        for each in self.modules:
            if wrong := [layer for layer in each.layers if not 0 <= layer < self.num_layers]:
                raise ValueError(f"{each.path} is in layer {wrong[0]}; layers are 0 to {self.num_layers - 1}")
        if not self._kv_shapes:
            raise ValueError("modules have no k_proj; pages hold the keys of the layers that have it")
        _ = self.projections.gemm_shapes  # raises ValueError
        return self

    def with_projections(self, projections: Projections) -> Geometry:
        """The same with a model's projections, if they are not the default."""
        if projections.layers == self.projections.layers:
            return self
        modules = [
            Module(
                path=each.path,
                product=str(each.product),
                row_parallel=each.is_row_parallel,
                inputs=each.inputs,
                outputs=each.outputs,
                units=each.units,
                sections=list(each.sections),
                section_units=list(each.section_units),
                experts=each.experts,
                form=each.form,
                layers=list(projections.layers_of(each.name)),
            )
            for each in map(projections.__getitem__, projections.names_with_mixtures)
        ]
        return self.model_copy(update={"modules": modules})

    def with_kv(self, shapes: Iterable[KvShape]) -> Geometry:
        """The same with what pages keep of each layer that has keys, if its projections don't say so."""
        found = [(shape.heads, shape.head_dim) for shape in shapes]
        if found == [(shape.heads, shape.head_dim) for shape in self._kv_shapes]:
            return self
        return self.model_copy(update={"kv": [LayerKv(heads=heads, head_dim=dim) for heads, dim in found]})

    @property
    def projections(self) -> Projections:
        """The projections that adapters may change."""
        if self.modules is None:
            heads = self.num_heads, self.num_kv_heads, self.head_dim
            return dense_projections(self.num_layers, self.hidden_size, self.intermediate_size, *heads)
        layers: list[list[Projection]] = [[] for _ in range(self.num_layers)]
        for each in self.modules:
            for layer in each.layers:
                sizes = each.inputs, each.outputs, each.units, tuple(each.sections), each.experts
                own = Projection(each.path, each.product, *sizes, None, tuple(each.section_units), each.form)
                layers[layer].append(replace(own, is_row_parallel=each.row_parallel))
        return Projections(tuple(map(tuple, layers)))

    def page_layout(self, block_tokens: int) -> PageLayout:
        shapes = self._kv_shapes
        shape = len(shapes), self.num_kv_heads, self.head_dim, block_tokens, self.itemsize
        several = shapes if len(set(shapes)) > 1 else ()
        return PageLayout(*shape, shapes=several, float8_kv=self.float8_kv, value_dim=self.value_dim)

    @property
    def _kv_shapes(self) -> tuple[KvShape, ...]:
        """What pages keep of a token in each layer with KV."""
        if self.kv is not None:
            return tuple(KvShape(each.heads, each.head_dim) for each in self.kv)
        return tuple(shape for layer in self.projections.layers for shape in _kept(layer))

    def adapter_bytes(self, rank: int, targets: Collection[str] | None = None) -> int:
        """Bytes on device and host of an adapter with `rank` on `targets`, in every layer and of every expert; by
        default on all projections outside mixtures of experts.
        """
        parts = uniform_parts(self.projections, rank, targets=targets)
        return AdapterLayout.build(parts, self.projections, 1, self.itemsize).num_elems * self.itemsize

    def product_bytes(self, targets: Collection[str] | None = None) -> int:
        """Bytes of a token's x·A·B of all layers, on `targets` or all projections outside mixtures of experts."""
        targets = self.projections.names if targets is None else targets
        every = (projection for layer in self.projections.layers for projection in layer)
        return sum(each.outputs for each in every if each.name in targets) * self.itemsize


def _kept(layer: Sequence[Projection]) -> Iterator[KvShape]:
    """What pages keep of a layer whose projections give keys or latents."""
    for each in layer:
        if each.module in ("k_proj", "kv_a_proj_with_mqa"):
            yield KvShape(each.units, each.outputs // each.units)


class Profile(_Strict):
    """Contents of a profile's JSON file. memory_bytes: the arena that KV and adapters share."""

    format: Literal[2] = FORMAT
    name: str = Field(min_length=1)
    device: str = Field(min_length=1)
    model: str = Field(min_length=1)
    source: str = Field(min_length=3)
    kernel: Literal["bgmv", "sgmv"]
    geometry: Geometry
    memory_bytes: Whole
    step: Terms
    disk: Terms
    link: Terms
    overhead: Terms | None = None
    merge: Terms | None = None
    network: Terms | None = None
    all_reduce: Terms | None = None
    cpu_lora: Terms | None = None

    def costs(self) -> CostModel:
        """The cost model. ProfileError for a term that a model doesn't have."""
        return CostModel(
            kernel=Kernel(self.kernel),
            step=self._model("step", StepCost),
            disk=self._model("disk", DiskCost),
            link=self._model("link", TransferCost),
            overhead=self._model("overhead", OverheadCost) if self.overhead else OverheadCost(),
            merge=self._model("merge", MergeCost) if self.merge else None,
            network=self._model("network", TransferCost) if self.network else None,
            all_reduce=self._model("all_reduce", AllReduceCost) if self.all_reduce else None,
            cpu_lora=self._model("cpu_lora", CpuLoraCost) if self.cpu_lora else None,
        )

    def _model(self, part: str, kind: type[T]) -> T:
        known = [field.name for field in fields(kind)]
        given = getattr(self, part).terms
        if unknown := sorted(given.keys() - set(known)):
            raise ProfileError(
                f"profile {self.name}: {part}.terms.{unknown[0]} is no term; known ones are {', '.join(known)}"
            )
        return kind(**{name: number.value for name, number in given.items()})

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(self.model_dump(exclude_none=True), indent=1) + "\n", encoding="utf-8")


def shipped_profiles() -> list[str]:
    """Names of the profiles that come with the package."""
    return sorted(entry.name.removesuffix(".json") for entry in _shipped().iterdir() if entry.name.endswith(".json"))


def load_profile(name: str | Path) -> Profile:
    """A shipped profile by its name, or a file by its path. Raises ProfileError."""
    text = str(name)
    if text in shipped_profiles():
        return parse_profile(_shipped().joinpath(f"{text}.json").read_bytes(), text)
    path = Path(name)
    try:
        return parse_profile(path.read_bytes(), text)
    except FileNotFoundError:
        raise ProfileError(
            f"{text} is neither a file nor a shipped profile; shipped are {', '.join(shipped_profiles())}"
        ) from None
    except OSError as error:
        raise ProfileError(f"{path}: cannot be read: {error}") from None


def parse_profile(data: bytes, origin: str) -> Profile:
    """A profile from JSON. origin: its name in error messages."""
    try:
        raw: Any = strict_json.loads(data)
    except ValueError as error:
        raise ProfileError(f"{origin}: no JSON: {error}") from None
    if isinstance(raw, dict) and raw.get("format") == 1:
        raise ProfileError(
            f"{origin}: format is 1, in which prefills and decode steps had prices of their own; since {FORMAT} there "
            "is one, `step`: measure the profile again with `chorus profile`"
        )
    try:
        profile = Profile.model_validate(raw)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"]) or "the file"
        shown = "" if first["type"] == "missing" else f" is {first['input']!r:.80}"
        raise ProfileError(f"{origin}: {field}{shown}: {first['msg']}") from None
    profile.costs()  # names of terms
    return profile


def _shipped() -> Any:
    return files(__name__.rsplit(".", 2)[0]).joinpath("profiles")
