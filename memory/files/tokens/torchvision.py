"""Lets torchvision, and so transformers, be imported whichever torch is installed.

A torchvision from the package index is built for GPUs: beside a torch for CPUs its library can't be loaded, and half of
transformers with it, tokenizers included. What is used of it needs none of that library: it is enough that two of its
operators are declared.

Tests: tests/core/media/test_lacking.py
"""

from __future__ import annotations

import sys
from functools import cache
from importlib.util import find_spec

_OPERATORS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)

_kept: list[object] = []
"""A library's operators are gone with its object."""


def matching() -> str:
    """The command that installs torch's own build: without it other programs can't import peft."""
    import torch

    build = "cpu" if torch.version.cuda is None else f"cu{torch.version.cuda.replace('.', '')}"
    return f"pip install --force-reinstall --no-deps torchvision --index-url https://download.pytorch.org/whl/{build}"


@cache
def mend_torchvision() -> bool:
    """Import torchvision, if it is installed, before transformers does; True if it is of another build than torch.

    Raises what its import raises.
    """
    if find_spec("torchvision") is None:
        return False
    try:
        import torchvision
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
        import torch

        for name in [each for each in sys.modules if each.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        library = torch.library.Library("torchvision", "DEF")
        for operator in _OPERATORS:
            library.define(operator)
        _kept.append(library)
        import torchvision  # noqa: F401

    return bool(_kept)
