"""Turns of a serving process's threads at the interpreter."""

from __future__ import annotations

import gc
import sys

SWITCH_SECONDS = 0.0005


def take_short_turns() -> None:
    """Let no thread keep the others from the interpreter for long; once all that lasts has been loaded.

    A full garbage collection looks at every object there is while all threads wait, 0.2 s with torch loaded; what is
    here by now stays to the end and is left out from now on. And a thread that computes in Python gives way after
    `SWITCH_SECONDS`: a step of the engine asks for the interpreter after each of its calls into native code, and would
    wait ten times as long each time.
    """
    gc.collect()
    gc.freeze()
    sys.setswitchinterval(SWITCH_SECONDS)
