"""Linear layers and patch convolutions of a tower, which an adapter changes while it is in use.

The modules stay transformers' own; only their class is replaced. One encode call has one adapter, so nothing is
grouped here.

Tests: tests/core/media/test_tower_adapters.py
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.nn.functional import conv2d, conv3d, linear


@dataclass(slots=True)
class Change:
    """What an adapter does to one module: PEFT's LoRA, or DoRA.

    a: `[rank, in]`, or as a convolution has it. b: `[out, rank]`, likewise. magnitude: `[out]`, of DoRA. bias: of B.
    """

    a: torch.Tensor
    b: torch.Tensor
    scale: float
    magnitude: torch.Tensor | None = None
    bias: torch.Tensor | None = None

    @property
    def delta(self) -> torch.Tensor:
        """What LoRA adds to a matrix of its own shape, `[out, in]`."""
        return self.scale * (self.b @ self.a)

    def to(self, dtype: torch.dtype, device: torch.device) -> Change:
        """The same in another dtype, on a device."""
        magnitude = None if self.magnitude is None else self.magnitude.to(device, dtype)
        bias = None if self.bias is None else self.bias.to(device, dtype)
        return replace(self, a=self.a.to(device, dtype), b=self.b.to(device, dtype), magnitude=magnitude, bias=bias)


@dataclass(slots=True)
class TowerChanges:
    """An adapter's part in a tower: changes of modules, and parameters that take the place of the tower's own."""

    modules: dict[str, Change] = field(default_factory=dict)
    copies: dict[str, torch.Tensor] = field(default_factory=dict)


class AdaptedLinear(nn.Linear):
    """A linear layer with the change of the adapter in use."""

    change: Change | None = None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if (change := self.change) is None:
            return super().forward(input)
        if change.magnitude is None:
            inner = linear(input, change.a)
            return super().forward(input) + linear(inner, change.b, change.bias) * change.scale
        weight = self.weight + change.scale * (change.b @ change.a)
        factor = change.magnitude / weight.norm(dim=1)
        return linear(input, weight * factor[:, None], self.bias)


class AdaptedPatches(nn.Conv2d):
    """A strided convolution of patches, likewise; on flattened patches it is a linear layer."""

    change: Change | None = None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if (change := self.change) is None:
            return super().forward(input)
        inner = conv2d(input, change.a, None, self.stride, self.padding, self.dilation)
        return super().forward(input) + conv2d(inner, change.b, change.bias) * change.scale


class AdaptedTubes(nn.Conv3d):
    """The same of patches of several frames."""

    change: Change | None = None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if (change := self.change) is None:
            return super().forward(input)
        inner = conv3d(input, change.a, None, self.stride, self.padding, self.dilation)
        return super().forward(input) + conv3d(inner, change.b, change.bias) * change.scale


def make_adaptable(module: nn.Module) -> dict[str, AdaptedLinear | AdaptedPatches | AdaptedTubes]:
    """Give a module's linear layers and patch convolutions a class that adapters can change; return them by name."""
    found: dict[str, Any] = {}
    for name, each in module.named_modules():
        if type(each) is nn.Linear:
            each.__class__ = AdaptedLinear
        elif isinstance(each, nn.Conv2d) and is_patches(each):
            each.__class__ = AdaptedPatches
        elif isinstance(each, nn.Conv3d) and is_patches(each):
            each.__class__ = AdaptedTubes
        else:
            continue
        found[name] = each
    return found


def is_patches(module: nn.Module) -> bool:
    """True for a convolution whose windows don't overlap."""
    if not isinstance(module, nn.Conv2d | nn.Conv3d) or type(module) not in (nn.Conv2d, nn.Conv3d):
        return False
    return module.kernel_size == module.stride and module.groups == 1
