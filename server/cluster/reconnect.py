"""A connection to a process that may end and come back: it is opened again whenever it ends."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable

from .stream import FrameStream, Refused
from .wire import WireError

log = logging.getLogger(__name__)

FIRST_RETRY_SECONDS, LAST_RETRY_SECONDS = 0.02, 0.5
"""Most seconds between tries to connect: at first, and after many. The last is below the registry's
`FIRST_WRITE_SECONDS`."""


async def stay_connected(
    peer: str, connect: Callable[[], Awaitable[FrameStream]], talk: Callable[[FrameStream], Awaitable[None]]
) -> None:
    """Connect and have `talk` read until the peer goes, again and again, until cancelled. A trouble is logged once."""
    retry, told = FIRST_RETRY_SECONDS, None
    while True:
        stream, trouble = None, None
        try:
            stream = await connect()
            retry, told = FIRST_RETRY_SECONDS, None
            await talk(stream)
            trouble = "it ended the connection"
        except FileNotFoundError:  # it has not listened yet
            pass
        except OSError as error:  # WireError among them
            trouble = f"{type(error).__name__}: {error}"
            if stream is not None and isinstance(error, WireError) and not isinstance(error, Refused):
                stream.close(trouble)
        except Exception:  # of this process's own: the peer must not be lost to it for good
            log.exception("what %s sent could not be dealt with; it is connected anew", peer)
        finally:
            if stream is not None:
                stream.close()
        if trouble not in (None, told):
            log.warning("%s is away: %s", peer, trouble)
            told = trouble
        await asyncio.sleep(retry * random.uniform(0.5, 1))
        retry = min(LAST_RETRY_SECONDS, 2 * retry)
