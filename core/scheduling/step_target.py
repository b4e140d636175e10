"""A target for the time of steps in which prompts of one tenant are computed beside answers of another.

Tests: tests/core/scheduling/test_step_target.py.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass, field
from statistics import median

from ..requests.request import Request
from ..requests.types import StepPlan
from .queues import num_missing, split_prompts
from .step_time import owed

DECODE_STEPS = 5.0
"""The default target, in decode steps."""

LEAST_DECODE_STEPS = 2.0
"""The least target, in decode steps: no debt would ever be paid off by steps that take longer than their target."""

EFFICIENT = 10.0
"""Least time of a step's prompts, in what a step takes without any of their tokens: shorter ones would mostly wait
for launches and weights."""

LEAST_TOKENS = 16
"""Prompt tokens of a step whatever its target: prompts always make progress, and each step reads all weights."""

PROMPT_TOKENS = 8
"""What a prompt takes in a step beside its tokens, in tokens: it is planned, sampled from and answered. Chosen; their
price is learned with that of tokens, so it matters where short and long prompts take turns."""

RECENT_SECONDS = 1.0
"""A tenant counts as decoding for so long after it did: its next request should not wait for a long step either."""

RECENT_STEPS = 64
"""Steps with prompts after which the time of a size that none of them had is old: a pause of the machine, or other work
beside the server, may have made it long."""

_NUM_SAMPLES = 8
_ANY = 1 << 30


class PromptTimes:
    """What the prompts of steps have taken: a time for each token, and one for having any. A prompt counts as
    `PROMPT_TOKENS` more.

    The latest steps are kept by the power of two of their tokens. The price of a token is the slope between the
    smallest and the largest of these sizes: were it a step's time by its tokens, then bounded steps, which are short,
    would make tokens look dear, and bound the next ones further. Old sizes count only while others give no slope; then
    one step may have more tokens than the price allows (`least_tokens`), else a price that was once too high would
    keep all steps too short to find that out.
    """

    def __init__(self) -> None:
        self._samples: dict[int, deque[tuple[int, float]]] = {}
        self._noted: dict[int, int] = {}  # the number of the last step of each size
        self._num_steps = 0

    def note(self, num_tokens: int, seconds: float) -> None:
        """Record a step. seconds: what it took longer than a step without prompts."""
        size = num_tokens.bit_length()
        self._num_steps += 1
        self._noted[size] = self._num_steps
        self._samples.setdefault(size, deque(maxlen=_NUM_SAMPLES)).append((num_tokens, seconds))

    def prices(self) -> tuple[float, float]:
        """Return seconds of having any, and of each token; zeros while nothing is known."""
        if not self._samples:
            return 0.0, 0.0
        few, most = self._ends(self._recent())
        if most[0] < 2 * few[0]:
            few, most = self._ends(self._samples)
        if most[0] < 2 * few[0]:
            return 0.0, most[1] / most[0]
        token = max(0.0, (most[1] - few[1]) / (most[0] - few[0]))
        return max(0.0, few[1] - token * few[0]), token

    @property
    def least_tokens(self) -> int:
        """Tokens that a step may have whatever the price: more if only old sizes give it."""
        recent = self._recent()
        if len(recent) == len(self._samples):
            return LEAST_TOKENS
        few, most = self._ends(recent)
        return LEAST_TOKENS if most[0] >= 2 * few[0] else max(LEAST_TOKENS, math.ceil(2 * most[0]))

    def _recent(self) -> list[int]:
        return [size for size, last in self._noted.items() if last > self._num_steps - RECENT_STEPS]

    def _ends(self, sizes: Collection[int]) -> tuple[tuple[float, float], tuple[float, float]]:
        """Return the tokens and the seconds of the smallest size, and of the largest."""
        return self._median(min(sizes)), self._median(max(sizes))

    def _median(self, size: int) -> tuple[float, float]:
        tokens, seconds = zip(*self._samples[size], strict=True)
        return median(tokens), median(seconds)


@dataclass(frozen=True, slots=True)
class StepPrompts:
    """Prompt tokens of a step, by tenant, with `PROMPT_TOKENS` for each prompt. num_scored: those of prompts whose
    log-probabilities are reported.
    """

    by_tenant: Mapping[str, int]
    num_scored: int = 0

    @classmethod
    def of(cls, plan: StepPlan, requests: Mapping[str, Request]) -> StepPrompts:
        """Count those of a plan. requests: by id; those that have ended belong to nobody."""
        by_tenant, num_scored = Counter[str](), 0
        for sequence in plan.sequences:
            if sequence.is_prompt:
                count = len(sequence.tokens) - sequence.drafts + PROMPT_TOKENS
                request = requests.get(sequence.request_id)
                by_tenant["" if request is None else request.fairness_key] += count
                num_scored += count * sequence.wants_prompt_logprobs
        return cls(by_tenant, num_scored)


NO_PROMPTS = StepPrompts({})


@dataclass(eq=False, slots=True)
class StepTarget:
    """Learns what steps cost, and bounds the prompt tokens of a step beside which another tenant decodes.

    A step takes the time of a decode step and that of its prompts; those whose log-probabilities are reported take
    longer. Times are those from a step's begin to the next one's: they are what a stream waits for. What is not known
    yet bounds nothing.

    The target is a mean: a step with prompts may take longer, so that prompts keep most of their rate. The time beyond
    the target is a debt of the tenants whose prompts it had, which later steps pay off. While a tenant has one and
    another tenant decodes, its prompts wait; those of tenants without a debt don't, so that a tenant with a few prompts
    does not wait for what a flood owes. Nor does its first token: in a step in which it begins a request, there are no
    prompts of tenants with a debt.

    target_seconds: None: `DECODE_STEPS` decode steps.
    """

    target_seconds: float | None
    began: float = 0.0
    """When the last step began."""

    has_plain_last: bool = False
    """True if the last step had no prompts, and the next one follows at once."""

    last: StepPrompts | None = None
    """The last step's, unless it was plain; None where its time tells nothing."""

    recent: dict[str, float] = field(default_factory=dict)
    """When tenants have decoded, of late."""

    debts: dict[str, float] = field(default_factory=dict)
    """Seconds that steps with a tenant's prompts have taken beyond the target, and that no other step has paid off."""

    decode_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_SAMPLES))
    """Of the latest steps without prompts."""

    _plain: PromptTimes = field(default_factory=PromptTimes)
    _scored: PromptTimes = field(default_factory=PromptTimes)

    def begin(self, prompts: StepPrompts, now: float) -> None:
        """Note that a step begins; the one before it has taken the time since it began, with all between the two."""
        before, began = NO_PROMPTS if self.has_plain_last else self.last, self.began
        self.has_plain_last, self.last, self.began = not prompts.by_tenant, prompts, now
        if before is None:
            return
        if before.by_tenant or not prompts.by_tenant:  # a plain step's time has the planning of the step after it
            self.note(before, now - began)
        self.settle(before, now - began)

    def settle(self, prompts: StepPrompts, seconds: float) -> None:
        """Add what a step took beyond the target to the debts of its tenants, by their tokens, or pay off some."""
        if not self.decode_seconds:
            return
        target, debts = self._target(), self.debts
        beyond, num_tokens = seconds - target, sum(prompts.by_tenant.values())
        if beyond > 0:
            for tenant, count in prompts.by_tenant.items():
                debts[tenant] = owed(debts.get(tenant, 0.0), beyond * count / num_tokens, target)
        elif debts:
            paid = -beyond / len(debts)
            self.debts = {tenant: debt - paid for tenant, debt in debts.items() if debt > paid}

    def _target(self) -> float:
        decode = median(self.decode_seconds)
        if self.target_seconds is None:
            return DECODE_STEPS * decode
        return max(self.target_seconds, LEAST_DECODE_STEPS * decode)

    def note(self, prompts: StepPrompts, seconds: float) -> None:
        """Learn from a step that took `seconds` until the next one began."""
        num_tokens, num_scored = sum(prompts.by_tenant.values()), prompts.num_scored
        if not num_tokens:
            self.decode_seconds.append(seconds)
        elif self.decode_seconds and not 0 < 2 * num_scored < num_tokens:
            times = self._scored if num_scored else self._plain
            times.note(num_tokens, max(0.0, seconds - median(self.decode_seconds)))

    def work_beside(
        self, decoding: Collection[str], prompts: Collection[str], waiting: Collection[str], now: float
    ) -> PromptWork | None:
        """Return the prompt work of a step; None if it is not bounded.

        decoding, prompts, waiting: tenants with a decoding request, with a prompt under way, with a waiting request.
        """
        if not self.decode_seconds:
            return None
        recent = self.recent = {tenant: at for tenant, at in self.recent.items() if at > now - RECENT_SECONDS}
        recent |= dict.fromkeys(decoding, now)
        held = self._held(decoding)
        if not any(_has_other(recent, tenants) for tenants in (prompts, waiting, held)):
            self.debts = {}
            return None
        any_seconds, token = self._plain.prices()
        scored_seconds, scored = self._scored.prices()
        least = median(self.decode_seconds) + max(any_seconds, scored_seconds)
        seconds = max(self._target() - least, EFFICIENT * least)
        least_tokens = self._plain.least_tokens, self._scored.least_tokens
        return PromptWork(seconds, token, max(0.0, scored - token), held, least_tokens, owing=self.debts.keys() - held)

    def without_held(self, requests: list[Request]) -> list[Request]:
        """Return the requests without the prompts of tenants that owe time to another one that decodes."""
        prompts, decoding = split_prompts(requests)
        held = self._held({each.fairness_key for each in decoding}) if prompts else ()
        if not held:
            return requests
        return [each for each in requests if num_missing(each) <= 1 or each.fairness_key not in held]

    def _held(self, decoding: Collection[str]) -> Set[str]:
        return {tenant for tenant in self.debts if _has_other(decoding, (tenant,))}


@dataclass(eq=False, slots=True)
class PromptWork:
    """Seconds that the prompts of a step may take. token, scored: of a token, and more if it is scored."""

    seconds: float
    token: float
    scored: float
    held: Set[str] = frozenset()
    """Tenants whose prompts are not in the step."""

    least_tokens: tuple[int, int] = (LEAST_TOKENS, LEAST_TOKENS)
    """Tokens of the step whatever they take, and if they are scored."""

    num_tokens: int = 0
    """Tokens that were taken."""

    owing: Set[str] = frozenset()
    """Further tenants with a debt, whose prompts are in the step unless one without a debt begins a request in it."""

    whole_seconds: float = field(init=False)
    """Seconds before any was taken."""

    def __post_init__(self) -> None:
        self.whole_seconds = self.seconds

    @property
    def room(self) -> int:
        """Tokens for which there is still time, if they are not scored."""
        left = self.least_tokens[False] - self.num_tokens
        return max(math.floor(self.seconds / self.token) - PROMPT_TOKENS, left) if self.token else _ANY

    def most(self, request: Request, count: int) -> int:
        """Return how many of `count` prompt tokens of a request the step may compute."""
        is_scored = _is_scored(request)
        price = self.token + self.scored * is_scored
        if not price:
            return count
        frees = not request.is_running and self.frees_step(request.fairness_key)
        seconds, num_taken = (self.whole_seconds, 0) if frees else (self.seconds, self.num_tokens)
        room = math.floor(seconds / price) - PROMPT_TOKENS
        return max(0, min(count, max(room, self.least_tokens[is_scored] - num_taken)))

    def frees_step(self, tenant: str) -> bool:
        """True if other tenants' prompts leave the step once this one begins a request in it, as they owe time: its
        first token waits for the whole step.
        """
        return bool(self.owing) and tenant not in self.owing and tenant not in self.held

    def free_step(self) -> None:
        """Hold the prompts of all tenants that owe time."""
        self.held, self.owing = self.held | self.owing, frozenset()
        self.seconds, self.num_tokens = self.whole_seconds, 0

    def take(self, request: Request, count: int) -> None:
        """Record that the step computes so many prompt tokens of a request."""
        self.seconds -= (count + PROMPT_TOKENS) * (self.token + self.scored * _is_scored(request))
        self.num_tokens += count


def _is_scored(request: Request) -> bool:
    return request.params.prompt_logprobs is not None and request.num_computed_tokens < request.num_prompt_tokens


def _has_other(tenants: Collection[str], others: Collection[str]) -> bool:
    """True if there is one of `others` next to another one of `tenants`."""
    if not tenants or not others:
        return False
    return len(tenants) > 1 or len(others) > 1 or next(iter(tenants)) != next(iter(others))
