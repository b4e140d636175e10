"""Log lines: one format for all, with the request that a line is about."""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Literal, TypedDict

log = logging.getLogger("chorus")

LogFormat = Literal["text", "json"]


class About(TypedDict, total=False):
    """Fields that identify a line's request and tell how it ended."""

    request_id: str
    tenant: str
    model: str
    status: int
    duration: float


FIELDS = ("request_id", "tenant", "model", "status", "duration")

_about: ContextVar[About | None] = ContextVar("about", default=None)
_PLAIN = re.compile(r"[\w.@/:+=-]+")


@contextmanager
def about_request(request_id: str) -> Iterator[About]:
    """Add a request's id, and other fields added later, to the log lines of this task and of the tasks it starts."""
    about = About(request_id=request_id)
    token = _about.set(about)
    try:
        yield about
    finally:
        _about.reset(token)


def note_request(*, tenant: str | None = None, model: str | None = None) -> None:
    """Add the tenant or the model to the following log lines of the current request."""
    if (about := _about.get()) is not None:
        if tenant is not None:
            about["tenant"] = tenant
        if model is not None:
            about["model"] = model


class TextLines(logging.Formatter):
    """`TIME LEVEL LOGGER: MESSAGE`, followed by the request's fields as NAME=VALUE."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        text = super().formatMessage(record)
        shown = [f"{name}={_shown(value)}" for name, value in _fields(record)]
        return f"{text} [{' '.join(shown)}]" if shown else text


class JsonLines(logging.Formatter):
    """A JSON object: time, level, logger, message, the request's fields, and an exception's traceback."""

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {
            "time": when.replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **dict(_fields(record)),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=True, default=str)


def log_to_stderr(level: str, form: LogFormat = "text") -> None:
    """Write warnings of all loggers, and Chorus's lines from a level on, to standard error in one format."""
    formatter = JsonLines() if form == "json" else TextLines()
    for handler in logging.getLogger().handlers:
        if isinstance(handler.formatter, JsonLines | TextLines):  # of an earlier call
            handler.setFormatter(formatter)
    handler = logging.StreamHandler()
    handler.setFormatter(formatter)
    logging.basicConfig(level=logging.WARNING, handlers=[handler])  # nothing if there are handlers
    logging.captureWarnings(True)
    logging.getLogger("chorus").setLevel(level.upper())


def tell(text: str, level: int = logging.INFO) -> None:
    """Print a line for whoever started the command: plain text, or a log line where log lines are JSON objects.

    Unlike a log line it doesn't depend on the log's level.
    """
    record = log.makeRecord(log.name, level, "", 0, text, (), None)
    handlers = [each for each in logging.getLogger().handlers if isinstance(each.formatter, JsonLines)]
    for handler in handlers:
        handler.handle(record)
    if not handlers:
        print(text, file=sys.stderr, flush=True)


class Stopwatch:
    """Seconds since the record was made."""

    def __init__(self) -> None:
        self._began = time.perf_counter()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._began


def _fields(record: logging.LogRecord) -> Iterator[tuple[str, object]]:
    """The request's fields of a line: its own (`extra`) first."""
    about = _about.get() or {}
    for name in FIELDS:
        value = record.__dict__.get(name, about.get(name))
        if value is not None:
            yield name, round(value, 6) if isinstance(value, float) else value


def _shown(value: object) -> str:
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)
