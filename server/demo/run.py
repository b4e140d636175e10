"""`chorus demo`: a real server on a loopback port and real HTTP requests for all adapters at once."""

from __future__ import annotations

import asyncio
import json
import random
import time
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from ..settings import Settings
from ..start.launch import LaunchError, build_app, serving
from .client import Answer, DemoClient, DemoError
from .questions import Question, Score, open_questions, skill_questions
from .skew import CLIENTS, Skew
from .table import Lane, LaneTable, score_table

MIN_ACCURACY = 0.95
MAX_LANES = 24
SKILL_INPUTS, OPEN_INPUTS = 10, 3


@dataclass(slots=True)
class Totals:
    """Result of a run."""

    scores: dict[str, Score]
    tokens: int = 0
    seconds: float = 0.0
    adapters: int = 0

    def judge(self, question: Question, answer: Answer) -> bool | None:
        """Add an answer to the totals and to its skill's score; see `Score.add`."""
        self.tokens += answer.tokens
        self.adapters = max(self.adapters, answer.adapters)
        return self.scores[question.skill or question.model].add(question, answer.text)

    @property
    def requests(self) -> int:
        return sum(score.asked for score in self.scores.values())

    @property
    def accuracy(self) -> float:
        return sum(score.exact for score in self.scores.values()) / max(self.requests, 1)

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


def run_demo(settings: Settings, inputs: int | None = None, check: int | None = None, skew: bool = False) -> int:
    """Run the demo, or with `check` the check with so many inputs per skill; return the exit code.

    skew: show the mode of the steps while one adapter's share of the requests grows.
    """
    console = Console()
    app = build_app(settings)
    with serving(app, settings) as url:
        try:
            return asyncio.run(_demo(url, settings, console, inputs=inputs, check=check, skew=skew))
        except DemoError as error:
            raise LaunchError(f"the demo failed: {error}") from None


async def _demo(
    url: str, settings: Settings, console: Console, *, inputs: int | None, check: int | None, skew: bool
) -> int:
    judged, seed = settings.is_builtin, settings.seed or 0
    # enough to keep every step full; of lanes and clients that run together, one for each
    connections = max(CLIENTS, MAX_LANES) + 1 if check is None else 2 * settings.max_num_seqs
    async with DemoClient(url, connections) as client:
        cards = await client.models()
        names = [card["id"] for card in cards]
        ranks = {card["id"]: card.get("rank", 0) for card in cards}
        if judged:
            questions = _skill_questions(names, check or inputs or SKILL_INPUTS, seed)
        else:
            chat = await client.takes_chat(names[0])
            questions = open_questions(names[:MAX_LANES], inputs or OPEN_INPUTS, chat=chat)
        lanes = [Lane(name, ranks.get(name, 0), asked) for name, asked in questions.items()]
        totals, started = Totals({lane.name: lane.score for lane in lanes}), time.perf_counter()
        if skew:
            await Skew(client, questions, console, totals.judge, seed).run()
        elif check is None:
            await _run_side_by_side(client, lanes, totals, LaneTable(console, lanes, judged=judged))
        else:
            await _run_mixed(client, lanes, totals, connections, seed)
        totals.seconds = time.perf_counter() - started
    _print_totals(console, totals, ranks, judged=judged)
    if check is not None:
        print(json.dumps({"inputs_per_skill": check, "seed": seed, **totals.as_json()}))
    return int(judged and not totals.passed())


async def _run_side_by_side(client: DemoClient, lanes: list[Lane], totals: Totals, table: LaneTable) -> None:
    with table:
        await asyncio.gather(*(_run_lane(client, lane, table, totals) for lane in lanes))


async def _run_lane(client: DemoClient, lane: Lane, table: LaneTable, totals: Totals) -> None:
    for question in lane.questions:
        lane.question, lane.right, lane.answer = question, None, Answer()
        async for answer in client.watch(question):
            lane.answer = answer
        lane.right = totals.judge(question, lane.answer)
        table.finished(lane)


async def _run_mixed(client: DemoClient, lanes: list[Lane], totals: Totals, at_once: int, seed: int) -> None:
    """All lanes' questions in one random order."""
    places = asyncio.Semaphore(at_once)

    async def ask(question: Question) -> None:
        async with places:
            totals.judge(question, await client.ask(question))

    mixed = [question for lane in lanes for question in lane.questions]
    random.Random(seed).shuffle(mixed)
    await asyncio.gather(*map(ask, mixed))


def _skill_questions(names: list[str], count: int, seed: int) -> dict[str, list[Question]]:
    questions = skill_questions(names[0], count, seed)
    for asked in questions.values():
        if asked[0].model not in names:
            raise LaunchError(f"the built-in model is served without its adapter {asked[0].model}")
    return questions


def _print_totals(console: Console, totals: Totals, ranks: dict[str, int], *, judged: bool) -> None:
    if judged:
        console.print(score_table(totals.scores, ranks))
    lines = [
        f"{totals.requests} requests, {totals.tokens} tokens in {totals.seconds:.1f} s: "
        f"{totals.tokens_per_second:.0f} tokens/s; up to {totals.adapters} different adapters in one step"
    ]
    if judged:
        lines.append(f"{100 * totals.accuracy:.1f} % exact, {len(totals.crossed)} answers were another skill's")
        lines += totals.crossed[:10]
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
