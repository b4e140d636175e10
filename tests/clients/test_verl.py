"""The parts of verl that call a server: its batch generation, and its client of SGLang's routes."""

from __future__ import annotations

import asyncio
import importlib.util
import shutil
import sys
import types
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest

pytest.importorskip("aiohttp")
pytest.importorskip("openai")
pytest.importorskip("requests")
import requests

from chorus.core.config import EngineConfig
from chorus.core.engine import Engine
from chorus.server.demo.builtin import BUILTIN_ADAPTERS, BUILTIN_MODEL
from chorus.server.text.tokenizer import Tokenizer

from ..server.conftest import live_server

SPEC = importlib.util.find_spec("verl")

pytestmark = [pytest.mark.integration, pytest.mark.skipif(SPEC is None, reason="verl is not installed")]

TRAINERS = (
    "hydra",
    "omegaconf",
    "pandas",
    "ray",
    "sglang",
    "sglang.srt",
    "sglang.srt.entrypoints",
    "sglang.srt.entrypoints.EngineBase",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers",
    "sglang.srt.managers.io_struct",
    "sglang.srt.server_args",
    "sglang.srt.utils",
    "verl",
    "verl.utils",
    "verl.utils.hdfs_io",
    "verl.workers",
    "verl.workers.rollout",
    "verl.workers.rollout.replica",
)
"""What the two files import and no call of them needs: trainers, and the engines that they start."""


class _Base:
    """In place of the engine that the client of SGLang's routes is derived from."""


class _Address:
    """In place of SGLang's arguments."""

    def __init__(self, *, host, port, node_rank=0, **_):
        self.host, self.port, self.node_rank = host, port, node_rank


@pytest.fixture(scope="module")
def verl():
    """Loads a file of verl's, by its path in the package."""
    before = dict(sys.modules)
    (root,) = SPEC.submodule_search_locations
    for name in TRAINERS:
        sys.modules[name] = MagicMock(name=name)
    stubs: dict[str, Any] = dict(sys.modules)
    stubs["hydra"].main = lambda **_: lambda function: function
    stubs["sglang.srt.entrypoints.EngineBase"].EngineBase = _Base
    stubs["sglang.srt.server_args"].ServerArgs = _Address

    def load(path: str) -> types.ModuleType:
        spec = importlib.util.spec_from_file_location(Path(path).stem, Path(root) / path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    yield load
    for name in TRAINERS:
        sys.modules.pop(name)
    sys.modules.update({name: module for name, module in before.items() if name in TRAINERS})


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """Two servers of the built-in model, with adapters below a directory."""
    root = tmp_path_factory.mktemp("roots")
    for name in ("upper", "reverse"):
        shutil.copytree(BUILTIN_ADAPTERS / name, root / name)
    tokenizer, settings = Tokenizer.load(BUILTIN_MODEL), {"model": BUILTIN_MODEL}

    def begin():
        engine = Engine.from_config(EngineConfig(model=BUILTIN_MODEL, memory_bytes=16 << 20, threads=1, adapters=root))
        return live_server(engine, tokenizer, adapter_roots=(root,), settings=settings)

    with begin() as one, begin() as two:
        yield one, two


def address(live):
    return live.url.removeprefix("http://")


def test_a_batch_is_generated_by_two_servers(verl, servers):
    module = verl("trainer/main_generation_server.py")
    words = ["hello", "abc", "xyz"]
    chats = np.array([[{"role": "user", "content": word}] for word in words])
    sampling = {"temperature": 0.0, "max_tokens": 12}
    made = asyncio.run(module.generate([*map(address, servers)], "upper", 2, sampling, chats))
    assert [len(each) for each in made] == [4, 2], "two samples of each prompt, the prompts divided over the servers"
    texts = [one.choices[0].message.content.strip() for each in made for one in each]
    assert texts == [word.upper() for word in words for _ in range(2)]


def test_its_client_of_sglang_s_routes(verl, servers):
    """It clears the cache and unloads an adapter; generation in SGLang's form is not served."""
    module = verl("workers/rollout/sglang_rollout/http_server_engine.py")
    live = servers[0]
    host, port = address(live).split(":")
    made = {"launch_server": False, "host": host, "port": int(port), "max_attempts": 1, "retry_delay": 0.01}
    client = module.HttpServerAdapter(**made)
    live.post(model="upper", prompt="hello\n", max_tokens=4)
    client.flush_cache()
    assert live.worker.stats.num_cached_pages == 0

    async def act():
        await module.AsyncHttpServerAdapter(**made).unload_lora_adapter("reverse")

    asyncio.run(act())
    assert "reverse" not in [one["id"] for one in live.client.get("/v1/models").json()["data"]]
    with pytest.raises(requests.HTTPError, match=r"400|422"):
        client.generate(prompt="hello\n", sampling_params={"max_new_tokens": 4})
    with pytest.raises(requests.HTTPError, match="501"):
        client.abort_request(rid="x")
