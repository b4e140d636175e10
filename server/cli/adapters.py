"""`chorus adapters`: shows and changes the adapters of a running server or cluster, which have the same routes."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TextIO
from urllib.parse import quote

import httpx

from ...memory.files.config import CONFIG_FILE
from ...memory.files.form import WEIGHTS_FILE
from ...memory.files.tokens.added_tokens import TEXT_FILES
from ..access.keys import InvalidKey, NamedKey, check_key, read_keys

URL = "http://127.0.0.1:8000"

SECONDS = 60.0
"""Seconds that the server may take: reading an adapter takes up to its `adapter_load_seconds`."""

KEY_VARIABLES = ("CHORUS_ADMIN_KEY", "CHORUS_API_KEY")
"""Environment variables with a key, the one with more rights first. Other users of the machine could see a flag."""


class CommandError(Exception):
    """The request failed; the text gives the reason."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="adapters_command", metavar="COMMAND", required=True)
    show = commands.add_parser("list", help="show the adapters and where their bytes are")
    show.add_argument("--json", action="store_true", help="print the server's response unchanged")
    show.set_defaults(act=_list)
    add = commands.add_parser("add", help="register an adapter, or replace the one of this name")
    add.add_argument("name", metavar="NAME")
    add.add_argument("path", metavar="DIR", help="its directory on the server's machine, below its adapter roots")
    add.set_defaults(act=_add)
    upload = commands.add_parser("upload", help="send an adapter's files, to a server with --adapter-uploads")
    upload.add_argument("name", metavar="NAME")
    upload.add_argument("path", type=Path, metavar="DIR", help="its directory on this machine")
    upload.set_defaults(act=_upload)
    for command in (add, upload):
        command.add_argument("--pin", action="store_true", help="keep it resident")
        command.add_argument(
            "--keep-versions",
            type=int,
            metavar="N",
            help="versions of the name to keep, including the new one (default: the server's --keep-versions)",
        )
    remove = commands.add_parser("remove", help="unload an adapter when its last request has ended")
    remove.add_argument("name", metavar="NAME")
    remove.add_argument("--force", action="store_true", help="unload it at once; its requests end with an error")
    remove.set_defaults(act=_remove)
    versions = commands.add_parser("versions", help="show the versions of an adapter that are kept, newest first")
    versions.set_defaults(act=_versions)
    back = commands.add_parser("rollback", help="have a name mean an earlier version that is kept; removes later ones")
    back.add_argument("--to", metavar="VERSION", help="a version that `versions` shows (default: the one before)")
    back.set_defaults(act=_roll_back)
    one = [versions, back]
    for verb, change, text in (
        ("pin", {"pinned": True}, "load an adapter, and keep it resident"),
        ("unpin", {"pinned": False}, "let an adapter leave the page pool again"),
        ("pause", {"paused": True}, "refuse new requests of an adapter; running ones continue"),
        ("resume", {"paused": False}, "accept requests of a paused adapter again"),
    ):
        command = commands.add_parser(verb, help=text)
        command.set_defaults(act=_change, change=change)
        one.append(command)
    drain = commands.add_parser("drain", help="wait until no request uses an adapter; pause it first")
    drain.add_argument("--seconds", type=float, default=60.0, metavar="S", help="longest time to wait (default: 60)")
    drain.set_defaults(act=_drain)
    one.append(drain)
    for command in one:
        command.add_argument("name", metavar="NAME")
    for command in (show, add, upload, remove, *one):
        command.add_argument("--url", default=URL, help=f"the server's address (default: {URL})")
        command.add_argument(
            "--api-key-file",
            type=Path,
            metavar="FILE",
            help="file with a key, in the format of the server's: the first one of an admin is sent, else the first; "
            f"default: the key in {' or '.join(KEY_VARIABLES)}, if one is set",
        )


def run(arguments: argparse.Namespace, out: TextIO | None = None) -> int:
    """Run the command; return the exit code. Raises CommandError."""
    key = _key(arguments.api_key_file)
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    act: Callable[[httpx.Client, argparse.Namespace, TextIO | None], None] = arguments.act
    try:
        with httpx.Client(base_url=arguments.url, headers=headers, timeout=SECONDS, trust_env=False) as client:
            act(client, arguments, out)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        reason = str(error) or type(error).__name__
        raise CommandError(f"can't reach {arguments.url}: {reason}; start the server, or give its --url") from None
    return 0


def _list(client: httpx.Client, arguments: argparse.Namespace, out: TextIO | None) -> None:
    answer = _answer(client.get("/v1/adapters"))
    if arguments.json:
        print(json.dumps(answer, indent=2), file=out)
        return
    rows = [("NAME", "TIER", "RANK", "PINNED", "VERSION", "CONTENT")]
    rows += [
        (
            one["name"],
            one["tier"],
            str(one["rank"]),
            "yes" if one["pinned"] else "no",
            str(one["version"]),
            (one["content_hash"] or "unknown")[:12],
        )
        for one in answer["data"]
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip(), file=out)
    for one in answer["quarantined"]:
        print(f"{one['name']} is not served: {one['reason']}", file=out)


def _add(client: httpx.Client, arguments: argparse.Namespace, out: TextIO | None) -> None:
    body = {"name": arguments.name, "path": arguments.path, "keep_versions": arguments.keep_versions}
    _loaded(client, arguments, client.post("/v1/adapters", json=body), out)


def _upload(client: httpx.Client, arguments: argparse.Namespace, out: TextIO | None) -> None:
    fields = {"name": arguments.name}
    if arguments.keep_versions is not None:
        fields["keep_versions"] = str(arguments.keep_versions)
    try:
        with ExitStack() as files:
            texts = [(name, name) for name in TEXT_FILES if (arguments.path / name).is_file()]
            sent = {
                field: (name, files.enter_context((arguments.path / name).open("rb")))
                for field, name in (("adapter_config", CONFIG_FILE), ("adapter_model", WEIGHTS_FILE), *texts)
            }
            response = client.post("/v1/adapters", data=fields, files=sent, timeout=httpx.Timeout(SECONDS, read=None))
    except OSError as error:
        raise CommandError(f"{error.filename}: {error.strerror}; name the directory of a PEFT adapter") from None
    _loaded(client, arguments, response, out)


def _loaded(client: httpx.Client, arguments: argparse.Namespace, response: httpx.Response, out: TextIO | None) -> None:
    """Print what a load did, and pin the adapter if that was asked for."""
    answer, verb = _answer(response), "added" if response.status_code == 201 else "replaced"
    if arguments.pin:
        _answer(client.patch(_path(answer["name"]), json={"pinned": True}))
        verb += " and pinned"
    print(f"{verb} {answer['name']}: version {answer['version']}, content {answer['content_hash']}", file=out)


def _versions(client: httpx.Client, arguments: argparse.Namespace, out: TextIO | None) -> None:
    for one in _kept(client, arguments.name):
        content = (one["content_hash"] or "unknown")[:12]
        marks = [mark for mark in ("pinned", "paused") if one[mark]]
        print(one["version"], content, *marks, sep="  ", file=out)


def _roll_back(client: httpx.Client, arguments: argparse.Namespace, out: TextIO | None) -> None:
    """Remove the versions after the wanted one, oldest first, so that the name changes its meaning once."""
    name, kept = arguments.name, [str(one["version"]) for one in _kept(client, arguments.name)]
    if arguments.to is None and len(kept) == 1:
        raise CommandError(
            f"{name} has no earlier version that is kept; load versions with --keep-versions 2 or more, and add the "
            "earlier files again"
        )
    wanted = kept[1] if arguments.to is None else arguments.to
    if wanted not in kept:
        raise CommandError(f"{name} has no version {wanted} that is kept; it has {', '.join(kept)}")
    later = kept[: kept.index(wanted)]
    if not later:
        print(f"{name} is version {wanted} already", file=out)
        return
    for version in reversed(later):
        _answer(client.delete(_path(f"{name}@{version}")))
    now = _answer(client.get(_path(name)))
    print(f"{name} is version {now['version']}, content {now['content_hash']}; removed {', '.join(later)}", file=out)


def _kept(client: httpx.Client, name: str) -> list[dict[str, Any]]:
    """The versions of a name that are kept, newest first. Raises CommandError without any."""
    newest = _answer(client.get(_path(name)))
    data = _answer(client.get("/v1/adapters"))["data"]
    older = [one for one in data if one["name"].startswith(f"{name}@") and one["version"] != newest["version"]]
    return [newest, *reversed(older)]


def _change(client: httpx.Client, arguments: argparse.Namespace, out: TextIO | None) -> None:
    answer = _answer(client.patch(_path(arguments.name), json=arguments.change))
    state = ", ".join(f"{'' if answer[field] else 'not '}{field}" for field in arguments.change)
    print(f"{answer['name']} is {state}", file=out)


def _drain(client: httpx.Client, arguments: argparse.Namespace, out: TextIO | None) -> None:
    body, limit = {"seconds": arguments.seconds}, SECONDS + arguments.seconds
    answer = _answer(client.post(f"{_path(arguments.name)}/drain", json=body, timeout=limit))
    print(f"no request uses {answer['name']}", file=out)


def _remove(client: httpx.Client, arguments: argparse.Namespace, out: TextIO | None) -> None:
    force = {"force": "true"} if arguments.force else {}
    answer = _answer(client.delete(_path(arguments.name), params=force))
    ended = answer["ended_requests"]
    print(f"removed {answer['name']}" + (f"; {ended} requests were ended" if ended else ""), file=out)


def _path(name: str) -> str:
    return f"/v1/adapters/{quote(name)}"


def _answer(response: httpx.Response) -> dict[str, Any]:
    """The JSON of a success. Raises CommandError with the server's message for any other response."""
    try:
        body = response.json()
    except ValueError:
        raise CommandError(f"{response.url} is not a Chorus server: it answered {response.status_code}") from None
    if response.is_success and isinstance(body, dict):
        return body
    error = body.get("error") if isinstance(body, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    raise CommandError(f"the server refused ({response.status_code}): {message or 'without a reason'}")


def _key(path: Path | None) -> str | None:
    """The key to send. Raises CommandError for a file or a variable without one."""
    try:
        if path is not None:
            return _sendable(read_keys(path), str(path))
        for name in KEY_VARIABLES:
            if given := os.environ.get(name):
                return _sendable([NamedKey(check_key(key)) for key in given.split(",")], name)
    except InvalidKey as error:
        raise CommandError(str(error)) from None
    return None


def _sendable(keys: Sequence[NamedKey], place: str) -> str:
    """The first admin key that is not only a hash, else the first other key. Raises CommandError if there is none."""
    whole = [one for one in keys if not one.id]
    if not whole:
        raise CommandError(
            f"{place} has only hashes of keys, which can't be sent; give a key as `chorus keys add` printed it"
        )
    return max(whole, key=lambda one: one.grant.admin).key
