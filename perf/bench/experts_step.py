"""The step of a mixture of experts on a CPU, held against the rate of this machine's memory.

A step reads the weights of all experts that any of its rows goes to, once; these bytes count, and nothing else does.
Steps take the layers in turns, with new rows, so that no cache has their experts.
The limit is the rate at which the same threads read memory, measured in turns with the step. So are steps in which each
row has an adapter of its own on the router and on all experts.

Tests: tests/perf/bench/test_experts_step.py
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial

import torch

from ...core.model.lora.lora_state import rows_in
from ...core.model.moe.experts import choose, mix_experts
from ...core.model.moe.listed_experts import ListedExperts
from ...core.model.moe.mixture_lora import MixtureLora, mixture_columns
from ...core.model.specs.feed_forward import Experts, Routing
from ...memory.pages import hugepages
from ...memory.pages.adapter_layout import AdapterLayout, uniform_parts
from ...memory.pages.projections import Projections, Role
from ...ops.gemm import packed_gemm
from ...ops.lora.sgmv import Segments
from ...ops.moe import expert_gemms
from ..report.command import judge, parser
from ..report.table import Goal, Table
from .recurrent_step import read_rate

BARS = {1: 0.7, 8: 0.6}
"""Share of the memory's rate that a step of so many rows must reach."""

ADAPTERS_BAR = 0.6
"""Share of the rate without adapters that a step of eight rows with eight adapters must reach."""

PACKS = {"native": partial(expert_gemms.pack, take=hugepages.Pieces().take), "torch": packed_gemm.pack}


@dataclass(frozen=True)
class Shape:
    """A layer of Qwen3-30B-A3B by default: 1.2 GB in bfloat16."""

    hidden: int = 2048
    size: int = 768
    count: int = 128
    per_token: int = 8

    @property
    def expert_bytes(self) -> int:
        """Of one expert's weights in bfloat16."""
        return 2 * 3 * self.hidden * self.size

    @property
    def spec(self) -> Experts:
        return Experts(self.count, self.size, Routing(self.per_token, renormalised=True))


class Adapters:
    """Random adapters of one rank on the router and on all experts of some layers, in an arena of pages."""

    _PAGE_ELEMS = 1 << 15

    def __init__(self, shape: Shape, layers: int, count: int, rank: int) -> None:
        table = Projections((shape.spec.projections(shape.hidden),) * layers)
        parts = uniform_parts(table, rank, scale=2.0, targets=[each.name for each in table])
        layout = AdapterLayout.build(parts, table, self._PAGE_ELEMS, torch.bfloat16.itemsize)
        generator = torch.Generator().manual_seed(1)
        pages = torch.randperm(count * layout.num_pages, generator=generator).view(count, -1).tolist()
        self._arena = hugepages.zeros((count * layout.num_pages, self._PAGE_ELEMS), torch.bfloat16)
        self._arena.normal_(0, 0.02, generator=generator)
        self._columns = mixture_columns(table)
        self._segments = Segments()
        for row, own in enumerate(pages):
            for part, place in zip(parts, layout.parts, strict=True):
                self._segments.add(row, row + 1, rows_in(part, place, own))

    def of(self, layer: int) -> MixtureLora:
        """What they add in a layer: adapter i to row i."""
        return MixtureLora(self._arena, self._segments, layer, self._columns[layer])


class Layers:
    """Random experts of some layers."""

    def __init__(self, shape: Shape, count: int, pack: expert_gemms.Pack = expert_gemms.pack) -> None:
        self._shape, self._pack, self._turn = shape, pack, 0
        self._generator = torch.Generator().manual_seed(0)
        self._layers = [self._layer() for _ in range(count)]

    def _layer(self) -> ListedExperts:
        shape = self._shape

        def matrix(rows: int, columns: int) -> expert_gemms.Matrix:
            return self._pack(torch.randn(rows, columns, generator=self._generator).div_(columns**0.5).bfloat16())

        router = torch.randn(shape.count, shape.hidden, generator=self._generator)
        gate_up = [matrix(2 * shape.size, shape.hidden) for _ in range(shape.count)]
        down = [matrix(shape.hidden, shape.size) for _ in range(shape.count)]
        return ListedExperts(router=router, gate_up=gate_up, down=down).packed(torch.bfloat16)

    @torch.inference_mode()
    def rate(self, rows: int, adapters: Adapters | None = None) -> float:
        """Bytes of experts per second that one step of the next layer reads. Those of adapters don't count."""
        layer, spec = self._turn % len(self._layers), self._shape.spec
        weights, lora = self._layers[layer], adapters and adapters.of(layer)
        self._turn += 1
        x = torch.randn(rows, self._shape.hidden, generator=self._generator).bfloat16()
        logits = x.float() @ expert_gemms.unpack(weights.router).T
        if lora is not None:
            lora.add(Role.ROUTER, logits, x.float())
        used = len(choose(logits, spec.routing).experts.unique())
        begin = time.perf_counter()
        mix_experts(x, weights, spec, lora)
        return used * self._shape.expert_bytes / (time.perf_counter() - begin)


def main(argv: list[str] | None = None) -> int:
    command = parser(__spec__, __doc__)
    add = command.add_argument
    add("--layers", type=int, default=3)
    add("--experts", type=int, default=Shape.count)
    add("--hidden", type=int, default=Shape.hidden)
    add("--size", type=int, default=Shape.size, help="width of an expert's gate and up")
    add("--per-token", type=int, default=Shape.per_token)
    add("--rows", type=int, nargs="+", default=[1, 8], help="of a step")
    add(
        "--kernels", choices=PACKS, default="native", help="of experts' products; native: the library's, if it is there"
    )
    add("--rank", type=int, default=8, help="of the adapters; 0: measure without any")
    add("--threads", type=int, default=torch.get_num_threads())
    add("--rounds", type=int, default=24, help="of which the best counts")
    add("--memory", type=int, default=512 << 20, help="bytes that are read for the limit")
    arguments = command.parse_args(argv)
    torch.set_num_threads(arguments.threads)
    memory = hugepages.zeros((arguments.memory,), torch.uint8).fill_(1)
    shape = Shape(arguments.hidden, arguments.size, arguments.experts, arguments.per_token)
    layers = Layers(shape, arguments.layers, PACKS[arguments.kernels])
    table = Table("step of experts", ["rows", "GB/s", "memory GB/s", "share", "with adapters / without"])
    shares, ratios, goals = {}, {}, []
    for rows in arguments.rows:
        adapters = Adapters(shape, arguments.layers, rows, arguments.rank) if arguments.rank else None
        found = limit = beside = 0.0
        for _ in range(arguments.rounds):
            limit = max(limit, read_rate(memory, arguments.threads))
            found = max(found, layers.rate(rows))
            if adapters is not None:
                beside = max(beside, layers.rate(rows, adapters))
        shares[str(rows)] = found / limit
        if adapters is not None:
            ratios[str(rows)] = beside / found
        table.add(rows, found / 1e9, limit / 1e9, found / limit, ratios.get(str(rows)))
        if rows in BARS:
            goals.append(Goal("share of the memory's rate", found / limit, BARS[rows], where=f"{rows} rows"))
        if rows == 8 and adapters is not None:
            goals.append(Goal("with eight adapters / without", beside / found, ADAPTERS_BAR, where="8 rows"))
    table.show()
    return judge({"shares": shares, "with adapters": ratios}, goals)


if __name__ == "__main__":
    raise SystemExit(main())
