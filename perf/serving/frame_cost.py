"""Processor time of the cluster's frames: `python -m chorus.perf.serving.frame_cost`.

A replica's `out` frames, one a step with a token for each of `--rows` requests, are sent, and read as a front reads
them, over a unix socket, over TCP and with `--tls DIR` over mutual TLS. Both sides are in this process: the time is
that of both, in microseconds for a frame and for a token. `opening` is that of a connection.
"""

from __future__ import annotations

import asyncio
import secrets
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import median

from ...core.requests.types import RequestOutput, StepInfo
from ...server.cluster.address import Listening, TcpSocket, UnixSocket
from ...server.cluster.rows import from_row, read_step, to_row
from ...server.cluster.stream import FrameStream, accept, connect
from ..report.command import parser
from ..report.table import Table

KINDS = ("out",)
BATCH = 16
"""Frames that are sent before the reader's turn."""


async def cpu_us(work: Callable[[], Awaitable[None]], count: int) -> float:
    before = time.process_time()
    await work()
    return 1e6 * (time.process_time() - before) / count


async def measure(address: Listening, rows: int, frames: int) -> tuple[float, float]:
    """Processor time of a connection's opening, and of a frame."""
    secret, accepted = secrets.token_bytes(32), asyncio.Queue[FrameStream]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.put_nowait(await accept(reader, writer, secret, KINDS))

    server, opened = await address.listen(serve)
    fronts: list[FrameStream] = []

    async def open_one() -> None:
        fronts.append(await connect(opened, secret, KINDS))

    opening = median([await cpu_us(open_one, 1) for _ in range(20)])
    front, replica = fronts[0], await accepted.get()
    outputs = [RequestOutput(secrets.token_hex(16), (token,)) for token in range(rows)]

    async def pass_on() -> None:
        for _ in range(frames // BATCH):
            for number in range(BATCH):
                replica.send("out", StepInfo(number, rows, 0, rows), [to_row(output, 1) for output in outputs])
            await replica.drain()
            for _ in range(BATCH):
                frame = await front.read()
                assert frame is not None
                step, data = frame.fields
                info = read_step(step)
                for row in data:
                    from_row(row, info)

    await pass_on()
    frame = await cpu_us(pass_on, frames // BATCH * BATCH)
    for stream in fronts:
        stream.close()
    server.close()
    return opening, frame


def main() -> int:
    command = parser(__spec__, __doc__)
    command.add_argument("--rows", type=int, default=32, help="requests of a step")
    command.add_argument("--frames", type=int, default=1600, help="frames of a round")
    command.add_argument("--rounds", type=int, default=5, help="rounds, in turns, of which the median counts")
    command.add_argument("--tls", type=Path, metavar="DIR", help="tls.crt, tls.key and ca.crt, for TLS beside")
    args = command.parse_args()
    table = Table("processor time, µs", ["over", "opening", "frame", "token"])
    with tempfile.TemporaryDirectory() as directory:
        ways: dict[str, Listening] = {"unix": UnixSocket(Path(directory) / "s"), "TCP": TcpSocket("127.0.0.1", 0)}
        if args.tls is not None:
            ways["TLS"] = TcpSocket("127.0.0.1", 0, args.tls)
        found: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
        for _ in range(args.rounds):
            for way, address in ways.items():
                found[way].append(asyncio.run(measure(address, args.rows, args.frames)))
    for way, seen in found.items():
        opening, frame = (median(values) for values in zip(*seen, strict=True))
        table.add(way, opening, frame, frame / args.rows)
    table.show()
    return 0


if __name__ == "__main__":
    sys.exit(main())
