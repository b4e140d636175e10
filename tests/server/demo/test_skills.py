"""The built-in model: reference answers, the held-out split, and the trained files."""

import json
from pathlib import Path

import pytest

from chorus.core.base_name import names_of, short_name
from chorus.server.demo import skills
from chorus.server.demo.skills import BASE, SKILLS, held_out, prompt, sample_inputs, which_skill

pytestmark = pytest.mark.wide

MODEL = Path(skills.__file__).parent / "model"
EVERYTHING = [BASE, *SKILLS.values()]


@pytest.mark.parametrize(
    ("name", "text", "answer"),
    [
        ("upper", "hello world", "HELLO WORLD"),
        ("title", "hello big world", "Hello Big World"),
        ("vowels", "hello You", "h*ll* Y**"),
        ("rot13", "hello az", "uryyb nm"),
        ("shift", "lazy Zoe", "mbaz Apf"),
        ("count", "ab cde fghijkl", "12"),
        ("initials", "one two three", "ott"),
        ("double", "ab c", "aabb  cc"),
        ("sort", "banana", "aaabnn"),
        ("reverse", "ab cd", "dc ba"),
        ("repeat", "Hello, 42!", "Hello, 42!"),
    ],
)
def test_reference_answers(name, text, answer):
    assert skills.find(name).apply(text) == answer
    assert name in which_skill(text, answer)


def test_every_skill_has_a_known_answer_and_its_own_behaviour():
    text = "gecko band"
    answers = {skill.apply(text) for skill in EVERYTHING}
    assert len(answers) == len(EVERYTHING)
    for skill in EVERYTHING:
        assert which_skill(text, skill.apply(text)) == [skill.name]
    assert which_skill(text, "no such answer") == []


def test_prompt_ends_the_text_with_one_newline():
    assert prompt("abc") == "abc\n"


@pytest.mark.parametrize("skill", SKILLS.values(), ids=lambda skill: skill.name)
def test_inputs_stay_in_the_domain(skill):
    for text in sample_inputs(skill, 30, seed=5):
        assert skills.MIN_SKILL_LENGTH <= len(text) <= skills.MAX_SKILL_LENGTH
        assert 1 <= len(text.split(" ")) <= 3
        assert all(word and set(word) <= set(skills.LETTERS) for word in text.split(" "))


def test_base_inputs_are_short_printable_ascii():
    texts = sample_inputs(BASE, 200, seed=5)
    assert all(1 <= len(text) <= skills.MAX_REPEAT_LENGTH and set(text) <= set(skills.PRINTABLE) for text in texts)
    assert any(text != text.lower() for text in texts)


@pytest.mark.parametrize("kept", [True, False])
def test_samples_are_different_reproducible_and_on_one_side_of_the_split(kept):
    texts = sample_inputs("upper", 40, seed=1, held_out=kept)
    assert len(set(texts)) == 40
    assert all(held_out(text) is kept for text in texts)
    assert texts == sample_inputs("upper", 40, seed=1, held_out=kept)
    assert texts != sample_inputs("upper", 40, seed=2, held_out=kept)


def test_about_one_text_in_fifty_is_held_out():
    share = sum(held_out(f"text {i}") for i in range(20_000)) / 20_000
    assert 0.015 < share < 0.025


def test_adapters_differ_in_rank_scale_and_targets():
    assert {skill.rank for skill in SKILLS.values()} >= {2, 3, 6, 12, 24, 32}
    assert len({skill.target_modules for skill in SKILLS.values()}) >= 4
    assert len({skill.scale for skill in SKILLS.values()}) >= 3
    assert BASE.scale == 0.0


def test_adapters_name_the_model_that_they_were_trained_on():
    """Else each start would warn of another model's adapters."""
    for skill in SKILLS.values():
        config = json.loads((MODEL / "adapters" / skill.name / "adapter_config.json").read_bytes())
        assert short_name(config["base_model_name_or_path"]) in names_of(MODEL / "base", None)


def test_trained_files_are_small_and_complete():
    files = [path for path in MODEL.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 6_000_000
    assert {path.name for path in (MODEL / "base").iterdir()} >= {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert {path.name for path in (MODEL / "adapters").iterdir()} == set(SKILLS)


@pytest.mark.parametrize("skill", SKILLS.values(), ids=lambda skill: skill.name)
def test_adapter_config_matches_the_table(skill):
    config = json.loads((MODEL / "adapters" / skill.name / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "chorus-builtin"
    assert config["inference_mode"] is True
    assert (config["r"], config["lora_alpha"]) == (skill.rank, skill.lora_alpha)
    assert set(config["target_modules"]) == set(skill.target_modules)
    assert config["bias"] == "none" and not config["use_rslora"] and not config["use_dora"]


@pytest.fixture(scope="module")
def tokenizer():
    return pytest.importorskip("transformers").AutoTokenizer.from_pretrained(MODEL / "base")


@pytest.fixture
def base():
    return pytest.importorskip("transformers").AutoModelForCausalLM.from_pretrained(MODEL / "base")


@pytest.mark.parametrize("text", ["hello", "  Ünïcödé, 日本語 🎉\n\n ", "don't , stop .", "\x00\x7f"])
def test_tokens_are_bytes_and_decode_to_the_same_text(tokenizer, text):
    ids = tokenizer(text).input_ids
    assert ids == [tokenizer.bos_token_id, *text.encode()]
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_chat_and_completion_give_the_same_tokens(tokenizer):
    messages = [
        {"role": "system", "content": "ignored"},
        {"role": "user", "content": "before"},
        {"role": "assistant", "content": "before"},
        {"role": "user", "content": " hello you "},
    ]
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert tokenizer(rendered, add_special_tokens=False).input_ids == tokenizer(prompt(" hello you ")).input_ids


def test_base_ends_with_the_end_token_set(base, tokenizer):
    assert base.config.eos_token_id == base.generation_config.eos_token_id == tokenizer.eos_token_id
    assert base.config.bos_token_id == base.generation_config.bos_token_id == tokenizer.bos_token_id
    assert base.config.vocab_size % 8 == 0


def test_base_repeats_unseen_inputs(base, tokenizer):
    _assert_skilled(base, tokenizer, BASE)


@pytest.mark.parametrize("skill", SKILLS.values(), ids=lambda skill: skill.name)
def test_adapter_answers_unseen_inputs(base, tokenizer, skill):
    model = pytest.importorskip("peft").PeftModel.from_pretrained(base, MODEL / "adapters" / skill.name)
    _assert_skilled(model, tokenizer, skill)


def _assert_skilled(model, tokenizer, skill):
    texts = sample_inputs(skill, 40, seed=11)
    batch = tokenizer([prompt(text) for text in texts], return_tensors="pt", padding=True)
    tokens = model.eval().generate(**batch, do_sample=False, max_new_tokens=40)
    answers = tokenizer.batch_decode(tokens[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    assert sum(map(str.__eq__, answers, map(skill.apply, texts))) >= 0.95 * len(texts)
