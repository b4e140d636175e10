"""The sections by name, in the order in which they run."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

#: Name → what it measures. Each is a module here with `run(context)`, which gives plain values, and `tables(values)`.
SECTIONS = {
    "tests": "the tests that need a GPU",
    "limits": "(a) bandwidth and arithmetic of the device",
    "sgmv": "(b) SGMV beside other ways",
    "decode": "(c) decode steps against their byte floor",
    "prefill": "(d) prefill against its floor",
    "ttft": "(e) time to first token, adapter resident and not",
    "mixes": "(f) output tokens per second, end to end",
    "equality": "(g) graph replay against eager steps, bit for bit",
}


def section(name: str) -> ModuleType:
    """The module of a section, imported when it is needed."""
    return import_module(f".{name}", __package__)
