"""Tokenizers of adapters that have tokens of their own, and chat templates, which are used if enabled, otherwise warned
about.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ...core.quarantine import Quarantined, stamp_of
from ...memory.adapters.composition import is_composition
from ...memory.adapters.store import UnknownAdapter
from ...memory.files.error import shown
from ...memory.files.json_stream import PIECE_BYTES, JsonStream, MalformedJson
from ...memory.files.tokens.added_tokens import TEMPLATE_FILE
from ...memory.files.tokens.base_tokens import MAX_TEXT_BYTES
from ..errors import ApiError, clipped, not_served
from ..executors import PoolFull
from ..text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from ...memory.files.tokens.added_tokens import OwnTokens
    from ..executors import DaemonPool
    from .backend_adapters import BackendAdapters, NamedVersion
    from .engine_view import AdapterState

log = logging.getLogger(__name__)

K = TypeVar("K")

IN_CONFIG = "tokenizer_config.json"
MAX_BYTES = 256 << 10
"""Largest template file that is read."""

MAX_KEPT = 256
"""Most adapters whose templates are cached, by latest use."""

MAX_TOKENIZERS = 64
"""Most tokenizers with tokens of adapters that are kept, by latest use."""

MAX_NAMED = 8
"""Most adapters that a warning names."""


class AdapterTokenizers:
    """The tokenizer for each adapter's requests: the model's, with the adapter's own tokens if it has any that the
    model's tokenizer lacks, and for conversations with its own template.

    threads: pool that reads files. used: use adapters' own templates; otherwise warn about them and use the model's.
    The coroutines run on one event loop.
    """

    def __init__(self, tokenizer: Tokenizer, adapters: BackendAdapters, threads: DaemonPool, *, used: bool) -> None:
        self._tokenizer = tokenizer
        self._adapters = adapters
        self._threads = threads
        self._used = used
        self._own: OrderedDict[tuple[Path, int], Tokenizer] = OrderedDict()
        self._with_tokens: OrderedDict[str, Tokenizer] = OrderedDict()
        self.bring: Callable[[str], Awaitable[bool]] = _nowhere
        """Fetches an adapter that is not registered; False if there is none."""

    async def tokenizer_of(self, adapter: str | None, *, chat: bool = True) -> Tokenizer:
        """The tokenizer of an adapter. adapter: a name, which need not exist; None: the base model's. chat: for a
        conversation. Raises an ApiError for an adapter that can't be fetched, or whose tokenizer can't be used.
        """
        if adapter is None or is_composition(adapter):
            return self._tokenizer
        version = await self._version_of(adapter)
        if version is None:  # the request is refused when it is queued
            return self._tokenizer
        manifest, found = version.manifest, self._tokenizer
        if manifest.tokens is not None:
            found = await self._of_tokens(adapter, manifest.tokens)
        if not self._used or not chat:
            return found
        key = manifest.path, version.version
        if (own := self._own.get(key)) is None:
            text = await self._threads.run(self._differing, manifest.path)
            own = found if text is None else found.with_chat_template(text)
        return _kept(self._own, key, own, MAX_KEPT)

    async def _version_of(self, adapter: str) -> NamedVersion | None:
        """The version that a name means, which is fetched if it is not registered."""
        with suppress(UnknownAdapter):
            return self._adapters.version_of(adapter)
        aside = await asyncio.wrap_future(self._adapters.quarantined())
        if any(one.name == adapter for one in aside) or not await self.bring(adapter):
            return None
        with suppress(UnknownAdapter):
            return self._adapters.version_of(adapter)
        return None

    async def _of_tokens(self, adapter: str, tokens: OwnTokens) -> Tokenizer:
        """The tokenizer with these tokens, one for all adapters that have them."""
        if (found := self._with_tokens.get(tokens.digest)) is None:
            broken = partial(self._broken, tokens)
            try:
                found = await self._threads.run(self._tokenizer.with_tokens, tokens, broken)
            except ValueError as error:
                raise broken(str(error)) from None
        return _kept(self._with_tokens, tokens.digest, found, MAX_TOKENIZERS)

    def _broken(self, tokens: OwnTokens, reason: str) -> ApiError:
        """The error for a tokenizer that can't be used; its adapters go into quarantine. Any thread may call it."""
        reason = f"its tokenizer can't be used: {clipped(reason)}"
        try:
            self._threads.submit(self._set_aside, tokens.digest, reason)
        except (PoolFull, RuntimeError) as error:  # the next request tries again
            log.warning("an adapter is not put into quarantine now: %s", error)
        return not_served(f"the adapter is not served: {reason}")

    def _set_aside(self, digest: str, reason: str) -> None:
        """Quarantine all adapters with these tokens. It reads the disk."""
        for one in self._adapters.listing().result().adapters():
            manifest = one.manifest
            if manifest.tokens is not None and manifest.tokens.digest == digest:
                stamp = stamp_of(manifest.path)
                aside = Quarantined(one.name, manifest.path, reason, stamp)
                self._adapters.set_aside(aside, one.version, in_use=True).result()

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


async def _nowhere(_: str) -> bool:
    return False


def _kept(kept: OrderedDict[K, Tokenizer], key: K, value: Tokenizer, most: int) -> Tokenizer:
    """Put a value in a cache, or note its use."""
    kept[key] = value
    kept.move_to_end(key)
    while len(kept) > most:
        kept.popitem(last=False)
    return value


def own_template(directory: Path) -> str | None:
    """The chat template in an adapter's directory; None without one. Raises OSError if the disk fails."""
    if (text := _text_of(directory / TEMPLATE_FILE)) is not None:
        return text
    try:
        with (directory / IN_CONFIG).open("rb") as file:
            template = _member(JsonStream(iter(partial(file.read, PIECE_BYTES), b"")), "chat_template")
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, MalformedJson):
        return None
    return template if isinstance(template, str) and len(template) <= MAX_BYTES else None


def _member(stream: JsonStream, name: str) -> object:
    """The value of a member of an object of at most `MAX_TEXT_BYTES`; None without it."""
    found = None
    for key in stream.members():
        if key == name:
            found = stream.value()
        else:
            stream.skip()
        if stream.num_bytes > MAX_TEXT_BYTES:
            return None
    return found


def _text_of(path: Path) -> str | None:
    """A file's text; None if it is missing, too large, or not text."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        return data.decode() if len(data) <= MAX_BYTES else None
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, UnicodeDecodeError):
        return None
