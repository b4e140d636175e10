"""Reading checkpoints: any dtype, any number of files, no second copy, and clear errors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from chorus.core.model.checkpoints import checkpoint as reading
from chorus.core.model.checkpoints.checkpoint import INDEX, Checkpoint
from chorus.core.model.checkpoints.load_progress import progress
from chorus.core.model.read_config import read_model_config
from chorus.core.model.specs.config import UnsupportedModel
from chorus.core.model.weights.open_weights import open_weights
from chorus.core.model.weights.tensor_parts import EMBED, LM_HEAD, sources, tensor_shapes
from chorus.core.model.weights.weight_loader import WeightLoader

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
Q = "model.layers.1.self_attn.q_proj.weight"
GATE = "model.layers.2.mlp.gate_proj.weight"


class Directory:
    """A checkpoint to spoil: `tensors` and `config` are written by `save`, in `files` shards."""

    def __init__(self, path: Path, **changes) -> None:
        self.path = path
        self.config = {**CONFIG, **changes}
        self.write_config()
        torch.manual_seed(0)
        model = read_model_config(path)
        names = sources(model, ())
        self.tensors = {names[n].name: torch.randn(s) for n, s in tensor_shapes(model).items()}

    def write_config(self) -> None:
        (self.path / "config.json").write_text(json.dumps(self.config))

    def save(self, files: int = 1) -> Directory:
        if files == 1:
            save_file(self.tensors, self.path / "model.safetensors")
            return self
        weight_map = {}
        for i in range(files):
            name = f"model-{i + 1:05}-of-{files:05}.safetensors"
            part = dict(list(self.tensors.items())[i::files])
            save_file(part, self.path / name)
            weight_map |= dict.fromkeys(part, name)
        (self.path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        return self

    def loader(self, dtype: torch.dtype = torch.float32, **options) -> WeightLoader:
        return WeightLoader(self.path, read_model_config(self.path), dtype, **options)

    def refusal(self) -> str:
        with pytest.raises(UnsupportedModel) as caught:
            self.loader()
        assert str(self.path) in str(caught.value)
        return str(caught.value)


@pytest.fixture
def checkpoint(tmp_path):
    return lambda **changes: Directory(tmp_path, **changes)


def every_tensor(loader: WeightLoader) -> dict[str, torch.Tensor]:
    embed = loader.embed()
    found = {"embed": embed, "norm": loader.norm(), "lm_head": loader.lm_head(embed)}
    for i, layer in enumerate(loader.layers()):
        found |= {f"{i}.{slot}": part for slot, part in layer.items()}
    return found


@pytest.mark.parametrize("files", [1, 2, 7])
def test_projections_are_packed_in_order(checkpoint, files):
    it = checkpoint(attention_bias=True, mlp_bias=True).save(files)
    found = every_tensor(it.loader())
    for i in range(3):
        at = f"model.layers.{i}."
        for packed, part, names in (
            ("qkv", "self_attn", "qkv"),
            ("o", "self_attn", "o"),
            ("gate_up", "mlp", ("gate", "up")),
            ("down", "mlp", ("down",)),
        ):
            for side, suffix in (("weight", ""), ("bias", "_bias")):
                want = torch.cat([it.tensors[f"{at}{part}.{name}_proj.{side}"] for name in names])
                assert torch.equal(found[f"{i}.{packed}{suffix}"], want)
        assert torch.equal(found[f"{i}.attention_norm"], it.tensors[at + "input_layernorm.weight"])
        assert torch.equal(found[f"{i}.mlp_norm"], it.tensors[at + "post_attention_layernorm.weight"])
        assert f"{i}.q_norm" not in found
    assert torch.equal(found["embed"], it.tensors[EMBED])
    assert torch.equal(found["lm_head"], it.tensors[LM_HEAD])


def test_qk_norms_are_read(checkpoint):
    it = checkpoint(architectures=["Qwen3ForCausalLM"], head_dim=8).save()
    layer = next(it.loader().layers())
    assert torch.equal(layer["q_norm"], it.tensors["model.layers.0.self_attn.q_norm.weight"])
    assert torch.equal(layer["k_norm"], it.tensors["model.layers.0.self_attn.k_norm.weight"])
    assert not [name for name in layer if name.endswith("_bias")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_any_stored_dtype_is_cast_to_the_wanted_one(checkpoint, dtype):
    it = checkpoint()
    stored = (torch.float32, torch.bfloat16, torch.float16)
    it.tensors = {name: tensor.to(stored[i % 3]) for i, (name, tensor) in enumerate(it.tensors.items())}
    found = every_tensor(it.save().loader(dtype))
    assert {tensor.dtype for tensor in found.values()} == {dtype}
    assert torch.equal(found["0.o"], it.tensors["model.layers.0.self_attn.o_proj.weight"].to(dtype))
    q, k, v = (it.tensors[f"model.layers.1.self_attn.{name}_proj.weight"].to(dtype) for name in "qkv")
    assert torch.equal(found["1.qkv"], torch.cat((q, k, v)))


def test_a_layer_is_read_when_it_is_asked_for_and_packed_at_once(checkpoint):
    """Nothing is read ahead, and each projection is packed before the next is read into the same memory."""
    it = checkpoint().save()
    events: list[str] = []
    loader = it.loader(advance=lambda _: events.append("read"))
    assert events == []

    places = set()

    def pack(weight: torch.Tensor) -> torch.Tensor:
        events.append("pack")
        places.add(weight.data_ptr())
        return weight.clone()

    layers = loader.layers(pack)
    first = next(layers)
    assert torch.equal(first["qkv"], next(it.loader().layers())["qkv"])
    assert torch.equal(first["down"], next(it.loader().layers())["down"])
    own = ["read", *["read"] * 3, "pack", "read", "pack", "read", "read", "read", "pack", "read", "pack"]
    assert events == own
    next(layers)
    assert events == own * 2
    assert len(places) < 4


def test_progress_counts_every_byte_once(checkpoint):
    it = checkpoint(tie_word_embeddings=True).save(3)
    seen: list[int] = []
    loader = it.loader(torch.bfloat16, advance=seen.append)
    every_tensor(loader)
    assert sum(seen) == loader.num_bytes == sum(t.numel() * 4 for t in it.tensors.values())
    assert loader.num_bytes_kept == loader.num_bytes // 2


def test_progress_is_silent_off_a_terminal_and_shown_on_one(checkpoint, monkeypatch, capsys):
    it = checkpoint().save()
    with open_weights(it.path, read_model_config(it.path), torch.float32) as loader:
        every_tensor(loader)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    with open_weights(it.path, read_model_config(it.path), torch.float32) as loader:
        every_tensor(loader)
    out, err = capsys.readouterr()
    assert out == ""
    assert f"loading {it.path.name}" in err


def test_counted_progress_says_how_many_of_how_many(monkeypatch, capsys):
    with progress("capturing", 3) as advance:
        advance(2)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    with progress("capturing", 3) as advance:
        advance(2)
    err = capsys.readouterr().err
    assert "capturing" in err
    assert "2/3" in err


# -- tied embeddings


def test_tied_head_is_the_embedding(checkpoint):
    it = checkpoint(tie_word_embeddings=True).save()
    assert LM_HEAD not in it.tensors
    found = every_tensor(it.loader())
    assert found["lm_head"] is found["embed"]


def test_tied_head_may_be_stored_too(checkpoint):
    it = checkpoint(tie_word_embeddings=True)
    it.tensors[LM_HEAD] = it.tensors[EMBED].clone()
    found = every_tensor(it.save().loader())
    assert found["lm_head"] is found["embed"]


def test_tied_weights_may_be_stored_as_the_head_only(checkpoint):
    it = checkpoint(tie_word_embeddings=True)
    it.tensors[LM_HEAD] = it.tensors.pop(EMBED)
    found = every_tensor(it.save().loader())
    assert found["lm_head"] is found["embed"]
    assert torch.equal(found["embed"], it.tensors[LM_HEAD])


def test_a_stored_head_that_differs_is_served_as_transformers_does(checkpoint, caplog):
    from transformers import AutoModelForCausalLM

    it = checkpoint(tie_word_embeddings=True, model_type="llama")
    it.tensors[LM_HEAD] = torch.randn(50, 16)
    found = every_tensor(it.save().loader())
    assert torch.equal(found["lm_head"], it.tensors[LM_HEAD])
    assert torch.equal(found["embed"], it.tensors[EMBED])
    assert "tie_word_embeddings is true" in caplog.text
    assert torch.equal(AutoModelForCausalLM.from_pretrained(it.path).lm_head.weight, it.tensors[LM_HEAD])


def test_untied_head_must_be_stored(checkpoint):
    it = checkpoint(tie_word_embeddings=True).save()
    it.config["tie_word_embeddings"] = False
    it.write_config()
    assert "tensor lm_head.weight is missing" in it.refusal()


# -- refusals


def test_missing_tensor_is_named(checkpoint):
    it = checkpoint()
    del it.tensors[Q]
    assert f"tensor {Q} is missing" in it.save().refusal()


@pytest.mark.parametrize("name", ["model.layers.3.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.bias", "x"])
def test_unknown_tensor_is_named(checkpoint, name):
    it = checkpoint()
    it.tensors[name] = torch.zeros(16)
    message = it.save().refusal()
    assert message.startswith(str(it.path / "model.safetensors"))
    assert f"tensor {name} has no place" in message


def test_rotary_tables_of_old_checkpoints_are_ignored(checkpoint):
    it = checkpoint()
    it.tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(2)
    it.tensors["model.layers.0.attention.masked_bias"] = torch.zeros(())  # GPT-NeoX's
    every_tensor(it.save().loader())


def test_misshaped_tensor_is_named(checkpoint):
    it = checkpoint()
    it.tensors[GATE] = torch.zeros(24, 17)
    assert f"tensor {GATE} has shape [24, 17], config.json needs [24, 16]" in it.save().refusal()


def test_other_dtypes_are_named(checkpoint):
    it = checkpoint()
    it.tensors[GATE] = torch.zeros(24, 16, dtype=torch.int8)
    assert f"tensor {GATE} is stored as I8; supported: F32, F16, BF16" in it.save().refusal()


def test_missing_files_are_named(checkpoint):
    it = checkpoint()
    assert "no model.safetensors, nor model.safetensors.index.json" in it.refusal()
    (it.path / "pytorch_model.bin").touch()
    assert "pickle files are never read" in it.refusal()


def test_missing_shard_is_named(checkpoint):
    it = checkpoint().save(3)
    (it.path / "model-00002-of-00003.safetensors").unlink()
    assert "index.json: names model-00002-of-00003.safetensors, which is not there" in it.refusal()


def test_shard_without_its_tensors_is_noticed(checkpoint):
    it = checkpoint().save(3)
    shard = it.path / "model-00002-of-00003.safetensors"
    part = load_file(shard)
    gone = part.popitem()[0]
    save_file(part, shard)
    assert f"tensor {gone} is missing" in it.refusal()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read"),
        ("{}", "weight_map is missing"),
        ('{"weight_map": []}', "weight_map is []"),
        ('{"weight_map": {"a": 1}}', "weight_map.a is 1"),
    ],
)
def test_broken_index_is_named(checkpoint, text, message):
    it = checkpoint().save(2)
    (it.path / INDEX).write_text(text)
    assert f"{INDEX}: {message}" in it.refusal()


@pytest.mark.parametrize("cut", [0, 5, 100, -1])
def test_broken_file_is_named(checkpoint, cut):
    it = checkpoint().save()
    path = it.path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:cut])
    assert f"{path}: cannot be read" in it.refusal()


def test_file_that_vanishes_while_loading_is_named(checkpoint):
    it = checkpoint().save()
    loader = it.loader()
    (it.path / "model.safetensors").unlink()
    with pytest.raises(UnsupportedModel, match=f"tensor {EMBED} cannot be read"):
        loader.embed()


def test_small_tensors_share_an_open_file_and_large_ones_do_not(checkpoint, monkeypatch):
    """To open a file reads the names of all its tensors; its pages leave memory once it is closed."""
    large = {f"large.{i}": torch.full((300_000,), float(i)) for i in range(2)}
    it = checkpoint()
    it.tensors |= large
    it.save(2)
    opened, plain = [], reading.safe_open
    weights = Checkpoint(it.path)
    monkeypatch.setattr(reading, "safe_open", lambda path, **more: opened.append(path) or plain(path, **more))
    for names, files in ((it.tensors.keys() - large, 2), (large, 2), ([*large] * 2, 4)):
        opened.clear()
        for name in sorted(names, key=lambda name: weights[name].path):
            assert torch.equal(weights.read(name), it.tensors[name])
        assert len(opened) == files


def test_checkpoint_knows_its_tensors(checkpoint):
    it = checkpoint().save(4)
    read = Checkpoint(it.path)
    assert read.names() == sorted(it.tensors)
    assert read[Q].shape == (16, 16)
    assert read[Q].num_bytes == 1024


# -- memory

PEAK = """
import os, sys, torch
from pathlib import Path
from chorus.core.model.read_config import read_model_config
from chorus.core.model.program.native_decoder import PackedWeights
from chorus.core.model.weights.open_weights import open_weights
from chorus.ops.library import native_model

def status(name):
    return next(int(l.split()[1]) << 10 for l in open("/proc/self/status") if l.startswith(name))

def measure(dtype, packed):
    native_model.pack(torch.ones(64, 64, dtype=dtype)).float().to(torch.bfloat16)
    open("/proc/self/clear_refs", "w").write("5")  # resets the peak
    before = status("VmRSS:")
    with open_weights(path, config, dtype) as weights:
        embed = weights.embed()
        pack = PackedWeights(dtype).add if packed else None
        layers = list(weights.layers(pack))
        head = pack(weights.lm_head(embed)) if packed else weights.lm_head(embed)
    print(status("VmHWM:") - before, flush=True)

path = Path(sys.argv[1])
config = read_model_config(path)
for dtype in (torch.float32, torch.bfloat16):
    for packed in (True, False):
        if not os.fork():  # a process of its own, that need not import all of this again
            measure(dtype, packed)
            os._exit(0)
        assert os.wait()[1] == 0
"""


@pytest.mark.wide
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
def test_peak_memory_is_the_weights_and_little_more(checkpoint):
    it = checkpoint(vocab_size=1024, hidden_size=512, intermediate_size=2048, num_hidden_layers=9).save(3)
    num_weights = sum(t.numel() for t in it.tensors.values())
    gate_up = 2 * 2048 * 512 * 4
    done = subprocess.run([sys.executable, "-c", PEAK, str(it.path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    float32, plain_float32, bfloat16, plain_bfloat16 = map(int, done.stdout.split())
    assert num_weights * 2 > 8 * gate_up
    assert max(float32, plain_float32) < num_weights * 4 + 2 * gate_up + (8 << 20)
    assert max(bfloat16, plain_bfloat16) < num_weights * 2 + 2 * gate_up + (8 << 20)


def test_rows_of_tensors_that_follow_one_another_are_read_alone(tmp_path, monkeypatch):
    parts = {"a.first": torch.arange(12.0).view(6, 2), "a.second": torch.arange(12.0, 20).view(4, 2)}
    save_file(parts, tmp_path / "model.safetensors")
    it = Checkpoint(tmp_path, joined={"both": ("first", "second")})
    whole = torch.cat([*parts.values()])
    read: list[tuple[str, int]] = []
    original = Checkpoint._read  # noqa: SLF001

    def noting(self, name, entry, part=()):
        found = original(self, name, entry, part)
        read.append((name, len(found)))
        return found

    monkeypatch.setattr(Checkpoint, "_read", noting)
    for begin, end in ((0, 10), (0, 3), (4, 8), (6, 10), (9, 10), (5, 5)):
        read.clear()
        assert torch.equal(it.read("a.both", (slice(begin, end), slice(1, 2))), whole[begin:end, 1:2])
        assert sum(count for _, count in read) == end - begin
    assert torch.equal(it.read("a.both"), whole)
