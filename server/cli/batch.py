"""`chorus batch`: the requests of a file in OpenAI's batch format, answered by the API's own code in this process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

import httpx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn
from starlette.applications import Starlette

from ..api import generation_api
from ..errors import EngineUnavailable
from ..settings import Settings
from ..start.flags import UsageError
from ..start.launch import OpenBackend, build_app

ROUTES = tuple(sorted(route for route in generation_api.ROUTES if route.startswith("/v1/")))
"""Where a line's request may go: TGI's and LoRAX's routes have no batches."""

IN_FLIGHT = 256
"""Requests that the engine is given at once; the others follow as these end."""

TRIES = 20
"""How often a request is sent that the server has no room for."""

CAN_PASS = (429, 500, 503, 504)
"""Statuses of answers that another run may better: requests that have them are asked again by it."""

JSON = {"content-type": "application/json"}


class BatchLine(NamedTuple):
    """A line of the input."""

    custom_id: str
    url: str
    body: dict[str, Any]


def run(settings: Settings, given: Path, output: Path, open_backend: OpenBackend | None = None) -> int:
    """Answers the input's requests; returns 0, or 1 if another run may better some answers. open_backend: see
    `build_app`.

    Raises UsageError for a file that can't be read, or with a line that is no request, before anything is answered.
    """
    try:
        left = {asked.custom_id for asked in _read(given)}
        total = len(left)
        left -= _keep_answers(output)
        console = Console(stderr=True)
        console.print(f"{total} requests, {total - len(left)} answered before")
        if not left:
            return 0
        app = build_app(settings, open_backend)
        with output.open("ab") as out:
            requests = (asked for asked in _read(given) if asked.custom_id in left)
            counts = asyncio.run(_answer(app, requests, out, len(left), console))
    except OSError as error:
        raise UsageError(f"chorus batch: error: {error.filename}: {error.strerror}") from None
    console.print(", ".join(f"{counts[status]} answered with {status}" for status in sorted(counts)))
    return 1 if counts.keys() & set(CAN_PASS) else 0


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
                raise _wrong(path, number, f"no JSON object with custom_id, url and body ({error!r:.80})") from None
            if not isinstance(asked.custom_id, str) or not isinstance(asked.body, dict):
                raise _wrong(path, number, "custom_id must be a string, and body an object")
            if asked.url not in ROUTES or line.get("method", "POST") != "POST":
                raise _wrong(path, number, f"a request may be a POST to {', '.join(ROUTES)}")
            if asked.body.get("stream"):
                raise _wrong(path, number, "an answer in a file can't be a stream")
            if (first := lines.setdefault(asked.custom_id, number)) != number:
                raise _wrong(path, number, f"its custom_id is that of line {first}, too")
            yield asked


def _wrong(path: Path, number: int, what: str) -> UsageError:
    return UsageError(f"chorus batch: error: {path} line {number}: {what}")


def _keep_answers(output: Path) -> set[str]:
    """The custom_ids of answers that stay; leaves out of the file cut ones, and ones that another run may better."""
    kept: set[str] = set()
    if not output.exists():
        return kept
    new = output.with_name(output.name + ".new")
    with output.open("rb") as file, new.open("wb") as out:
        for text in file:
            with suppress(ValueError, KeyError, TypeError):
                line = json.loads(text)
                if text.endswith(b"\n") and line["response"]["status_code"] not in CAN_PASS:
                    kept.add(line["custom_id"])
                    out.write(text)
    new.replace(output)
    return kept


async def _answer(
    app: Starlette, requests: Iterator[BatchLine], out: IO[bytes], total: int, console: Console
) -> dict[int, int]:
    """Writes an answer for each request as it comes; returns how many had which status."""
    counts, pending = dict[int, int](), set[asyncio.Task[dict[str, Any]]]()
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
    """The line of an answer. Raises EngineUnavailable when there will be none."""
    content = json.dumps(asked.body)
    answer = await client.post(asked.url, content=content, headers=JSON)
    for _ in range(TRIES - 1):
        if "retry-after" not in answer.headers:
            break
        await asyncio.sleep(float(answer.headers["retry-after"]))
        answer = await client.post(asked.url, content=content, headers=JSON)
    body, request_id = answer.json(), answer.headers["x-request-id"]
    if answer.status_code == 503 and body["error"]["code"] == "engine_unavailable":
        raise EngineUnavailable(body["error"]["message"])
    response = {"status_code": answer.status_code, "request_id": request_id, "body": body}
    return {"id": f"batch_req_{request_id}", "custom_id": asked.custom_id, "response": response, "error": None}


async def _write(
    pending: set[asyncio.Task[dict[str, Any]]], out: IO[bytes], counts: dict[int, int]
) -> set[asyncio.Task[dict[str, Any]]]:
    """Writes the answers of requests that ended, at least one; returns the requests that did not."""
    done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        line = task.result()
        out.write(json.dumps(line, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n")
        status = line["response"]["status_code"]
        counts[status] = counts.get(status, 0) + 1
    out.flush()
    return pending
