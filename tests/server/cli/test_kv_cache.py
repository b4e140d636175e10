"""`chorus kv-cache`: what it removes, and what it refuses."""

from __future__ import annotations

import pytest

from chorus.memory.disk.folder import BlockFile, BlockFolder, SealedBlock
from chorus.server.cli.command import main


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
