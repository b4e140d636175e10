"""`chorus kv-cache`: what it removes, and what it refuses."""

from __future__ import annotations

import pytest

from chorus.memory.disk.folder import BlockFile, BlockFolder, SealedBlock
from chorus.server.cli.command import main
from chorus.server.machine_faults import size_text


@pytest.fixture
def folder(tmp_path):
    made = BlockFolder(tmp_path / "kv", 1 << 20, 8)
    for owner in ("base", "aa"):
        for tenant in ("mine", "yours"):
            block = SealedBlock((0,), 0, 0, [bytes(8)])
            assert made.write(BlockFile(owner, made.tenant(tenant), "00"), block, [memoryview(bytes(8))])
    return made


@pytest.mark.parametrize(
    "flags, removed",
    [(["--remove-adapter", "aa"], 2), (["--remove-tenant", "mine"], 2), (["--remove-all"], 4), ([], None)],
)
def test_it_removes_what_is_named(folder, capsys, flags, removed):
    before = folder.num_bytes
    assert main(["kv-cache", folder.root, *flags]) == 0
    text = capsys.readouterr().out
    assert (f"removed {removed} blocks" in text) == (removed is not None)
    assert folder.num_bytes == before * (4 - (removed or 0)) // 4


def test_another_folder_is_left_alone(tmp_path, capsys):
    assert main(["kv-cache", str(tmp_path), "--remove-all"]) == 1
    assert "holds no cached prefixes" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_no_hash_of_an_adapter_is_refused(folder, capsys):
    assert main(["kv-cache", folder.root, "--remove-adapter", "../x"]) == 1
    assert "content hash" in capsys.readouterr().err


def test_it_shows_units_adapters_and_the_limit(folder, capsys):
    composed = f"{'c' * 64}.{'d' * 16}"
    block = SealedBlock((0,), 0, 0, [bytes(8)])
    assert folder.write(BlockFile(composed, folder.tenant("mine"), "00"), block, [memoryview(bytes(8))])
    assert main(["kv-cache", folder.root]) == 0
    first, head, *rows = capsys.readouterr().out.splitlines()
    assert first == f"{size_text(folder.num_bytes)} of 1 MiB in {folder.root}"
    assert head.split() == ["CONTENT", "BLOCKS", "SIZE", "TENANTS", "LAST", "USED"]
    assert [row.split()[0] for row in rows] == ["aa", "base", f"{'c' * 12}+{'d' * 12}"]
    size = size_text(folder.num_bytes * 2 // 5)
    assert rows[0].split()[1:5] == ["2", *size.split(), "2"]
    assert folder.told_limit == 1 << 20, "the command has no limit of its own"


def test_an_empty_folder_has_no_rows(folder, capsys):
    assert main(["kv-cache", folder.root, "--remove-all"]) == 0
    assert capsys.readouterr().out.splitlines() == ["removed 4 blocks", f"{size_text(0)} of 1 MiB in {folder.root}"]
