"""Several adapters in one request, and an adapter under the base model's name, in a cluster."""

from __future__ import annotations

import pytest

from chorus import LLM, SamplingParams
from tests.server.cluster.conftest import cluster_up

PAIR = "upper*0.6+reverse*0.7"
BODY = {"prompt": "abc\n", "max_tokens": 8, "temperature": 0, "return_token_ids": True, "ignore_eos": True}


@pytest.fixture(scope="module")
def own(roots):
    """A cluster with two replicas that begins with no adapters of its own."""
    with cluster_up(2, "--adapter-roots", str(roots), key="") as running:
        yield running


def ask(up, model, status=200):
    response = up.client.post("/v1/completions", json={**BODY, "model": model})
    assert response.status_code == status, response.text
    return response.json()["choices"][0]["token_ids"] if status == 200 else response


@pytest.mark.wide
def test_several_adapters_answer_as_on_one_server(own, roots):
    with LLM(threads=1, adapter_roots=[roots]) as llm:
        params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
        want = {
            name: list(llm.generate("abc\n", params, adapter=name).token_ids) for name in (PAIR, "upper*0.5", "upper")
        }
    assert len(set(map(tuple, want.values()))) > 1
    for _ in range(3):
        for name, tokens in want.items():
            assert ask(own, name) == tokens
    response = own.client.post("/v1/completions", json={**BODY, "model": PAIR})
    assert response.headers["x-chorus-adapter"].count("@1") == 2
    assert "nobody" in ask(own, "upper*0.5+nobody*1", 404).text


def test_a_part_that_is_replaced_or_removed(own, roots):
    def load(path):
        body = {"lora_name": "part", "lora_path": str(roots / path), "load_inplace": True}
        assert own.client.post("/v1/load_lora_adapter", json=body).status_code == 200

    load("upper")
    first = ask(own, "part*1.5+reverse*0.2")
    load("reverse")
    assert ask(own, "part*1.5+reverse*0.2") != first
    load("upper")
    assert ask(own, "part*1.5+reverse*0.2") == first
    assert own.client.post("/v1/adapters/part/drain", json={"seconds": 5}).status_code == 200
    assert own.client.delete("/v1/adapters/part").status_code == 200
    ask(own, "part*1.5+reverse*0.2", 404)


@pytest.mark.wide
def test_an_adapter_serves_the_bases_name(own, roots):
    base, upper = ask(own, None), ask(own, "upper")
    assert base != upper
    body = {"lora_name": "step", "lora_path": str(roots / "upper"), "as_base": True}
    assert own.client.post("/v1/load_lora_adapter", json=body).status_code == 200
    assert ask(own, None) == upper
    assert own.client.post("/v1/unload_lora_adapter", json={"lora_name": "step"}).status_code == 200
    assert ask(own, None) == base
