"""Rows of embeddings and heads that an adapter has of its own, in whole copies or by trained tokens: PEFT's tokens."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from chorus.core.model.read_config import read_model_config
from chorus.graphs.runner import StepMode
from chorus.memory.files.error import AdapterFormatError
from chorus.memory.files.format import inspect_adapter
from chorus.memory.files.identity import with_content

from ...conftest import quiet
from ...greedy import MIN_MARGIN
from ...kept import KeptAnswers, kept_files
from ..conftest import moved
from ..merging.test_merged import merge
from ..tiny_families import save_family
from .model_module_forms import Alone

pytestmark = [pytest.mark.native, pytest.mark.wide]

TOKENS = [70, 3, 149, 22, 23, 24, 0, 101]

#: Arguments of `LoraConfig`, and which of the saved rows are trained: by module, as far as it has a whole copy.
FORMS = {
    "tokens": {"target_modules": ["q_proj"], "trainable_token_indices": TOKENS},
    "of each": {
        "target_modules": ["up_proj"],
        "trainable_token_indices": {"embed_tokens": TOKENS[:3], "lm_head": TOKENS[2:]},
    },
    "whole": {"target_modules": ["v_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
    "whole head": {"target_modules": ["v_proj"], "modules_to_save": ["lm_head"]},
    "whole embeddings": {"target_modules": ["v_proj"], "modules_to_save": ["embed_tokens"]},
    "with LoRA on the head": {
        "target_modules": ["q_proj", "lm_head"],
        "trainable_token_indices": {"embed_tokens": TOKENS},
    },
}


@quiet()
def save_rows(model, path, seed, **arguments):
    """Write an adapter with PEFT itself, with some rows of its own that differ from the base model's."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    config = LoraConfig(r=3, lora_alpha=6, init_lora_weights=False, task_type="CAUSAL_LM", **arguments)
    peft = get_peft_model(AutoModelForCausalLM.from_pretrained(model), config)
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if "trainable_tokens_delta" in name:
                parameter.add_(torch.randn_like(parameter))
            elif "modules_to_save" in name:
                parameter[TOKENS] += torch.randn(len(TOKENS), parameter.shape[1])
    peft.save_pretrained(path)


def save(family, root):
    save_family(family, root / "model", **({"vocab_size": 151} if family == "llama2" else {}))
    for seed, (name, arguments) in enumerate(FORMS.items()):
        save_rows(root / "model", root / name, seed, **arguments)


def make(family):
    root = kept_files(f"trained rows {family}", lambda root: save(family, root))
    return Alone(root / "model", {name: root / name for name in FORMS}, kept=KeptAnswers(root))


@pytest.fixture(scope="module", params=["llama2", "llama3", "gemma-2", "granite"])
def it(request):
    return make(request.param)


@pytest.fixture(scope="module")
def tied():
    return make("llama3")


def ask_all(it, driver, names=(None, *FORMS), times=2, tokens=8):
    """Prompts have many of the trained tokens."""
    want = {}
    for turn in range(times):
        for number, name in enumerate(names):
            generator = torch.Generator().manual_seed(100 * turn + number)
            margin = 0.0
            while margin < MIN_MARGIN:
                prompt = torch.randint(3, 150, (5 + 11 * turn,), generator=generator).tolist()
                prompt[::2] = [TOKENS[i % len(TOKENS)] for i in range(len(prompt[::2]))]
                answer, margin = it.greedy(name, prompt, tokens)
            want[f"{turn} {name}"] = answer
            driver.add(f"{turn} {name}", name, prompt, max_tokens=tokens)
    return want


def told(driver, want):
    answers = driver.drain()
    return {name: answers[name].tokens for name in want}


def manifest_of(it, name):
    return inspect_adapter(it.adapters[name], read_model_config(it.model).module_paths)


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_all_forms_in_one_batch(it, drive):
    driver = drive(it, max_num_seqs=8, max_num_batched_tokens=24)
    want = ask_all(it, driver)
    assert told(driver, want) == want


@pytest.mark.parametrize("kernels", ["native"])
def test_moved_to_another_engine(it, drive):
    """In the middle of prompts and of answers."""
    here, there = (drive(it, block_tokens=8, max_num_batched_tokens=12, max_num_seqs=8) for _ in range(2))
    want = ask_all(it, here, tokens=12)
    assert moved(here, there, want, steps=8) == want


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_two_ranks(it, drive):
    driver = drive(it, max_num_seqs=8, max_num_batched_tokens=24, tensor_parallel_size=2)
    want = ask_all(it, driver)
    assert told(driver, want) == want


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_merged(tied, drive):
    driver = drive(tied, max_num_seqs=8, max_num_batched_tokens=24)
    merge(driver, "tokens")
    want = ask_all(tied, driver)
    assert told(driver, want) == want
    assert {plan.mode for plan in driver.plans} == {StepMode.MERGED}


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_log_probabilities_are_of_the_adapters_rows(tied, drive):
    driver = drive(tied, max_num_seqs=8, max_num_batched_tokens=24)
    prompt = [5, *TOKENS, 9, *TOKENS]
    for name in FORMS:
        driver.add(name, name, prompt, max_tokens=4, logprobs=2, prompt_logprobs=1)
    for name, answer in driver.drain().items():
        with torch.inference_mode():
            every = tied.use(name)(torch.tensor([prompt + answer.tokens])).logits[0].log_softmax(-1)
        assert answer.prompt_logprobs is not None
        found = [entry.logprob for entry in (*answer.prompt_logprobs, *answer.logprobs)]
        want = [float(every[at, token]) for at, token in enumerate([*prompt[1:], *answer.tokens])]
        assert found == pytest.approx(want, abs=2e-4)


@pytest.mark.parametrize("kernels", ["native"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_preempted_requests_swap_and_go_on(tied, drive_crowded, ranks):
    driver = drive_crowded(tied, tensor_parallel_size=ranks)
    want = ask_all(tied, driver, tokens=60)
    assert told(driver, want) == want
    assert driver.engine.stats().num_swaps_out > 0


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_bfloat16_is_float32_within_rounding(tied, drive):
    scored = {}
    for dtype in ("bfloat16", "float32"):
        driver = drive(tied, dtype=dtype, max_num_seqs=8, max_num_batched_tokens=64)
        for number, name in enumerate((None, *FORMS)):
            prompt = torch.randint(3, 150, (40,), generator=torch.Generator().manual_seed(number)).tolist()
            prompt[::2] = (3 * TOKENS)[:20]
            driver.add(str(name), name, prompt, max_tokens=1, prompt_logprobs=0)
        scored[dtype] = {
            name: torch.tensor([entry.logprob for entry in answer.prompt_logprobs or ()])
            for name, answer in driver.drain().items()
        }
    for name, want in scored["float32"].items():
        error = (scored["bfloat16"][name] - want).norm() / want.norm()
        assert float(error) < 6e-2, (name, error)


def test_only_what_differs_is_kept(tied):
    parts = {name: [part for part in manifest_of(tied, name).parts if part.token_ids] for name in FORMS}
    rows = {name: {part.targets[0]: part.token_ids for part in of} for name, of in parts.items()}
    every = tuple(sorted(TOKENS))
    assert rows["tokens"] == {"embed_tokens_rows": every, "lm_head_rows": every}
    assert rows["of each"] == {
        "embed_tokens_rows": tuple(sorted(TOKENS[:3])),
        "lm_head_rows": tuple(sorted(TOKENS[2:])),
    }
    assert rows["whole"] == {"embed_tokens_rows": every, "lm_head_rows": every}
    assert rows["whole head"] == {"lm_head_rows": every}
    assert rows["whole embeddings"] == {"embed_tokens_rows": every}


def test_the_content_is_of_the_rows(tied, tmp_path):
    found = with_content(manifest_of(tied, "tokens"))
    assert found.no_effect is False
    path = tmp_path / "other"
    shutil.copytree(tied.adapters["tokens"], path)
    tensors = load_file(path / "adapter_model.safetensors")
    name = next(name for name in tensors if name.endswith("trainable_tokens_delta"))
    tensors[name][2, 5] += 1
    save_file(tensors, path / "adapter_model.safetensors")
    other = inspect_adapter(path, read_model_config(tied.model).module_paths)
    assert with_content(other).content_hash != found.content_hash


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1, 1], "different tokens"),
        ({"score": [1]}, "not of 'score'"),
        ([1, 2, 3], r"shape \[8, 64\], \[3, 64\] is needed"),
        (["a"], "token ids"),
        (7, "a list of token ids, or an object"),
        (None, "names no tokens of embed_tokens"),
        ({"lm_head": TOKENS}, "names no tokens of embed_tokens"),
    ],
)
def test_refusals(tied, tmp_path, value, message):
    path = tmp_path / "bad"
    shutil.copytree(tied.adapters["tokens"], path)
    config = json.loads((path / "adapter_config.json").read_text())
    config["trainable_token_indices"] = value
    (path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(AdapterFormatError, match=message):
        inspect_adapter(path, read_model_config(tied.model).module_paths)


@pytest.mark.parametrize("name", ["tokens", "whole embeddings"])
def test_rows_of_embeddings_that_are_normalised_are_refused(tied, name):
    paths = replace(read_model_config(tied.model).module_paths, norms_embeddings=True)
    with pytest.raises(AdapterFormatError, match="normalises its embeddings"):
        inspect_adapter(tied.adapters[name], paths)
