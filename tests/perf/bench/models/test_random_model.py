"""Random models and adapters follow their recipe."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tokenizers import Tokenizer

from chorus.core.model.read_config import read_model_config
from chorus.memory.files.format import inspect_adapter
from chorus.perf.bench.models.random_model import RandomModel, adapters, checkpoint
from chorus.perf.bench.models.sizes import Geometry

TINY = RandomModel(Geometry(hidden=128, ffn=256, layers=2, heads=4, kv_heads=2, vocab=1024), ranks=(8, 16, 32, 64))


def test_adapters_are_what_the_recipe_says(tmp_path):
    made = adapters(TINY, tmp_path)
    assert list(made) == ["a00-r8", "a01-r16", "a02-r32", "a03-r64"]
    config = read_model_config(checkpoint(TINY, tmp_path))
    manifests = [inspect_adapter(path, config.module_paths) for path in made.values()]
    assert tuple(manifest.rank for manifest in manifests) == TINY.ranks
    assert all(len(manifest.targets) == 7 for manifest in manifests)
    per_rank = TINY.geometry.rank_params
    assert [manifest.num_params(config.projections) for manifest in manifests] == [r * per_rank for r in TINY.ranks]


def test_a_checkpoint_is_written_once(tmp_path):
    path = checkpoint(TINY, tmp_path)
    before = (path / "model.safetensors").stat().st_mtime_ns
    assert checkpoint(TINY, tmp_path) == path
    assert (path / "model.safetensors").stat().st_mtime_ns == before
    assert checkpoint(replace(TINY, seed=1), tmp_path) != path


@pytest.mark.parametrize("vocab", [1024, 32000])
def test_the_tokenizer_covers_the_vocabulary(tmp_path, vocab):
    model = replace(TINY, geometry=replace(TINY.geometry, vocab=vocab))
    tokenizer = Tokenizer.from_file(str(checkpoint(model, tmp_path) / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == vocab
    text = "plain words, 7 signs and ünïcode"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
