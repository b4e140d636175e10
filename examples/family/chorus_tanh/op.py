"""A dynamic tanh (arXiv 2503.10622)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from chorus.core.model.program.op import Op, Read

if TYPE_CHECKING:
    from chorus.core.model.program.torch_step import OpContext, Run, Step


@dataclass(frozen=True, slots=True)
class DynamicTanh(Op):
    """`out = weight · tanh(alpha · x) + bias`. alpha is one number; weight and bias are `[hidden]`."""

    READS = ("x",)
    WRITES = ("out",)
    SLOTS = ("alpha", "weight", "bias")
    LACKS = "dynamic tanh"  # what models have that the native library lacks: PyTorch's operators serve them

    x: Read
    out: str
    alpha: str
    weight: str
    bias: str

    def torch(self, at: OpContext) -> Run:
        """See `Op.torch`. What needs torch is imported here: configurations are read without it."""
        import torch

        read, index = at.reader(self.x), at.index

        def run(step: Step) -> None:
            own = step.layers[index]
            x = torch.tanh(own[self.alpha] * read(step.names))
            step.names[self.out] = own[self.weight] * x + own[self.bias]

        return run

    def formula(self) -> str:
        """See `Op.formula`."""
        return f"{self.out} = {self.weight} · tanh({self.alpha} · {self.x}) + {self.bias}"
