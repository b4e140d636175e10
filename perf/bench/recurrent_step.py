"""The recurrent step of Gated DeltaNet in the native library, held against the rate of this machine's memory.

A decode step reads the state of each sequence in each layer and writes it to another place, as steps of the engine do;
both count. What else a layer does between its projections takes time and doesn't count.
The limit is the rate at which the same threads read memory, measured in turns with the step.

Tests: tests/perf/bench/test_recurrent_step.py
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...memory.pages import hugepages
from ...ops.cpu.native_delta import run_delta
from ...ops.library import native_library
from ...ops.mixers.gated_delta import DeltaWeights
from ...ops.mixers.recurrent import RecurrentState
from ..report.command import judge, parser
from ..report.table import Goal, Table

BAR = 0.7
"""Share of the memory's rate that a step of many sequences must reach."""

#: Heads of keys and of values of Qwen3.5's sizes; all heads are 128 wide.
SHAPES = {"0.8b": (16, 16), "9b": (16, 32), "27b": (16, 48)}
WIDTH, CONV_SIZE = 128, 4


@dataclass(frozen=True)
class Case:
    """A layer's shape, and sequences with states that are larger than the caches where there are many."""

    size: str
    sequences: int

    @property
    def bytes_moved(self) -> int:
        return 2 * 4 * self.sequences * SHAPES[self.size][1] * WIDTH * WIDTH


class Step:
    """One layer's step of many sequences."""

    def __init__(self, case: Case, threads: int) -> None:
        k_heads, v_heads = SHAPES[case.size]
        channels = (2 * k_heads + v_heads) * WIDTH
        self.case, self._threads = case, threads
        shapes = (case.sequences, CONV_SIZE - 1, channels), (case.sequences, v_heads, WIDTH, WIDTH)
        random = torch.Generator().manual_seed(0)
        self._before, self._after = (
            RecurrentState(
                *(hugepages.zeros(shape, torch.float32).normal_(0, 0.1, generator=random) for shape in shapes)
            )
            for _ in range(2)
        )
        self._weights = DeltaWeights(
            torch.randn(CONV_SIZE, channels, generator=random),
            torch.zeros(v_heads),
            torch.full((v_heads,), -4.0),
            torch.ones(WIDTH),
            eps=1e-6,
        )
        self._mixed = torch.randn(case.sequences, channels + v_heads * (WIDTH + 2), generator=random)

    def rate(self, times: int) -> float:
        """Bytes of state per second, read and written."""
        indptr = range(self.case.sequences + 1)
        _, seconds = run_delta(
            self._mixed, self._weights, self._before, indptr, after=self._after, threads=self._threads, times=times
        )
        return self.case.bytes_moved / seconds


def read_rate(memory: torch.Tensor, threads: int) -> float:
    """Bytes per second that the threads read."""
    found = native_library.library()
    assert found is not None
    return found.chorus_read_rate(threads, memory.data_ptr(), memory.numel())


def main(argv: list[str] | None = None) -> int:
    command = parser(__spec__, __doc__)
    add = command.add_argument
    add("--sizes", nargs="+", choices=SHAPES, default=list(SHAPES), help="models whose layers are taken")
    add("--sequences", type=int, nargs="+", default=[1, 64], help="of a step")
    add("--threads", type=int, default=torch.get_num_threads())
    add("--rounds", type=int, default=8, help="of which the best counts")
    add("--memory", type=int, default=512 << 20, help="bytes that are read for the limit")
    arguments = command.parse_args(argv)
    memory = hugepages.zeros((arguments.memory,), torch.uint8).fill_(1)
    table = Table("recurrent step", ["layer", "sequences", "GB/s", "memory GB/s", "share"])
    shares: dict[str, float] = {}
    for case in (Case(size, count) for size in arguments.sizes for count in arguments.sequences):
        step, found, limit = Step(case, arguments.threads), 0.0, 0.0
        for _ in range(arguments.rounds):
            limit = max(limit, read_rate(memory, arguments.threads))
            found = max(found, step.rate(times=max(1, 64 // case.sequences)))
        shares[f"{case.size}, {case.sequences}"] = found / limit
        table.add(case.size, case.sequences, found / 1e9, limit / 1e9, found / limit)
    table.show()
    worst = min(shares, key=lambda name: shares[name])
    goal = Goal("share of the memory's rate", shares[worst], BAR, where=worst)
    return judge({"level": native_library.level(), "shares": shares}, [goal])


if __name__ == "__main__":
    raise SystemExit(main())
