"""Mixtures of experts.

Tests: tests/core/test_experts.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from ...specs.feed_forward import Experts
from ..layer_program import Kept
from ..op import NoNativeOp, Op, Read, name_of

if TYPE_CHECKING:
    from .....ops.moe.routing import Routing
    from ..lowering import Lowering
    from ..native_binding import LayerBinding
    from ..torch_step import OpContext, Run, Step


@dataclass(frozen=True, slots=True)
class Moe(Op):
    """A mixture of experts, and what adapters add to them. routed: the router's input, where it is another one."""

    READS = ("x", "routed")
    WRITES = ("out",)
    SLOTS = ("experts",)
    ROUNDED = True

    x: Read
    routed: Read | None
    out: str
    spec: Experts
    experts: str = "experts"

    def torch(self, at: OpContext) -> Run:
        """See `Op.torch`."""
        from ...moe.experts import mix_experts
        from ..torch_experts import backend_of, launches

        read, index, spec = at.reader(self.x), at.index, self.spec
        routed_of = None if self.routed is None else at.reader(self.routed)

        def run(step: Step) -> None:
            names, experts, lora = step.names, step.layers[index][self.experts], step.batch.lora
            added = None if lora is None else lora.mixture(index)
            routed = None if routed_of is None else routed_of(names)
            launched = launches(backend_of(step, experts))
            y = mix_experts(read(names), experts, spec, added, routed, launches=launched)
            out = step.kept.get(Kept(self.out, y.shape[1:]))
            names[self.out] = y if out is None else out.copy_(y)

        return run

    @property
    def router_reads(self) -> str:
        """The buffer that the router reads."""
        return name_of(self.x if self.routed is None else self.routed)

    def native(self, to: Lowering, at: int) -> None:
        """See `Op.native`."""
        from ...moe.experts import what_kernels_lack

        if (lack := what_kernels_lack(self.spec)) is not None:
            raise NoNativeOp(lack)
        x = to.read_rounded(at, self.x)
        to.route(x if self.routed is None else to.read_rounded(at, self.routed))
        to.arrive()
        own = {"layer": to.index, "experts": _mixture_address, "targets": _mixture_targets}
        to.emit("Moe", x=x, **own)
        to.give(at, lambda out, _: to.emit("Combine", out=out, **own))

    def detail(self) -> str:
        """See `Op.detail`."""
        return f"{chosen_of(self.spec, f'{self.spec.size}')}{self.spec.for_all}"


@dataclass(frozen=True, slots=True)
class SharedExpert(Op):
    """The shared expert of a mixture whose others read latents, and what adapters add to it."""

    READS = ("x",)
    WRITES = ("out",)
    SLOTS = ("experts",)
    ROUNDED = True

    x: Read
    out: str
    spec: Experts
    experts: str = "experts"

    def torch(self, at: OpContext) -> Run:
        """See `Op.torch`."""
        from ...moe.experts import shared_expert as of_shared

        read, index = at.reader(self.x), at.index

        def run(step: Step) -> None:
            experts, lora = step.layers[index][self.experts], step.batch.lora
            added = None if lora is None else lora.mixture(index)
            step.names[self.out] = of_shared(read(step.names), experts, self.spec, added)

        return run

    def native(self, to: Lowering, at: int) -> None:
        """See `Op.native`."""
        x = to.read_rounded(at, self.x)
        to.arrive()
        own = {"layer": to.index, "experts": _shared_address, "targets": _shared_targets}
        to.emit("Moe", x=x, **own)
        to.give(at, lambda out, _: to.emit("Combine", out=out, **own))

    def detail(self) -> str:
        """See `Op.detail`."""
        return f"width {self.spec.shared_size}"


class _Mixture(Protocol):
    """Some of what there is, chosen for each token."""

    @property
    def count(self) -> int: ...

    @property
    def routing(self) -> Routing: ...


def chosen_of(spec: _Mixture, what: str) -> str:
    """How many experts of what there are, and how a token's are chosen; for people."""
    routing = spec.routing
    return f"{spec.count} experts of {what}, {routing.per_token} for each token by {routing.scoring}"


def _mixture_address(at: LayerBinding) -> Any:
    return None if at.mixture is None else at.mixture.weights


def _mixture_targets(at: LayerBinding) -> Any:
    return None if at.mixture is None else at.mixture.targets


def _shared_address(at: LayerBinding) -> Any:
    return None if at.mixture is None or at.mixture.shared is None else at.mixture.shared.weights


def _shared_targets(at: LayerBinding) -> Any:
    return None if at.mixture is None or at.mixture.shared is None else at.mixture.shared.targets
