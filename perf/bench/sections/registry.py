"""The sections by name, in the order in which they run: requirements of others, correctness, sections with goals."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

#: Name → description. Each is a module here with `run(context)`, which returns plain values, and `tables(values)`.
SECTIONS = {
    "limits": "(a) bandwidth and arithmetic of the device",
    "equality": "(g) graph replay against eager steps, bit for bit",
    "decode": "(c) decode steps against their byte floor",
    "sgmv": "(b) SGMV against the bandwidth",
    "products": "(h) products of few rows, ours and cuBLAS",
    "attention": "(j) decode attention alone, ours and FlashInfer's",
    "latents": "(u) decode attention over latents, ours and PyTorch's operators",
    "sampling": "(k) sampling, alone and in decode steps",
    "ttft": "(e) time to first token, adapter resident and not",
    "merged": "(p) decode steps with an adapter in the weights",
    "experts": "(t) steps of a mixture of experts against their byte floor",
    "prefill": "(d) prefill against its floor",
    "mixes": "(f) output tokens per second, end to end",
    "http": "(i) output tokens per second over HTTP",
    "peers": "(r) rates over HTTP compared with other servers, and with the machine's limits",
    "levels": "(s) steps at each ISA level, compared with the machine's limits",
    "families": "(v) steps of other families beside Llama's, compared with the rate of reading memory",
}

_OF_GPUS = {"equality", "sgmv", "products", "attention", "latents", "experts"}
_OF_CPUS = {"peers", "levels", "families"}


def sections_of(device: str, smoke: bool) -> dict[str, str]:
    """The sections of a complete run on a device, by name; a smoke run tries all of them."""
    left_out = set() if smoke else _OF_CPUS if device == "cuda" else _OF_GPUS
    return {name: about for name, about in SECTIONS.items() if name not in left_out}


def section(name: str) -> ModuleType:
    """The module of a section, imported when needed."""
    return import_module(f".{name}", __package__)
