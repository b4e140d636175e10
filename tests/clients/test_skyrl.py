"""SkyRL's client of inference servers: rollouts, samples in Tinker's form, and what it calls between two steps."""

from __future__ import annotations

import asyncio
import importlib
import shutil
import sys
import types
from pathlib import Path

import pytest

pytest.importorskip("aiohttp")
pytest.importorskip("skyrl")
from transformers import AutoTokenizer

from chorus.core.config import EngineConfig
from chorus.core.engine import Engine
from chorus.server.demo.builtin import BUILTIN_ADAPTERS, BUILTIN_MODEL
from chorus.server.text.tokenizer import Tokenizer

from ..server.conftest import live_server

pytestmark = pytest.mark.integration

PACKAGES = ("skyrl", "skyrl.backends", "skyrl.backends.skyrl_train", "skyrl.backends.skyrl_train.inference_servers")


@pytest.fixture(scope="module")
def client_class():
    """The class alone: the packages around it import trainers."""
    before = dict(sys.modules)
    root = Path(importlib.import_module("skyrl").__path__[0]).parent
    for name in PACKAGES:
        package = types.ModuleType(name)
        package.__path__ = [str(root / name.replace(".", "/"))]
        sys.modules[name] = package
    yield importlib.import_module(f"{PACKAGES[-1]}.remote_inference_client").RemoteInferenceClient
    for name in [name for name in sys.modules if name.split(".")[0] == "skyrl" and name not in before]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The built-in model, with adapters below a directory."""
    root = tmp_path_factory.mktemp("roots")
    for name in ("upper", "reverse"):
        shutil.copytree(BUILTIN_ADAPTERS / name, root / name)
    engine = Engine.from_config(EngineConfig(model=BUILTIN_MODEL, memory_bytes=16 << 20, threads=1))
    tokenizer, settings = Tokenizer.load(BUILTIN_MODEL), {"model": BUILTIN_MODEL}
    with live_server(engine, tokenizer, adapter_roots=(root,), settings=settings) as live:
        yield live, root


@pytest.fixture
def play(client_class, server):
    """Runs a coroutine with a client of the server."""
    live, _ = server
    base = live.client.get("/v1/models").json()["data"][0]["id"]

    def run(act):
        async def inside():
            client = client_class(live.url, [live.url], 1, model_name=base, uses_lora_weight_sync=True)
            async with client:
                await act(client, base)

        asyncio.run(inside())

    return run


@pytest.fixture(scope="module")
def ids_of():
    tokenizer = AutoTokenizer.from_pretrained(BUILTIN_MODEL)
    return lambda text: tokenizer(text).input_ids


def plain(texts):
    """Texts without the token that ends them, which the client keeps."""
    return [text.removesuffix("<|eos|>").strip() for text in texts]


def test_rollouts_of_a_policy_that_is_replaced(play, server, ids_of):
    """A load, rollouts by tokens with log-probabilities, a replacement under the same name, and its end."""
    _, root = server
    prompts = [ids_of("hello\n"), ids_of("abc\n")]
    asked = {"prompt_token_ids": prompts, "sampling_params": {"temperature": 0.01, "max_tokens": 8, "logprobs": 0}}

    async def act(client, _):
        for content, expected in (("upper", ["HELLO", "ABC"]), ("reverse", ["olleh", "cba"])):
            loaded = await client.load_lora_adapter("policy", str(root / content))
            assert [one["status"] for one in loaded.values()] == [200]
            made = await client.generate(asked, model="policy")
            assert plain(made["responses"]) == expected
            assert made["stop_reasons"] == ["stop", "stop"]
            for ids, scores in zip(made["response_ids"], made["response_logprobs"], strict=True):
                assert len(ids) == len(scores) and all(score <= 0 for score in scores)
        unloaded = await client.unload_lora_adapter("policy")
        assert [one["status"] for one in unloaded.values()] == [200]

    play(act)


def test_between_two_steps(play, server, ids_of):
    live, root = server
    asked = {"prompt_token_ids": [ids_of("hello\n")], "sampling_params": {"temperature": 0.01, "max_tokens": 8}}

    async def act(client, base):
        await client.pause()
        begun = asyncio.create_task(client.generate(asked, model=base))
        await asyncio.sleep(0.3)
        assert not begun.done()
        await client.load_lora_adapter("policy", str(root / "upper"))
        await client.resume()
        assert plain((await begun)["responses"]) == ["hello"]
        await client.reset_prefix_cache()
        assert live.worker.stats.num_cached_pages == 0
        await client.sleep(level=2)  # which it turns into 1 for adapters
        assert live.client.get("/is_sleeping").json()["is_sleeping"]
        await client.wake_up(tags=["weights"])
        await client.wake_up(tags=["kv_cache"])
        assert plain((await client.generate(asked, model="policy"))["responses"]) == ["HELLO"]

    play(act)


def test_a_sample_in_tinker_s_form(play, ids_of):
    prompt = ids_of("abc\n")

    async def act(client, base):
        body = {
            "model": base,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": prompt}]},
            "num_samples": 2,
            "sampling_params": {"temperature": 0.01, "max_tokens": 6, "seed": 1},
            "include_prompt_logprobs": True,
            "topk_prompt_logprobs": 2,
        }
        made = await client.sample({"json": body})
        texts = await client.detokenize([one["tokens"] for one in made["sequences"]])
        assert plain(texts) == ["abc", "abc"]
        assert all(len(one["tokens"]) == len(one["logprobs"]) for one in made["sequences"])
        assert made["prompt_logprobs"][0] is None and len(made["prompt_logprobs"]) == len(prompt)
        assert all(len(each) == 2 for each in made["topk_prompt_logprobs"][1:])

    play(act)


def test_the_number_of_processes_of_a_server(play):
    """It is asked by a GET with a body."""

    async def act(client, _):
        assert await client.get_world_size() == (1, 1)

    play(act)
