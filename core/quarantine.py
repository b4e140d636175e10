"""Registration of the adapters of the start, of which a broken one does not stop the others."""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ..memory.adapters.adapter import check_name
from ..memory.files.config import CONFIG_FILE
from ..memory.files.directory import AdapterDirectory
from ..memory.files.error import AdapterFormatError, shown
from ..memory.files.format import is_adapter_dir, is_one_file, weights_path
from ..memory.files.manifest import AdapterManifest
from ..memory.files.peft_names import STEM
from ..memory.files.tokens.added_tokens import TOKENIZER_FILES
from ..memory.files.unserved import hint_of
from ..memory.host.daemon_pool import DaemonPool, NoAnswer, PoolFull, ask_for_short_slices

if TYPE_CHECKING:
    from .config import EngineConfig

logger = logging.getLogger(__name__)

MAX_STUCK = 8
"""Directories that may hang at the start; as every one takes its time limit, no more are tried then."""

MOST_NAMED = 8
"""Adapters of another base model that a warning names."""

_OTHER_BASE = (
    "by base_model_name_or_path, which is not the model that is served; --served-model-name says what that is, "
    "--strict-base refuses others"
)

#: Stamp of a directory, which changes when the adapter in it is repaired.
Stamp = tuple[tuple[int, int, int, int] | None, ...]


class AdapterNames(Protocol):
    """A registry of adapters: an engine's store, or a cluster's catalog."""

    def register(self, name: str, source: AdapterManifest, /) -> object: ...
    def unregister(self, name: str, /) -> object: ...
    def __contains__(self, name: str, /) -> bool: ...


@dataclass(frozen=True, slots=True)
class Quarantined:
    """An adapter that is not served, and the reason.

    stamp: the state of its directory then; None when it did not tell. can_retry: whether a change to its files may
    help, as it can't for an invalid name.
    """

    name: str
    path: Path
    reason: str
    stamp: Stamp | None = None
    can_retry: bool = True


def adapter_directories(directory: Path) -> list[Path]:
    """Paths that hold an adapter, sorted by name. Raises NotADirectoryError if there is no such directory."""
    if not directory.is_dir():
        raise NotADirectoryError(f"adapters directory {directory} does not exist; create it or leave the flag out")
    found, skipped = [], []
    with os.scandir(directory) as entries:
        for entry in entries:
            path = directory / entry.name
            if is_adapter_dir(path):
                found.append(path)
            elif _is_dir(entry):
                skipped.append(entry.name)
    for name in sorted(skipped):
        hint = _hint_of(directory / name)
        logger.warning("skipped the directory %s in %s: it has no %s%s", shown(name), directory, CONFIG_FILE, hint)
    if os.path.lexists(directory / CONFIG_FILE):
        logger.warning(
            "%s is an adapter itself, and only its sub-directories are served: name its parent, or serve it with "
            "--lora-modules NAME=%s",
            directory,
            directory,
        )
    return sorted(found)


def _hint_of(path: Path) -> str:
    """Advice about a directory without a configuration, after a semicolon; "" if there is none."""
    try:
        with AdapterDirectory(path) as directory:
            hint = hint_of(directory, CONFIG_FILE)
    except AdapterFormatError:
        return ""
    return hint and f"; {hint}"


def register_directories(
    store: AdapterNames,
    inspect: Callable[[Path], AdapterManifest],
    config: EngineConfig,
    modules: Iterable[tuple[str, Path]],
) -> dict[str, Quarantined]:
    """Register the adapters of the configuration's directory, and `modules`, each a name and its directory; return the
    adapters that can't be served. Of two with one name the last counts.

    Where the configuration says so, the first such adapter raises AdapterFormatError instead.
    """
    strict, seconds = config.strict_adapters, config.adapter_load_seconds
    found = [] if config.adapters is None else adapter_directories(config.adapters)
    quarantine: dict[str, Quarantined] = {}
    registered: dict[str, AdapterManifest] = {}
    with DaemonPool("adapter-inspect", MAX_STUCK, 0, initializer=ask_for_short_slices) as threads:
        for given, path in (*((path.stem if is_one_file(path) else path.name, path) for path in found), *modules):
            stamp = None
            try:
                check_name(given)
                stamp, manifest = threads.wait_for(partial(_inspect, inspect, path), seconds)
                registered[given] = _register(store, given, manifest)
                quarantine.pop(given, None)
                continue
            except AdapterFormatError as error:
                if strict:
                    raise
                reason = str(error)
            except (NoAnswer, PoolFull) as error:
                reason = str(error)
                if strict:
                    raise AdapterFormatError(f"{shown(str(path))}: {reason}") from None
            if given in store:
                store.unregister(given)
                registered.pop(given, None)
            one = _quarantined(given, path, reason, stamp)
            quarantine[one.name] = one
    _log(list(quarantine.values()))
    _log_other_bases(registered)
    return quarantine


def _register(store: AdapterNames, name: str, manifest: AdapterManifest | AdapterFormatError) -> AdapterManifest:
    if isinstance(manifest, AdapterFormatError):
        raise manifest
    store.register(name, manifest)
    report_contents(name, manifest)
    return manifest


def _log_other_bases(registered: Mapping[str, AdapterManifest]) -> None:
    """Log one warning for all adapters of one other base model."""
    by_base: dict[str, list[str]] = defaultdict(list)
    for name, manifest in registered.items():
        if manifest.names_other_base and manifest.base_model is not None:
            by_base[manifest.base_model].append(name)
    for base, names in by_base.items():
        others = f" and {len(names) - MOST_NAMED} others" if len(names) > MOST_NAMED else ""
        which = f"adapter {names[0]} was" if len(names) == 1 else f"{len(names)} adapters were"
        listed = "" if len(names) == 1 else f" ({', '.join(names[:MOST_NAMED])}{others})"
        logger.warning("%s trained on %s, %s%s", which, shown(base), _OTHER_BASE, listed)


def _quarantined(given: str, path: Path, reason: str, stamp: Stamp | None) -> Quarantined:
    """given: the adapter's name, which may be none that can be shown."""
    name = given if given.isprintable() else shown(given)
    return Quarantined(name, path, reason, stamp, can_retry=_is_name(given))


def _is_name(given: str) -> bool:
    try:
        return check_name(given) == given
    except AdapterFormatError:
        return False


def _log(quarantined: list[Quarantined]) -> None:
    """Log each adapter that is not served, with all others of the same reason."""
    if not quarantined:
        return
    by_reason: dict[str, list[str]] = defaultdict(list)
    for one in quarantined:
        by_reason[one.reason.replace(f"{one.path}/", "")].append(one.name)
    for reason, names in by_reason.items():
        are = ("adapter", "is") if len(names) == 1 else ("adapters", "are")
        logger.warning("%s %s %s not served: %s", are[0], ", ".join(names), are[1], reason)
    logger.warning(
        "%d adapters are not served; GET /v1/adapters says why. They are tried again when their files change, unless "
        "it is their name that is refused",
        len(quarantined),
    )


def report(name: str, manifest: AdapterManifest) -> None:
    """Log warnings about a registered adapter that its author may not expect."""
    _log_other_bases({name: manifest})
    report_contents(name, manifest)


def report_contents(name: str, manifest: AdapterManifest) -> None:
    """Log properties of a registered adapter's files that its author may not expect."""
    if manifest.stem != STEM:
        layers = f"{manifest.stem}.layers" if manifest.stem else "layers"
        logger.info("adapter %s: its %s are served as the base model's %s.layers", name, layers, STEM)
    if manifest.num_left_out:
        sees = manifest.modules is not None and manifest.modules.tower is not None
        logger.warning(
            "adapter %s: %d of its tensors are outside the text model, such as in a vision tower, and have no effect%s",
            name,
            manifest.num_left_out,
            "" if sees else ": images are not served, and GET /health says why",
        )
    if manifest.untrained:
        logger.info("adapter %s: does not train %s, which stay the base model's", name, ", ".join(manifest.untrained))
    if manifest.dropped:
        logger.info(
            "adapter %s: %s equal the base model's own and are dropped", name, ", ".join(map(shown, manifest.dropped))
        )
    if manifest.tokens is not None:
        logger.info("adapter %s: its requests use its own tokenizer, which has more tokens than the base model's", name)
    if manifest.no_effect:
        logger.warning("adapter %s changes nothing: all of its B, or A, or its alpha are zero", name)


def stamp_of(path: Path) -> Stamp:
    """Return modification times and sizes of a directory and its files."""
    tokens = (path / name for name in TOKENIZER_FILES)
    return tuple(_state(each) for each in (path, path / CONFIG_FILE, weights_path(path), *tokens))


def is_as_registered(stamp: Stamp, manifest: AdapterManifest) -> bool:
    """True if a directory of this state has the weights file that was registered."""
    if manifest.identity is None:
        return False
    inode, changed = manifest.identity.inode, manifest.identity.changed_ns
    return stamp[2] == (inode, manifest.file_size, manifest.mtime_ns, changed)


def _inspect(
    inspect: Callable[[Path], AdapterManifest], path: Path
) -> tuple[Stamp, AdapterManifest | AdapterFormatError]:
    """Return a directory's stamp, taken first so that later changes are noticed, and its manifest or the error."""
    stamp = stamp_of(path)
    try:
        return stamp, inspect(path)
    except AdapterFormatError as error:
        return stamp, error


def _state(path: Path) -> tuple[int, int, int, int] | None:
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _is_dir(entry: os.DirEntry) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False
