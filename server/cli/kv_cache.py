"""`chorus kv-cache`: shows and removes cached prefixes in the files of `--kv-cache-dir`, with or without a server."""

from __future__ import annotations

import argparse
from pathlib import Path

from ...memory.disk.folder import BlockFolder, FolderRefused
from .adapters import CommandError


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="DIR", help="the servers' kv_cache_dir")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--remove-adapter", metavar="HASH", help="remove an adapter's blocks, by its content hash")
    what.add_argument("--remove-tenant", metavar="NAME", help="remove the blocks of a tenant, of all adapters")
    what.add_argument("--remove-all", action="store_true", help="remove all blocks")


def run(arguments: argparse.Namespace) -> int:
    """Print what was removed, or else how large the folder is. Raises CommandError."""
    if not (arguments.folder / "lock").is_file():
        raise CommandError(f"{arguments.folder} holds no cached prefixes; name the servers' kv_cache_dir")
    try:
        folder = BlockFolder(arguments.folder, None, 0)
        if arguments.remove_adapter is not None:
            print(f"removed {folder.remove_owner(arguments.remove_adapter)} blocks")
        elif arguments.remove_tenant is not None:
            print(f"removed {folder.remove_tenant(arguments.remove_tenant)} blocks")
        elif arguments.remove_all:
            print(f"removed {folder.clear()} blocks")
        print(f"{folder.num_bytes} bytes in {arguments.folder}")
    except (FolderRefused, ValueError) as error:
        raise CommandError(str(error)) from None
    return 0
