"""Products of projections side by side.

Tests: tests/core/paths, tests/core/model/program/test_native_ops.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .....memory.pages.projections import Role
from ..op import Op, Read, name_of
from .rows import Activate, Scale

if TYPE_CHECKING:
    from ..lowering import Lowering
    from ..native_registers import Held
    from ..torch_step import OpContext, Run, Step


@dataclass(frozen=True, slots=True)
class Gemm(Op):
    """`out = x · wᵀ + bias` of a product's projections, side by side, and what adapters add to them. With `silu` (a
    peephole's), out is `silu(gate) · up` of the two halves of that.
    """

    READS = ("x",)
    WRITES = ("out",)
    SLOTS = ("weight",)
    ROUNDED = True

    x: Read
    out: str

    weight: str
    """The slot of its matrices, and the product's name."""

    silu: bool = False

    @property
    def bias(self) -> str:
        """The slot of its bias, if the layer has one; merged weights may have one where the model's have none."""
        return f"{self.weight}_bias"

    def torch(self, at: OpContext) -> Run:
        """See `Op.torch`."""
        from .....ops.elementwise.elementwise import silu_and_mul
        from ...batch import GemmBackend
        from ...lora.step_lora import OFFLOADED
        from ...nvtx_spans import span
        from ..torch_gemm import SPANS, backend_for, multiply

        # with what adapters add, gated or not; in one launch but for shrink where the backend has that
        read, index, slot, bias_slot, out, silu = (
            at.reader(self.x),
            at.index,
            self.weight,
            self.bias,
            self.out,
            self.silu,
        )
        gemm, offloads = at.gemm(slot), slot in OFFLOADED
        base_name, lora_name = SPANS.get(slot, slot), f"lora.{slot}"

        def run(step: Step) -> None:
            names, weights, lora, shrunk = step.names, step.layers[index], step.batch.lora, None
            x, weight, bias = read(names), weights[slot], weights.get(bias_slot)
            backend = backend_for(step.batch.backends, weight, bias, silu=silu)
            if lora is not None:
                if offloads:
                    lora.offload(gemm, x, index)
                if backend is GemmBackend.EXPANDED:
                    with span(lora_name):
                        shrunk = lora.shrink(gemm, x, index)
            is_added = lora is None or shrunk is not None
            with span(base_name):
                y = multiply(backend, x, weight, bias, gate=silu and is_added, shrunk=shrunk)
            if lora is not None and shrunk is None:
                with span(lora_name):
                    lora.add(gemm, y, x, index)
                y = silu_and_mul(y) if silu else y
            names[out] = y

        return run

    def native(self, to: Lowering, at: int) -> None:
        """See `Op.native`."""
        from ..native_binding import weight_of

        if self.weight == Role.PER_LAYER:
            module, inputs, outputs = to.model_product(Role.PER_LAYER)
            own = {"inputs": inputs, "outputs": outputs, "module": module, "w": weight_of(self.weight)}
            to.emit("Multiply", x=to.read_rounded(at, self.x), out=to.held_as(to.written(at)), **own)
            return
        if self._gate_up(to, at):
            return

        def emit(out: Held, added: bool) -> None:
            to.emit("Gemm", **self._arguments(to, at, out, accumulate=added))

        to.give(at, emit, adds=True)

    def _arguments(self, to: Lowering, at: int, out: Held, *, accumulate: bool) -> dict[str, Any]:
        from ..native_binding import weight_of

        own = {"accumulate": int(accumulate), "shape": to.gemm_shape(self.weight)[0], "layer": to.index}
        x, weights = to.read_rounded(at, self.x), {"w": weight_of(self.weight), "bias": weight_of(self.bias)}
        number = to.next_product()
        to.arrive()
        return {"x": x, "out": out, **own, "number": number, **weights}

    def _gate_up(self, to: Lowering, at: int) -> bool:
        """List gate, up and their activation as one op; False if something else comes between them."""
        last, factor, scale = at + 1, 1.0, to.next(at)
        if isinstance(scale, Scale) and scale.in_place and scale.weight is None and name_of(scale.x) == self.out:
            last, factor = last + 1, scale.factor
        activate = to.next(last - 1)
        if not isinstance(activate, Activate) or activate.x != self.out:
            return False
        if len(to.readers(to.written(at))) > last - at:  # others read it, too
            return False
        act = to.rounded(to.written(last))
        gemm = self._arguments(to, at, to.held_as(to.written(at), "Gates"), accumulate=False)
        to.emit("GateUp", gemm=gemm, act=act, factor=factor, **activate.native_arguments(act.value.width))
        to.done |= set(range(at + 1, last + 1))
        return True

    def columns(self, given: Sequence[int], to: Lowering) -> int:
        """See `Op.columns`."""
        if self.weight == Role.PER_LAYER:
            return to.model_product(Role.PER_LAYER)[2]
        return to.gemm_shape(self.weight)[1].outputs

    def formula(self) -> str:
        """See `Op.formula`."""
        return f"{self.out} ← gemm[{self.weight}] {' '.join(map(str, self.reads))}"
