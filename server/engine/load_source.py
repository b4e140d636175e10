"""Where the files of a load come from, and where they stay.

Tests: tests/server/api/adapters/test_uploads_kept.py
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ...memory.files.form import WEIGHTS_FILE
from ...memory.files.identity import moved
from .backend import Settle, in_place

if TYPE_CHECKING:
    from ...memory.files.manifest import AdapterManifest
    from ...memory.files.uploads.content_store import StagedUpload


class LoadSource(NamedTuple):
    """The files of a load."""

    find: Callable[[], Path]
    """Returns their directory; it reads the disk, so it runs in the background."""

    roots: Sequence[Path] = ()
    """Directories that must contain the files; empty: any."""

    settle: Settle = in_place
    """See `Backend.check_adapter`."""

    is_push: bool = False
    """A client loads it and waits until every replica of a cluster has it."""

    max_bytes: int | None = None
    """See `AdapterManifest.check_size`; None: an operator's own files."""

    @classmethod
    def upload(cls, draft: StagedUpload) -> LoadSource:
        """Uploaded files, which get their final directory once they were checked."""
        return cls(draft.directory, settle=partial(_sealed, draft), is_push=True, max_bytes=draft.max_bytes)


def _sealed(draft: StagedUpload, manifest: AdapterManifest) -> AdapterManifest:
    assert manifest.content_hash is not None  # it was checked
    path = draft.seal({WEIGHTS_FILE: manifest.content_hash})
    return moved(manifest, path, draft.copied(WEIGHTS_FILE))
