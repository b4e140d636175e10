"""The model that an app serves, and its limits."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from .limits import RequestLimits
from .sampling_defaults import SamplingDefaults


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Description of the base model for the API, and the limits of one call.

    max_prompts: most choices of one call, all prompts together. adapter_roots: resolved directories below which
    adapters may be loaded; none: adapters can't be changed over HTTP. adapter_load_seconds: how long a load may take.
    limits: what a request may cost. defaults: what it samples with where it says nothing.
    """

    name: str
    root: str
    max_body_bytes: int
    max_prompts: int
    adapter_roots: tuple[Path, ...] = ()
    adapter_load_seconds: float = 30.0
    limits: RequestLimits = field(default_factory=RequestLimits)
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
