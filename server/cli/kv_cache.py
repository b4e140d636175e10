"""`chorus kv-cache`: shows and removes cached prefixes in the files of `--kv-cache-dir`, with or without a server."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from ...memory.disk.folder import BlockFolder, FolderRefused, OwnedFiles
from ..machine_faults import size_text
from .adapters import CommandError


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="DIR", help="the servers' kv_cache_dir")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--remove-adapter", metavar="HASH", help="remove an adapter's blocks, by its content hash")
    what.add_argument("--remove-tenant", metavar="NAME", help="remove the blocks of a tenant, of all adapters")
    what.add_argument("--remove-all", action="store_true", help="remove all blocks")


def run(arguments: argparse.Namespace) -> int:
    """Print what was removed, and what the folder has then. Raises CommandError."""
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
        limit = folder.told_limit
        of = "" if limit is None else f" of {size_text(limit)}"
        print(f"{size_text(folder.num_bytes)}{of} in {arguments.folder}")
        _print_owners(folder.owners())
    except OSError as error:
        raise CommandError(f"{arguments.folder}: {error.strerror or error}") from None
    except (FolderRefused, ValueError) as error:
        raise CommandError(str(error)) from None
    return 0


def _print_owners(owners: Sequence[OwnedFiles]) -> None:
    """Print a row for each adapter, by its content hash, for each composition, and for the base model."""
    if not owners:
        return
    rows = [("CONTENT", "BLOCKS", "SIZE", "TENANTS", "LAST USED")]
    for each in owners:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(each.used_at))
        content = "+".join(part[:12] for part in each.owner.split("."))
        rows.append((content, f"{each.num_blocks:,}", size_text(each.num_bytes), str(len(each.tenants)), used))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
