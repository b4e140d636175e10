"""Loads that are profiled: decode steps by bucket and mode, mixed steps, prefill, and cold starts.

Tests: tests/perf/profile/test_main.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

from ..bench.context import Context
from ..bench.subject import Subject
from .parts import Part, floors

RANKS = 8, 16, 32, 64
RANK = 16

#: Opens the span of one step.
Span = Callable[[], AbstractContextManager[object]]


class UnknownLoad(ValueError):
    """No load has this name."""


@dataclass(frozen=True)
class Load:
    """kind: decode, mixed, prefill or cold. size: sequences of a decode step, or tokens of the prompt. mode: base, lora
    (each sequence has another adapter), ranks (of another rank, too) or merged.
    """

    kind: str
    size: int
    mode: str = "base"

    @classmethod
    def parse(cls, text: str) -> Load:
        """Of `KIND:SIZE[:MODE]`, as in `decode:32:lora` or `prefill:2048`. Raises UnknownLoad."""
        kind, _, rest = text.partition(":")
        size, _, mode = rest.partition(":")
        if kind not in _KINDS or not size.isdecimal() or not int(size):
            raise UnknownLoad(f"{text!r} is no load: give KIND:SIZE[:MODE] with {', '.join(_KINDS)}")
        mode = mode or ("lora" if kind == "cold" else "base")
        if mode not in _KINDS[kind]:
            raise UnknownLoad(f"{text!r}: the mode of {kind} is one of {', '.join(_KINDS[kind])}, not {mode!r}")
        return cls(kind, int(size), mode)

    def __str__(self) -> str:
        return f"{self.kind}:{self.size}:{self.mode}"


#: Modes of each kind.
_KINDS = {
    "decode": ("base", "lora", "ranks", "merged"),
    "mixed": ("base", "lora"),
    "prefill": ("base", "lora"),
    "cold": ("lora",),
}


@contextmanager
def opened(context: Context, load: Load) -> Iterator[Runner]:
    """A warm engine that runs a load's steps; it is idle, and freed at the end."""
    sequences = load.size if load.kind == "decode" else _beside(context) + 1
    before, prompt = context.prompt, 0 if load.kind == "decode" else load.size
    ranks = RANKS if load.mode == "ranks" and not context.smoke else (RANK,)
    named = {rank: context.adapters(rank, sequences) for rank in ranks}
    names = [name for name, _ in zip(_in_turn([list(each) for each in named.values()]), range(sequences), strict=False)]
    adapters = {name: path for each in named.values() for name, path in each.items()}
    size: dict[str, Any] = {
        "max_seqs": sequences,
        "max_batched": max(prompt + sequences, context.pick(64, 8192, 8192)),
        "max_len": max(prompt, before) + 4 * sequences + 160,
    }
    with Subject(context, adapters, shadow=load.mode == "merged", inline_reads=True, **size) as subject:
        yield Runner(context, load, subject, names, list(islice(cycle(ranks), sequences)))


@dataclass(frozen=True)
class Runner:
    """Runs a load's steps on an engine. names, ranks: the adapters of its sequences."""

    context: Context
    load: Load
    subject: Subject
    names: Sequence[str]
    ranks: Sequence[int]

    def floors(self) -> dict[Part, float]:
        """See `parts.floors`. Of a mixed step: its prompt and the sequences that decode beside it, added up."""
        load, before = self.load, self.context.prompt
        ranks = [] if load.mode in ("base", "merged") else self.ranks
        if load.kind == "decode":
            return floors(self.context, load.size, 1, before, ranks)
        found = floors(self.context, 1, load.size, 0, ranks[:1])
        if load.kind == "mixed":
            beside = floors(self.context, len(self.names) - 1, 1, before, ranks[1:])
            for part in (Part.LORA, Part.ATTENTION, Part.ELEMENTWISE):  # weights are read once
                if part in beside:
                    found[part] = found.get(part, 0.0) + beside[part]
        return found

    def run(self, steps: int, span: Span) -> None:
        """Run so many measured steps, each in a span; what they need is run before, without one."""
        {"decode": self._decode, "mixed": self._mixed, "prefill": self._prompts, "cold": self._prompts}[self.load.kind](
            steps, span
        )

    def _decode(self, steps: int, span: Span) -> None:
        subject, mode = self.subject, self.load.mode
        if mode == "merged":
            subject.load(self.names[:1])
            subject.merge(self.names[0])
        adapters = {"base": [None] * self.load.size, "merged": [self.names[0]] * self.load.size}.get(mode, self.names)
        requests = subject.decoding(adapters, self.context.prompt, steps)
        for _ in range(steps):
            with span():
                subject.step()
        subject.clear(requests)

    def _mixed(self, steps: int, span: Span) -> None:
        """Each step computes a whole prompt beside the decoding sequences."""
        subject = self.subject
        adapters: list[str | None] = [None] * len(self.names) if self.load.mode == "base" else [*self.names]
        for measured in (False, *[True] * steps):
            requests = subject.decoding(adapters[1:], self.context.prompt, 4)
            requests.append(subject.add(self.load.size, 2, adapters[0]))
            if measured:
                with span():
                    subject.step()
            subject.clear(requests)

    def _prompts(self, steps: int, span: Span) -> None:
        """Each step is a whole prompt's; of a cold start, its adapter comes from host memory meanwhile."""
        subject, name = self.subject, None if self.load.mode == "base" else self.names[0]
        for measured in (False, *[True] * steps):
            if self.load.kind == "cold" and name is not None and measured:
                subject.to_host(name)
            request = subject.add(self.load.size, 1, name)
            while not request.num_output_tokens:
                if not measured:
                    subject.step()
                else:
                    with span():
                        subject.step()
            subject.finish()


def _beside(context: Context) -> int:
    """Sequences that decode beside the prompt of a mixed step."""
    return context.pick(2, 16, 32, cpu=4)


def _in_turn(lists: Sequence[Sequence[str]]) -> Iterator[str]:
    """Return the first of each, then the second of each, and so on."""
    return (each for row in zip(*lists, strict=True) for each in row)
