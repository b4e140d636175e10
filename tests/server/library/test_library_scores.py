"""`LLM.classify` and `LLM.score` on a tiny model, against transformers and peft."""

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForSequenceClassification

from chorus import LLM, InvalidRequest
from chorus.server.demo.builtin import BUILTIN_MODEL

from ...conftest import quiet
from ..api.pooling.test_pooling_api import save_classifier

pytestmark = pytest.mark.wide

TEXTS = ["abc", "a longer text", "zz"]
LABELS = {"three": 3, "one": 1}


@pytest.fixture(scope="module")
def heads(subject, tmp_path_factory):
    root = tmp_path_factory.mktemp("heads")
    for seed, (name, labels) in enumerate(LABELS.items()):
        save_classifier(subject("wide_heads").model, root / name, labels, seed)
    return root


@pytest.fixture(scope="module")
def llm(subject, heads):
    model = subject("wide_heads").model
    adapters = {name: heads / name for name in LABELS}
    with LLM(
        model,
        tokenizer=BUILTIN_MODEL,
        adapters=adapters,
        memory_bytes=8 << 20,
        threads=1,
        cpu_kernels="torch",
        max_inputs=2,
    ) as llm:
        yield llm


@quiet()
def logits_of(subject, heads, name, tokens):
    base = AutoModelForSequenceClassification.from_pretrained(
        subject("wide_heads").model, num_labels=LABELS[name], pad_token_id=0
    )
    with torch.inference_mode():
        return PeftModel.from_pretrained(base, str(heads / name))(torch.tensor([tokens])).logits[0].numpy()


def test_classes_are_those_of_transformers(llm, subject, heads):
    found = llm.classify(TEXTS, "three")
    raw = llm.classify(TEXTS, "three", use_activation=False)
    assert len(found) == 3, "more than max_inputs, which are asked for in turn"
    for each, values in zip(found, raw, strict=True):
        expected = logits_of(subject, heads, "three", each.prompt_token_ids)
        np.testing.assert_allclose(values.probs, expected, atol=1e-4)
        powers = np.exp(expected - expected.max())
        np.testing.assert_allclose(each.probs, powers / powers.sum(), atol=1e-4)
        assert each.label == f"LABEL_{expected.argmax()}" and each.adapter == "three@1"
    alone = llm.classify(TEXTS[0], "three")
    np.testing.assert_allclose(alone.probs, found[0].probs, atol=1e-6)
    mixed = llm.classify(TEXTS[:2], ["three", "one"])
    assert [len(each.probs) for each in mixed] == [3, 1]


def test_scores_are_those_of_a_head_or_similarities_of_vectors(llm):
    scores = llm.score("a", TEXTS, "one")
    assert [llm.score("a", text, "one") for text in TEXTS] == pytest.approx(scores, abs=1e-6)
    assert all(0 < score < 1 for score in scores)
    raw = llm.score(["a"] * 3, TEXTS, "one", use_activation=False)
    assert [1 / (1 + np.exp(-score)) for score in raw] == pytest.approx(scores, abs=1e-6)
    first, *others = (each.embedding / np.linalg.norm(each.embedding) for each in llm.embed(["a", *TEXTS]))
    assert llm.score("a", TEXTS) == pytest.approx([float(first @ other) for other in others], abs=1e-4)


def test_what_can_not_be_scored_is_told_in_the_library_s_words(llm):
    with pytest.raises(InvalidRequest, match="there are 2 queries and 3 documents; give one query"):
        llm.score(["a", "b"], TEXTS)
    with pytest.raises(InvalidRequest, match="it has a head with 3 labels, scores need one with 1"):
        llm.score("a", "b", "three")
    with pytest.raises(InvalidRequest, match="there is no adapter 'three2'; did you mean 'three'"):
        llm.classify("a", "three2")
    with pytest.raises(InvalidRequest, match="there is no adapter 'nobody'"):
        llm.score("a", "b", "nobody")
