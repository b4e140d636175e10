"""A folder of cached blocks: complete or absent files, sealed, within one bound for all servers that use it.

```
key                          the key of the seals, 32 random bytes
lock                         locked while files are counted; has the number of bytes, and the last server's limit
hashes                       hashes of checkpoints and adapters, see `remembered`
new/…                        files that are being written
blocks/<owner>/<tenant>/<key of the block>
```

A file begins with its header and ends with an HMAC by SHA-256 of its name, header and pages: a file that is torn,
flipped, or made by anyone without the key is no answer. Processors have instructions for SHA-256. The count of bytes
rises before a file is made and falls after one is gone, so a process that is killed between the two leaves a count that
is too high, which the next recount corrects. What is counted of a file is what the disk allocates for it.

Parts of the folder that somebody removes while servers run are made again. Folders of owners and tenants last as long
as they have files.

Tests: tests/memory/disk/test_folder.py
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import hmac
import logging
import os
import secrets
import shutil
import stat
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ..host.fault_log import FaultLog
from .files import Files
from .keys import is_of

logger = logging.getLogger(__name__)

MAGIC = b"chorus kv 2\n"
KEY_BYTES = SEAL_BYTES = 32
_HEAD = struct.Struct("<12sQIII")
"""Magic, page groups that have a page (a bit each), pages of a state, accepted drafts, and bytes of a page."""
_COUNT_BYTES = 20
_SECTOR = 512
"""Bytes that `st_blocks` counts in."""
_SPARE = 16
"""When the folder is full, a 1/16 of it is freed at once, because finding the oldest files lists all of them."""


class FolderRefused(ValueError):
    """The folder can't be used; the message says why, and what to do."""


class BlockFile(NamedTuple):
    """Where a block's file lies."""

    owner: str
    """What it was computed with: an adapter, by `keys.owner_name`, or the base model."""
    tenant: str
    key: str

    @property
    def folder(self) -> str:
        return f"blocks/{self.owner}/{self.tenant}"


@dataclass(slots=True)
class OwnedFiles:
    """The files of an owner."""

    owner: str
    num_blocks: int = 0
    num_bytes: int = 0
    tenants: set[str] = field(default_factory=set)
    """Names of their folders."""
    used_at: float = 0.0
    """When any was used last, in seconds since 1970."""


@dataclass(slots=True)
class SealedBlock:
    """A block's pages in a file: those of its page groups, then those of the state after it."""

    groups: tuple[int, ...]
    num_state_pages: int
    accepted: int
    pages: list[Any]
    """Images, each of one page."""


class BlockFolder:
    """Reads, writes and removes files; any thread, and several servers at once. A fault of the disk is a miss."""

    def __init__(self, root: Path, capacity_bytes: int | None, page_bytes: int, files: Files | None = None) -> None:
        """capacity_bytes: None for no limit. page_bytes: of an image of a page. Raises FolderRefused."""
        self.root = str(root)
        self._limit = capacity_bytes
        self.capacity_bytes = capacity_bytes = 1 << 62 if capacity_bytes is None else capacity_bytes
        self._page_bytes = page_bytes
        self.files = files or Files()
        self._faults = FaultLog(logger)
        self._mutex = threading.Lock()
        self.known_bytes = 0
        """Bytes in the folder, as this process has seen them last."""
        self.gone: Callable[[str], None] = lambda name: None
        """Called with the name of a file that is not there, or no more, from any thread."""
        self.num_files = Counter[tuple[str, str]]()
        """Files by owner and identity, as this process has seen them last: the latter is what names begin with."""
        self.num_read_bytes = self.num_written_bytes = self.num_bad = self.num_failed = self.num_evicted = 0
        try:
            os.makedirs(self.root, mode=0o700, exist_ok=True)
            _check(self.root, is_folder=True)
            self._lock = os.open(f"{self.root}/lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            _check(f"{self.root}/lock", is_folder=False)
            self._grain = os.statvfs(self.root).f_frsize
            self._key = b""
            with self.locked():
                self._key = self._read_key()
                for name in ("blocks", "new"):
                    self.files.make_folder(f"{self.root}/{name}")
                self._sweep()
                self._remove_empty()
                self._recount()
                self._evict_to(capacity_bytes)
        except OSError as error:
            raise FolderRefused(f"kv_cache_dir {self.root}: {error.strerror or error}") from None

    # -- files

    def tenant(self, name: str) -> str:
        """The name of a tenant's folders, which tells nobody without the key who it is."""
        return self._digest(b"tenant", name.encode())

    def seal_of(self, data: bytes) -> bytes:
        """The keyed hash of other data that lies in the folder."""
        return hashlib.blake2b(data, key=self._key, digest_size=SEAL_BYTES).digest()

    def has(self, file: BlockFile, block: SealedBlock) -> bool:
        """True if there seems to be a file with at least as many pages."""
        try:
            return os.lstat(self._path(file)).st_size >= self._size(len(block.pages))
        except OSError:
            return False

    def read(self, file: BlockFile, make: Callable[[], tuple[Any, memoryview]]) -> SealedBlock | None:
        """Read a block; None if there is no sound file. make: returns a new image of a page, and its bytes."""
        path = self._path(file)
        try:
            fd = self.files.open(path)
        except FileNotFoundError:
            self.gone(file.key)
            return None
        except OSError as error:
            self._fail("opened", path, error)
            return None
        try:
            found = self._read(fd, file, make)
        except OSError as error:
            self._fail("read", path, error)
            return None
        finally:
            with suppress(OSError):
                self.files.close(fd)
        for done in ("opened", "read"):
            self._faults.worked(self._kind(done))
        if found is None:
            self.num_bad += 1
            about = f"{path} is not a block that a server with this key wrote; it is removed"
            self._faults.failed(self._kind("checked"), "damaged", about)
            self._remove(path)
            return None
        self._faults.worked(self._kind("checked"))
        with suppress(OSError):
            self.files.touch(path)
        return found

    def _read(self, fd: int, file: BlockFile, make: Callable[[], tuple[Any, memoryview]]) -> SealedBlock | None:
        status = self.files.stat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            return None
        seal = hmac.new(self._key, file.key.encode(), "sha256")
        head = memoryview(bytearray(_HEAD.size))
        if not self._fill(fd, head):
            return None
        seal.update(head)
        magic, mask, num_state_pages, accepted, page_bytes = _HEAD.unpack(head)
        groups = tuple(group for group in range(64) if mask >> group & 1)
        count = len(groups) + num_state_pages
        if magic != MAGIC or page_bytes != self._page_bytes or status.st_size != self._size(count):
            return None
        pages: list[Any] = []
        for _ in range(count):
            image, data = make()
            if not self._fill(fd, data):
                return None
            seal.update(data)
            pages.append(image)
        told = memoryview(bytearray(SEAL_BYTES))
        if not self._fill(fd, told) or not hmac.compare_digest(bytes(told), seal.digest()):
            return None
        self.num_read_bytes += status.st_size
        return SealedBlock(groups, num_state_pages, accepted, pages)

    def write(
        self, file: BlockFile, block: SealedBlock, data: Sequence[memoryview], then: Callable[[], None] = lambda: None
    ) -> bool:
        """Write a block's file, in place of the one that it may have; False if the disk refuses.

        data: the bytes of its pages. then: called once the file is there, before anything can remove it.
        """
        size, new = self._size(len(data)), f"{self.root}/new/{secrets.token_hex(8)}"
        room = -(-size // self._grain) * self._grain
        mask = sum(1 << group for group in block.groups)
        head = _HEAD.pack(MAGIC, mask, block.num_state_pages, block.accepted, self._page_bytes)
        fd = -1
        try:
            with self.locked():
                if room > self.capacity_bytes or not self._evict_to(self.capacity_bytes - room):
                    return False
                self._count(room)
                try:
                    fd = self._create(new, size)
                except BaseException:
                    self._count(-room)
                    raise
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # tells other servers that it is being written
                if (more := _allocated(os.fstat(fd)) - room) > 0:
                    self._count(more)
                    if not self._evict_to(self.capacity_bytes):
                        raise OSError(errno.EFBIG, "the disk allocates more for it than fits in kv_cache_disk_bytes")
            seal = hmac.new(self._key, file.key.encode(), "sha256")
            for part in (head, *data):
                seal.update(part)
                self._put(fd, part)
            self._put(fd, seal.digest())
            with self.locked():
                self.files.make_folder(f"{self.root}/{file.folder}")
                replaced = self._bytes_of(self._path(file))
                self.files.rename(new, self._path(file))
                self._count(-replaced)
                if not replaced:
                    self.num_files[_kind_of(self._path(file))] += 1
                then()
        except OSError as error:
            self._fail("written", self._path(file), error)
            if fd >= 0:
                self._remove(new)
            return False
        finally:
            if fd >= 0:
                with suppress(OSError):
                    self.files.close(fd)
        self.num_written_bytes += size
        self._faults.worked(self._kind("written"))
        return True

    def _create(self, path: str, size: int) -> int:
        """Create a file in a folder that somebody may have removed."""
        try:
            return self.files.create(path, size)
        except FileNotFoundError:
            self.files.make_folder(os.path.dirname(path))
            return self.files.create(path, size)

    # -- removal

    def remove_owner(self, owner: str) -> int:
        """Remove all blocks of an adapter's content, and of what is composed of it; return how many."""
        content = _name(owner)
        found = self.files.entries(f"{self.root}/blocks")
        return self._remove_all([entry.path for entry in found if is_of(entry.name, content)])

    def remove_tenant(self, tenant: str) -> int:
        """Remove all blocks of a tenant; return how many."""
        owners = [entry.path for entry in self.files.entries(f"{self.root}/blocks") if entry.is_dir()]
        return self._remove_all([f"{owner}/{self.tenant(tenant)}" for owner in owners])

    def clear(self) -> int:
        """Remove all blocks; return how many."""
        return self._remove_all([entry.path for entry in self.files.entries(f"{self.root}/blocks")])

    def owners(self) -> list[OwnedFiles]:
        """What each owner has in the folder, of all identities, most bytes first. Raises OSError."""
        found: dict[str, OwnedFiles] = {}
        with self.locked():
            for entry in self._walk(f"{self.root}/blocks"):
                try:
                    status = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                owner, tenant, _ = entry.path.rsplit("/", 3)[1:]
                each = found.setdefault(owner, OwnedFiles(owner))
                each.num_blocks += 1
                each.num_bytes += _allocated(status)
                each.tenants.add(tenant)
                each.used_at = max(each.used_at, status.st_mtime)
        return sorted(found.values(), key=lambda each: (-each.num_bytes, each.owner))

    @property
    def told_limit(self) -> int | None:
        """The limit of the server that began last with one; None if none did."""
        try:
            return int(os.pread(self._lock, _COUNT_BYTES, _COUNT_BYTES)) or None
        except (OSError, ValueError):
            return None

    def tell_names(self, tell: Callable[[list[str]], None]) -> None:
        """Call with the names of all files of blocks, before any of them can be removed. Raises OSError."""
        with self.locked():
            tell([entry.name for entry in self._walk(f"{self.root}/blocks")])

    @property
    def num_bytes(self) -> int:
        """Bytes in the folder, as counted."""
        try:
            return max(0, int(os.pread(self._lock, _COUNT_BYTES, 0) or b"0"))
        except (OSError, ValueError):
            return 0

    def look(self) -> None:
        """See how many bytes other servers have left in the folder."""
        self.known_bytes = self.num_bytes

    def close(self) -> None:
        """Let go of the folder."""
        os.close(self._lock)

    def _remove_all(self, folders: Sequence[str]) -> int:
        count = 0
        with self.locked():
            for folder in folders:
                for entry in self._walk(folder):
                    count += self._unlink(entry.path, _allocated(entry.stat(follow_symlinks=False)))
                shutil.rmtree(folder, ignore_errors=True)
        return count

    def _remove(self, path: str) -> None:
        """Remove one file; no error if that is impossible."""
        try:
            with self.locked():
                self._unlink(path, self._bytes_of(path))
        except OSError as error:
            self._fail("removed", path, error)
        else:
            self._faults.worked(self._kind("removed"))

    def _unlink(self, path: str, size: int) -> bool:
        """Remove a file; the caller holds the lock."""
        try:
            self.files.unlink(path)
        except FileNotFoundError:
            return False
        self._count(-size)
        if (kind := _kind_of(path)) in self.num_files:
            self.num_files[kind] -= 1
            if not self.num_files[kind]:
                del self.num_files[kind]
        self.gone(os.path.basename(path))
        if path.startswith(f"{self.root}/blocks/"):
            with suppress(OSError):  # they have other files
                self.files.remove_folder(tenant := os.path.dirname(path))
                self.files.remove_folder(os.path.dirname(tenant))
        return True

    # -- the bound

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Alone among all threads and servers: the system lets go of the lock when a process ends. Raises OSError."""
        with self._mutex:
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            try:
                if not self._is_there():
                    self._restore()
                yield
            finally:
                fcntl.flock(self._lock, fcntl.LOCK_UN)

    def _is_there(self) -> bool:
        """True unless somebody has removed the folder, or its lock, which other servers would not have."""
        own = os.fstat(self._lock)
        try:
            found = os.lstat(f"{self.root}/lock")
        except FileNotFoundError:
            return False
        return (found.st_dev, found.st_ino) == (own.st_dev, own.st_ino)

    def _restore(self) -> None:
        """Make the folder again, or use the one that another server has made, and lock it. Raises OSError."""
        logger.warning("%s was removed, or its lock; it is made again", self.root)
        try:
            while not self._is_there():
                os.makedirs(self.root, mode=0o700, exist_ok=True)
                _check(self.root, is_folder=True)
                lock = os.open(f"{self.root}/lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX)
                    os.dup2(lock, self._lock, inheritable=False)
                finally:
                    os.close(lock)
            self._key = self._read_key()
        except FolderRefused as error:
            raise OSError(errno.EACCES, str(error)) from None
        for name in ("blocks", "new"):
            self.files.make_folder(f"{self.root}/{name}")
        self._recount()

    def _count(self, num_bytes: int) -> None:
        self._note(max(0, self.num_bytes + num_bytes))

    def _note(self, total: int) -> None:
        self.known_bytes = total
        limit = "" if self._limit is None else f"{self._limit:0{_COUNT_BYTES}d}"
        os.pwrite(self._lock, f"{total:0{_COUNT_BYTES}d}{limit}".encode(), 0)

    def _recount(self) -> None:
        found = [(entry.path, _allocated(entry.stat(follow_symlinks=False))) for entry in self._all()]
        self.num_files = Counter(_kind_of(path) for path, _ in found if path.startswith(f"{self.root}/blocks/"))
        self._note(sum(size for _, size in found))

    def _all(self) -> Iterator[os.DirEntry[str]]:
        yield from self._walk(f"{self.root}/blocks")
        yield from self._walk(f"{self.root}/new")

    def _walk(self, folder: str) -> Iterator[os.DirEntry[str]]:
        for entry in list(self.files.entries(folder)):
            if entry.is_dir(follow_symlinks=False):
                yield from self._walk(entry.path)
            else:
                yield entry

    def _evict_to(self, num_bytes: int) -> bool:
        """Remove the files that were used longest ago until at most `num_bytes` are left; False if that is impossible.
        The caller holds the lock.
        """
        if self.num_bytes <= num_bytes:
            return True
        self._sweep()
        self._recount()
        wanted = max(0, num_bytes - self.capacity_bytes // _SPARE)
        if self.num_bytes > num_bytes:
            found = [(entry.stat(follow_symlinks=False), entry.path) for entry in self._walk(f"{self.root}/blocks")]
            for status, path in sorted(found, key=lambda each: (each[0].st_mtime_ns, each[1])):
                if self.num_bytes <= wanted:
                    break
                self.num_evicted += self._unlink(path, _allocated(status))
        return self.num_bytes <= num_bytes

    def _remove_empty(self) -> None:
        """Remove folders without files."""
        for owner in list(self.files.entries(f"{self.root}/blocks")):
            if owner.is_dir(follow_symlinks=False):
                for tenant in [*self.files.entries(owner.path), owner]:
                    with suppress(OSError):
                        self.files.remove_folder(tenant.path)

    def _sweep(self) -> None:
        """Remove files that a process began and did not finish; the caller holds the lock."""
        for entry in self.files.entries(f"{self.root}/new"):
            with suppress(OSError):
                fd = os.open(entry.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # refused while its writer lives
                    os.unlink(entry.path)
                finally:
                    os.close(fd)

    # --

    def _read_key(self) -> bytes:
        """The key of the seals; made if there is none. The caller holds the lock."""
        path = f"{self.root}/key"
        if os.path.lexists(path):
            _check(path, is_folder=False)
            key = Path(path).read_bytes()
            if len(key) == KEY_BYTES:
                return key
            logger.warning(
                "%s has not %d bytes: a new key is made, and all blocks in the folder are lost", path, KEY_BYTES
            )
        key, new = self._key or secrets.token_bytes(KEY_BYTES), f"{path}.{secrets.token_hex(8)}"
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, key)
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(new, path)
        return key

    def _digest(self, kind: bytes, name: bytes) -> str:
        return hashlib.blake2b(name, key=self._key, digest_size=16, person=kind).hexdigest()

    def _path(self, file: BlockFile) -> str:
        return f"{self.root}/{file.folder}/{file.key}"

    def _size(self, num_pages: int) -> int:
        return _HEAD.size + num_pages * self._page_bytes + SEAL_BYTES

    def _bytes_of(self, path: str) -> int:
        try:
            return _allocated(os.lstat(path))
        except OSError:
            return 0

    def _fill(self, fd: int, data: memoryview) -> bool:
        """Read as many bytes as `data` has; False if the file ends before."""
        while data:
            count = self.files.read(fd, data)
            if count == 0:
                return False
            data = data[count:]
        return True

    def _put(self, fd: int, data: bytes | memoryview) -> None:
        data = memoryview(data)
        while data:
            data = data[self.files.write(fd, data) :]

    def _fail(self, done: str, path: str, error: OSError) -> None:
        self.num_failed += 1
        reason = str(error.strerror or error)
        self._faults.failed(self._kind(done), reason, f"{path} could not be {done}: {reason}")

    def _kind(self, done: str) -> str:
        return f"files of {self.root} that are {done}"


def _allocated(status: os.stat_result) -> int:
    """What a file takes of its disk; some allocate it only when they write it."""
    return max(status.st_size, status.st_blocks * _SECTOR)


def _kind_of(path: str) -> tuple[str, str]:
    """A file's owner and identity."""
    owner, _, name = path.rsplit("/", 3)[1:]
    return owner, name.partition("-")[0]


def check_folder(root: Path) -> None:
    """Raise FolderRefused if a folder is there, and others may use it. Makes nothing: a start asks before it loads."""
    try:
        for path, is_folder in ((root, True), (root / "lock", False)):
            with suppress(FileNotFoundError):
                _check(str(path), is_folder=is_folder)
    except OSError as error:
        raise FolderRefused(f"kv_cache_dir {root}: {error.strerror or error}") from None


def _check(path: str, *, is_folder: bool) -> None:
    """Raise FolderRefused unless only this process's user can use a file or folder."""
    status, what, mode = os.lstat(path), f"kv_cache_dir: {path}", "700" if is_folder else "600"
    if not (stat.S_ISDIR if is_folder else stat.S_ISREG)(status.st_mode):
        raise FolderRefused(f"{what} is not a {'folder' if is_folder else 'file'}; name another folder")
    if status.st_uid != os.geteuid():
        raise FolderRefused(
            f"{what} belongs to user {status.st_uid}, and the server runs as {os.geteuid()}; name a folder of its own"
        )
    if status.st_mode & 0o077:
        raise FolderRefused(
            f"{what} has mode {stat.S_IMODE(status.st_mode):o}, so other users may use it; chmod {mode} it"
        )


def _name(owner: str) -> str:
    """Raises ValueError for what is no name of an owner's folder."""
    if not owner or not owner.isalnum():
        raise ValueError(f"{owner!r} is not the content hash of an adapter, or 'base'")
    return owner
