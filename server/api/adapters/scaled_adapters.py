"""Fields that name several adapters of one request, each with a scale: ours, llama.cpp's and LoRAX's.

Tests: tests/server/api/adapters/test_scaled_adapters.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StrictFloat, StrictInt

from ....memory.adapters.adapter import MAX_NAME_CHARACTERS
from ....memory.adapters.composition import MAX_TERMS, Composition, InvalidComposition
from ...errors import ApiError

Scale = StrictFloat | StrictInt
AdapterId = Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARACTERS)]

_LINEAR = (
    "LoRAX's linear adds up A and B apart, so that each adapter's A meets the others' B; cat sums what the adapters "
    'add to the base model: set merge_strategy to "cat", or name the adapters in model, as A*0.7+B*0.5'
)


class ScaledAdapter(BaseModel):
    """An entry of `adapters`."""

    model_config = ConfigDict(extra="forbid")

    name: AdapterId
    scale: Scale = 1.0


class LlamaAdapter(BaseModel):
    """An entry of llama.cpp's `lora`; an adapter that is not listed has the scale 0."""

    model_config = ConfigDict(extra="forbid")

    id: AdapterId | StrictInt
    scale: Scale


class MergedAdapters(BaseModel):
    """LoRAX's `merged_adapters`."""

    model_config = ConfigDict(extra="forbid")

    ids: list[AdapterId] = Field(default=[], max_length=MAX_TERMS)
    weights: list[Scale] = Field(default=[], max_length=MAX_TERMS)
    merge_strategy: str = "linear"
    density: Any = None
    majority_sign_method: Any = None

    def terms(self) -> list[tuple[str, float]]:
        """Names and scales. Raises ApiError for what is not served."""
        if not self.model_fields_set:
            return []
        if not self.ids:
            raise _refused("merged_adapters", ".ids is empty; name the adapters, or leave merged_adapters out")
        if self.merge_strategy != "cat":
            why = _LINEAR if self.merge_strategy == "linear" else 'only "cat" is supported'
            raise _refused("merged_adapters", f".merge_strategy is {self.merge_strategy[:40]!r}; {why}")
        for name in ("density", "majority_sign_method"):
            if getattr(self, name) not in (None, 0, 0.0):
                raise _refused("merged_adapters", f".{name} has no meaning with cat; leave it out")
        weights = self.weights or [1.0] * len(self.ids)
        if len(weights) != len(self.ids):
            raise _refused("merged_adapters", f" has {len(weights)} weights for {len(self.ids)} ids; give one for each")
        return [(name, float(weight)) for name, weight in zip(self.ids, weights, strict=True)]


def composed(
    adapters: list[ScaledAdapter] | None,
    lora: list[LlamaAdapter] | None,
    merged: MergedAdapters | None,
    numbers: Mapping[int, str],
) -> tuple[str, Composition] | None:
    """The field that names adapters, and what it means; None if no field does. Raises ApiError.

    numbers: names of adapters by their numbers.
    """
    given = {
        "adapters": [(one.name, float(one.scale)) for one in adapters or ()],
        "lora": [(_named(one.id, numbers), float(one.scale)) for one in lora or ()],
        "merged_adapters": [] if merged is None else merged.terms(),
    }
    used = [name for name, terms in given.items() if terms]
    if not used:
        return None
    if len(used) > 1:
        raise ApiError(400, f"{used[0]} and {used[1]} both name adapters; give one of them", param=used[1])
    (field,) = used
    try:
        return field, Composition.of(given[field])
    except InvalidComposition as error:
        raise ApiError(400, f"{field}: {error}", param=field) from None


def _named(adapter: str | int, numbers: Mapping[int, str]) -> str:
    if isinstance(adapter, str):
        return adapter
    if adapter not in numbers:
        message = f"lora: no adapter has the id {adapter}; GET /lora-adapters lists them, or give the adapter's name"
        raise ApiError(400, message, param="lora")
    return numbers[adapter]


def _refused(field: str, why: str) -> ApiError:
    return ApiError(400, f"{field}{why}", param=field, code="unsupported_parameter")
