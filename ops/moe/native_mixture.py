"""A layer's mixture of experts by the native library, adapters included: one call, or a part of a decoder's layer.

Tests: tests/ops/moe/test_native_mixture.py, tests/core/model/moe/test_experts.py
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Array, Structure, addressof, c_int32, c_void_p
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from ..library.described_adapters import described
from ..library.native_descriptors import (
    ELEMENT_OF,
    NativeGating,
)
from ..library.native_integers import IntegerPanels, integers_of_each
from ..library.native_library import library, native_layout
from ..lora.sgmv import AdapterRows, Segments
from .expert_gemms import Panels
from .routing import Routing


@dataclass(frozen=True, slots=True)
class NativeExperts:
    """Experts of one shape, each with a product for gate and up and one for down."""

    gate_up: Sequence[Panels | IntegerPanels]
    """Of each `[2·size, hidden]`."""
    down: Sequence[Panels | IntegerPanels]
    """Of each `[hidden, size]`."""
    gate_up_bias: Sequence[torch.Tensor] | None = None
    """Of each `[2·size]`."""
    down_bias: Sequence[torch.Tensor] | None = None
    """Of each `[hidden]`."""


class MixtureModules(NamedTuple):
    """Of each product that adapters change: (module id, first column, width) of its projections."""

    router: Sequence[tuple[int, int, int]]
    shared_gate: Sequence[tuple[int, int, int]]
    shared_gate_up: Sequence[tuple[int, int, int]]
    shared_down: Sequence[tuple[int, int, int]]
    gate_up: Sequence[tuple[int, int, int]]
    """Of an expert; likewise `down`."""
    down: Sequence[tuple[int, int, int]]

    def split_shared(self) -> tuple[MixtureModules, MixtureModules]:
        """Those of all but the shared expert, and its own."""
        return self._replace(shared_gate=(), shared_gate_up=(), shared_down=()), self._replace(
            router=(), gate_up=(), down=()
        )

    def described(self) -> Array[Any]:
        """In the library's form."""
        layout = native_layout()
        found = layout.array("MixtureTargets", [{"count": len(own)} for own in self])
        for targets, own in zip(found, self, strict=True):
            targets.targets[: len(own)] = [layout.structure("Target")(*each) for each in own]
        return found


class NativeMixtureLora:
    """A step's adapters of mixtures, in the library's form."""

    def __init__(
        self,
        arena: torch.Tensor,
        segments: Segments,
        layer: int = 0,
        targets: Array[Any] | None = None,
    ) -> None:
        """arena: `[pages, page_elems]`. segments: of the step's rows. layer, targets: of a call of its own."""
        parts, length = [_described(rows) for rows in segments.rows], len(segments.rows)
        adapters = (c_void_p * length)(*(addressof(part.adapter) for part in parts))
        begin, end = (c_int32 * length)(*segments.begin), (c_int32 * length)(*segments.end)
        level = (c_int32 * length)(*segments.level)
        experts = (c_void_p * length)(*(addressof(part.experts) for part in parts))
        num_experts = (c_int32 * length)(*(len(part.experts) for part in parts))
        arrays = adapters, begin, end, level, experts, num_experts
        self.dtype = arena.dtype
        begins, ends, addresses, levels = map(addressof, (begin, end, adapters, level))
        self.description = native_layout().filled(
            "MixtureLoraDesc",
            arena=arena.data_ptr(),
            page_elems=arena.shape[1],
            segments={"count": length, "begin": begins, "end": ends, "adapters": addresses, "level": levels},
            experts=addressof(experts),
            num_experts=addressof(num_experts),
            layer=layer,
            targets=None if targets is None else addressof(targets),
        )
        self._kept = arena, segments, parts, arrays, targets  # the description has addresses of these


class _Part(NamedTuple):
    """A part of an adapter in the library's form."""

    adapter: Structure
    tensors: tuple[torch.Tensor, ...]
    """To which it points."""
    experts: Array[c_int32]
    """Of its rank-rows."""


_parts: WeakKeyDictionary[AdapterRows, _Part] = WeakKeyDictionary()


def _described(rows: AdapterRows) -> _Part:
    """Made once."""
    found = _parts.get(rows)
    if found is None:
        found = _parts[rows] = _Part(*described(rows), (c_int32 * len(rows.experts))(*rows.experts))
    return found


class MixtureRows(NamedTuple):
    """What a mixture makes of rows."""

    y: torch.Tensor
    """`[rows, hidden]`, in the dtype of the rows."""
    chosen: torch.Tensor
    """`[rows, per_token]` int64: the experts of each row, the best first."""
    weights: torch.Tensor
    """Likewise, float32."""


class NativeMixture:
    """A layer's router, experts and shared expert, in the library's form."""

    def __init__(
        self,
        router: Panels | None,
        experts: NativeExperts,
        routing: Routing,
        gating: NativeGating,
        *,
        router_bias: torch.Tensor | None = None,
        correction: torch.Tensor | None = None,
        factors: torch.Tensor | None = None,
        shared: NativeExperts | None = None,
        shared_gate: torch.Tensor | None = None,
        shared_gating: NativeGating | None = None,
        out_norm: tuple[torch.Tensor, float] | None = None,
    ) -> None:
        """router: of float32, `[experts, inputs]`; it may have more experts than there are, which give their input
        back. None: the shared expert is alone. router_bias, correction: `[experts]`. out_norm: see `LatentExperts`.
        factors: likewise, of their weights. shared: one expert that every
        row goes to. shared_gate: `[1, hidden]`, of its output. shared_gating: its own; None: that of the others.
        """
        if router is not None and router.data.dtype != torch.float32:
            raise ValueError(f"a router's weights are of {router.data.dtype}; they must be of float32")
        first, *_ = (*experts.gate_up, *(() if shared is None else shared.gate_up))
        self._hidden, self._per_token = first.inputs, routing.per_token
        matrices, count = [*experts.gate_up, *experts.down], len(experts.down)
        self._dtype = next((each.data.dtype for each in matrices if isinstance(each, Panels)), None)
        self._kept: list[Any] = [router, experts, shared]  # the description has addresses of these
        self._description = native_layout().filled(
            "MixtureDesc",
            hidden=self._hidden,
            experts=count,
            size=experts.down[0].inputs if count else 0,
            shared_size=0 if shared is None else shared.down[0].inputs,
            router=None if router is None else router.data.data_ptr(),
            routed=self._hidden if router is None else router.inputs,
            identity=0 if router is None else router.outputs - count,
            out_norm=None if out_norm is None else self._values(out_norm[0]),
            out_eps=0.0 if out_norm is None else out_norm[1],
            router_bias=self._values(router_bias),
            routing={
                "correction": self._values(correction),
                "factors": self._values(factors),
                "per_token": routing.per_token,
                "scoring": "k" + routing.scoring.name.title().replace("_", ""),
                "renormalised": routing.renormalised,
                "groups": routing.groups,
                "kept_groups": routing.kept_groups,
                "group_best": routing.group_best,
                "epsilon": routing.epsilon,
                "factor": routing.factor,
                "jitter": routing.jitter,
                "masked_score": routing.masked_score,
                "logits_factor": routing.logits_factor,
            },
            activation=gating.activation,
            alpha=gating.alpha,
            limit=gating.limit,
            shared_activation=(shared_gating or gating).activation,
            shared_alpha=(shared_gating or gating).alpha,
            shared_limit=(shared_gating or gating).limit,
            gate_up=self._matrices(experts.gate_up, experts.gate_up_bias),
            down=self._matrices(experts.down, experts.down_bias),
            shared_gate_up=self._matrices(() if shared is None else shared.gate_up),
            shared_down=self._matrices(() if shared is None else shared.down),
            shared_gate=self._values(shared_gate),
            of_inputs=routing.of_inputs,
        )

    @property
    def address(self) -> int:
        """Of its description, which lives as long as the object."""
        return addressof(self._description)

    def _values(self, tensor: torch.Tensor | None) -> int | None:
        """Address of a tensor's values as float32, which are kept."""
        if tensor is None:
            return None
        self._kept.append(values := tensor.float().contiguous())
        return values.data_ptr()

    def _matrices(
        self, matrices: Sequence[Panels | IntegerPanels], biases: Sequence[torch.Tensor] | None = None
    ) -> dict[str, int | None]:
        length = len(matrices)
        data, integers, bias = (
            (c_void_p * length)(*(each.data.data_ptr() for each in matrices)),
            integers_of_each(matrices),
            None,
        )
        if biases is not None:
            bias = (c_void_p * length)(*map(self._values, biases))
        arrays = {"w": data, "integers": integers, "bias": bias}
        self._kept.append(arrays)
        return {name: None if each is None else addressof(each) for name, each in arrays.items()}

    def mix(self, x: torch.Tensor, lora: NativeMixtureLora | None = None) -> MixtureRows:
        """Compute the mixture of rows `[rows, hidden]`. lora: the step's adapters.

        Raises RuntimeError if the matrices were packed for the native library, and it is no longer in use.
        """
        if (found := library()) is None:
            raise RuntimeError("experts were packed for the native library, which is no longer in use; pack them again")
        rows = len(x)
        wide, y = x.float().contiguous(), torch.empty(rows, self._hidden)
        chosen = torch.empty(rows, self._per_token, dtype=torch.int64)
        weights = torch.empty(rows, self._per_token)
        step = native_layout().filled(
            "MixtureStepDesc",
            rows=rows,
            x=wide.data_ptr(),
            y=y.data_ptr(),
            chosen=chosen.data_ptr(),
            weights=weights.data_ptr(),
            lora=None if lora is None else addressof(lora.description),
            lora_element=0 if lora is None else ELEMENT_OF[lora.dtype],
        )
        element = ELEMENT_OF[self._dtype or x.dtype]
        found.chorus_mix(torch.get_num_threads(), element, addressof(self._description), addressof(step))
        return MixtureRows(y.to(x.dtype), chosen, weights)
