"""Directories of this machine, which are nobody's business who only talks to the server."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path


class PrivatePaths:
    """Takes known directories out of messages, so that paths are told from below them."""

    def __init__(self, directories: Iterable[str | Path]) -> None:
        absolute = {form for one in directories for form in (os.path.abspath(one), os.path.realpath(one))}
        self._directories = sorted((one for one in absolute if one != "/"), key=len, reverse=True)

    def hide(self, text: str) -> str:
        """The text with every path below one of the directories told from there."""
        for directory in self._directories:
            if directory in text:
                text = text.replace(f"{directory}/", "").replace(directory, os.path.basename(directory))
        return text
