"""The real thing: `chorus serve` as a process, asked by the OpenAI client, compared with transformers and PEFT."""

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager

import httpx
import openai
import pytest

from chorus.server.engine.worker import EngineWorker

LENGTH, COUNT = 12, 8
KEY = "sk-of-all-tests"


@pytest.fixture(scope="module")
def model_dir(subject, pretrained, tmp_path_factory):
    directory = tmp_path_factory.mktemp("served") / "tiny"
    shutil.copytree(subject("wide_heads").model, directory)
    pretrained.save_pretrained(directory)
    return directory


@contextmanager
def served(model_dir, *more):
    """A server's process and its URL."""
    flags = ["--model", str(model_dir), "--port", "0", "--threads", "1", *map(str, more)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("CHORUS_")}
    with subprocess.Popen(
        [sys.executable, "-m", "chorus.server", "serve", *flags], stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if found := re.search(r"listening on (\S+)", line):
                break
        else:
            pytest.fail("the server ended before it listened")
        try:
            yield process, found[1]
        except BaseException:
            process.kill()
            raise
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
        assert process.wait(20) in (0, 130)
        assert "Traceback" not in rest


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    """The file of the server's keys."""
    path = tmp_path_factory.mktemp("served") / "keys"
    path.write_text(f"{KEY} client\nsk-the-old-one old\n")
    return path


@pytest.fixture(scope="module")
def server(subject, model_dir, keys):
    """The process of the server that the tests share, and its URL."""
    adapters = next(iter(subject("wide_heads").adapters.values())).parent
    with served(model_dir, "--adapters", adapters, "--api-key-file", keys) as running:
        yield running


@pytest.fixture(scope="module")
def url(server):
    return server[1]


@contextmanager
def reloaded(process, keys, text):
    """The server's keys are those of `text`; afterwards those there were."""

    def reload(text):
        keys.write_text(text)
        process.send_signal(signal.SIGHUP)
        return next(line for line in process.stderr if "chorus.audit" in line).rstrip()

    before = keys.read_text()
    try:
        yield reload(text)
    finally:
        reload(before)


@pytest.mark.wide
def test_keys_change_while_the_server_runs(server, keys):
    process, url = server
    with httpx.Client(base_url=url, timeout=60) as client:

        def statuses():
            each = ({"authorization": f"Bearer {key}"} for key in ("sk-the-old-one", "sk-the-new-one"))
            return [client.get("/v1/models", headers=headers).status_code for headers in each]

        assert statuses() == [200, 401]
        with reloaded(process, keys, f"{KEY} client\nsk-the-new-one new\n") as said:
            assert said.endswith("reloaded the keys: 2 tenants, new: new, removed: old")
            assert statuses() == [401, 200]
        assert statuses() == [200, 401]


def test_every_adapter_at_once_says_what_peft_says(url, subject):
    reference = subject("wide_heads")

    async def ask(client: openai.AsyncOpenAI, name: str | None, prompt: list[int]) -> tuple[list[int], int]:
        stream = await client.completions.create(
            model=name or "tiny",
            prompt=prompt,
            max_tokens=COUNT,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True, "return_token_ids": True, "return_step_info": True},
        )
        tokens, shared = [], 0
        async for chunk in stream:
            tokens += chunk.choices[0].token_ids
            shared = max(shared, chunk.step["adapters"])
        return tokens, shared

    async def main() -> None:
        names = [None, *reference.adapters] * 2
        prompts = [reference.prompt(name, LENGTH, COUNT, seed) for seed, name in enumerate(names)]
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as client:
            listed = {model.id async for model in client.models.list()}
            assert listed == {"tiny", *reference.adapters}
            answers = await asyncio.gather(
                *(ask(client, name, prompt) for name, prompt in zip(names, prompts, strict=True))
            )
        for name, prompt, (tokens, _) in zip(names, prompts, answers, strict=True):
            assert tokens == reference.greedy(name, prompt, COUNT), name
        assert max(shared for _, shared in answers) > 1

    asyncio.run(main())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "metric", "count"),
    [
        (["--mode-policy", "dlora-1"], "chorus_mode_switches_total", COUNT),
        (["--num-pages", "20", "--preemption", "swap", "--no-prefix-cache"], "chorus_swaps_in_total", 3 * COUNT),
    ],
    ids=["merged", "swapped"],
)
def test_two_ranks_say_what_peft_says(model_dir, subject, flags, metric, count):
    """All requests for one adapter, until it is merged; or more than there are pages for, until one was swapped."""
    reference = subject("wide_heads")
    name, path = next(iter(reference.adapters.items()))
    prompts = [reference.prompt(name, LENGTH, count, seed) for seed in range(8)]

    async def ask(client: httpx.AsyncClient, prompt: list[int]) -> list[int]:
        body = {"model": name, "prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True}
        answer = await client.post("/v1/completions", json={**body, "return_token_ids": True})
        return answer.json()["choices"][0]["token_ids"]

    async def main(url: str) -> None:
        wanted = [reference.greedy(name, prompt, count) for prompt in prompts]
        async with httpx.AsyncClient(base_url=url, timeout=60) as client, asyncio.timeout(120):
            found = 0.0
            while not found:
                assert await asyncio.gather(*(ask(client, prompt) for prompt in prompts)) == wanted
                line = re.search(rf"^{metric} (\S+)$", (await client.get("/metrics")).text, re.MULTILINE)
                assert line is not None
                found = float(line[1])

    ranks = "--tensor-parallel-size", 2, "--dtype", "float32"
    with served(model_dir, *ranks, "--lora-modules", f"{name}={path}", *flags) as (_, url):
        asyncio.run(main(url))


def test_text_and_tokens_agree(url, tokenizer):
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as client:
        answer = client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "hi"}],
            max_tokens=20,
            seed=1,
            extra_body={"return_token_ids": True},
        )
    choice = answer.choices[0]
    assert choice.message.content == tokenizer.decode(choice.token_ids)
    assert answer.usage.completion_tokens == len(choice.token_ids)


@pytest.mark.wide
def test_the_app_is_served_on_the_event_loop_that_its_worker_gives(start, fake_engine, monkeypatch):
    loop = asyncio.new_event_loop()
    monkeypatch.setattr(EngineWorker, "take_loop", lambda _: loop)
    assert start(fake_engine).loop is loop
