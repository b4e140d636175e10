"""Settings of a replica's process, as the file that its launcher writes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

from ...core.config import EngineConfig

if TYPE_CHECKING:
    from ..settings import Settings


class ReplicaSettings(BaseModel):
    """engine: without adapters; fronts name the adapters to load. roots: directories below which adapters must lie."""

    model_config = ConfigDict(extra="forbid")

    engine: EngineConfig
    roots: list[Path]
    grace_seconds: float
    log_level: str

    @classmethod
    def of(cls, settings: Settings) -> ReplicaSettings:
        """The replica's part of a server's settings; paths are made absolute."""
        config = settings.engine_config()
        return cls(
            engine=config.model_copy(update={"adapters": None, "model": config.model.absolute()}),
            roots=[place.resolve() for place in settings.adapter_places],
            grace_seconds=settings.grace_seconds,
            log_level=settings.log_level,
        )
