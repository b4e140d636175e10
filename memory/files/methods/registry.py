"""PEFT's methods by their names in configurations: those that are served, and the reasons against all others.

Tests: tests/memory/files/methods/test_methods.py, tests/memory/files/methods/test_unserved.py
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..error import AdapterFormatError, shown
from ..unserved import MERGE
from .adalora import AdaLora
from .ia3 import Ia3
from .loha import LoHa
from .lokr import LoKr
from .method import CONVERT, Method
from .miss import Miss
from .vb_lora import VbLora
from .vera import Vera

METHODS: dict[str, type[Method]] = {each.peft_type: each for each in (AdaLora, Ia3, LoHa, LoKr, Miss, VbLora, Vera)}

_TRAIN = "PEFT neither converts nor merges it; train LoRA"

#: By method, what to do with adapters of it.
UNSERVED: dict[str, str] = {
    **dict.fromkeys(
        (
            "C3A", "DELORA", "FOURIERFT", "GRALORA", "PSOFT", "RANDLORA", "TINYLORA", "UNILORA", "WAVEFT",
        ),
        f"its A and B are not in the file; {CONVERT}",
    ),
    **dict.fromkeys(
        (
            "BOFT", "DEFT", "FROD", "GLORA", "HIRA", "HRA", "LN_TUNING", "OFT", "OSF", "PEANUT", "PVERA", "ROAD",
            "SHIRA", "SUPERTUNING",
        ),
        f"PEFT has no conversion of it to LoRA; {MERGE}",
    ),
}  # fmt: skip


def method_of(file: Path, fields: Mapping[str, Any]) -> Method | None:
    """The method of a configuration; None for LoRA. Raises AdapterFormatError for one that is not served."""
    name = fields.get("peft_type", "LORA")
    if name == "LORA":
        return None
    if isinstance(name, str) and name in METHODS:
        method = METHODS[name](fields)
        if (why := method.why_not()) is not None:
            raise AdapterFormatError(f"{file}: of {method.title}, {why}")
        return method
    served = ", ".join(("LORA", *METHODS))
    why = UNSERVED.get(name, _TRAIN) if isinstance(name, str) else "train LoRA"
    raise AdapterFormatError(f"{file}: peft_type is {shown(name)}; {served} are served: {why}")
