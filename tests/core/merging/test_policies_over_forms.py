"""Every form of adapter on every group of projections under every mode policy, in an arena too small for all of them:
tokens are those of steps that merge nothing.
"""

from __future__ import annotations

import math
import random
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from chorus.core.merging.mode_policy import Batch, work_of
from chorus.core.merging.modes import mode_policy
from chorus.core.model.read_config import read_model_config
from chorus.core.policies import Policies
from chorus.core.requests.types import CannotMerge
from chorus.graphs.runner import StepMode
from chorus.memory.adapters.adapter import Adapter
from chorus.memory.files.error import AdapterFormatError

from ...conftest import quiet
from ...kept import kept_files
from ..conftest import Answer, Driver, ticking
from ..quantised.test_forms_by_group import FORMS, INVOCATION, Subject, base_of, groups_of, model_of, subject_of
from ..tiny_families import train_vectors, without_conversion

pytestmark = [pytest.mark.native(needed=False), pytest.mark.wide]

FAMILIES = ("llama-biased", "deepseek-v3", "kimi-linear", "qwen3.5", "nemotron-h", "gemma-3n")
POLICIES = ("dlora-1", "dlora-2", "dlora-3", "dlora-artifact", "fastest")

ROWS = [20, 3, 31, 14]

#: Forms of one adapter on all groups: name → further arguments of `LoraConfig`.
WHOLE: dict[str, dict[str, Any]] = {
    "bias-all": {"bias": "all"},
    "dora-bias-all": {"use_dora": True, "bias": "all"},
    "rslora-dora": {"use_rslora": True, "use_dora": True},
    "saved": {"modules_to_save": ["embed_tokens", "embeddings", "lm_head"]},
    "tokens": {"trainable_token_indices": ROWS},
    "embed-and-head": {},
    "experts": {"target_parameters": ["experts.gate_up_proj", "experts.down_proj", "gate.weight"]},
}

#: Largest difference of a log-probability, and the least lead of a token that must be the same.
NEAR, CLEAR = 0.03, 0.06

#: Sequences of a step; requests of a burst's adapter, which are more, so that Algorithm 1 of dLoRA merges it; tokens.
ROOM, OWN, TOKENS = 4, 5, 5

#: Policies whose thresholds rise where adapters are mixed, so that they merge few.
HESITANT = ("dlora-2", "dlora-3")

REASONS = (
    "parts of a mixture of experts, of inputs of layers, of norms' gates or beside a mixer",
    "times as large, but rounding allows",
    "there is no room for them beside what is in use",
)


@pytest.fixture
def kernels() -> str:
    return "auto"


@pytest.fixture
def subject(family: str) -> Subject:
    """Names are forms and groups."""
    adapters = {f"{form} {group}": path for form in FORMS for group, path in subject_of(family, form).adapters.items()}
    root = kept_files(f"whole forms {family}", lambda root: save_whole(family, root))
    return Subject(model_of(family), {**adapters, **{form: root / form for form in WHOLE if (root / form).is_dir()}})


@quiet()
@without_conversion()
def save_whole(family: str, root: Path) -> None:
    from peft import LoraConfig, get_peft_model

    table = read_model_config(model_of(family)).projections
    merged = {each for layer in range(table.num_layers) for each in table.merged(layer)}
    paths = [path for group, paths in groups_of(family).items() if group in merged for path in paths]
    for seed, (form, arguments) in enumerate(WHOLE.items()):
        base = base_of(model_of(family))
        torch.manual_seed(seed)
        modules = [name.rpartition(".")[2] for name, _ in base.named_modules()]
        parameters = [name for name, _ in base.named_parameters()]
        arguments = dict(arguments)
        for field, there in (("modules_to_save", modules), ("target_parameters", parameters)):
            if wanted := arguments.pop(field, None):
                arguments[field] = [each for each in wanted if any(f".{name}".endswith(f".{each}") for name in there)]
        if arguments.get("target_parameters") == []:
            continue
        of_model = [name for name in ("embed_tokens", "embeddings", "lm_head") if name in modules]
        targets = [*paths, *of_model] if form == "embed-and-head" else paths
        lora = LoraConfig(
            r=3, lora_alpha=5, target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM", **arguments
        )
        model = get_peft_model(base, lora)
        train_vectors(model)
        train_rows(model)
        model.save_pretrained(root / form)


def train_rows(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "trainable_tokens_delta" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
            elif "modules_to_save" in name and parameter.dim() == 2:
                parameter[ROWS] += 0.3 * torch.randn(len(ROWS), parameter.shape[1])


class Prices:
    """Prices of a device on which every row of LoRA costs as much as a step, so that merging always pays."""

    def step_seconds(self, batch: Batch, merged: Adapter | None, context: float) -> float:
        work = work_of(batch, merged)
        return 1.0 + work.users + 0.01 * work.rows

    def merge_seconds(self, adapter: Adapter) -> float:
        return 0.5

    def observe(self, batch: Batch, merged: Adapter | None, context: float, seconds: float) -> None: ...

    def observe_merge(self, adapter: Adapter, seconds: float) -> None: ...


@dataclass(frozen=True)
class Asked:
    adapter: str | None
    prompt: list[int]


def bursts(names: list[str], seed: int) -> list[list[Asked]]:
    """Requests of one adapter after another, each burst with some of another adapter and of the base model."""
    rng, found = random.Random(seed), []
    for name in rng.sample(names, len(names)):
        used = [*[name] * OWN, rng.choice(names), None]
        found.append([Asked(each, prompt_of(rng)) for each in used])
    return found


def prompt_of(rng: random.Random) -> list[int]:
    tokens = [rng.randrange(12, 150) for _ in range(rng.randint(4, 14))]
    return [*tokens[:3], *INVOCATION, *tokens[3:]]


def answered(driver: Driver, asked: list[list[Asked]]) -> list[list[Answer]]:
    """Answers to bursts, of which the next begins while the last requests of the one before still run."""
    answers = []
    for number, burst in enumerate(asked):
        names = [f"{number}/{index}" for index in range(len(burst))]
        for name, each in zip(names, burst, strict=True):
            driver.add(name, each.adapter, each.prompt, max_tokens=TOKENS, logprobs=2)
        while sum(driver.answers[name].finish_reason is None for name in names) > 3:
            driver.step()
        answers.append([driver.answers[name] for name in names])
    driver.drain()
    return answers


def check_same(asked: Asked, found: Answer, want: Answer) -> None:
    """The same tokens with near log-probabilities, up to a token whose lead is not clear."""
    assert found.error is None, f"{asked.adapter}: {found.error}"
    for token, other, one, two in zip(want.tokens, found.tokens, want.logprobs, found.logprobs, strict=True):
        best = [each for each in one.top if each[0] != token]
        lead = one.logprob - max((each[1] for each in best), default=-math.inf)
        if lead < CLEAR:
            return
        assert token == other, asked.adapter
        assert abs(one.logprob - two.logprob) < NEAR, asked.adapter


def register(driver: Driver, it: Subject) -> list[str]:
    """The adapters that are served."""
    names = []
    for name, path in it.adapters.items():
        with suppress(AdapterFormatError):
            driver.engine.store.register(name, path)
            names.append(name)
    return names


def pages_of(driver: Driver, names: list[str]) -> int:
    """For the merged weights of any adapter, some adapters, and the requests of half a step."""
    store, needs = driver.engine.store, [0]
    for name in names:
        driver.run(f"load {name}", name, [3], max_tokens=1)
        adapter = store.get(name)
        if not adapter.manifest.unmerged_targets:
            needs.append(sum(driver.executor.shadow.sizes(adapter)))
    largest = max(adapter.num_pages for _, adapter in store.registered())
    return max(needs) + 2 * largest + driver.executor.layout.pages_for_tokens(32, chunk=64)


@pytest.mark.usefixtures("crowded")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_steps_that_merge_nothing(drive, subject, policy):
    limits = {"adapters": {}, "max_num_seqs": ROOM, "block_tokens": 8, "max_num_batched_tokens": 64}
    limits |= {"max_model_len": 64, "preemption": "swap", "prefix_cache": False}
    plain = drive(subject, **limits, memory_bytes=32 << 20)
    names = register(plain, subject)
    num_pages = pages_of(plain, names)
    asked = bursts(names, seed=POLICIES.index(policy))
    want = answered(plain, asked)
    assert {plan.merged for plan in plain.plans} == {None}

    chosen = Policies(mode=mode_policy(policy, Prices()))
    driver = drive(
        subject,
        **limits,
        num_pages=num_pages,
        policies=chosen,
        clock=ticking(1.0),
        max_turn_seconds=1e9,
        max_turn_steps=10**9,
    )
    assert register(driver, subject) == names
    found = answered(driver, asked)
    for burst, ours, theirs in zip(asked, found, want, strict=True):
        for each, one, other in zip(burst, ours, theirs, strict=True):
            check_same(each, one, other)
    merged = {plan.merged.name for plan in driver.plans if plan.merged is not None}
    assert {plan.mode for plan in driver.plans} >= {StepMode.MERGED, StepMode.LORA}
    assert driver.engine.stats().num_adapter_evictions > len(names) // 5, "there is room for all"
    mergeable = [name for name in names if not driver.engine.store.get(name).manifest.unmerged_targets]
    assert merged <= {*mergeable}
    assert len(merged) > (0 if policy in HESITANT else len(mergeable) // 2)
    reasons = {name: why_not(driver, name) for name in set(names) - merged}
    assert [f"{name}: {why}" for name, why in reasons.items() if why and not any(each in why for each in REASONS)] == []


def why_not(driver: Driver, name: str) -> str | None:
    """Why an adapter can't be merged; None if it can."""
    driver.run(f"load {name}", name, [3], max_tokens=1)
    driver.engine.unmerge()
    with suppress(CannotMerge):
        driver.engine.merge(name)
    driver.run(f"beside {name}", None, [3], max_tokens=8)
    try:
        driver.engine.merge(name)
    except CannotMerge as error:
        return None if "not resident" in str(error) else str(error)
    return None
