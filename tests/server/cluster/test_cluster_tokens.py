"""Tokens of an adapter's own in a cluster: every API server makes the prompts and answers that one server makes."""

from __future__ import annotations

import httpx
import pytest

from tests.server.cluster.conftest import cluster_up
from tests.server.own_tokens import COUNT, Reference, save_own

TEXT = "quiet <tool> river<end>"


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A directory with an adapter that has tokens of its own, and one of equal weights without."""
    root = tmp_path_factory.mktemp("tokens")
    for name in ("own", "bare"):
        save_own(root / name)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (root / "bare" / name).unlink()
    return root


@pytest.fixture(scope="module")
def cluster(root):
    with cluster_up(2, "--api-servers", "2", "--adapters", str(root), "--adapter-roots", str(root)) as running:
        yield running


@pytest.mark.slow
def test_all_api_servers_use_the_adapter_s_tokens(cluster, root):
    """Also where another adapter has the same weights."""
    reference = Reference(root / "own")
    ids = reference.tokenizer(TEXT)["input_ids"]
    expected = reference.answer(ids)
    body = {"model": "own", "prompt": TEXT, "max_tokens": COUNT, "temperature": 0, "return_token_ids": True}
    url, headers = cluster.client.base_url, cluster.client.headers
    for _ in range(8):  # each connection may be another server's
        with httpx.Client(base_url=url, headers=headers) as client:
            choice = client.post("/v1/completions", json=body).json()["choices"][0]
            assert (choice["prompt_token_ids"], choice["token_ids"]) == (ids, expected)
            bare = client.post("/v1/completions", json={**body, "model": "bare"}).json()["choices"][0]
            assert bare["prompt_token_ids"] != ids
