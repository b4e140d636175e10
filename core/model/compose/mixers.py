"""Recurrent mixers: functions with which layers write them.

Tests: tests/core/model/program/test_golden.py, tests/core/model/program/test_builder.py
"""

from __future__ import annotations

from functools import partial
from itertools import accumulate
from typing import Any

from ..program.op import Read, View
from ..program.ops.mix import Mix
from ..specs.recurrent import Inner, RecurrentSpec
from ..weights.layer_weights import PartWeights
from ..weights.slot import Keep, SlotTensor
from ..weights.slots import RECURRENT
from .build import Build, Proj, Value


def product(b: Build, mixer: RecurrentSpec, name: str, path: str = "") -> tuple[Proj, ...]:
    """A mixer's projections of one of its products. path: of the module around it."""
    return tuple(each._replace(path=path + each.path) for each in mixer.products(b.hidden)[name])


def mixer_in(b: Build, mixer: RecurrentSpec, n: Value, slot: str = "qkv", out: str = "in", path: str = "") -> Value:
    """What the mixer reads, with decays and gates in place of their latents: see `RecurrentSpec.input_parts`."""
    x = b.linear(slot, n, out, *product(b, mixer, "in", path))
    if mixer.input_parts is None:
        return Value(x, mixer.in_size)
    ends = list(accumulate(mixer.input_parts))
    gates, decays = View(x, ends[0], ends[1], copied=True), View(x, ends[2], ends[3], copied=True)
    og = b.linear("output_gate_up", gates, "og", *product(b, mixer, "output_gate_up", path))
    de = b.linear("decay_up", decays, "de", *product(b, mixer, "decay_up", path))
    return Value(b.concat(out, View(x, 0, ends[0]), og, View(x, ends[1], ends[2]), de), mixer.in_size)


def mix(b: Build, mixer: RecurrentSpec, x: Read, out: str = "a", path: str = "") -> Value:
    """What the mixer makes of what `mixer_in` gave."""
    mixer_weights(b, mixer, path)
    if mixer.inner is not None:
        assert isinstance(x, str), "a mixer of two parts reads a buffer"
        x = _between(b, mixer, mixer.inner, x)
    return b.put(Mix(x, out, mixer), mixer.out_size)


def mixer_weights(b: Build, mixer: RecurrentSpec, path: str = "") -> None:
    """Declare the mixer's own tensors. path: of the module around it."""
    for name, tensor in mixer.tensors.items():
        b.weight(f"{RECURRENT}.{name}", SlotTensor(path + name, tensor.shape, tensor.sections), keep=Keep.FLOAT32)
    b.part(RECURRENT, partial(_made, mixer))


def _made(mixer: RecurrentSpec, of: PartWeights) -> Any:
    """What a rank has of its weights."""
    return mixer.share(of.ranks).weights(of.own)


def mixer_out(b: Build, mixer: RecurrentSpec, x: Value, slot: str = "o", out: str = "y", path: str = "") -> Value:
    """The product of what `mix` gave, which ranks must sum."""
    return b.linear(slot, x, out, *product(b, mixer, "out", path), rows=True)


def _between(b: Build, mixer: RecurrentSpec, inner: Inner, x: str) -> Value:
    """What stands between the two parts of a mixer: steps, B and C of what the first gives."""
    x = Value(x, mixer.in_size)
    c = b.put(Mix(x, "c", mixer, is_first=True), mixer.channels)
    low = b.reduce(b.linear("scan_in", c, "low", *product(b, mixer, "scan_in"), rows=True))
    widths, parts = (inner.rank, inner.state, inner.state), list[Read]()
    for name, end, width in zip(("dt", "b", "c"), accumulate(widths), widths, strict=True):
        if inner.norm is None:
            parts.append(View(low, end - width, end, copied=name == "dt"))
        else:
            part = View(low, end - width, end)
            parts.append(b.norm(f"{name}_norm", part, f"{name}n", inner.norm, f"mamba.{name}_layernorm"))
    steps = b.linear("decay_up", parts[0], "de", *product(b, mixer, "decay_up"))
    found = b.concat("sc", c, steps, *parts[1:], View(x, mixer.channels))
    return Value(found, mixer.channels + 2 * inner.state + mixer.in_size)
