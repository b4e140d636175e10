"""Pooled vectors and scores of a real engine, against transformers and peft running each request alone in float32."""

import json
import shutil

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForSequenceClassification

from chorus.core.requests.pooling import from_bytes
from chorus.core.requests.record import NotHere
from chorus.core.requests.request_params import InvalidRequest, RequestParams
from chorus.memory.files.identity import with_content

from ..conftest import Subject, quiet
from .conftest import Answer, exported

pytestmark = pytest.mark.wide

HEADS = {"three": 3, "one": 1, "seven": 7}


@pytest.fixture(scope="module")
def reference(subject):
    return subject("gqa")


@quiet()
def save_classifier(model, path, labels, seed, bare=False, **more):
    """An adapter with a score head, made by peft."""
    torch.manual_seed(seed)
    base = AutoModelForSequenceClassification.from_pretrained(model, num_labels=labels, pad_token_id=0)
    config = LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], init_lora_weights=False, task_type="SEQ_CLS", **more
    )
    peft = get_peft_model(base, config)
    torch.nn.init.normal_(peft.get_parameter("base_model.model.score.modules_to_save.default.weight"), std=0.4)
    peft.save_pretrained(str(path))


@pytest.fixture(scope="module")
def classifiers(reference, tmp_path_factory):
    root = tmp_path_factory.mktemp("classifiers")
    for seed, (name, labels) in enumerate(HEADS.items()):
        save_classifier(reference.model, root / name, labels, seed)
    return {name: root / name for name in HEADS}


@quiet()
def states(model, adapter, prompt):
    """The final hidden states `[tokens, hidden]` of a prompt."""
    base = AutoModel.from_pretrained(model, dtype=torch.float32)
    if adapter is not None:  # its keys are those of a causal LM
        from transformers import AutoModelForCausalLM

        base = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), adapter)
        base = base.base_model.model.model
    with torch.inference_mode():
        return base.eval()(torch.tensor([prompt])).last_hidden_state[0]


@quiet()
def logits(model, adapter, labels, prompt):
    base = AutoModelForSequenceClassification.from_pretrained(
        model, num_labels=labels, pad_token_id=0, dtype=torch.float32
    )
    peft = base if adapter is None else PeftModel.from_pretrained(base, adapter)
    with torch.inference_mode():
        return peft.eval()(torch.tensor([prompt])).logits[0]


def pooled(states, pooling):
    return {"last": states[-1], "cls": states[0], "mean": states.mean(0)}[pooling]


def cosine(a, b):
    a, b = (torch.as_tensor(np.array(each)).double() for each in (a, b))
    return torch.cosine_similarity(a, b, dim=0).item()


def assert_same(data, want):
    got = from_bytes(data)
    assert got.dtype == np.float32 and len(got) == len(want)
    if len(want) > 1:
        assert cosine(got, want) >= 0.999999
    np.testing.assert_allclose(got, np.array(want), rtol=2e-4, atol=2e-4 * float(np.abs(np.array(want)).max()))


def prompts_of(vocab, count, seed, least=1, most=40):
    random = np.random.default_rng(seed)
    return [random.integers(3, vocab, random.integers(least, most + 1)).tolist() for _ in range(count)]


def pool(driver, request_id, adapter, prompt, pooling="last", **params):
    return driver.add(request_id, adapter, prompt, max_tokens=1, pooling=pooling, **params)


def test_vectors_of_a_mixed_batch_are_those_of_transformers_and_peft(drive, reference):
    driver = drive(reference, max_num_batched_tokens=16, max_num_seqs=4)
    adapters = [None, "r2-qv", "r33-all", "r16-down"]
    asked = {}
    for index, prompt in enumerate(prompts_of(reference.vocab_size, 24, 0)):
        adapter, pooling = adapters[index % 4], ("last", "mean", "cls")[index % 3]
        asked[f"r{index}"] = adapter, pooling, prompt
        pool(driver, f"r{index}", adapter, prompt, pooling)
    generated = {}
    for index, prompt in enumerate(prompts_of(reference.vocab_size, 3, 1, least=5)):
        generated[f"g{index}"] = reference.greedy("r8-attention", prompt, 6)
        driver.add(f"g{index}", "r8-attention", prompt, max_tokens=6)
    answers = driver.drain()
    for name, (adapter, pooling, prompt) in asked.items():
        answer = answers[name]
        assert answer.tokens == [] and answer.finish_reason == "stop"
        path = None if adapter is None else reference.adapters[adapter]
        assert_same(answer.pooled, pooled(states(reference.model, path, prompt), pooling))
    assert {name: answers[name].tokens for name in generated} == generated
    stats = driver.engine.stats()
    assert stats.num_generated_tokens == 18


def test_a_cached_prefix_is_used_for_last_and_never_for_mean_or_cls(drive, reference):
    driver = drive(reference, block_tokens=8)
    (prompt,) = prompts_of(reference.vocab_size, 1, 2, least=37)
    driver.run("warm", "r2-qv", prompt, max_tokens=2)
    for pooling in ("last", "mean", "cls"):
        pool(driver, pooling, "r2-qv", prompt, pooling)
        answer = driver.drain()[pooling]
        assert (answer.num_cached_tokens >= 32) == (pooling == "last")
        assert_same(answer.pooled, pooled(states(reference.model, reference.adapters["r2-qv"], prompt), pooling))


def test_equal_prompts_do_not_wait_for_each_other_where_no_prefix_can_be_used(drive, reference):
    driver = drive(reference, block_tokens=4)
    (prompt,) = prompts_of(reference.vocab_size, 1, 10, least=30)
    for name in ("a", "b"):
        pool(driver, name, None, prompt, "mean")
    answers = driver.drain()
    assert [len(plan.sequences) for plan in driver.plans] == [2]
    assert answers["a"].pooled == answers["b"].pooled


def test_a_prompt_may_fill_the_whole_context(drive, reference):
    driver = drive(reference, max_model_len=32)
    prompt = prompts_of(reference.vocab_size, 1, 3, least=33, most=33)[0]
    pool(driver, "fits", None, prompt[:32], "mean")
    assert_same(driver.drain()["fits"].pooled, states(reference.model, None, prompt[:32]).mean(0))
    with pytest.raises(InvalidRequest, match="the prompt has 33 tokens, the model takes 32; shorten it"):
        pool(driver, "too long", None, prompt)


@pytest.mark.usefixtures("crowded")
@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_preempted_pooling_requests_give_the_same_vectors(drive, reference, preemption):
    driver = drive(
        reference,
        adapters={},
        num_pages=14,
        block_tokens=4,
        max_num_batched_tokens=12,
        max_num_seqs=8,
        preemption=preemption,
    )
    asked = {}
    for index, prompt in enumerate(prompts_of(reference.vocab_size, 6, 4, least=20, most=28)):
        asked[f"r{index}"] = prompt, ("mean", "cls", "last")[index % 3]
        driver.add(f"g{index}", None, prompt[:4], max_tokens=12)
        pool(driver, f"r{index}", None, *asked[f"r{index}"])
    answers = driver.drain()
    assert sum(answers[name].num_preemptions for name in asked) > 0
    for name, (prompt, pooling) in asked.items():
        assert_same(answers[name].pooled, pooled(states(reference.model, None, prompt), pooling))


def test_heads_with_different_label_counts_score_in_one_batch(drive, reference, classifiers):
    driver = drive(reference, adapters={**classifiers, "r2-qv": reference.adapters["r2-qv"]}, max_num_batched_tokens=32)
    asked = {}
    for index, prompt in enumerate(prompts_of(reference.vocab_size, 12, 5)):
        adapter = [*HEADS][index % 3]
        asked[f"r{index}"] = adapter, prompt
        pool(driver, f"r{index}", adapter, prompt, classify=True)
    pool(driver, "vector", "three", asked["r0"][1])
    answers = driver.drain()
    for name, (adapter, prompt) in asked.items():
        assert_same(answers[name].pooled, logits(reference.model, classifiers[adapter], HEADS[adapter], prompt))
    assert len(from_bytes(answers["vector"].pooled)) == 64


def test_an_adapter_without_a_head_never_classifies(drive, reference, classifiers):
    driver = drive(reference, adapters={**classifiers, "r2-qv": reference.adapters["r2-qv"]})
    with pytest.raises(InvalidRequest, match="adapter 'r2-qv' has no score head, so it can't classify") as refusal:
        pool(driver, "a", "r2-qv", [5, 6], classify=True)
    assert refusal.value.field == "head"
    with pytest.raises(InvalidRequest, match="the base model has no score head"):
        pool(driver, "b", None, [5, 6], classify=True)


def test_a_removed_adapter_takes_its_head_with_it(drive, reference, classifiers, tmp_path):
    driver = drive(reference, adapters={})
    (prompt,) = prompts_of(reference.vocab_size, 1, 6)
    for name in ("three", "seven"):  # a reload under the same name has another head
        shutil.rmtree(tmp_path / "a", ignore_errors=True)
        shutil.copytree(classifiers[name], tmp_path / "a")
        driver.engine.store.register("a", tmp_path / "a")
        pool(driver, name, "a", prompt, classify=True)
        answer = driver.drain()[name]
        assert_same(answer.pooled, logits(reference.model, classifiers[name], HEADS[name], prompt))
        driver.engine.adapters.remove("a")


def test_a_merged_adapter_and_others_beside_it(drive, reference, classifiers):
    driver = drive(reference, adapters={**classifiers, "r2-qv": reference.adapters["r2-qv"]})
    (prompt,) = prompts_of(reference.vocab_size, 1, 8, least=20)
    driver.run("warm", "three", prompt, max_tokens=1)
    driver.engine.merge("three")
    asked = {"own": ("three", True), "other": ("seven", True), "base": (None, False), "vector": ("r2-qv", False)}
    driver.run("merging", "three", prompt, max_tokens=20)
    for name, (adapter, classify) in asked.items():
        pool(driver, name, adapter, prompt, "mean" if not classify else "last", classify=classify)
    answers = driver.drain()
    assert driver.plans[-1].merged is not None
    assert_same(answers["own"].pooled, logits(reference.model, classifiers["three"], 3, prompt))
    assert_same(answers["other"].pooled, logits(reference.model, classifiers["seven"], 7, prompt))
    assert_same(answers["base"].pooled, states(reference.model, None, prompt).mean(0))
    assert_same(answers["vector"].pooled, states(reference.model, reference.adapters["r2-qv"], prompt).mean(0))


def test_a_request_moves_to_another_engine(drive, reference, classifiers):
    (prompt,) = prompts_of(reference.vocab_size, 1, 9, least=30)
    first, second = (drive(reference, adapters=classifiers, max_num_batched_tokens=32) for _ in range(2))
    for driver in (first, second):
        adapter = driver.engine.store.get("three")
        driver.engine.store.note(adapter, with_content(adapter.manifest))
    pool(first, "a", "three", prompt + prompt, classify=True)
    pool(first, "b", None, prompt + prompt, "mean")
    first.step()
    for name in ("a", "b"):
        record = exported(first.engine, name)
        first.engine.abort(name)
        assert not isinstance(second.engine.resume(record), NotHere)
        second.answers[name] = Answer()
    answers = second.drain()
    assert_same(answers["a"].pooled, logits(reference.model, classifiers["three"], 3, prompt + prompt))
    assert_same(answers["b"].pooled, states(reference.model, None, prompt + prompt).mean(0))


@pytest.fixture(scope="module")
def checkpoints(reference, tmp_path_factory):
    """The model as a classifier's checkpoint, and without any head."""
    root = tmp_path_factory.mktemp("checkpoints")
    with quiet():
        torch.manual_seed(11)
        model = AutoModelForSequenceClassification.from_pretrained(reference.model, num_labels=5, pad_token_id=0)
        model.save_pretrained(root / "classifier")
        AutoModel.from_pretrained(reference.model).save_pretrained(root / "bare")
    return root


def test_a_checkpoint_of_a_classifier_and_one_without_a_head(drive, reference, checkpoints, classifiers):
    (prompt,) = prompts_of(reference.vocab_size, 1, 7)
    driver = drive(Subject(checkpoints / "classifier", classifiers))
    pool(driver, "base", None, prompt, classify=True)
    pool(driver, "own", "seven", prompt, classify=True)
    pool(driver, "vector", None, prompt)
    answers = driver.drain()
    assert_same(answers["base"].pooled, logits(checkpoints / "classifier", None, 5, prompt))
    assert_same(answers["own"].pooled, logits(reference.model, classifiers["seven"], 7, prompt))
    assert_same(answers["vector"].pooled, states(reference.model, None, prompt)[-1])
    with pytest.raises(InvalidRequest, match="no language-model head"):
        driver.add("text", None, prompt)

    driver = drive(Subject(checkpoints / "bare", {}))
    pool(driver, "vector", None, prompt)
    assert_same(driver.drain()["vector"].pooled, states(reference.model, None, prompt)[-1])


@pytest.mark.parametrize("family", ["qwen3", "gemma-3", "mistral-window", "granite", "cohere-2", "qwen3.5"])
def test_families_whose_layers_or_norms_differ(tiny, drive, family):
    it = tiny(family)
    driver = drive(it, max_num_seqs=4, max_num_batched_tokens=24, max_model_len=128, block_tokens=16)
    wanted = {}
    for index, pooling in enumerate(("last", "mean", "cls") * 2):
        adapter = [None, *it.adapters][index % 4]
        prompt = prompts_of(150, 1, index, least=20, most=60)[0]
        pool(driver, f"r{index}", adapter, prompt, pooling)
        model = it.use(adapter).base_model.model.model
        with torch.inference_mode():
            wanted[f"r{index}"] = pooled(model(torch.tensor([prompt])).last_hidden_state[0], pooling)
    answers = driver.drain()
    for name, vector in wanted.items():
        assert_same(answers[name].pooled, vector)


@quiet()
def test_a_checkpoint_without_a_head_whose_norms_have_no_weights(tiny, drive, tmp_path):
    it = tiny("olmo-1")
    AutoModel.from_pretrained(it.model).save_pretrained(tmp_path)
    driver = drive(Subject(tmp_path, {}))
    (prompt,) = prompts_of(150, 1, 7)
    pool(driver, "vector", None, prompt)
    assert_same(driver.drain()["vector"].pooled, states(it.model, None, prompt)[-1])


@quiet()
def test_an_adapter_and_a_checkpoint_without_the_module_around_the_layers(drive, tmp_path):
    """Qwen3-Embedding's form: the checkpoint is an AutoModel's, and so is what the adapter was trained on."""
    from transformers import Qwen3Config, Qwen3Model

    torch.manual_seed(4)
    config = Qwen3Config(
        vocab_size=150,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        initializer_range=0.3,
        tie_word_embeddings=True,
    )
    Qwen3Model(config).save_pretrained(tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    lora = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, task_type="FEATURE_EXTRACTION")
    tuned = get_peft_model(Qwen3Model.from_pretrained(tmp_path / "model"), lora)
    tuned.save_pretrained(str(tmp_path / "tuned"))
    keys = load_file(tmp_path / "tuned" / "adapter_model.safetensors")
    assert all(key.startswith("base_model.model.layers.") for key in keys)
    (prompt,) = prompts_of(150, 1, 3, least=30)
    for architecture in ("Qwen3Model", "Qwen3ForCausalLM"):  # as published checkpoints say of the same tensors
        file.write_text(json.dumps(json.loads(file.read_text()) | {"architectures": [architecture]}))
        driver = drive(Subject(tmp_path / "model", {"tuned": tmp_path / "tuned"}))
        pool(driver, "base", None, prompt)
        pool(driver, "tuned", "tuned", prompt, "mean")
        answers = driver.drain()
        assert_same(answers["base"].pooled, states(tmp_path / "model", None, prompt)[-1])
        with torch.inference_mode():
            assert_same(answers["tuned"].pooled, tuned.eval()(torch.tensor([prompt])).last_hidden_state[0].mean(0))


@pytest.mark.parametrize(
    ("field", "params"),
    [
        ("pooling", {"pooling": "max", "max_tokens": 1}),
        ("max_tokens", {"pooling": "mean", "max_tokens": 2}),
        ("classify", {"classify": True}),
    ],
)
def test_pooling_parameters_out_of_range_are_refused_by_name(field, params):
    with pytest.raises(InvalidRequest, match=field) as refusal:
        RequestParams(**params)
    assert refusal.value.field == field
