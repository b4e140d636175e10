"""A row of the table of paths: what is served."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from chorus.core.model.read_config import read_model_config
from chorus.core.model.specs.config import ModelConfig

from ..tiny_families import ADAPTERS

Adapters = tuple[str | None, ...]


@dataclass(frozen=True, eq=False)
class Subject:
    """A model with adapters, and its answers in transformers + peft, as `Tiny` has them.

    make: is called once in a process.
    """

    name: str
    make: Callable[[], Any]
    adapters: Adapters = (None, *ADAPTERS)
    """Adapters whose requests are served in one batch; None is the base model."""

    merged: str = "r3-all"
    """The adapter that is merged into the weights where a path merges one."""

    options: Mapping[str, Any] = field(default_factory=dict)
    """Settings of all its engines."""

    refused: Mapping[str, str] = field(default_factory=dict)
    """Needs of paths that this row is refused → the text of the error."""

    untold: Mapping[str, str] = field(default_factory=dict)
    """Needs of paths for which a comparison would mean nothing → the reason."""

    family: str = ""
    """The family whose model is saved again in bfloat16; empty if the row is not compared in bfloat16."""

    most_tokens: int = 24
    """Longest answer that is asked for. Long answers have unclear choices where the reference rounds."""

    changes: Mapping[str, Any] = field(default_factory=dict)
    """Changes of the configuration in bfloat16."""

    @cached_property
    def it(self) -> Any:
        return self.make()

    @cached_property
    def config(self) -> ModelConfig:
        return read_model_config(self.it.model)

    def why_untold(self, needs: tuple[str, ...]) -> str | None:
        """Why a path with these needs is not compared; None if it is."""
        return next((self.untold[each] for each in needs if each in self.untold), None)

    def why_refused(self, needs: tuple[str, ...]) -> str | None:
        """A pattern of the error that a path with these needs ends in; None if it serves."""
        return next((self.refused[each] for each in needs if each in self.refused), None)
