"""Named spans of a step for profilers: `layer.12`, `attn.qkv`, `attn.run`, `mlp`, `lora.qkv`; names are stable.

They are off unless the environment has `CHORUS_NVTX=1`. Then the package `nvtx` marks them; install it with `pip
install 'chorus-lora[profile]'`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any

logger = logging.getLogger(__name__)

#: Opens a span that lasts as long as the context.
Span = Callable[[str], AbstractContextManager[Any]]

DOMAIN = "chorus"


def make_span(enabled: bool) -> Span:
    """Return a span factory; a no-op if not `enabled` or, with a warning, if nvtx is not installed."""
    if not enabled:
        return nullcontext
    try:
        nvtx = import_module("nvtx")
    except ImportError:
        logger.warning("CHORUS_NVTX is set, but nvtx is not installed: pip install 'chorus-lora[profile]'")
        return nullcontext
    return lambda name: nvtx.annotate(name, domain=DOMAIN)


span: Span = make_span(os.environ.get("CHORUS_NVTX") == "1")
