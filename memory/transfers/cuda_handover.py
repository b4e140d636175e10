"""Hand-overs of rows from a GPU to processes of its host and back, for which the host never waits (CaraServe §4.2).

The compute stream is given a hand-over before any of it has run: the rows x go to pinned memory, then the hand-over's
number to the word `given`; the base product runs meanwhile; the stream waits until every process's word in `returned`
has the number, and copies the products back. A process looks at `given`, computes, and writes its word.

Why each reads the right bytes. A stream does its work in order, and a write of a value comes after all writes before
it: a process that sees the number sees x. It writes its word after its products, so they are there when the wait ends.
One buffer each way is enough: the next x is copied after that wait, when every process has read this one, and the
next products are written after the next number, which follows the copy of these.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .cuda_driver import CupyDriver

#: Bytes between two processes' words: each has a cache line of its own.
_LINE = 64

_MASK = 0xFFFFFFFF

#: Words of a hand-over that say what is to be computed.
HEAD_WORDS = 4


@dataclass(frozen=True, slots=True)
class HandoverLayout:
    """Processes; rows that are handed over at once; bytes of a row of x and of its products; hand-overs of a step."""

    processes: int
    rows: int
    x_bytes: int
    y_bytes: int
    most: int

    @property
    def heads(self) -> int:
        """Byte at which the heads begin, behind `given` and the words of `returned`."""
        return (1 + self.processes) * _LINE

    @property
    def x(self) -> int:
        return -(-(self.heads + 4 * HEAD_WORDS * self.most) // _LINE) * _LINE

    @property
    def y(self) -> int:
        return -(-(self.x + self.rows * self.x_bytes) // _LINE) * _LINE

    @property
    def num_bytes(self) -> int:
        return self.y + self.rows * self.y_bytes


class HandoverMemory:
    """Memory that the device and the processes see; zeroed at first, pinned where a device reads it.

    given: the last hand-over of which x is there. returned: of each process the last one that it has computed. heads:
    `[most, HEAD_WORDS]` int32, what the hand-overs of a step ask for. x, y: rows as bytes.
    """

    def __init__(self, memory: np.ndarray, layout: HandoverLayout) -> None:
        """memory: uint8 `[layout.num_bytes]`."""
        words = memory[: layout.heads].view(np.uint32)
        self.layout = layout
        self.given, self.returned = words[:1], words[_LINE // 4 :: _LINE // 4]
        heads = memory[layout.heads :][: 4 * HEAD_WORDS * layout.most]
        self.heads = heads.view(np.int32).reshape(layout.most, HEAD_WORDS)
        self.x = memory[layout.x :][: layout.rows * layout.x_bytes].reshape(layout.rows, -1)
        self.y = memory[layout.y :][: layout.rows * layout.y_bytes].reshape(layout.rows, -1)


class CudaHandover:
    """A device's side of the hand-overs of one step after the other. One thread at a time, but for `give_up`.

    is_given_up: products that came back since are void.
    """

    def __init__(self, memory: HandoverMemory, driver: CupyDriver) -> None:
        self._memory, self._driver = memory, driver
        self._number = int(memory.given[0])  # of the last hand-over; it wraps around
        self._count = 0  # in the step
        self.is_given_up = False

    def begin_step(self) -> None:
        """Between two steps, when the device has done all of the last one: its heads may be written again."""
        self._count = 0

    def lend(self, head: tuple[int, ...], x: int, rows: int) -> None:
        """Hand `rows` rows over that lie on the device at address x, once the compute stream's work so far is done.

        head: of `HEAD_WORDS` numbers. Raises RuntimeError for more than the layout's hand-overs in a step.
        """
        memory, place = self._memory, self._count
        if place == memory.layout.most:
            raise RuntimeError(f"a step hands rows over {place + 1} times; its memory has room for {place}")
        self._count, self._number = place + 1, self._number + 1 & _MASK
        memory.heads[place] = head
        stream, driver = self._driver.compute_stream(), self._driver
        driver.memcpy_async(memory.x.ctypes.data, x, rows * memory.layout.x_bytes, False, stream)
        driver.write_value(stream, memory.given.ctypes.data, self._number)

    def collect(self, y: int, rows: int) -> None:
        """Have the products of the last hand-over at address y on the device before what is launched from now on."""
        memory, stream, driver = self._memory, self._driver.compute_stream(), self._driver
        for process in range(memory.layout.processes):
            driver.wait_value(stream, memory.returned[process:].ctypes.data, self._number)
        driver.memcpy_async(y, memory.y.ctypes.data, rows * memory.layout.y_bytes, True, stream)
        if self.is_given_up:  # since the last look: whatever was just launched is released, too
            self.give_up()

    def give_up(self) -> None:
        """Let the device go on without the processes, which have ended or write no word any more; from any thread."""
        self.is_given_up = True
        self._memory.returned[:] = self._number
