"""`chorus adapters`: shows and changes the adapters of a running server or cluster, which have the same routes."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO
from urllib.parse import quote

import httpx

from ..access.keys import InvalidKey, check_key, read_keys

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
    add.add_argument("--pin", action="store_true", help="keep it resident")
    add.set_defaults(act=_add)
    remove = commands.add_parser("remove", help="unload an adapter when its last request has ended")
    remove.add_argument("name", metavar="NAME")
    remove.add_argument("--force", action="store_true", help="unload it at once; its requests end with an error")
    remove.set_defaults(act=_remove)
    for command in (show, add, remove):
        command.add_argument("--url", default=URL, help=f"the server's address (default: {URL})")
        command.add_argument(
            "--api-key-file",
            type=Path,
            metavar="FILE",
            help=f"file with a key in its first line; default: the key in {' or '.join(KEY_VARIABLES)}, if one is set",
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
    response = client.post("/v1/adapters", json={"name": arguments.name, "path": arguments.path})
    answer, verb = _answer(response), "added" if response.status_code == 201 else "replaced"
    if arguments.pin:
        _answer(client.patch(_path(arguments.name), json={"pinned": True}))
        verb += " and pinned"
    print(f"{verb} {answer['name']}: version {answer['version']}, content {answer['content_hash']}", file=out)


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
            key = read_keys(path)[0]
            if key.id:
                raise CommandError(f"{path} has no key, only its hash; give a file with the key itself")
            return key.key
        given = next((os.environ[name] for name in KEY_VARIABLES if os.environ.get(name)), None)
        return None if given is None else check_key(given.partition(",")[0])
    except InvalidKey as error:
        raise CommandError(str(error)) from None
