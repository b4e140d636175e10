"""Adapters on experts' parameters as PEFT before 0.19 saved them, with A and B swapped."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from chorus.core.model.read_config import read_model_config
from chorus.memory.files.adapter_weights import are_swapped
from chorus.memory.files.error import AdapterFormatError
from chorus.memory.files.format import inspect_adapter
from chorus.memory.files.identity import with_content
from chorus.memory.files.module_paths import StackedSides

from ...conftest import quiet
from ...kept import kept_files
from ..tiny_families import load_peft, save_family, without_conversion
from ..tiny_mixtures import Mixture

pytestmark = pytest.mark.native(needed=False)

RANK, ALPHA = 2, 6
BOTH, UP = ("gate_up_proj", "down_proj"), ("gate_up_proj",)
UNGATED = ("up_proj", "down_proj")

#: Family, changes to its configuration, the parameters that are trained, and whether their shapes fit both layouts.
CASES = {
    "nemotron-3": ("nemotron-3", {}, UNGATED, True),
    "nemotron-3-up": ("nemotron-3", {}, ("up_proj",), True),
    "half-width-up": ("olmoe", {"intermediate_size": 32}, UP, True),
    "half-width": ("olmoe", {"intermediate_size": 32}, BOTH, False),
    "square-down": ("olmoe", {"intermediate_size": 64}, ("down_proj",), True),
    "olmoe": ("olmoe", {}, BOTH, False),
    "granite-moe": ("granite-moe", {}, BOTH, False),
    "minimax-m2": ("minimax-m2", {"intermediate_size": 32}, UP, True),
    "gpt-oss": ("gpt-oss", {}, BOTH, False),
    "gpt-oss-half-width": ("gpt-oss", {"intermediate_size": 32}, UP, False),
    "llama-4": ("llama-4", {}, BOTH, False),
    "llama-4-half-width": ("llama-4", {"intermediate_size": 32}, UP, True),
}
every_case = pytest.mark.parametrize("case", CASES)


@pytest.fixture
def kernels() -> str:
    return "auto"


def model_of(case: str) -> Path:
    family, changes, *_ = CASES[case]
    name = f"older experts {family} {changes}"
    return kept_files(name, lambda root: save_family(family, root / "model", **changes)) / "model"


def random_prompt() -> list[int]:
    return torch.randint(3, 150, (40,), generator=torch.Generator().manual_seed(3)).tolist()


@quiet()
def scores_of(model: Any, prompt: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        found = model(torch.tensor([prompt]), use_cache=False).logits[0, :-1].log_softmax(-1)
    return found.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]


@quiet()
def save_old(model: Path, path: Path, parameters: Collection[str], **fields: Any) -> Any:
    """Write an adapter as PEFT 0.18 does for parameters `[experts, d1, d2]`: A `[experts · rank, d1]` and
    B `[d2, rank · experts]`. Return the base model with it in its weights.
    """
    from transformers import AutoModelForCausalLM

    trained: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    generator, tensors = torch.Generator().manual_seed(7), {}
    of_module = defaultdict(list)
    for name, parameter in trained.named_parameters():
        module, _, own = name.rpartition(".")
        if own in parameters and module.endswith("experts") and parameter.ndim == 3:
            of_module[module].append(parameter)
    for module, own in of_module.items():
        for depth, parameter in enumerate(reversed(own)):  # PEFT wraps a module once for each of its parameters
            experts, first, second = parameter.shape
            a = 0.4 * torch.randn(experts * RANK, first, generator=generator)
            b = 0.4 * torch.randn(second, RANK * experts, generator=generator)
            at = f"base_model.model.{module}{'.base_layer' * depth}"
            tensors[f"{at}.lora_A.weight"], tensors[f"{at}.lora_B.weight"] = a, b
            of_b, of_a = b.view(second, RANK, experts), a.view(experts, RANK, first)
            with torch.no_grad():
                parameter += ALPHA / RANK * torch.einsum("sre,erf->efs", of_b, of_a)
    path.mkdir(parents=True)
    save_file(tensors, path / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": ALPHA,
        "target_modules": [],
        "target_parameters": [f"experts.{each}" for each in parameters],
        "peft_version": "0.18.1",
        **fields,
    }
    (path / "adapter_config.json").write_text(json.dumps(config))
    return trained.eval()


def change_version(path: Path, version: str | None) -> None:
    file = path / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "peft_version": version}))


def check(drive, case: str, path: Path, want: torch.Tensor) -> None:
    it, prompt = Mixture(model_of(case), {}, load_peft), random_prompt()
    driver = drive(it, adapters={"it": path}, max_num_seqs=2, max_num_batched_tokens=64)
    answer = driver.run("one", "it", prompt, max_tokens=1, prompt_logprobs=1)
    assert answer.prompt_logprobs is not None, answer.error
    torch.testing.assert_close(torch.tensor([each.logprob for each in answer.prompt_logprobs]), want, rtol=0, atol=5e-3)
    with_content(driver.engine.store.get("it").manifest)  # as it is read again


@every_case
def test_an_old_file_changes_the_weights_as_peft_changed_them(drive, tmp_path, case):
    _, _, parameters, _ = CASES[case]
    want = scores_of(save_old(model_of(case), tmp_path / "old", parameters), random_prompt())
    check(drive, case, tmp_path / "old", want)


@every_case
def test_a_file_of_today_is_read_as_peft_reads_it(drive, tmp_path, case):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    _, _, parameters, _ = CASES[case]
    with quiet(), without_conversion():
        torch.manual_seed(1)
        names = [f"experts.{each}" for each in parameters]
        config = LoraConfig(
            r=RANK, lora_alpha=ALPHA, target_modules=[], target_parameters=names, init_lora_weights=False
        )
        get_peft_model(AutoModelForCausalLM.from_pretrained(model_of(case)), config).save_pretrained(tmp_path / "new")
    want = scores_of(load_peft(model_of(case), {"new": tmp_path / "new"}), random_prompt())
    check(drive, case, tmp_path / "new", want)


@pytest.mark.parametrize("version", [None, "0.18.1.dev0@0123456", "0.19.0.dev0", "tomorrow"])
@every_case
def test_without_a_version_shapes_tell_or_it_is_refused(tmp_path, case, version):
    _, _, parameters, fits_both = CASES[case]
    save_old(model_of(case), tmp_path / "old", parameters)
    modules = read_model_config(model_of(case)).module_paths
    known = with_content(inspect_adapter(tmp_path / "old", modules))
    change_version(tmp_path / "old", version)
    if fits_both:
        with pytest.raises(AdapterFormatError, match=r"peft_version .*does not tell which; .*set peft_version to"):
            inspect_adapter(tmp_path / "old", modules)
    else:
        assert with_content(inspect_adapter(tmp_path / "old", modules)).content_hash == known.content_hash


@pytest.mark.parametrize(
    ("version", "before", "since"),
    [
        ("0.17.0", True, False),
        ("0.17.2.dev0@abc", True, False),
        ("0.18.1", True, False),
        ("0.18.1.dev0@abc", None, None),
        ("0.19.0", False, True),
        ("0.19.0.dev0", None, None),
        ("0.20.1.dev0", False, True),
        ("1.0", False, True),
        ("", None, None),
        (None, None, None),
    ],
)
def test_versions(version, before, since):
    assert are_swapped(StackedSides.BEFORE, version) is before
    assert are_swapped(StackedSides.SINCE, version) is since
    assert are_swapped(StackedSides.NEVER, version) is False
    of_transformers = None if before else before
    assert are_swapped(StackedSides.BY_TRANSFORMERS, version) is of_transformers
