"""Tokens of an adapter's own in a cluster: every API server makes the prompts and answers that one server makes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import torch

from tests.server.cluster.conftest import cluster_up
from tests.server.own_tokens import COUNT, Reference, save_own

TEXT = "quiet <tool> river<end>"
LONG = 160


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


@pytest.mark.slow
def test_requests_that_move_go_on_with_the_adapter_s_rows(root):
    """Trained rows, and rows beyond the base model's, under a policy that moves requests as soon as it may."""
    save_own(root / "beyond", 2, beyond=True)
    want = {}
    for name in ("own", "beyond"):
        reference = Reference(root / name)
        ids = reference.tokenizer(TEXT)["input_ids"]
        whole = reference.model.generate(torch.tensor([ids]), max_new_tokens=LONG, do_sample=False, eos_token_id=[-1])
        want[name] = whole[0, len(ids) :].tolist()
    body = {"prompt": TEXT, "max_tokens": LONG, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    policy = ("--policy", "first-fit", "--migration", "greedy")  # all requests begin at one replica
    eager = (f"--migration-setting={each}" for each in ("interval_seconds=0.05", "excess_requests=1"))
    with cluster_up(2, "--adapters", str(root), *policy, *eager) as up, ThreadPoolExecutor(8) as threads:

        def ask(name):
            answer = up.client.post("/v1/completions", json={**body, "model": name})
            assert answer.status_code == 200, answer.text
            return answer.json()["choices"][0]["token_ids"]

        for _ in range(20):
            names = ["own", "beyond"] * 4
            assert list(threads.map(ask, names)) == [want[name] for name in names]
            if up.metric("chorus_requests_moved_total") > 0:
                return
    pytest.fail("no request moved")
