"""Chat templates of adapters: used for their conversations if enabled, otherwise warned about."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...memory.adapters.store import UnknownAdapter
from ...memory.files.error import shown
from ..text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from ..executors import DaemonPool
    from .backend_adapters import BackendAdapters
    from .engine_view import AdapterState

log = logging.getLogger(__name__)

FILE, IN_CONFIG = "chat_template.jinja", "tokenizer_config.json"
MAX_BYTES = 256 << 10
"""Largest template file that is read."""

MAX_KEPT = 256
"""Most adapters whose templates are cached, by latest use."""

MAX_NAMED = 8
"""Most adapters that a warning names."""


class AdapterTemplates:
    """The tokenizer for each adapter's conversations: the model's, with the adapter's own template if it has one.

    threads: pool that reads files. used: use adapters' own templates; otherwise warn about them and use the model's.
    The coroutines run on one event loop.
    """

    def __init__(self, tokenizer: Tokenizer, adapters: BackendAdapters, threads: DaemonPool, *, used: bool) -> None:
        self._tokenizer = tokenizer
        self._adapters = adapters
        self._threads = threads
        self._used = used
        self._own: OrderedDict[tuple[Path, int], Tokenizer] = OrderedDict()

    async def tokenizer_of(self, adapter: str | None) -> Tokenizer:
        """The tokenizer for a conversation. adapter: a name, which need not exist; None: the base model's."""
        if not self._used or adapter is None:
            return self._tokenizer
        try:
            state = await asyncio.wrap_future(self._adapters.state(adapter))
        except UnknownAdapter:  # the request is refused when it is queued
            return self._tokenizer
        key = state.manifest.path, state.version
        if (found := self._own.get(key)) is None:
            own = await self._threads.run(self._differing, state.manifest.path)
            found = self._own[key] = self._tokenizer if own is None else self._tokenizer.with_chat_template(own)
        self._own.move_to_end(key)
        while len(self._own) > MAX_KEPT:
            self._own.popitem(last=False)
        return found

    def note(self, adapters: Sequence[AdapterState]) -> None:
        """Warn about adapters whose own template is not used, in one line for all. It reads the disk."""
        if self._used:
            return
        found = [one.name for one in adapters if self._has_own(one)]
        if not found:
            return
        told = ", ".join(map(shown, found[:MAX_NAMED])) + (", …" if len(found) > MAX_NAMED else "")
        log.warning(
            "%d adapters have a chat template of their own, which differs from the model's and is not used: %s; "
            "--adapter-chat-templates uses them",
            len(found),
            told,
        )

    def note_all(self) -> None:
        """The same for all registered adapters."""
        if not self._used:
            self.note(self._adapters.listing().result().adapters())

    def _has_own(self, one: AdapterState) -> bool:
        try:
            return self._differing(one.manifest.path) is not None
        except OSError:
            return False

    def _differing(self, directory: Path) -> str | None:
        own = own_template(directory)
        return None if own is None or own.strip() == self._tokenizer.chat_template.strip() else own


def own_template(directory: Path) -> str | None:
    """The chat template in an adapter's directory; None without one. Raises OSError if the disk fails."""
    if (text := _text_of(directory / FILE)) is not None:
        return text
    try:
        config = json.loads(_text_of(directory / IN_CONFIG) or "{}")
    except (ValueError, RecursionError):
        return None
    template = config.get("chat_template") if isinstance(config, dict) else None
    return template if isinstance(template, str) else None


def _text_of(path: Path) -> str | None:
    """A file's text; None if it is missing, too large, or not text."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        return data.decode() if len(data) <= MAX_BYTES else None
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, UnicodeDecodeError):
        return None
