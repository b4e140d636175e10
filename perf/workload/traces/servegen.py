"""ServeGen's clients (arXiv:2505.09999; Apache-2.0): a directory, or a tar file, of `chunk-N-trace.csv` and
`chunk-N-dataset.json`, one pair a client.

They describe requests, window by window, instead of listing them: rows of `start, rate, cv, pattern, shape, scale`
without a header, where pattern is the law of the gaps (Gamma or Weibull, empty: no requests), and for wider windows the
distributions of input and output tokens. Requests are drawn from them; each client stands for an adapter.
"""

from __future__ import annotations

import ast
import io
import itertools
import json
import lzma
import math
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import NonNegativeFloat, PositiveFloat

from ..errors import TraceError
from ..seeds import stream
from .source import Source, TraceRow
from .text import Rows

_MEMBER = re.compile(r"chunk-(\d+)-(trace\.csv|dataset\.json)")
_LAWS = ("Gamma", "Weibull")


@dataclass(frozen=True, slots=True)
class Window:
    """Gaps between a client's requests from `start` on: `shape` of a law that is scaled to a mean of 1/rate seconds."""

    start: float
    rate: float
    law: str
    shape: float

    def gaps(self, rng: np.random.Generator, count: int) -> np.ndarray:
        if self.law == "Gamma":
            return rng.standard_gamma(self.shape, count) / (self.shape * self.rate)
        return rng.weibull(self.shape, count) / (math.gamma(1 + 1 / self.shape) * self.rate)


@dataclass(frozen=True, slots=True)
class Tokens:
    """A distribution of token counts: values and their cumulated probabilities."""

    values: np.ndarray
    cumulated: np.ndarray

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        return self.values[np.searchsorted(self.cumulated, rng.random(count), side="right")]


@dataclass(slots=True)
class Client:
    """One client's requests, described by windows of time."""

    #: start → window
    windows: dict[float, Window] = field(default_factory=dict)
    #: start of a span → distributions of input and output tokens
    tokens: dict[float, tuple[Tokens, Tokens]] = field(default_factory=dict)

    def tokens_at(self, seconds: float) -> tuple[Tokens, Tokens] | None:
        """The distributions of the latest span that begins by then; ServeGen's own rule."""
        starts = [start for start in self.tokens if start <= seconds]
        return self.tokens[max(starts)] if starts else None


class ServeGen(Source):
    """Arrivals, lengths and clients as adapters, drawn from the seed of the workload.

    start: second of the two weeks to begin at. clients: the first so many, in order of their number; default: all.
    rate_scale: multiplies all rates. Clients and windows without token counts are left out, as ServeGen does.
    """

    format: Literal["servegen"]
    start: NonNegativeFloat = 0.0
    clients: int | None = None
    rate_scale: PositiveFloat = 1.0
    provides = frozenset({"arrival", "adapter", "prompt_tokens", "output_tokens"})

    def rows(self, seed: int = 0) -> Iterator[TraceRow]:
        clients = self._read()
        starts = sorted({start for client in clients.values() for start in client.windows})
        lengths = np.diff(starts).tolist()
        lengths.append(lengths[-1] if lengths else math.inf)
        rngs = {number: stream(seed, f"servegen {number}") for number in clients}
        names = {number: f"client-{number:03d}" for number in clients}
        for begin, seconds in zip(starts, lengths, strict=True):
            if begin + seconds <= self.start:
                continue
            found = []
            for number, client in clients.items():
                window = client.windows.get(begin)
                tokens = client.tokens_at(begin)
                if window and tokens:
                    found.append((number, *self._draw(window, tokens, seconds, rngs[number])))
            if found:
                yield from _merged(found, names, self.start)

    def _draw(
        self, window: Window, tokens: tuple[Tokens, Tokens], seconds: float, rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        wanted = window.rate * self.rate_scale * seconds
        chunks, reached = [], 0.0
        while reached < seconds:
            gaps = window.gaps(rng, math.ceil(wanted) + 16) / self.rate_scale
            chunks.append(reached + np.cumsum(gaps))
            reached = float(chunks[-1][-1])
        times = np.concatenate(chunks)
        times = window.start + times[times < seconds]
        prompts, outputs = (each.draw(rng, len(times)) for each in tokens)
        kept = times >= self.start
        return times[kept], prompts[kept], outputs[kept]

    def _read(self) -> dict[int, Client]:
        clients: dict[int, Client] = {}
        for name, number, text in self._members():
            client = clients.setdefault(number, Client())
            where = self.path / name
            if name.endswith(".csv"):
                client.windows = {window.start: window for window in _windows(where, text)}
            else:
                client.tokens = dict(_tokens(where, text))
        whole = {number: clients[number] for number in sorted(clients) if clients[number].tokens}
        if not any(client.windows for client in whole.values()):
            raise TraceError(
                self.path, None, "no pair of chunk-N-trace.csv and chunk-N-dataset.json", "give ServeGen's data folder"
            )
        return dict(itertools.islice(whole.items(), self.clients))

    def _members(self) -> Iterator[tuple[str, int, str]]:
        """(name, client's number, text) of each file of a client."""
        if self.path.is_dir():
            for path in sorted(self.path.iterdir()):
                if match := _MEMBER.fullmatch(path.name):
                    yield path.name, int(match[1]), path.read_text("utf-8")
            return
        try:
            with tarfile.open(self.path, "r|*") as archive:
                for member in archive:
                    name = member.name.rpartition("/")[2]
                    file = archive.extractfile(member) if (match := _MEMBER.fullmatch(name)) else None
                    if match and file:
                        yield name, int(match[1]), file.read().decode("utf-8")
        except (OSError, EOFError, tarfile.TarError, lzma.LZMAError) as error:
            mend = "give ServeGen's data folder, or a tar file of it"
            raise TraceError(self.path, None, f"not readable ({error})", mend) from None


def _windows(path: Path, text: str) -> Iterator[Window]:
    file = Rows(path)
    for row in file.table(io.StringIO(text)):
        if len(row) != 6:
            raise file.error("row", row, f"it has {len(row)} fields, not 6; mend or drop the line")
        start = file.in_order("start", row[0], file.number("start", row[0], 0.0))
        rate = file.number("rate", row[1], 0.0)
        if not row[3] or not rate:
            continue
        if row[3] not in _LAWS:
            raise file.error("pattern", row[3], f"it must be empty or one of {', '.join(_LAWS)}")
        shape = file.number("shape", row[4])
        if shape <= 0:
            raise file.error("shape", row[4], "it must be above 0")
        yield Window(start, rate, row[3], shape)


def _tokens(path: Path, text: str) -> Iterator[tuple[float, tuple[Tokens, Tokens]]]:
    """The spans with distributions for both input and output."""
    file = Rows(path)
    try:
        spans = json.loads(text)
    except json.JSONDecodeError as error:
        raise TraceError(path, error.lineno, f"not JSON ({error.msg})", "give an intact file") from None
    for start, fields in spans.items():
        found = []
        for name in ("input_tokens", "output_tokens"):
            try:
                # a Python dict in a string: {tokens: probability}
                law = ast.literal_eval(fields[name])
                values = np.array(list(law), np.int64)
                weights = np.array(list(law.values()), np.float64)
                if (values < 0).any() or not (np.isfinite(weights) & (weights >= 0)).all():
                    raise ValueError
                if len(values) and not weights.sum() > 0:
                    raise ValueError
            except (KeyError, TypeError, ValueError, SyntaxError, AttributeError, OverflowError):
                mend = "it must be a dict of token counts and their probabilities, as a string"
                value = fields.get(name) if isinstance(fields, dict) else fields
                raise TraceError(path, None, f"{name} of span {start} is {value!r:.60}", mend) from None
            if len(values):
                order = np.argsort(values, kind="stable")
                cumulated = np.cumsum(weights[order])
                # a request without tokens cannot be served
                found.append(Tokens(np.maximum(values[order], 1), cumulated[:-1] / cumulated[-1]))
        if len(found) == 2:
            yield file.number("span", start, 0.0), (found[0], found[1])


def _merged(
    found: list[tuple[int, np.ndarray, np.ndarray, np.ndarray]], names: dict[int, str], start: float
) -> Iterator[TraceRow]:
    """All clients' requests of one window in order of time."""
    times = np.concatenate([each[1] for each in found])
    order = np.argsort(times, kind="stable")
    clients = np.repeat([each[0] for each in found], [len(each[1]) for each in found])[order].tolist()
    prompts = np.concatenate([each[2] for each in found])[order].tolist()
    outputs = np.concatenate([each[3] for each in found])[order].tolist()
    for time, client, prompt, output in zip((times[order] - start).tolist(), clients, prompts, outputs, strict=True):
        yield TraceRow(time, names[client], prompt, output)
