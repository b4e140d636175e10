"""Tokens that adapters add to the base model's vocabulary: PEFT's tokens, and nothing of them for other adapters."""

from __future__ import annotations

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from chorus.core.model.program.native_decoder import NativeDecoderModel
from chorus.core.model.read_config import read_model_config
from chorus.core.requests.grammar import Grammar
from chorus.core.requests.request_params import InvalidRequest
from chorus.graphs.runner import StepMode
from chorus.memory.files.error import AdapterFormatError
from chorus.memory.files.format import inspect_adapter
from chorus.ops.lora.trained_rows import TrainedRows
from chorus.ops.sampling.sampling import RowSamplingParams, sample, uniform

from ...conftest import quiet
from ...greedy import MIN_MARGIN
from ...kept import KeptAnswers, kept_files
from ...tiny_tokenizer import save_tokenizer
from ..conftest import moved
from ..merging.test_merged import merge
from ..tiny_families import save_family
from .model_module_forms import Alone, save_form

pytestmark = [pytest.mark.native, pytest.mark.wide]

VOCAB = 150

#: Arguments of `LoraConfig`, and rows of the resized vocabulary.
FORMS = {
    "whole": (153, {"target_modules": ["v_proj"], "modules_to_save": ["embed_tokens", "lm_head"]}),
    "by itself": (155, {"target_modules": ["q_proj"]}),
    "head": (153, {"target_modules": ["up_proj"], "modules_to_save": ["lm_head"]}),
    "tokens": (153, {"target_modules": ["q_proj"], "trainable_token_indices": [3, 150, 151, 152]}),
    "of each": (
        152,
        {
            "target_modules": ["up_proj"],
            "trainable_token_indices": {"embed_tokens": [151, 7, 150], "lm_head": [150, 151]},
        },
    ),
}


@quiet()
def resized(model, rows):
    """The base model with so many tokens; the added ones are likely, as if they were trained."""
    from transformers import AutoModelForCausalLM

    found = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    vocab = found.config.vocab_size
    found.resize_token_embeddings(rows)
    generator = torch.Generator().manual_seed(rows)
    for module in (found.get_input_embeddings(), found.get_output_embeddings()):
        with torch.no_grad():
            weight: torch.Tensor = module.weight
            values = torch.randn(rows - vocab, weight.shape[1], generator=generator)
            weight[vocab:] = 2 * weight[:vocab].std() * values
    return found


@quiet()
def save_added(model, path, seed, rows, **arguments):
    """Write an adapter over the resized model with PEFT itself."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    config = LoraConfig(r=3, lora_alpha=6, init_lora_weights=False, task_type="CAUSAL_LM", **arguments)
    peft = get_peft_model(resized(model, rows), config)
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if "trainable_tokens_delta" in name:
                parameter.add_(0.02 * torch.randn_like(parameter))
            elif "modules_to_save" in name:
                parameter[[5, 9]] += 0.02 * torch.randn(2, parameter.shape[1])
    peft.save_pretrained(path)


class Resized(Alone):
    """Adapters that PEFT loads into models of more tokens."""

    def use(self, adapter):
        from peft import PeftModel

        if adapter in FORMS and adapter not in self.alone:
            with quiet():
                base = resized(self.model, FORMS[adapter][0])
                self.alone[adapter] = PeftModel.from_pretrained(base, self.adapters[adapter]).eval()
        return super().use(adapter)


def save(family, root):
    save_family(family, root / "model", vocab_size=VOCAB)
    for seed, (name, (rows, arguments)) in enumerate(FORMS.items()):
        save_added(root / "model", root / name, seed, rows, **arguments)
    save_form(root / "model", root / "plain", 9, r=4, lora_alpha=6, target_modules=["q_proj", "lm_head"])


def make(family):
    root = kept_files(f"added tokens {family}", lambda root: save(family, root))
    return Resized(root / "model", {name: root / name for name in (*FORMS, "plain")}, kept=KeptAnswers(root))


@pytest.fixture(scope="module", params=["llama2", "llama3", "gemma-2", "granite"])
def it(request):
    return make(request.param)


@pytest.fixture(scope="module")
def tied():
    return make("llama3")


def prompt_of(name, length, generator):
    """Half of it are tokens that the adapter adds."""
    prompt = torch.randint(3, VOCAB, (length,), generator=generator).tolist()
    if name in FORMS:
        prompt[::2] = torch.randint(VOCAB, FORMS[name][0], (len(prompt[::2]),), generator=generator).tolist()
    return prompt


def ask_all(it, driver, names=(None, *FORMS, "plain"), times=2, tokens=8, **params):
    want = {}
    for turn in range(times):
        for number, name in enumerate(names):
            generator = torch.Generator().manual_seed(100 * turn + number)
            margin = 0.0
            while margin < MIN_MARGIN:
                prompt = prompt_of(name, 5 + 11 * turn, generator)
                answer, margin = it.greedy(name, prompt, tokens)
            want[f"{turn} {name}"] = answer
            driver.add(f"{turn} {name}", name, prompt, max_tokens=tokens, **params)
    return want


def told(driver, want):
    answers = driver.drain()
    assert not {name: answer.error for name, answer in answers.items() if answer.error}
    return {name: answers[name].tokens for name in want}


def manifest_of(it, name):
    return inspect_adapter(it.adapters[name], read_model_config(it.model).module_paths)


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_all_forms_in_one_batch(it, drive):
    driver = drive(it, max_num_seqs=8, max_num_batched_tokens=24)
    want = ask_all(it, driver)
    assert told(driver, want) == want
    added = [token for tokens in want.values() for token in tokens if token >= VOCAB]
    assert added, "no answer has an added token"
    assert max(want["0 None"]) < VOCAB > max(want["0 plain"])


@pytest.mark.parametrize("kernels", ["native"])
@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}], ids=["greedy", "sampled"])
def test_the_native_head_chooses_among_them(tied, drive, monkeypatch, params):
    """No logits of the model are copied for them, and PyTorch computes none."""
    monkeypatch.setattr(TrainedRows, "added_logits", None)
    kept = []
    keep_logits = NativeDecoderModel.keep_logits

    def recorded(self, rows, *of):
        kept.append(list(rows))
        keep_logits(self, rows, *of)

    monkeypatch.setattr(NativeDecoderModel, "keep_logits", recorded)
    driver = drive(tied, max_num_seqs=8, tensor_parallel_size=1)  # ranks sample on the host
    for name in (None, *FORMS, "plain"):
        prompt = prompt_of(name, 9, torch.Generator().manual_seed(8))
        driver.add(str(name), name, prompt, max_tokens=12, seed=7, **params)
    found = driver.drain()
    assert not {name: answer.error for name, answer in found.items() if answer.error}
    assert max(max(answer.tokens) for answer in found.values()) >= VOCAB
    assert kept and not any(kept)


@pytest.mark.parametrize("kernels", ["native"])
def test_moved_to_another_engine(tied, drive):
    """In the middle of prompts and of answers."""
    here, there = (drive(tied, block_tokens=8, max_num_batched_tokens=12, max_num_seqs=8) for _ in range(2))
    want = ask_all(tied, here, tokens=12)
    assert moved(here, there, want, steps=8) == want


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_two_ranks(tied, drive):
    driver = drive(tied, max_num_seqs=8, max_num_batched_tokens=24, tensor_parallel_size=2)
    want = ask_all(tied, driver)
    assert told(driver, want) == want


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_merged(tied, drive):
    driver = drive(tied, max_num_seqs=8, max_num_batched_tokens=24)
    merge(driver, "tokens")
    want = ask_all(tied, driver)
    assert told(driver, want) == want
    assert {plan.mode for plan in driver.plans} == {StepMode.MERGED}


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_drafts(tied, drive):
    driver = drive(tied, max_num_seqs=8, max_num_batched_tokens=64, speculation="ngram")
    want = ask_all(tied, driver, tokens=24)
    assert told(driver, want) == want
    assert any(plan.num_drafts for plan in driver.plans)


@pytest.mark.parametrize("kernels", ["native"])
def test_cached_prefixes(tied, drive):
    driver = drive(tied, max_num_seqs=8, max_num_batched_tokens=64, block_tokens=4)
    for again in (False, True):
        want = ask_all(tied, driver)
        assert told(driver, want) == want
        if again:
            assert all(driver.answers[name].num_cached_tokens for name in want if name.startswith("1"))


@pytest.mark.parametrize("kernels", ["native"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_preempted_requests_swap_and_go_on(tied, drive_crowded, ranks):
    driver = drive_crowded(tied, tensor_parallel_size=ranks)
    want = ask_all(tied, driver, tokens=60)
    assert told(driver, want) == want
    assert driver.engine.stats().num_swaps_out > 0


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_log_probabilities(tied, drive):
    """Of the adapter's whole vocabulary, and with most likely tokens and ranks among all of it."""
    driver = drive(tied, max_num_seqs=8, max_num_batched_tokens=9)
    prompts = {name: prompt_of(name, 12, torch.Generator().manual_seed(4)) for name in (*FORMS, "plain")}
    for name, prompt in prompts.items():
        driver.add(name, name, prompt, max_tokens=6, logprobs=3, prompt_logprobs=2)
    for name, answer in driver.drain().items():
        prompt = prompts[name]
        with torch.inference_mode():
            every = tied.use(name)(torch.tensor([prompt + answer.tokens])).logits[0].log_softmax(-1)
        if name == "of each":
            every = every[:, : FORMS[name][0]]
        assert answer.prompt_logprobs is not None
        entries = (*answer.prompt_logprobs, *answer.logprobs)
        tokens = [*prompt[1:], *answer.tokens]
        found = [entry.logprob for entry in entries]
        assert found == pytest.approx([float(every[at, token]) for at, token in enumerate(tokens)], abs=2e-4)
        for at, entry in enumerate(entries):
            best = every[at].topk(len(entry.top)).indices.tolist()
            assert [token for token, _ in entry.top] == best
        ranks = [entry.rank for entry in answer.prompt_logprobs]
        assert ranks == [int((every[at] > every[at, token]).sum()) + 1 for at, token in enumerate(prompt[1:])]


def drawn(tied, name, prompt, params, seed, count):
    """The reference's draws, by the same rule from its own logits."""
    tokens = []
    for _ in range(count):
        with torch.inference_mode():
            logits = tied.use(name)(torch.tensor([prompt + tokens])).logits[:1, -1]
        u = uniform(seed, len(prompt) + len(tokens))
        tokens.append(int(sample(logits, [RowSamplingParams(u=u, **params)], logits.shape[1])))
    return tokens


@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize(
    "params", [{"temperature": 1.0}, {"temperature": 2.0, "top_p": 0.9, "top_k": 60, "min_p": 0.01}]
)
def test_draws(tied, drive, params):
    driver, want = drive(tied, max_num_seqs=8), {}
    for name in (None, *FORMS, "plain"):
        prompt = prompt_of(name, 9, torch.Generator().manual_seed(8))
        driver.add(str(name), name, prompt, max_tokens=24, seed=7, **params)
        want[str(name)] = drawn(tied, name, prompt, params, 7, 24)
    assert told(driver, want) == want
    assert max(max(tokens) for tokens in want.values()) >= VOCAB


@pytest.mark.parametrize("kernels", ["native"])
def test_a_sequence_is_as_alone(tied, drive):
    """Others' bits do not depend on a neighbour with added tokens, nor its own on theirs."""

    def scored(*names):
        driver = drive(tied, max_num_seqs=8)
        for name in names:
            prompt = prompt_of(name, 9, torch.Generator().manual_seed(3))
            driver.add(str(name), name, prompt, max_tokens=6, temperature=1.0, seed=5, logprobs=3, prompt_logprobs=1)
        return {name: (it.tokens, it.logprobs, it.prompt_logprobs) for name, it in driver.drain().items()}

    together = scored(None, "whole", "by itself", "plain")
    for name in (None, "whole", "plain"):
        assert scored(name)[str(name)] == together[str(name)]


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_parameters_with_added_tokens(tied, drive):
    driver = drive(tied, max_num_seqs=16)
    prompt = [5, 150, 9, 152, 7]
    asked = {
        "forced": {"logit_bias": {151: 100.0}},
        "listed": {"allowed_token_ids": (150, 152)},
        "banned": {"bad_words": ((150,), (151,), (152,))},
        "stopped": {"logit_bias": {152: 100.0}, "ignore_eos": False, "stop_token_ids": (152,)},
        "named": {"logprobs": 0, "logprob_token_ids": (151, 4)},
        "penalised": {"repetition_penalty": 50.0, "logit_bias": {150: 60.0, 151: 55.0}},
    }
    for name, params in asked.items():
        driver.add(name, "whole", prompt, max_tokens=4, **params)
    found = driver.drain()
    assert not {name: answer.error for name, answer in found.items() if answer.error}
    assert found["forced"].tokens == [151] * 4
    assert set(found["listed"].tokens) <= {150, 152}
    assert max(found["banned"].tokens) < VOCAB
    assert (found["stopped"].stop_token_id, len(found["stopped"].tokens)) == (152, 1)
    assert {token for token, _ in found["named"].logprobs[0].top} >= {151, 4}
    with torch.inference_mode():
        logits = tied.use("whole")(torch.tensor([prompt])).logits[0, -1].tolist()
    logits = torch.tensor(logits)
    logits[150] += 60
    logits[151] += 55
    seen = torch.tensor(sorted(set(prompt)))
    logits[seen] = torch.where(logits[seen] > 0, logits[seen] / 50, logits[seen] * 50)
    assert found["penalised"].tokens[0] == int(logits.argmax())


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_a_grammar_allows_no_added_token(tmp_path, drive):
    """They are as likely as ever: without the grammar they are sampled."""
    save_family("llama3", tmp_path / "model", vocab_size=287)
    tokenizer = save_tokenizer(tmp_path / "model")
    save_added(tmp_path / "model", tmp_path / "own", 3, 290, target_modules=["v_proj"])
    (tmp_path / "own" / "added_tokens.json").write_text(json.dumps({f"<{id_}>": id_ for id_ in range(275, 290)}))
    driver = drive(Alone(tmp_path / "model", {"own": tmp_path / "own"}, {}))
    params = {"max_tokens": 12, "logit_bias": {287: 90.0, 289: 99.0, 280: 80.0}}
    driver.add("free", "own", [5, 288, 9], **params)
    driver.add("bound", "own", [5, 288, 9], grammar=Grammar("regex", "[a-f]{4,8}"), **{**params, "ignore_eos": False})
    found = driver.drain()
    assert set(found["free"].tokens) == {289}
    assert max(found["bound"].tokens) < 275
    assert re.fullmatch("[a-f]{4,8}", tokenizer.decode(found["bound"].tokens))


@pytest.mark.parametrize("kernels", ["native"])
def test_other_tokens_are_refused(tied, drive):
    driver = drive(tied)
    for name, prompt, message in (
        (None, [5, 150], "token id 150 is outside the vocabulary of 150"),
        ("plain", [5, 151], "token id 151 is outside the vocabulary of 150"),
        ("whole", [5, 153], "token id 153 is outside the vocabulary of 150 and the 3 tokens that its adapter adds"),
    ):
        with pytest.raises(InvalidRequest, match=message):
            driver.add("bad", name, prompt, max_tokens=2)
    for field, value in (("stop_token_ids", (150,)), ("logit_bias", {150: 1.0}), ("allowed_token_ids", (150,))):
        with pytest.raises(InvalidRequest, match="token id 150 is outside") as raised:
            driver.add("bad", "plain", [5], max_tokens=2, **{field: value})
        assert raised.value.field == field


def test_manifests(tied):
    every = {name: manifest_of(tied, name) for name in (*FORMS, "plain")}
    assert {name: (it.num_tokens, sorted(it.added)) for name, it in every.items()} == {
        "whole": (153, [150, 151, 152]),
        "by itself": (155, [150, 151, 152, 153, 154]),
        "head": (153, [150, 151, 152]),
        "tokens": (153, [150, 151, 152]),
        "of each": (152, [150, 151]),
        "plain": (0, []),
    }
    assert every["whole"].why_alone == "has trained token rows, which can't be composed with others"


@pytest.fixture
def changed(tied, tmp_path):
    def make(name, change=lambda tensors, raw: None):
        path = tmp_path / "changed"
        shutil.copytree(tied.adapters[name], path)
        tensors, config = load_file(path / "adapter_model.safetensors"), path / "adapter_config.json"
        raw = json.loads(config.read_text())
        change(tensors, raw)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "adapter_model.safetensors")
        config.write_text(json.dumps(raw))
        return path

    return make


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_an_id_between_them_without_a_row_is_never_sampled(it, drive, tmp_path):
    """However unlikely all others are; a cap of logits would make it likelier."""
    path = tmp_path / "own"
    shutil.copytree(it.adapters["tokens"], path)
    tensors, config = load_file(path / "adapter_model.safetensors"), path / "adapter_config.json"
    raw = json.loads(config.read_text())
    kept = [at for at, token in enumerate(raw["trainable_token_indices"]) if token != 151]
    raw["trainable_token_indices"] = [raw["trainable_token_indices"][at] for at in kept]
    config.write_text(json.dumps(raw))
    for name in tensors:
        if name.endswith("trainable_tokens_delta"):
            tensors[name] = tensors[name][kept]
    save_file(tensors, path / "adapter_model.safetensors")
    found = manifest_of(Alone(it.model, {"own": path}, {}), "own")
    assert (found.num_tokens, found.added) == (153, {150, 152})
    driver = drive(it, adapters={"own": path})
    bias = dict.fromkeys([*range(VOCAB), 150, 152], -100.0)
    for name, temperature in (("greedy", 0.0), ("sampled", 1.0)):
        driver.add(name, "own", [5, 150, 9], max_tokens=6, temperature=temperature, seed=3, logit_bias=bias)
    answers = driver.drain()
    assert not {name: answer.error for name, answer in answers.items() if answer.error}
    assert 151 not in {token for answer in answers.values() for token in answer.tokens}


def refused(tied, path, message):
    with pytest.raises(AdapterFormatError, match=message):
        inspect_adapter(path, read_model_config(tied.model).module_paths)


def test_a_token_without_an_embedding_is_refused(tied, changed):
    def cut(tensors, raw):
        for name in [name for name in tensors if "embed_tokens" in name]:
            tensors[name] = tensors[name][:VOCAB]

    refused(tied, changed("head", cut), "lm_head for token 150, beyond the base model's 150, and none of embed_tokens")


def test_all_added_tokens_are_trained(tied, changed):
    def fewer(tensors, raw):
        raw["trainable_token_indices"] = raw["trainable_token_indices"][:3]
        for name in [name for name in tensors if name.endswith("trainable_tokens_delta")]:
            tensors[name] = tensors[name][:3]

    path = changed("tokens", fewer)
    assert inspect_adapter(path, read_model_config(tied.model).module_paths).num_tokens == 152
    (path / "added_tokens.json").write_text(json.dumps({"<a>": 150, "<b>": 152}))
    refused(tied, path, "adds token 152 to the base model's 150, which is not among those of embed_tokens; train all")


def test_lora_on_a_resized_head_is_refused(tied, tmp_path):
    save_added(tied.model, tmp_path / "lora", 3, 153, target_modules=["q_proj", "embed_tokens", "lm_head"])
    refused(tied, tmp_path / "lora", "target_modules.*LoRA on embed_tokens of a vocabulary with added tokens is not")


def test_activated_lora_is_refused(tied, changed):
    def activate(tensors, raw):
        raw["alora_invocation_tokens"] = [4, 5]

    refused(
        tied,
        changed("whole", activate),
        "alora_invocation_tokens.*rows of embed_tokens of its own, which PEFT uses",
    )


def test_copies_that_differ_are_refused(tied, changed):
    def differ(tensors, raw):
        tensors["base_model.model.lm_head.modules_to_save.weight"][151] += 1

    refused(tied, changed("whole", differ), "are both lm_head, and differ")
