"""Connections that are opened again."""

from __future__ import annotations

import asyncio

import pytest

from chorus.server.cluster.stream import WrongSecret, stay_connected


class Stream:
    """A connection that only ends."""

    def close(self, reason: str | None = None) -> None:
        pass


@pytest.mark.wide
def test_a_lasting_trouble_is_said_once_and_a_fault_of_its_own_does_not_end_it(caplog):
    """An API server whose certificate has expired tries for hours; one that fails over a frame goes on."""
    refusals = [WrongSecret("the peer does not have this cluster's secret")] * 5
    tries = iter([FileNotFoundError(), *refusals, None, *refusals, None, None])
    ends = iter([KeyError("a fault of its own"), None])

    async def connect():
        if (error := next(tries)) is not None:
            raise error
        return Stream()

    async def run():
        done = asyncio.Event()

        async def talk(_):
            end = next(ends, done)
            if end is done:
                done.set()
                await asyncio.get_running_loop().create_future()
            if end is not None:
                raise end

        task = asyncio.create_task(stay_connected("replica r0", connect, talk))
        await done.wait()
        task.cancel()

    asyncio.run(run())
    told = [record.message for record in caplog.records if record.levelname == "WARNING"]
    wrong = "replica r0 is not connected: WrongSecret: the peer does not have this cluster's secret"
    assert told == [wrong, wrong, "replica r0 is not connected: it ended the connection"]
    assert "could not be processed" in caplog.text
