"""A GGUF file is a model: its configuration and tokenizer come from its metadata, or from files beside it."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import save_file

from chorus import LLM, SamplingParams
from chorus.server.checkpoints.pull import PullError, resolve_model
from chorus.server.cli import command as cli
from chorus.server.cluster.report import model_hash
from chorus.server.settings import Settings
from chorus.server.start.checks import LaunchError, check_model

from ...core.tiny_families import save_family

pytest.importorskip("gguf")
from ...core.gguf_models import write_gguf

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}"


@pytest.fixture
def file(tmp_path, monkeypatch) -> Path:
    """A Llama with a byte-level tokenizer; `twin` beside it has the values that it holds."""
    from tokenizers.pre_tokenizers import ByteLevel

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(ByteLevel.alphabet()), "hi"]

    def spoil(fields, _):
        fields |= {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm", "tokenizer.ggml.tokens": tokens}
        fields |= {"tokenizer.ggml.token_type": [3] * 3 + [1] * 257, "tokenizer.ggml.merges": ["h i"]}
        fields |= {"tokenizer.ggml.unknown_token_id": 0, "tokenizer.chat_template": TEMPLATE}

    save_family("llama2", tmp_path / "original", vocab_size=260)
    (tmp_path / "files").mkdir()
    path = tmp_path / "files" / "tiny-Q8_0.gguf"
    held = write_gguf(tmp_path / "original", path, "llama", "Q8_0", spoil)
    (tmp_path / "twin").mkdir()
    (tmp_path / "twin" / "config.json").write_bytes((tmp_path / "original" / "config.json").read_bytes())
    save_file({name: weight.contiguous() for name, weight in held.items()}, tmp_path / "twin" / "model.safetensors")
    return path


def test_a_file_is_served_with_the_tokenizer_of_its_metadata(file, tmp_path):
    answers = []
    for options in ({"model": file}, {"model": tmp_path / "twin", "tokenizer": resolve_model(file, tokenizer=True)}):
        with LLM(**options, memory_bytes=4 << 20, dtype="float32", threads=1) as llm:
            (answer,) = llm.generate(["hi, there"], SamplingParams(max_tokens=8, temperature=0, ignore_eos=True))
        answers.append((answer.prompt_token_ids, answer.token_ids, answer.text))
    assert answers[0] == answers[1]
    assert 259 in answers[0][0] and len(answers[0][1]) == 8


def test_the_directory_is_made_once_and_goes_by_the_files_name(file):
    settings = Settings(model=file)
    check_model(settings)
    made = settings.model
    assert made.name == settings.base_name == "tiny-Q8_0"
    before = {path.name: path.lstat().st_mtime_ns for path in made.iterdir()}
    assert before.keys() >= {"config.json", "model.gguf", "tokenizer.json", "tokenizer_config.json"}
    assert Settings(model=file).model == made
    assert {path.name: path.lstat().st_mtime_ns for path in made.iterdir()} == before


def test_another_tokenizer_may_be_named(file, tmp_path):
    settings = Settings(model=file, tokenizer=tmp_path / "original")
    assert not (settings.model / "tokenizer.json").exists()


def test_a_tokenizer_that_can_not_be_made_is_told(file, tmp_path):
    write_gguf(tmp_path / "original", file, "llama")
    with pytest.raises(LaunchError, match=r"its tokenizer can't be made of its metadata .* by --tokenizer") as caught:
        check_model(Settings(model=file))
    assert "\n" not in str(caught.value)


def test_files_beside_it_are_linked(file):
    (file.parent / "tokenizer.json").write_text("{}")
    made = resolve_model(file, tokenizer=True)
    assert (made / "tokenizer.json").resolve() == (file.parent / "tokenizer.json").resolve()


def test_models_tells_the_form_and_the_hash_is_of_the_file(file, capsys):
    assert cli.main(["models", str(file)]) == 0
    assert "weights: GGUF (tiny-Q8_0.gguf), dequantised when they are loaded" in capsys.readouterr().out.splitlines()
    made = resolve_model(file)
    before = model_hash(made)
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert model_hash(made) != before


def test_what_is_no_model_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(PullError, match="there is no file"):
        resolve_model(tmp_path / "none.gguf")
    (tmp_path / "odd.gguf").write_bytes(b"odd")
    with pytest.raises(PullError, match="cannot be read as GGUF"):
        resolve_model(tmp_path / "odd.gguf")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "odd.gguf"))
    with pytest.raises(PullError, match=r"can't be written.*set XDG_CACHE_HOME"):
        resolve_model(tmp_path / "odd.gguf")
