"""`chorus batch`: runs a file of requests in OpenAI's batch format through the API's own code in this process."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

import httpx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn
from starlette.applications import Starlette

from ..api import generation_api
from ..api.pooling import pooling_api
from ..errors import EngineUnavailable
from ..machine_faults import fault_of
from ..settings import Settings
from ..start.flags import UsageError
from ..start.launch import OpenBackend, build_app
from .adapters import CommandError

ROUTES = tuple(sorted(route for route in (*generation_api.ROUTES, *pooling_api.ROUTES) if route.startswith("/v1/")))
"""Routes that a line may name: TGI's and LoRAX's routes have no batches."""

IN_FLIGHT = 256
"""Requests in the engine at once; the others follow as these end."""

TRIES = {429: 20, 503: 20, 500: 2, 504: 2}
"""How often a request is sent that ends with a status that another attempt, or another run, may improve: often if the
server had no room for it.
"""

WAIT_SECONDS = 1.0
"""Seconds before the second attempt, if the answer names none; each further wait is twice as long."""

MAX_WAIT_SECONDS = 60.0

_FAILED = 400
"""Least status of a failure."""

JSON = {"content-type": "application/json"}


class BatchLine(NamedTuple):
    """A line of the input."""

    custom_id: str
    url: str
    body: dict[str, Any]


def run(settings: Settings, given: Path, output: Path, open_backend: OpenBackend | None = None) -> int:
    """Run the input's requests; return 0 if all have succeeded, in this run or before, else 1.

    open_backend: see `build_app`. Raises UsageError for a file that can't be read or has an invalid line, before any
    request is run, and CommandError if the results can't be written.
    """
    try:
        left = {asked.custom_id for asked in _read(given)}
    except OSError as error:
        raise UsageError(f"chorus batch: error: {given}: {error.strerror}") from None
    total = len(left)
    try:
        kept = _keep_answers(output)
        counts = Counter(kept[name] for name in left & kept.keys())
        left -= kept.keys()
        console = Console(stderr=True)
        console.print(f"{total} requests, {total - len(left)} answered before")
        if left:
            app = build_app(settings, open_backend)
            with output.open("ab") as out:
                requests = (asked for asked in _read(given) if asked.custom_id in left)
                counts += asyncio.run(_answer(app, requests, out, len(left), console))
    except OSError as error:
        raise CommandError(fault_of(error, output) or f"{error.filename or output}: {error.strerror}") from None
    console.print(", ".join(f"{counts[status]} answered with {status}" for status in sorted(counts)))
    if failed := sum(count for status, count in counts.items() if status >= _FAILED):
        console.print(f"{failed} of {total} requests failed; their lines in {output} have the reasons", soft_wrap=True)
    return 1 if failed else 0


def _read(path: Path) -> Iterator[BatchLine]:
    """The requests of a file. Raises UsageError that names the line."""
    lines: dict[str, int] = {}
    with path.open("rb") as file:
        for number, text in enumerate(file, start=1):
            if not text.strip():
                continue
            try:
                line = json.loads(text)
                asked = BatchLine(line["custom_id"], line["url"], line["body"])
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise _wrong(
                    path, number, f"must be a JSON object with custom_id, url and body ({error!r:.80})"
                ) from None
            if not isinstance(asked.custom_id, str) or not isinstance(asked.body, dict):
                raise _wrong(path, number, "custom_id must be a string, and body an object")
            if asked.url not in ROUTES or line.get("method", "POST") != "POST":
                raise _wrong(path, number, f"method must be POST, and url one of {', '.join(ROUTES)}")
            if asked.body.get("stream"):
                raise _wrong(path, number, "stream must be false or left out: results are written to a file")
            if (first := lines.setdefault(asked.custom_id, number)) != number:
                raise _wrong(path, number, f"line {first} has the same custom_id")
            yield asked


def _wrong(path: Path, number: int, what: str) -> UsageError:
    return UsageError(f"chorus batch: error: {path} line {number}: {what}")


def _keep_answers(output: Path) -> dict[str, int]:
    """The statuses of results that stay, by custom_id; removes incomplete ones, and those that another run may improve.

    Raises UsageError for an output that can't be read again, such as a pipe.
    """
    kept: dict[str, int] = {}
    if not output.exists():
        return kept
    if not output.is_file():
        raise UsageError(f"chorus batch: error: {output} is no file; results are kept in one, so that a run can go on")
    new = output.with_name(output.name + ".new")
    with output.open("rb") as file, new.open("wb") as out:
        for text in file:
            with suppress(ValueError, KeyError, TypeError):
                line = json.loads(text)
                status = line["response"]["status_code"]
                if text.endswith(b"\n") and status not in TRIES:
                    kept[line["custom_id"]] = int(status)
                    out.write(text)
    new.replace(output)
    return kept


async def _answer(
    app: Starlette, requests: Iterator[BatchLine], out: IO[bytes], total: int, console: Console
) -> Counter[int]:
    """Write a result for each request as it comes; return how many had each status."""
    counts, pending = Counter[int](), set[asyncio.Task[dict[str, Any]]]()
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(
            transport=httpx.ASGITransport(app, raise_app_exceptions=False), base_url="http://localhost", timeout=None
        ) as client,
    ):
        with Progress(*columns, console=console) as progress:
            bar = progress.add_task("", total=total)
            try:
                for asked in requests:
                    pending.add(asyncio.create_task(_ask(client, asked)))
                    if len(pending) >= IN_FLIGHT:
                        pending = await _write(pending, out, counts)
                        progress.update(bar, completed=sum(counts.values()))
                while pending:
                    pending = await _write(pending, out, counts)
                    progress.update(bar, completed=sum(counts.values()))
            finally:
                for task in pending:
                    task.cancel()
    return counts


async def _ask(client: httpx.AsyncClient, asked: BatchLine) -> dict[str, Any]:
    """The output line of a request. Raises EngineUnavailable if there will be none."""
    content, tries = json.dumps(asked.body), 0
    while True:
        answer = await client.post(asked.url, content=content, headers=JSON)
        tries += 1
        body, status = answer.json(), answer.status_code
        if status == 503 and body["error"]["code"] == "engine_unavailable":
            raise EngineUnavailable(body["error"]["message"])
        if tries >= TRIES.get(status, 1):
            break
        wait = float(answer.headers.get("retry-after", WAIT_SECONDS * 2 ** (tries - 1)))
        await asyncio.sleep(min(wait, MAX_WAIT_SECONDS))
    request_id = answer.headers["x-request-id"]
    response = {"status_code": status, "request_id": request_id, "body": body}
    return {"id": f"batch_req_{request_id}", "custom_id": asked.custom_id, "response": response, "error": None}


async def _write(
    pending: set[asyncio.Task[dict[str, Any]]], out: IO[bytes], counts: Counter[int]
) -> set[asyncio.Task[dict[str, Any]]]:
    """Write the results of the requests that have ended, at least one; return the requests that have not."""
    done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        line = task.result()
        out.write(json.dumps(line, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n")
        counts[line["response"]["status_code"]] += 1
    out.flush()
    return pending
