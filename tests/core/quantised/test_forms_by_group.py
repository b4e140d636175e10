"""Each form of an adapter on each group of projections gives the log-probabilities of transformers + peft."""

from __future__ import annotations

import random
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache, lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from chorus.core.model.read_config import read_model_config
from chorus.graphs.runner import StepMode
from chorus.memory.files.error import AdapterFormatError
from chorus.memory.pages.projections import Role

from ...conftest import quiet
from ...kept import KeptAnswers, kept_files
from ..conftest import Driver
from ..merging.test_merged import merge
from ..model.program import golden
from ..tiny_families import NO_OUT_PROJ, load_peft, save_family, train_vectors, without_conversion

pytestmark = [pytest.mark.native(needed=False), pytest.mark.wide]

#: Together they have every group.
FAMILIES = (
    *("llama-biased", "deepseek-v3", "kimi-linear", "falcon-h1", "gemma-3n", "qwen3.5-moe", "falcon-mamba"),
    *("ax-k2", "zamba-2", "zaya", "qwen4-exp"),
)

INVOCATION = [7, 9]

#: name → arguments of `LoraConfig`.
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "lora-bias": {"lora_bias": True},
    "alora": {"alora_invocation_tokens": INVOCATION},
    "alora-lora-bias": {"alora_invocation_tokens": INVOCATION, "lora_bias": True},
    "lora-only": {"bias": "lora_only"},
}

#: Of the whole model, with tests of their own in `test_model_modules.py`; routed experts, which are parameters of
#: all of them: see `test_expert_adapters.py`; and out_proj beside attention, on which PEFT puts no LoRA.
ELSEWHERE = {
    Role.EMBEDDING,
    Role.HEAD,
    Role.EMBEDDING_ROWS,
    Role.HEAD_ROWS,
    Role.ROUTER,
    Role.EXPERT_GATE_UP,
    Role.EXPERT_DOWN,
    "mixer_out",
}

SHARED = (Role.SHARED_GATE_UP, Role.SHARED_DOWN, Role.SHARED_GATE)
WITH_VECTORS = ("dora", "lora-bias", "alora-lora-bias")

#: (form, group) → why it is refused.
REFUSED: dict[tuple[str, str], str] = {
    **dict.fromkeys(product(WITH_VECTORS, SHARED), "a part of a mixture of experts, where plain LoRA alone is served"),
    **dict.fromkeys(product(WITH_VECTORS, [Role.PER_LAYER]), "on a module other than a projection of a layer"),
    **dict.fromkeys(product(["alora", "alora-lora-bias"], [Role.KV_UP]), "which makes keys and values of the tokens"),
}

#: Largest difference of a log-probability: transformers' own is 0.005 of the same in float64 on `qwen3.5-moe`.
NEAR = 0.03


def is_computed_by_peft(family: str, form: str, group: str) -> bool:
    """False where PEFT's forward pass raises an error."""
    return not (family in ("qwen3.5-moe", "qwen4-exp") and form == "alora" and group in SHARED)


@pytest.fixture
def kernels() -> str:
    return "auto"


@dataclass(frozen=True)
class Subject:
    """A model, and an adapter of a form on each of its groups."""

    model: Path
    adapters: dict[str, Path]
    kept: KeptAnswers = field(default_factory=KeptAnswers)


@cache
def groups_of(family: str) -> dict[str, tuple[str, ...]]:
    """The ends of the modules' names of each of a family's groups."""
    modules = read_model_config(model_of(family)).module_paths
    found: dict[str, dict[str, None]] = {}
    for layer in range(modules.projections.num_layers):
        for path, names in modules.in_layer(layer).items():
            is_refused = path.endswith("out_proj") and family.startswith(NO_OUT_PROJ)
            is_refused = is_refused or path.endswith("v_proj_delayed")  # with a bias: see test_convolved_heads.py
            if is_refused or modules.projections[names[0]].is_bypassed:
                continue
            found.setdefault(modules.projections[names[0]].product, {})[modules.name_in(layer, path)] = None
    for projection in modules.projections.model:
        found.setdefault(projection.product, {})[projection.path] = None
    return {group: tuple(paths) for group, paths in found.items() if group not in ELSEWHERE}


def model_of(family: str) -> Path:
    return kept_files(f"group forms {family}", lambda root: save_family(family, root / "model")) / "model"


def base_of(model: Path) -> Any:
    """The model in transformers, for peft to change. It is read once for all forms of a family."""
    return deepcopy(_read(model))


@lru_cache(1)
def _read(model: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model)


def subject_of(family: str, form: str) -> Subject:
    groups = [group for group in groups_of(family) if is_computed_by_peft(family, form, group)]

    def write(root: Path) -> None:
        for group in groups:
            save_form(family, groups_of(family)[group], root / _name(group), form)

    root = kept_files(f"group forms {family} {form}", write)
    return Subject(model_of(family), {_name(group): root / _name(group) for group in groups}, KeptAnswers(root))


def _name(group: str) -> str:
    """An adapter's: PEFT takes none with a dot."""
    return group.replace(".", "-")


@quiet()
@without_conversion()
def save_form(family: str, paths: tuple[str, ...], path: Path, form: str) -> None:
    from peft import LoraConfig, get_peft_model

    base = base_of(model_of(family))
    torch.manual_seed(5)
    lora = LoraConfig(
        r=3, lora_alpha=5, target_modules=[*paths], init_lora_weights=False, task_type="CAUSAL_LM", **FORMS[form]
    )
    model = get_peft_model(base, lora)
    train_vectors(model)
    model.save_pretrained(path)


def expected(it: Subject, name: str | None, prompt: list[int]) -> torch.Tensor:
    """PEFT's log-probability of each token of a prompt but the first."""

    def compute() -> list[list[float]]:
        model = load_peft(it.model, {} if name is None else {name: it.adapters[name]})
        with quiet(), torch.inference_mode():
            scores = model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0, :-1].log_softmax(-1)
        return [scores.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0].tolist()]

    return torch.tensor(it.kept.get([name, prompt, "log-probabilities"], compute)[0])


def found(driver: Driver, name: str | None, prompt: list[int]) -> torch.Tensor:
    answer = driver.run(f"{name} {len(driver.answers)}", name, prompt, max_tokens=2, prompt_logprobs=1)
    assert answer.prompt_logprobs is not None, answer.error
    return torch.tensor([each.logprob for each in answer.prompt_logprobs])


def prompt_of(name: str) -> list[int]:
    """Tokens with the invocation of activated LoRA among them."""
    rng = random.Random(name)
    tokens = [rng.randrange(12, 150) for _ in range(40)]
    return tokens[:13] + INVOCATION + tokens[13:]


def register(driver: Driver, it: Subject, form: str) -> list[str]:
    """The adapters that are served; of the others the reason is right."""
    names = []
    for name, path in it.adapters.items():
        why = REFUSED.get((form, name.replace("-", ".")))
        with pytest.raises(AdapterFormatError, match=why) if why else nullcontext():
            driver.engine.store.register(name, path)
        if why is None:
            names.append(name)
    return names


def check_near(found: torch.Tensor, want: torch.Tensor, name: str) -> None:
    """Compare all tokens but one: two of its experts may be as good as each other, so that rounding chooses."""
    *others, _ = (found - want).abs().sort().values.tolist()
    assert max(others) < NEAR, name


def test_the_families_have_every_group():
    configs = kept_files("configurations of geometries", quiet()(golden.make_configs))
    every = {each.product for path in configs.iterdir() for each in golden.model_of(path).projections}
    assert {group for family in FAMILIES for group in groups_of(family)} == every - ELSEWHERE


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", FAMILIES)
def test_each_form_on_each_group(drive, family, form):
    """Of prompts in small chunks and in one, and with each adapter in the weights, beside the base model."""
    it = subject_of(family, form)
    limits = {"adapters": {}, "max_num_seqs": 4, "max_model_len": 128, "prefix_cache": False}
    drivers = [drive(it, max_num_batched_tokens=chunk, **limits) for chunk in (7, 64)]
    served = [register(driver, it, form) for driver in drivers]
    assert served[0]
    for name in served[0]:
        prompt = prompt_of(name)
        base, want = expected(it, None, prompt), expected(it, name, prompt)
        assert float((base - want).abs().max()) > 2 * NEAR, f"{name} changes nothing"
        for driver in drivers:
            check_near(found(driver, name, prompt), want, name)
        if not driver.engine.store.get(name).manifest.unmerged_targets:
            merge(driver, name)
            driver.plans.clear()
            check_near(found(driver, name, prompt), want, name)
            check_near(found(driver, None, prompt), base, name)
            assert {plan.mode for plan in driver.plans} == {StepMode.MERGED}
            driver.engine.unmerge()
