"""`chorus demo`: a real server on a loopback port, asked by real HTTP requests, all adapters side by side."""

from __future__ import annotations

import asyncio
import json
import random
import time
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console

from ..launch import LaunchError, build_app, serving
from ..settings import Settings
from .client import Answer, DemoClient, DemoError
from .questions import Question, Score, open_questions, skill_questions
from .table import Lane, LaneTable, score_table

MIN_ACCURACY = 0.95
MAX_LANES = 24
SKILL_INPUTS, OPEN_INPUTS = 10, 3


@dataclass(slots=True)
class Totals:
    """Result of a run."""

    requests: int = 0
    tokens: int = 0
    seconds: float = 0.0
    adapters: int = 0
    scores: dict[str, Score] = field(default_factory=dict)

    def add(self, answer: Answer) -> None:
        self.requests += 1
        self.tokens += answer.tokens
        self.adapters = max(self.adapters, answer.adapters)

    @property
    def accuracy(self) -> float:
        asked = sum(score.asked for score in self.scores.values())
        return sum(score.exact for score in self.scores.values()) / asked if asked else 0.0

    @property
    def crossed(self) -> list[str]:
        return [case for score in self.scores.values() for case in score.crossed]

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    def passed(self) -> bool:
        return not self.crossed and self.accuracy >= MIN_ACCURACY

    def as_json(self) -> dict[str, Any]:
        return {
            "accuracy": round(self.accuracy, 4),
            "exact": {name: round(100 * score.accuracy, 2) for name, score in self.scores.items()},
            "cross_talk": len(self.crossed),
            "requests": self.requests,
            "tokens": self.tokens,
            "seconds": round(self.seconds, 2),
            "tokens_per_second": round(self.tokens_per_second, 1),
            "max_adapters_in_step": self.adapters,
        }


def run_demo(settings: Settings, inputs: int | None = None, check: int | None = None) -> int:
    """Runs the demo, or the check with `check` inputs per skill, and returns the exit code."""
    console = Console()
    app = build_app(settings)
    with serving(app, settings) as url:
        try:
            if check is not None:
                return asyncio.run(_check(url, settings, console, check))
            return asyncio.run(_show(url, settings, console, inputs))
        except DemoError as error:
            raise LaunchError(f"the demo failed: {error}") from None


async def _show(url: str, settings: Settings, console: Console, inputs: int | None) -> int:
    judged = settings.is_builtin
    async with DemoClient(url, connections=MAX_LANES + 1) as client:
        cards = await client.models()
        names = [card["id"] for card in cards]
        ranks = {card["id"]: card.get("rank", 0) for card in cards}
        if judged:
            questions = _skill_questions(names, inputs or SKILL_INPUTS, settings.seed)
        else:
            chat = await client.takes_chat(names[0])
            questions = open_questions(names[:MAX_LANES], inputs or OPEN_INPUTS, chat=chat)
        lanes = [Lane(name, ranks.get(name, 0), asked) for name, asked in questions.items()]
        totals, started = Totals(), time.perf_counter()
        with LaneTable(console, lanes, judged=judged) as table:
            await asyncio.gather(*(_run_lane(client, lane, table, totals) for lane in lanes))
        totals.seconds = time.perf_counter() - started
    if judged:
        totals.scores = {lane.name: lane.score for lane in lanes}
        console.print(score_table(totals.scores, ranks))
    _print_totals(console, totals, judged=judged)
    return 0 if totals.passed() or not judged else 1


async def _run_lane(client: DemoClient, lane: Lane, table: LaneTable, totals: Totals) -> None:
    for question in lane.questions:
        lane.question, lane.right, lane.answer = question, None, Answer()
        async for answer in client.stream(question):
            lane.answer = answer
        lane.right = lane.score.add(question, lane.answer.text)
        totals.add(lane.answer)
        table.finished(lane)


async def _check(url: str, settings: Settings, console: Console, count: int) -> int:
    places = asyncio.Semaphore(2 * settings.max_num_seqs)  # enough to keep every step full
    async with DemoClient(url, connections=2 * settings.max_num_seqs) as client:
        cards = await client.models()
        questions = _skill_questions([card["id"] for card in cards], count, settings.seed)
        totals = Totals(scores={name: Score() for name in questions})

        async def ask(skill: str, question: Question) -> None:
            async with places:
                answer = await client.ask(question)
            totals.scores[skill].add(question, answer.text)
            totals.add(answer)

        mixed = [(skill, question) for skill, asked in questions.items() for question in asked]
        random.Random(settings.seed or 0).shuffle(mixed)
        started = time.perf_counter()
        await asyncio.gather(*(ask(skill, question) for skill, question in mixed))
        totals.seconds = time.perf_counter() - started
    console.print(score_table(totals.scores, {card["id"]: card.get("rank", 0) for card in cards}))
    _print_totals(console, totals, judged=True)
    print(json.dumps({"inputs_per_skill": count, "seed": settings.seed or 0, **totals.as_json()}))
    return 0 if totals.passed() else 1


def _skill_questions(names: list[str], count: int, seed: int | None) -> dict[str, list[Question]]:
    questions = skill_questions(names[0], count, seed or 0)
    for asked in questions.values():
        if asked[0].model not in names:
            raise LaunchError(f"the built-in model is served without its adapter {asked[0].model}")
    return questions


def _print_totals(console: Console, totals: Totals, *, judged: bool) -> None:
    lines = [
        f"{totals.requests} requests, {totals.tokens} tokens in {totals.seconds:.1f} s: "
        f"{totals.tokens_per_second:.0f} tokens/s; up to {totals.adapters} different adapters in one step"
    ]
    if judged:
        lines.append(f"{100 * totals.accuracy:.1f} % exact, {len(totals.crossed)} answers were another skill's")
        lines += totals.crossed[:10]
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
