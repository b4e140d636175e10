"""A folder of sealed blocks: what was written is read, anything else is a miss, and the bound holds under kills."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chorus.memory.disk.files import Files
from chorus.memory.disk.folder import BlockFile, BlockFolder, FolderRefused, SealedBlock
from chorus.memory.disk.keys import BASE, owner_name

PAGE_BYTES = 64
PLACE = BlockFile("base", "t", "ab" * 32)


def page(value):
    return bytes([value]) * PAGE_BYTES


def make():
    image = bytearray(PAGE_BYTES)
    return image, memoryview(image)


def write(folder, place=PLACE, pages=(1, 2), groups=(0, 1), accepted=0):
    block = SealedBlock(tuple(groups), len(pages) - len(groups), accepted, [page(each) for each in pages])
    return folder.write(place, block, [memoryview(each) for each in block.pages])


def read(folder, place=PLACE):
    found = folder.read(place, make)
    return None if found is None else [bytes(each) for each in found.pages]


def path_of(folder, place=PLACE):
    return os.path.join(folder.root, place.folder, place.key)


@pytest.fixture
def root(tmp_path):
    return tmp_path / "kv"


def open_folder(root, capacity=1 << 20, **options):
    return BlockFolder(root, capacity, PAGE_BYTES, **options)


def unit(path):
    """What the disk allocates for a small file."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return os.statvfs(path).f_frsize


def allocated(path):
    status = os.lstat(path)
    return max(status.st_size, status.st_blocks * 512)


def real_bytes(root):
    """What the disk allocates for blocks."""
    total = 0
    for folder, _, names in os.walk(root):
        for name in names if folder != str(root) else ():
            with suppress(FileNotFoundError):  # a writer has just renamed or removed it
                total += allocated(os.path.join(folder, name))
    return total


def test_a_block_is_read_as_it_was_written(root):
    folder = open_folder(root)
    assert read(folder) is None
    assert write(folder, pages=(1, 2, 3), groups=(0, 3), accepted=2)
    found = folder.read(PLACE, make)
    assert found is not None
    assert (found.groups, found.num_state_pages, found.accepted) == ((0, 3), 1, 2)
    assert [bytes(each) for each in found.pages] == [page(1), page(2), page(3)]
    assert folder.num_bytes == real_bytes(root) == folder.known_bytes


def test_another_server_reads_it_too(root):
    first, second = open_folder(root), open_folder(root)
    write(first)
    assert read(second) == [page(1), page(2)]
    assert second.num_bytes == first.num_bytes


def test_the_folder_and_its_files_are_the_user_s_alone(root):
    write(open_folder(root))
    for each in (root, *root.rglob("*")):
        assert stat.S_IMODE(each.stat().st_mode) == (0o700 if each.is_dir() else 0o600), each


@pytest.mark.parametrize("name", ["", "key", "lock"])
def test_a_folder_that_others_may_use_is_refused(root, name):
    open_folder(root).close()
    (root / name).chmod(0o755)
    with pytest.raises(FolderRefused, match="chmod"):
        open_folder(root)


def test_a_link_or_a_file_is_no_folder(tmp_path):
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "file").touch()
    for name in ("link", "file"):
        with pytest.raises(FolderRefused):
            open_folder(tmp_path / name)


def test_another_user_s_folder_is_refused(root, monkeypatch):
    open_folder(root)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(FolderRefused, match="belongs to user"):
        open_folder(root)


def damaged(data, kind):
    return {
        "torn": data[:-1],
        "empty": b"",
        "longer": data + b"x",
        "flipped page": data[:40] + bytes([data[40] ^ 1]) + data[41:],
        "flipped head": data[:14] + bytes([data[14] ^ 1]) + data[15:],
        "flipped seal": data[:-1] + bytes([data[-1] ^ 1]),
        "zeros": bytes(len(data)),
    }[kind]


@pytest.mark.parametrize("kind", ["torn", "empty", "longer", "flipped page", "flipped head", "flipped seal", "zeros"])
def test_a_damaged_file_is_a_miss_and_is_removed(root, kind):
    folder = open_folder(root)
    write(folder)
    with open(path_of(folder), "r+b") as file:
        data = file.read()
        file.seek(0)
        file.truncate()
        file.write(damaged(data, kind))
    assert read(folder) is None
    assert not os.path.exists(path_of(folder))
    assert folder.num_bad == 1
    assert write(folder)
    assert read(folder) == [page(1), page(2)]


def test_a_file_under_another_name_or_of_another_key_is_a_miss(root, tmp_path):
    folder, other = open_folder(root), open_folder(tmp_path / "other")
    elsewhere = PLACE._replace(key="cd" * 32)
    write(folder)
    os.rename(path_of(folder), path_of(folder, elsewhere))
    assert read(folder, elsewhere) is None
    write(other)
    os.makedirs(os.path.dirname(path_of(folder)), exist_ok=True)
    os.rename(path_of(other), path_of(folder))
    assert read(folder) is None


def test_a_link_in_place_of_a_file_is_a_miss(root):
    folder = open_folder(root)
    write(folder)
    os.rename(path_of(folder), root / "moved")
    os.symlink(root / "moved", path_of(folder))
    assert read(folder) is None


def test_the_oldest_leave_when_the_folder_is_full(root):
    size = unit(root)
    folder = open_folder(root, 4 * size)
    places = [PLACE._replace(key=f"{index:064x}") for index in range(6)]
    for index, place in enumerate(places):
        assert write(folder, place)
        os.utime(path_of(folder, place), (index, index))
        assert folder.num_bytes == real_bytes(root) <= 4 * size
    assert read(folder, places[5]) is not None
    assert read(folder, places[0]) is None
    assert folder.num_evicted >= 2


def test_a_smaller_bound_holds_from_the_start(root):
    folder = open_folder(root)
    for index in range(6):
        write(folder, PLACE._replace(key=f"{index:064x}"))
    folder.close()
    most = 3 * unit(root)
    assert 0 < open_folder(root, most).num_bytes <= most
    assert real_bytes(root) <= most


def test_the_bound_is_of_what_the_disk_allocates(root):
    """Blocks of a small model had taken several times the bound: a file takes whole blocks of the disk."""
    most = 4 * unit(root)
    folder = open_folder(root, most)
    for index in range(40):
        assert write(folder, PLACE._replace(key=f"{index:064x}"))
    assert sum(allocated(path) for path in (root / "blocks").rglob("*") if path.is_file()) <= most


def test_a_folder_of_new_files_that_is_removed_is_made_again(root):
    """Nothing had been written until a restart."""
    folder = open_folder(root)
    for name in ("new", "blocks"):
        shutil.rmtree(root / name)
        assert write(folder)
        assert read(folder) == [page(1), page(2)]
    assert folder.num_failed == 0


@pytest.mark.parametrize("gone", ["all", "lock", "key and lock"])
def test_a_folder_that_is_removed_is_made_again_with_its_key(root, gone):
    """Another server that begins meanwhile, or later, shares its lock and reads its blocks."""
    folder = open_folder(root)
    write(folder)
    if gone == "all":
        shutil.rmtree(root)
    else:
        for name in gone.split(" and "):
            (root / name).unlink()
    assert write(folder, pages=(3, 4, 5))
    other = open_folder(root)
    assert read(other) == read(folder) == [page(3), page(4), page(5)]
    assert folder.num_bytes == other.num_bytes == real_bytes(root)
    other.remove_owner("base")
    assert folder.num_bytes == 0


def test_a_key_of_a_server_that_began_meanwhile_is_used(root):
    folder = open_folder(root)
    shutil.rmtree(root)
    other = open_folder(root)
    assert write(folder)
    assert read(other) == [page(1), page(2)]


def test_a_disk_that_fails_is_logged_when_it_begins_to_fail_and_when_it_works_again(root, caplog):
    """Each block had a line: 41,588 in five minutes."""
    files = FaultyFiles()
    folder = open_folder(root, files=files)
    write(folder)

    def lines():
        found = [record.getMessage() for record in caplog.records]
        caplog.clear()
        return found

    for call, act in (("write", write), ("create", write), ("rename", write), ("read", read), ("open", read)):
        for error in (errno.EIO, errno.ENOSPC):
            files.call, files.error = call, error
            for _ in range(20):
                act(folder)
            (one,) = lines()
            assert os.strerror(error) in one
        files.call = ""
        act(folder)
        (one,) = lines()
        assert "works again" in one and "40 times" in one
    assert folder.num_failed == 200


def test_files_of_another_key_are_told_in_one_line(root, caplog):
    folder = open_folder(root)
    places = [PLACE._replace(key=f"{index:064x}") for index in range(30)]
    for place in places:
        write(folder, place)
    folder.close()
    (root / "key").write_bytes(b"k" * 32)
    folder = open_folder(root)
    assert [read(folder, place) for place in places] == [None] * 30
    assert len(caplog.records) == 1 and folder.num_bad == 30


def folders_of(root):
    return sorted(str(path.relative_to(root)) for path in (root / "blocks").rglob("*") if path.is_dir())


def test_folders_of_blocks_that_have_left_are_removed(root):
    """Each eviction had walked them: 2,656 after a soak."""
    folder = open_folder(root, 4 * unit(root))
    for index in range(40):
        assert write(folder, BlockFile(f"{index:064x}", folder.tenant(f"tenant {index}"), PLACE.key))
    assert len(folders_of(root)) <= 8
    (root / "blocks" / "left" / "by an earlier server").mkdir(parents=True)
    folder.close()
    folder = open_folder(root, 4 * unit(root))
    assert len(folders_of(root)) <= 8
    folder.remove_tenant("tenant 39")
    folder.clear()
    assert folders_of(root) == []


def test_a_block_larger_than_the_bound_is_not_written(root):
    folder = open_folder(root, 100)
    assert not write(folder)
    assert (real_bytes(root), folder.num_bytes) == (0, 0)


class FaultyFiles(Files):
    """Fails one call, or writes a part of what it is given."""

    def __init__(self, call="", error=0):
        self.call, self.error = call, error

    def _meet(self, call):
        if call == self.call:
            raise OSError(self.error, os.strerror(self.error))

    def create(self, path, num_bytes):
        self._meet("create")
        return super().create(path, num_bytes)

    def write(self, fd, data):
        self._meet("write")
        return super().write(fd, data[:7] if self.call == "short" else data)

    def open(self, path):
        self._meet("open")
        return super().open(path)

    def read(self, fd, data):
        self._meet("read")
        return super().read(fd, data[:5] if self.call == "short" else data)

    def rename(self, path, other):
        self._meet("rename")
        super().rename(path, other)

    def unlink(self, path):
        self._meet("unlink")
        super().unlink(path)


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC, errno.EROFS, errno.EDQUOT])
@pytest.mark.parametrize("call", ["create", "write", "rename"])
def test_a_write_that_fails_leaves_nothing(root, call, error):
    files = FaultyFiles()
    folder = open_folder(root, files=files)
    files.call, files.error = call, error
    assert not write(folder)
    assert (real_bytes(root), folder.num_bytes, folder.num_failed) == (0, 0, 1)
    files.call = ""
    assert write(folder)
    assert read(folder) == [page(1), page(2)]


@pytest.mark.parametrize("call", ["open", "read"])
def test_a_read_that_fails_is_a_miss(root, call):
    files = FaultyFiles()
    folder = open_folder(root, files=files)
    write(folder)
    files.call, files.error = call, errno.EIO
    assert read(folder) is None
    files.call = ""
    assert read(folder) == [page(1), page(2)]


def test_short_reads_and_writes_go_on(root):
    folder = open_folder(root, files=FaultyFiles("short"))
    assert write(folder)
    assert read(folder) == [page(1), page(2)]


def test_a_lost_key_makes_every_block_a_miss_and_no_failed_start(root):
    folder = open_folder(root)
    write(folder)
    folder.close()
    (root / "key").write_bytes(b"short")
    assert read(open_folder(root)) is None


def test_removal_by_adapter_and_by_tenant(root):
    folder = open_folder(root)
    mine, yours = folder.tenant("mine"), folder.tenant("yours")
    places = [BlockFile(owner, tenant, PLACE.key) for owner in ("base", "aa", "bb") for tenant in (mine, yours)]
    for place in places:
        write(folder, place)
    assert folder.remove_owner("aa") == 2
    assert [read(folder, place) is not None for place in places] == [True, True, False, False, True, True]
    assert folder.remove_tenant("mine") == 2
    assert [read(folder, place) is not None for place in places] == [False, True, False, False, False, True]
    assert folder.num_bytes == real_bytes(root)
    assert folder.clear() == 2
    assert (folder.num_bytes, real_bytes(root)) == (0, 0)


def test_an_adapter_s_removal_takes_what_is_composed_of_it(root):
    folder, (one, two, three) = open_folder(root), ("1" * 64, "2" * 64, "3" * 64)
    composed = [owner_name("c" * 64, [one, two]), owner_name("d" * 64, [two]), owner_name("e" * 64, [three, one])]
    for owner in (BASE, one, two, three, *composed):
        write(folder, BlockFile(owner, folder.tenant("mine"), PLACE.key))
    assert folder.remove_owner(one) == 3
    left = {path.name for path in (root / "blocks").iterdir()}
    assert left == {BASE, two, three, composed[1]}
    assert folder.remove_tenant("mine") == 4
    assert folder.num_bytes == real_bytes(root) == 0


@pytest.mark.parametrize("owner", ["", "..", "a/b", "."])
def test_no_name_of_an_owner_leaves_the_folder(root, owner):
    with pytest.raises(ValueError, match="content hash"):
        open_folder(root).remove_owner(owner)


def test_a_tenant_s_name_is_not_told(root):
    folder = open_folder(root)
    assert "alice" not in folder.tenant("alice")
    assert folder.tenant("alice") != folder.tenant("bob")


_WRITER = """
import os, sys
sys.path[:0] = {paths!r}
from pathlib import Path
from chorus.memory.disk.folder import BlockFolder, BlockFile, SealedBlock
folder = BlockFolder(Path({root!r}), {capacity}, {page_bytes})
print("ready", flush=True)
number = int(sys.argv[1])
while True:
    number += 2
    data = [bytes([number % 251]) * {page_bytes}] * 3
    block = SealedBlock((0, 1, 2), 0, 0, data)
    folder.write(BlockFile("base", "t", f"{{number:064x}}"), block, [memoryview(each) for each in data])
"""


@pytest.mark.timeout(120)
def test_the_bound_holds_and_no_torn_block_is_read_whenever_writers_are_killed(root):
    capacity, page_bytes = 60_000, 1 << 12
    for round_number in range(3):
        code = _WRITER.format(paths=sys.path, root=str(root), capacity=capacity, page_bytes=page_bytes)
        writers = [
            subprocess.Popen([sys.executable, "-c", code, str(first)], stdout=subprocess.PIPE, text=True)
            for first in (round_number * 10_000, round_number * 10_000 + 1)
        ]
        try:
            for writer in writers:
                assert writer.stdout is not None
                assert writer.stdout.readline() == "ready\n"
            watcher = BlockFolder(root, capacity, page_bytes)
            for _ in range(200):
                assert watcher.num_bytes <= capacity
                with watcher.locked():  # a file must not move while it is counted
                    assert real_bytes(root) <= watcher.num_bytes
        finally:
            for writer in writers:
                writer.send_signal(signal.SIGKILL)
                writer.wait()
        folder = BlockFolder(root, capacity, page_bytes)
        assert folder.num_bytes == real_bytes(root) <= capacity
        assert list((root / "new").iterdir()) == []
        for path in (root / "blocks" / "base" / "t").iterdir():
            found = folder.read(BlockFile("base", "t", path.name), lambda: _image(page_bytes))
            assert found is not None
            assert {bytes(each) for each in found.pages} == {bytes([int(path.name, 16) % 251]) * page_bytes}


def _image(num_bytes):
    image = bytearray(num_bytes)
    return image, memoryview(image)


def test_threads_share_a_folder(root):
    most = 15 * unit(root)
    folder = open_folder(root, most)

    def work(first):
        for index in range(first, first + 20):
            write(folder, PLACE._replace(key=f"{index:064x}"))

    threads = [threading.Thread(target=work, args=(first,)) for first in (0, 100, 200)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert folder.num_bytes == real_bytes(root) <= most


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["write", "read", "remove", "reopen", "fail"]), st.integers(0, 7)), max_size=25)
)
def test_whatever_is_done_the_bound_holds_and_what_is_read_was_written(tmp_path_factory, acts):
    root, files, capacity = tmp_path_factory.mktemp("kv") / "kv", FaultyFiles(), 0
    capacity = 3 * unit(root)
    folder, written = open_folder(root, capacity, files=files), {}
    for act, number in acts:
        place = PLACE._replace(key=f"{number:064x}", owner="aa" if number % 2 else "base")
        if act == "write" and write(folder, place, pages=(number, number + 1)):
            written[place] = [page(number), page(number + 1)]
        elif act == "fail":
            files.call, files.error = ("write", "rename", "create", "unlink")[number % 4], errno.EIO
            write(folder, place, pages=(9, 9))
            files.call = ""
        elif act == "read":
            assert read(folder, place) in (None, written.get(place), [page(9), page(9)])
        elif act == "remove":
            folder.remove_owner("aa")
            assert all(read(folder, each) is None for each in written if each.owner == "aa")
        elif act == "reopen":
            folder.close()
            folder = open_folder(root, capacity, files=files)
        assert real_bytes(root) <= folder.num_bytes <= capacity
