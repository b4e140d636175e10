"""Vectors and classes from a real cluster: those of one engine, also where a replica is killed meanwhile."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForSequenceClassification

from chorus.server.demo.builtin import BUILTIN_MODEL
from tests.conftest import quiet
from tests.server.cluster.conftest import SECONDS, Up, cluster_up

pytestmark = pytest.mark.slow

BASE = "chorus-builtin"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with an adapter that has a score head, `judge`."""
    root = tmp_path_factory.mktemp("heads")
    with quiet():
        torch.manual_seed(0)
        base = AutoModelForSequenceClassification.from_pretrained(BUILTIN_MODEL, num_labels=3, pad_token_id=0)
        config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="SEQ_CLS")
        peft = get_peft_model(base, config)
        torch.nn.init.normal_(peft.get_parameter("base_model.model.score.modules_to_save.default.weight"), std=0.3)
        peft.save_pretrained(str(root / "judge"))
        peft.eval()
        torch.save(peft, root / "peft.pt")
    return root


@pytest.fixture(scope="module")
def cluster(root: Path):
    flags = "--adapter-roots", str(root), "--slo-tpot", "0.5", "--give-up-seconds", str(SECONDS)
    with cluster_up(2, *flags) as running:
        answer = running.client.post(
            "/v1/load_lora_adapter", json={"lora_name": "judge", "lora_path": str(root / "judge")}
        )
        assert answer.status_code == 200, answer.text
        yield running


def vectors(up: Up, text: str, model: str) -> list[list[float]]:
    response = up.client.post("/v1/embeddings", json={"model": model, "input": [text, f"{text} again"]})
    assert response.status_code == 200, response.text
    return [each["embedding"] for each in response.json()["data"]]


def test_classes_and_vectors_are_those_of_peft(cluster: Up, root: Path):
    peft = torch.load(root / "peft.pt", weights_only=False)
    body = {"model": "judge", "input": "hello world", "use_activation": False}
    (each,) = cluster.client.post("/classify", json=body).json()["data"]
    prompt = {"model": "judge", "prompt": "hello world"}
    tokens = cluster.client.post("/tokenize", json=prompt).json()["tokens"]
    with torch.inference_mode():
        outputs = peft(torch.tensor([tokens]), output_hidden_states=True)
    np.testing.assert_allclose(each["probs"], outputs.logits[0], rtol=1e-3, atol=1e-3)
    (found, _) = vectors(cluster, "hello world", "judge")
    last = outputs.hidden_states[-1][0, -1]
    np.testing.assert_allclose(found, last / last.norm(), atol=1e-4)


def test_an_adapter_without_a_head_is_refused_as_by_one_server(cluster: Up):
    error = cluster.client.post("/classify", json={"model": BASE, "input": "a"})
    assert error.status_code == 400 and error.json()["error"]["param"] == "model"
    assert "no score head" in error.json()["error"]["message"]
    error = cluster.client.post("/v1/embeddings", json={"model": "judg", "input": "a"})
    assert error.status_code == 404 and "did you mean 'judge'?" in error.json()["error"]["message"]


def test_vectors_are_the_same_where_a_replica_is_killed(cluster: Up):
    texts = [f"a text of number {index} " * 8 for index in range(6)]
    asked = [(text, model) for text in texts for model in (BASE, "judge")] * 4
    with ThreadPoolExecutor(8) as threads:
        unbroken = list(threads.map(lambda each: vectors(cluster, *each), asked))
        answers = [threads.submit(vectors, cluster, *each) for each in asked]
        answers[4].result()
        os.kill(cluster.replicas[0], signal.SIGKILL)
        for answer, want in zip(answers, unbroken, strict=True):
            np.testing.assert_allclose(answer.result(), want, atol=1e-5)
    cluster.wait_until(lambda: cluster.metric("chorus_replicas_up") == 2)
