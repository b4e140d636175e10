"""The comparison of quantised weights with plain ones, on a tiny model."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer

from chorus.perf.bench.models import random_model
from chorus.perf.bench.models.sizes import Geometry
from chorus.perf.bench.quantised_quality import in_common, main, pairs

LINES = [{"instruction": "Why is water wet?", "response": "It is so."}, {"question": "1 + 1?", "answer": "It is 2."}]


@pytest.fixture
def texts(tmp_path):
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return path


def test_outputs_in_common():
    assert in_common([[1, 2, 3, 4], [5, 6, 7, 8]], [[1, 2, 3, 4], [5, 0, 7, 8]]) == (0.5, 5 / 8)


def test_a_run_says_perplexity_and_tokens_in_common(texts, tmp_path, capsys):
    shape = Geometry(hidden=64, ffn=96, layers=1, heads=2, kv_heads=1, vocab=300)
    model = random_model.checkpoint(random_model.RandomModel(shape), tmp_path)
    assert main([str(model), "--texts", str(texts), "--tokens", "3", "--forms", "plain", "int8"]) == 0
    told = capsys.readouterr().out
    assert "perplexity, texts" in told and "int8" in told
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    assert len(pairs(texts, 1, tokenizer)) == 1
    texts.write_text('{"text": "no answer"}\n')
    with pytest.raises(ValueError, match="a line has none of the fields"):
        pairs(texts, 1, tokenizer)
