"""`chorus keys`: makes, shows and revokes keys in a key file, which a running server reloads by itself."""

from __future__ import annotations

import argparse
import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from ..access.grants import Grant, InvalidKey
from ..access.keys import TENANT, new_key, read_keys
from ..machine_faults import fault_of
from .adapters import CommandError


def add_flags(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="keys_command", metavar="COMMAND", required=True)
    add = commands.add_parser("add", help="make a key and print it, once: the file keeps its hash")
    add.add_argument("tenant", metavar="TENANT", help="owner of the key")
    add.add_argument(
        "rights",
        nargs="*",
        metavar="NAME=VALUE",
        help="adapters=GLOB,GLOB (default: all), base=no, requests=N at once, tokens_per_minute=N, weight=W, admin=yes",
    )
    add.set_defaults(act=_add)
    show = commands.add_parser("list", help="show each key's id, tenant and rights")
    show.set_defaults(act=_list)
    revoke = commands.add_parser("revoke", help="remove a key from the file")
    revoke.add_argument("id", metavar="ID", help="as `chorus keys list` shows it")
    revoke.set_defaults(act=_revoke)
    for command in (add, show, revoke):
        command.add_argument("--file", type=Path, required=True, metavar="FILE", help="the server's --api-key-file")


def run(arguments: argparse.Namespace, out: TextIO | None = None) -> int:
    """Run the command; return the exit code. Raises CommandError."""
    try:
        arguments.act(arguments, out)
    except InvalidKey as error:
        raise CommandError(str(error)) from None
    except OSError as error:
        raise CommandError(fault_of(error, arguments.file) or f"{arguments.file}: {error.strerror}") from None
    return 0


def _add(arguments: argparse.Namespace, out: TextIO | None) -> None:
    if not TENANT.fullmatch(arguments.tenant):
        raise CommandError(
            f"the tenant's name is {arguments.tenant!r}; it must have up to 128 letters, digits and ._:/+=@-"
        )
    grant = Grant.parse(arguments.rights)
    key, kept = new_key()
    with _locked(arguments.file):
        lines = arguments.file.read_text("utf-8").splitlines() if arguments.file.exists() else []
        _write(arguments.file, [*lines, " ".join((kept, arguments.tenant, *grant.words()))])
    print(key, file=out)


def _list(arguments: argparse.Namespace, out: TextIO | None) -> None:
    for one in read_keys(arguments.file):
        print(one.id or "(not made here)", one.tenant or "(no tenant)", *one.grant.words(), file=out)


def _revoke(arguments: argparse.Namespace, out: TextIO | None) -> None:
    with _locked(arguments.file):
        ids = [one.id for one in read_keys(arguments.file)]
        if not arguments.id or arguments.id not in ids:
            raise CommandError(f"{arguments.file} has no key of id {arguments.id}; `chorus keys list` shows the ids")
        if len(ids) == 1:
            raise CommandError(
                f"{arguments.id} is the last key of {arguments.file}, and servers would keep it; add another one first"
            )
        lines = arguments.file.read_text("utf-8").splitlines()
        _write(arguments.file, [line for line in lines if not line.lstrip().startswith(f"sha256:{arguments.id}:")])
    print(f"revoked {arguments.id}", file=out)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Keep other commands from changing the file. The lock is on its directory, because the file is replaced."""
    handle = os.open(path.absolute().parent, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _write(path: Path, lines: list[str]) -> None:
    """Replace the file's contents atomically; a new file is readable by its owner only."""
    path = path.resolve()
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    new = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in lines)
            file.flush()
            os.fsync(file.fileno())
        read_keys(new)
        if path.exists():
            state = path.stat()
            new.chmod(state.st_mode & 0o777)
            if (state.st_uid, state.st_gid) != (os.getuid(), os.getgid()):
                os.chown(new, state.st_uid, state.st_gid)
        new.replace(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
