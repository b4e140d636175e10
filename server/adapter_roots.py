"""Directories that adapters may be loaded from over HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .errors import DISK_FAULTS, ApiError


class AdapterRoots:
    """Directories below which a path must lie, symbolic links followed; with none, adapters stay as they are."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self.roots = tuple(root.resolve() for root in roots)

    def require(self) -> None:
        """Raises an ApiError unless adapters may be changed over HTTP at all."""
        if not self.roots:
            raise ApiError(
                403,
                "this server's adapters can't be changed over HTTP: adapter_roots is not set; "
                "start it with --adapter-roots DIR (or --adapters DIR) to allow what lies below DIR",
                code="adapter_loading_disabled",
            )

    def find(self, path: str, field: str) -> Path:
        """The directory that `path` means, resolved; relative ones are looked for below each root.

        It asks the disk, which may take any time: not on the thread of the event loop.

        Raises an ApiError that names `field`: 403 for what lies elsewhere, whether it exists or not, 404 for what
        doesn't exist; and the OSError of a disk that fails.
        """
        self.require()
        try:
            candidates = [(root / path).resolve() for root in self.roots]
            allowed = [found for found in candidates if any(found.is_relative_to(root) for root in self.roots)]
            found = next((found for found in allowed if found.is_dir()), None)
        except (OSError, ValueError, RuntimeError) as error:
            if getattr(error, "errno", None) in DISK_FAULTS:
                raise
            raise ApiError(400, f"{field} is no path: {error}", param=field) from None
        if found is not None:
            return found
        if not allowed:
            raise ApiError(
                403,
                f"{field} {path!r} lies outside the directories that adapters may be loaded from; "
                "put the adapter there, or start the server with --adapter-roots",
                param=field,
                code="path_not_allowed",
            )
        raise ApiError(
            404,
            f"No adapter found for {field} {path!r}: there is no such directory on the server",
            param=field,
            code="adapter_not_found",
        )
