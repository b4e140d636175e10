"""Score heads of adapters: read as they were saved, part of the content, refused by name."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from chorus.memory.files.error import AdapterFormatError
from chorus.memory.files.format import inspect_adapter
from chorus.memory.files.identity import with_content
from chorus.memory.files.score_head import BIAS, MAX_LABELS, WEIGHT, ScoreHead

from ...tables import TINY_PATHS

PATHS = replace(TINY_PATHS, hidden_size=16)
CLASSIFIER = {"task_type": "SEQ_CLS", "modules_to_save": ["classifier", "score"]}


@pytest.fixture
def saved(adapter_draft, tmp_path):
    """`saved(name, tensors, **config)`: the directory of an adapter with a head."""

    def make(name="a", tensors=None, **config):
        it = adapter_draft()
        it.config |= {**CLASSIFIER, **config}
        torch.manual_seed(5)
        it.tensors |= {WEIGHT: torch.randn(3, 16)} if tensors is None else tensors
        return it.write(tmp_path / name)

    return make


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_head_is_read_in_float32(saved, dtype):
    weight, bias = torch.randn(3, 16).to(dtype), torch.randn(3).to(dtype)
    head = inspect_adapter(saved(tensors={WEIGHT: weight, BIAS: bias}), PATHS).head
    assert head is not None and head.num_labels == 3 and head.num_bytes == 4 * (3 * 16 + 3)
    vector = np.linspace(-1, 1, 16)
    wanted = weight.float() @ torch.tensor(vector).float() + bias.float()
    np.testing.assert_allclose(head.scores(vector), wanted, rtol=1e-6, atol=1e-6)


def test_a_plain_adapter_has_none(adapter_draft, tmp_path):
    assert inspect_adapter(adapter_draft().write(tmp_path / "a"), PATHS).head is None


@pytest.mark.parametrize("modules", [["score"], ["classifier", "score"]])
@pytest.mark.parametrize("task", ["SEQ_CLS", None])
def test_names_of_modules_and_task(saved, task, modules):
    assert inspect_adapter(saved(task_type=task, modules_to_save=modules), PATHS).head is not None


def test_the_head_is_part_of_the_content(saved):
    first = with_content(inspect_adapter(saved("a"), PATHS))
    assert with_content(inspect_adapter(saved("b"), PATHS)).content_hash == first.content_hash
    other = with_content(inspect_adapter(saved("c", {WEIGHT: torch.zeros(3, 16)}), PATHS))
    assert other.content_hash != first.content_hash
    assert not other.no_effect


@pytest.mark.parametrize(
    ("tensors", "config", "words"),
    [
        ({}, {}, (WEIGHT, "missing", "modules_to_save")),
        ({WEIGHT: torch.ones(3, 8)}, {}, (WEIGHT, "[3, 8]", "[labels, 16]")),
        ({WEIGHT: torch.ones(16)}, {}, (WEIGHT, "[16]")),
        ({WEIGHT: torch.ones(MAX_LABELS + 1, 16)}, {}, (WEIGHT, f"at most {MAX_LABELS} labels")),
        ({WEIGHT: torch.ones(3, 16), BIAS: torch.ones(2)}, {}, (BIAS, "[2]", "[3]")),
        ({WEIGHT: torch.full((3, 16), float("nan"))}, {}, (WEIGHT, "not finite")),
        ({WEIGHT: torch.ones(3, 16)}, {"modules_to_save": None}, (WEIGHT, "modules_to_save names it")),
        ({WEIGHT: torch.ones(3, 16)}, {"modules_to_save": ["score", "norm"]}, ("modules_to_save", "'norm'")),
        ({WEIGHT: torch.ones(3, 16)}, {"task_type": "TOKEN_CLS"}, ("task_type is 'TOKEN_CLS'",)),
        ({WEIGHT: torch.ones(3, 16)}, {"alora_invocation_tokens": [5]}, ("modules_to_save", "activated LoRA")),
    ],
    ids=["missing", "width", "flat", "labels", "bias", "nan", "unnamed", "others", "tokens", "activated"],
)
def test_refusals_name_the_field_or_the_tensor(saved, tensors, config, words):
    with pytest.raises(AdapterFormatError) as refusal:
        inspect_adapter(saved(tensors=tensors, **config), PATHS)
    for word in words:
        assert word in str(refusal.value)


def test_scores_without_a_bias():
    head = ScoreHead(np.eye(2, 3, dtype=np.float32))
    assert head.scores(np.array([1.5, -2.0, 7.0])).tolist() == [1.5, -2.0]
