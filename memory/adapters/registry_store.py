"""The adapter registry's SQLite file: the meaning of each name, and since which generation.

Generations count the changes of one file, removals included, and never go back. A name that is registered again gets a
higher generation than before. A change is on disk when the method that made it returns. The file also remembers the
last version number of each name, and the content of retired versions. Therefore a version never means two contents.

SQLite finds a damaged structure, but not a damaged value, such as a pause that became its opposite. Therefore the file
holds a digest of its entries: the sum of their hashes, which a change updates without reading the others.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import sqlite3
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from ..files.directory import MAX_PATH_BYTES
from ..files.error import AdapterFormatError
from ..files.manifest import AdapterManifest
from .adapter import check_name
from .registry_lock import RegistryLock
from .versions import LABEL, VersionNames, number_of, plain_of, versioned

APPLICATION_ID = 0x43485253
"""SQLite's `application_id` of these files, "CHRS"."""

MIGRATIONS = (
    """
    CREATE TABLE adapters (
        name TEXT PRIMARY KEY, content_hash TEXT NOT NULL, path TEXT NOT NULL, generation INTEGER NOT NULL,
        rank INTEGER NOT NULL, bytes INTEGER NOT NULL, pinned INTEGER NOT NULL
    ) STRICT;
    CREATE TABLE registry (identity TEXT NOT NULL, generation INTEGER NOT NULL) STRICT;
    """,
    """
    ALTER TABLE adapters ADD COLUMN version TEXT NOT NULL DEFAULT '';
    ALTER TABLE adapters ADD COLUMN paused INTEGER NOT NULL DEFAULT 0;
    """,
    """
    CREATE TABLE numbers (name TEXT PRIMARY KEY, number INTEGER NOT NULL) STRICT;
    CREATE TABLE retired (
        id INTEGER PRIMARY KEY, name TEXT NOT NULL, label TEXT NOT NULL, content_hash TEXT NOT NULL,
        UNIQUE (name, label)
    ) STRICT;
    """,
    """
    ALTER TABLE registry ADD COLUMN digest TEXT NOT NULL DEFAULT '';
    """,
)
"""Item `i` migrates a file from schema version `i` to `i + 1`; version 0 is an empty file."""

MAX_ADAPTERS = 100_000
"""The most adapters of a cluster; an API server's copy of so many takes 100 MB."""

MAX_RETIRED = 100_000
"""Number of retired versions whose content is remembered; the latest ones are."""

MAX_RANK = 1 << 16
MAX_ADAPTER_BYTES = 1 << 48

DIGEST_SCHEMA = 4
"""First schema with a digest of the entries."""

_HASH = re.compile(r"[0-9a-f]{64}")
_DIGESTS = 1 << 256


class RegistryError(RuntimeError):
    """The registry's file can't be used; the message names the file and the reason."""


class RegistryFull(ValueError):
    """The registry has no room for another adapter."""


class Entry(NamedTuple):
    """The meaning of a name."""

    name: str
    content_hash: str
    path: str
    generation: int
    """Generation of the change that gave the name this meaning."""
    rank: int
    bytes: int
    """Size of the adapter's files."""
    pinned: bool
    version: str = ""
    """Its label; "" means the generation, in files of earlier releases."""
    paused: bool = False
    """True if it takes no new requests."""

    @classmethod
    def of(
        cls, name: str, manifest: AdapterManifest, label: str, *, pinned: bool = False, paused: bool = False
    ) -> Entry:
        """Make the entry for a name; the change that writes it sets the generation. label: "" for the next number."""
        return cls(
            name,
            content_hash=manifest.content_hash or "",
            path=str(manifest.path.absolute()),
            generation=0,
            rank=manifest.rank,
            bytes=manifest.file_size,
            pinned=pinned,
            version=label,
            paused=paused,
        )

    @property
    def label(self) -> str:
        return self.version or str(self.generation)

    @property
    def plain_name(self) -> str:
        """The adapter's name, also for an entry `name@version`."""
        return plain_of(self.name, self.version)


Changes = Sequence[tuple[str, Entry | None]]
"""Names with their new meanings; None removes a name."""


class Done(NamedTuple):
    """Changes that were made."""

    told: list[tuple[str, Entry | None]]
    """The changes in order, with their generations."""
    before: list[tuple[str, Entry | None]]
    """The changes that undo them."""

    @property
    def retired(self) -> list[Entry]:
        """Entries that lost a name; another name may still mean their content."""
        return [old for _, old in self.before if old is not None]


def check_entry(fields: Sequence[Any]) -> Entry:
    """Build an entry from fields that a peer sent, in the order of `Entry`. Raises ValueError if a field is invalid."""
    if len(fields) != len(Entry._fields):
        raise ValueError(f"an adapter entry has {len(Entry._fields)} fields, not {len(fields)}")
    name, content_hash, path, generation, rank, num_bytes, pinned, version, paused = fields
    try:
        check_name(name if isinstance(name, str) else "")
    except AdapterFormatError as error:
        raise ValueError(str(error)) from None
    if not isinstance(content_hash, str) or not _HASH.fullmatch(content_hash):
        raise ValueError("content_hash must be a SHA-256 in 64 lowercase hexadecimal digits")
    if not isinstance(path, str) or not os.path.isabs(path) or "\0" in path or len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise ValueError(f"path must be an absolute path of at most {MAX_PATH_BYTES} bytes")
    _check_count("generation", generation, 1 << 62)
    _check_count("rank", rank, MAX_RANK)
    _check_count("bytes", num_bytes, MAX_ADAPTER_BYTES)
    if type(pinned) is not bool or type(paused) is not bool:
        raise ValueError("pinned and paused must be booleans")
    if not isinstance(version, str) or (version and not LABEL.fullmatch(version)):
        raise ValueError("version must be 1 to 64 letters, digits or . _ + -")
    return Entry(
        name=name,
        content_hash=content_hash,
        path=path,
        generation=generation,
        rank=rank,
        bytes=num_bytes,
        pinned=pinned,
        version=version,
        paused=paused,
    )


def _entry_of(row: Sequence[Any]) -> Entry:
    """The entry of a row of `adapters`. Raises ValueError if a field is invalid."""
    if row[6] not in (0, 1) or row[8] not in (0, 1):
        raise ValueError("pinned and paused must be 0 or 1")
    return check_entry((*row[:6], bool(row[6]), row[7], bool(row[8])))


def _digest(fields: Sequence[Any]) -> int:
    return int.from_bytes(hashlib.sha256(json.dumps(fields).encode()).digest())


def _check_count(what: str, value: Any, most: int) -> None:
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"{what} must be an integer from 0 to {most}")


class RegistryStore:
    """The file of one registry, which alone changes it, while others may read it; not thread-safe.

    Raises RegistryError if the file belongs to another program, has a newer schema, is damaged, or is held by another
    registry.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock: RegistryLock | None = None
        try:
            self._db = sqlite3.connect(path, timeout=1, isolation_level=None, check_same_thread=False)
        except sqlite3.Error as error:
            raise RegistryError(f"the registry file {path} can't be opened: {error}") from None
        try:
            self._lock = None if str(path) == ":memory:" else RegistryLock(path)
            self._open()
        except RegistryError:
            self.close()
            raise
        except Exception as error:  # a damaged file may raise anything
            self.close()
            is_held = getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY
            if is_held or isinstance(error, BlockingIOError):
                raise RegistryError(f"the registry file {path} is held by another registry") from None
            raise RegistryError(f"the registry file {path} can't be used: {error or type(error).__name__}") from None
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        db = self._db
        owner, version = self._pragma("application_id"), self._pragma("user_version")
        is_new = not owner and not version and db.execute("SELECT count(*) FROM sqlite_master").fetchone() == (0,)
        if not is_new and owner != APPLICATION_ID:
            raise RegistryError(f"{self._path} is another program's database; give the registry a file of its own")
        if version > len(MIGRATIONS):
            raise RegistryError(
                f"{self._path} has schema {version}, written by a newer Chorus; this one reads up to {len(MIGRATIONS)}"
            )
        db.execute("PRAGMA journal_mode = WAL")  # a reader, such as a backup, delays no change
        db.execute("PRAGMA synchronous = FULL")  # a commit reaches the disk, not only the system's cache
        found = db.execute("PRAGMA integrity_check(1)").fetchone()[0]
        if found != "ok":
            raise self._damaged(found)
        db.execute("BEGIN IMMEDIATE")
        for number in range(version, len(MIGRATIONS)):
            for statement in MIGRATIONS[number].split(";"):
                db.execute(statement)
        if is_new:
            db.execute("INSERT INTO registry (identity, generation) VALUES (?, 0)", (secrets.token_hex(16),))
        db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        db.execute(f"PRAGMA user_version = {len(MIGRATIONS)}")
        self._read(has_digest=version >= DIGEST_SCHEMA)
        db.execute("COMMIT")

    def _read(self, *, has_digest: bool) -> None:
        """Read all entries and check them; a file without a digest gets one. Raises RegistryError."""
        try:
            ((self.identity, self.generation, digest),) = self._db.execute(
                "SELECT identity, generation, digest FROM registry"
            )
            if not self.identity:
                raise ValueError("the registry has no identity")
            _check_count("the registry's generation", self.generation, 1 << 62)
            self._entries: VersionNames[Entry] = VersionNames()
            self._sum = 0
            for row in self._db.execute("SELECT * FROM adapters ORDER BY generation"):
                entry = _entry_of(row)
                self._entries.put(entry.name, entry, None)
                self._sum += _digest(entry)
            if has_digest and digest != self._digest_with(self._sum, self.generation):
                raise ValueError("its entries differ from those that were written")
        except (ValueError, TypeError) as error:  # a wrong number of rows, too
            raise self._damaged(error) from None
        self._db.execute("UPDATE registry SET digest = ?", (self._digest_with(self._sum, self.generation),))

    def _digest_with(self, total: int, generation: int) -> str:
        """The digest of a file with this sum of entries' digests and this generation."""
        return f"{(total + _digest((self.identity, generation))) % _DIGESTS:064x}"

    def _damaged(self, why: object) -> RegistryError:
        return RegistryError(
            f"the registry file {self._path} is damaged: {' '.join(str(why).split())}; restore it from a backup, or "
            "remove it and load the adapters again"
        )

    def _pragma(self, name: str) -> int:
        return self._db.execute(f"PRAGMA {name}").fetchone()[0]

    def close(self) -> None:
        self._db.close()
        if self._lock is not None:
            self._lock.release()

    @property
    def is_new(self) -> bool:
        """True for a file in which nothing was ever registered."""
        return self.generation == 0

    def entries(self) -> list[Entry]:
        return list(self._entries.values())

    def get(self, name: str) -> Entry | None:
        return self._entries.find(name) if name in self._entries else None

    def find(self, name: str) -> Entry | None:
        """The entry of a name; `name@version` may also name the newest version."""
        return self._entries.find(name)

    def kept(self, name: str) -> list[str]:
        """`name@version` of the earlier versions of a name, oldest first."""
        return self._entries.kept(name)

    def last_number(self, name: str) -> int:
        """The highest version number that a name has had; 0 before its first."""
        row = self._ask("SELECT number FROM numbers WHERE name = ?", name)
        return max(self._entries.last_number(name), 0 if row is None else row[0])

    def retired_content(self, name: str, label: str) -> str | None:
        """The content hash of a retired version; None if it is unknown."""
        row = self._ask("SELECT content_hash FROM retired WHERE name = ? AND label = ?", name, label)
        return None if row is None else row[0]

    def put(self, entry: Entry, *, replace: bool = True) -> Entry:
        """Give a name this meaning, and return the entry with its generation.

        Raises FileExistsError for a name that it may not `replace`, and RegistryFull.
        """
        if not replace and entry.name in self._entries:
            raise FileExistsError(entry.name)
        made = self.change([(entry.name, entry)]).told[-1][1]
        assert made is not None
        return made

    def remove(self, name: str) -> int:
        """Forget a name, and return the generation of the change. Raises KeyError if it is not registered."""
        if name not in self._entries:
            raise KeyError(name)
        self.change([(name, None)])
        return self.generation

    def change(self, changes: Changes, *, retires: bool = True) -> Done:
        """Make all changes, or none if one fails.

        retires: remember versions that lose their names; False when changes are undone. Raises RegistryFull, and
        RegistryError if they can't be written.
        """
        if not changes:
            return Done([], [])
        new = {name for name, entry in changes if entry is not None and name not in self._entries}
        if new and len(self._entries) + len(new) > MAX_ADAPTERS:
            raise RegistryFull(f"the cluster has {MAX_ADAPTERS} adapters; remove some")
        told = [
            (name, entry and entry._replace(generation=self.generation + count))
            for count, (name, entry) in enumerate(changes, 1)
        ]
        done = Done(told, [(name, self.get(name)) for name in dict.fromkeys(name for name, _ in changes)])
        self._commit(done, self._retired_by(done) if retires else ())
        for name, entry in told:
            if entry is not None:
                self._entries.put(name, entry, None)
            elif name in self._entries:
                self._entries.pop(name)
        return done

    def _retired_by(self, done: Done) -> list[Entry]:
        """The versions that have no name after a change."""
        after = {(entry.plain_name, entry.label) for _, entry in done.told if entry is not None}
        gone = [one for one in done.retired if (one.plain_name, one.label) not in after]
        return [one for one in gone if not self._is_elsewhere(one, done)]

    def _is_elsewhere(self, entry: Entry, done: Done) -> bool:
        """True if a version has another name that the changes leave as it is."""
        names = {entry.plain_name, versioned(entry.plain_name, entry.label)} - {name for name, _ in done.told}
        return any((one := self.get(name)) is not None and one.label == entry.label for name in names)

    def _commit(self, done: Done, retired: Sequence[Entry]) -> None:
        """Write the changes and their generation in one transaction."""
        db, generation = self._db, self.generation + len(done.told)
        total = self._sum - sum(_digest(one) for one in done.retired)
        total += sum(_digest(entry) for entry in dict(done.told).values() if entry is not None)
        try:
            db.execute("BEGIN IMMEDIATE")
            for name, entry in done.told:
                if entry is None:
                    db.execute("DELETE FROM adapters WHERE name = ?", (name,))
                else:
                    db.execute("INSERT OR REPLACE INTO adapters VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", entry)
                    db.execute("DELETE FROM retired WHERE name = ? AND label = ?", (entry.plain_name, entry.label))
            self._count([entry for _, entry in (*done.told, *done.before) if entry is not None])
            for one in retired:
                db.execute(
                    "INSERT OR REPLACE INTO retired (name, label, content_hash) VALUES (?, ?, ?)",
                    (one.plain_name, one.label, one.content_hash),
                )
                db.execute("DELETE FROM retired WHERE id <= last_insert_rowid() - ?", (MAX_RETIRED,))
            digest = self._digest_with(total, generation)
            db.execute("UPDATE registry SET generation = ?, digest = ?", (generation, digest))
            db.execute("COMMIT")
        except sqlite3.Error as error:
            with suppress(sqlite3.Error):
                db.execute("ROLLBACK")
            raise RegistryError(f"the registry file {self._path} can't be written: {error}") from None
        self.generation, self._sum = generation, total

    def _count(self, entries: Sequence[Entry]) -> None:
        """Remember the highest version number of each name."""
        upsert = (
            "INSERT INTO numbers VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET number = max(number, excluded.number)"
        )
        for entry in entries:
            if (number := number_of(entry.label)) is not None:
                self._db.execute(upsert, (entry.plain_name, number))

    def _ask(self, statement: str, *values: str) -> tuple[Any, ...] | None:
        try:
            return self._db.execute(statement, values).fetchone()
        except sqlite3.Error as error:
            raise RegistryError(f"the registry file {self._path} can't be read: {error}") from None
