"""The library's front door, on the built-in model."""

import asyncio
import os
import pickle
import runpy
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from chorus import LLM, SamplingParams
from chorus.core.requests.request_params import InvalidRequest
from chorus.memory.adapters.store import UnknownAdapter
from chorus.memory.files.error import AdapterFormatError
from chorus.memory.files.identity import with_content
from chorus.server.demo.builtin import BUILTIN_ADAPTERS, BUILTIN_MODEL
from chorus.server.demo.skills import SKILLS
from chorus.server.engine.adapter_loader import LoadTimedOut

EXAMPLES = Path(__file__).parents[2] / "examples"
GREEDY = SamplingParams(temperature=0, max_tokens=40)
TEXT = "quiet river"


@pytest.fixture(scope="module")
def llm():
    with LLM(memory_bytes=8 << 20, threads=1) as llm:
        yield llm


def test_the_prefix_cache_is_reset(llm):
    prompt = "abcdefgh" * 8 + "\n"
    before, worker = llm.generate(prompt, GREEDY), llm._worker  # noqa: SLF001  # the library shows no counts
    assert worker.stats.num_cached_pages > 0
    assert llm.reset_prefix_cache() is True
    assert worker.stats.num_cached_pages == 0
    assert llm.generate(prompt, GREEDY).text == before.text
    assert llm.reset_prefix_cache(reset_running_requests=True) is True
    llm.generate(prompt, GREEDY)
    assert llm.reset_prefix_cache(tiers=["host"]) and worker.stats.num_cached_pages > 0
    assert llm.reset_prefix_cache(tiers="pool,host") and worker.stats.num_cached_pages == 0
    for wrong, named in (("gpu", "gpu"), (["pool", "gpu"], "gpu"), ("", "")):
        with pytest.raises(InvalidRequest, match=f"tiers names '{named}'; give some of pool, host, disk"):
            llm.reset_prefix_cache(tiers=wrong)


def test_one_text_gives_one_completion(llm):
    answer = llm.generate(f"{TEXT}\n", GREEDY, adapter="reverse")
    assert (answer.text, answer.finish_reason) == (TEXT[::-1], "stop")
    assert llm.generate(f"{TEXT}\n", GREEDY).text == TEXT, "without an adapter the base model repeats"


def test_every_prompt_may_have_its_own_adapter_and_params(llm):
    names = [None, *SKILLS]
    params = [SamplingParams(temperature=0, max_tokens=3 + i) for i in range(len(names))]
    answers = llm.generate([f"{TEXT}\n"] * len(names), params, adapter=names)
    for name, one, answer in zip(names, params, answers, strict=True):
        alone = llm.generate(f"{TEXT}\n", one, adapter=name)
        assert answer == alone and len(answer.token_ids) <= one.max_tokens


def test_more_prompts_than_the_engine_is_given_at_once(llm, monkeypatch):
    monkeypatch.setattr("chorus.server.llm.IN_FLIGHT", 3)
    texts = [f"{'abc' * (1 + i % 3)}{chr(97 + i)}" for i in range(11)]
    answers = llm.generate([f"{text}\n" for text in texts], GREEDY, adapter="reverse")
    assert [answer.text for answer in answers] == [text[::-1] for text in texts]


@pytest.mark.parametrize("name", ["generate", "agenerate", "chat", "achat"])
def test_methods_have_names_of_their_own(name):
    """By which other processes find them."""
    method = getattr(LLM, name)
    assert method.__qualname__ == f"LLM.{name}"
    assert pickle.loads(pickle.dumps(method)) is method


def test_tokens_for_a_prompt_and_no_prompts(llm):
    answer = llm.generate(f"{TEXT}\n", GREEDY, adapter="upper")
    assert llm.generate([list(answer.prompt_token_ids)], GREEDY, adapter="upper") == [answer]
    assert llm.generate([], GREEDY) == []


def test_stop_texts_and_logprobs(llm):
    params = SamplingParams(temperature=0, max_tokens=40, logprobs=2)
    answer = llm.generate(f"{TEXT}\n", params, stop=["river"])
    assert (answer.text, answer.finish_reason) == ("quiet ", "stop")
    assert len(answer.logprobs) == len(answer.token_ids)
    assert all(len(one.top) == 2 and one.logprob <= 0 for one in answer.logprobs)


def test_a_refused_prompt_is_named_and_takes_the_others_with_it(llm):
    with pytest.raises(InvalidRequest, match=r"prompt 1: .*no tokens"):
        llm.generate([f"{TEXT}\n", [], f"{TEXT}\n"], GREEDY)
    with pytest.raises(InvalidRequest, match=r"prompt 0: .*nobody"):
        llm.generate(f"{TEXT}\n", GREEDY, adapter="nobody")
    with pytest.raises(InvalidRequest, match="2 adapter for 1 prompts"):
        llm.generate([f"{TEXT}\n"], GREEDY, adapter=["reverse", "upper"])
    assert llm.generate(f"{TEXT}\n", GREEDY).text == TEXT


def test_a_stream_may_be_left_early(llm):
    async def first_pieces():
        pieces = []
        async for text in llm.stream(f"{TEXT}\n", GREEDY, adapter="reverse"):
            pieces.append(text)
            if len(pieces) == 2:
                break
        return pieces

    async def whole():
        return [text async for text in llm.stream(f"{TEXT}\n", GREEDY, adapter="reverse")]

    pieces = asyncio.run(whole())
    assert "".join(pieces) == TEXT[::-1] and len(pieces) > 2
    assert asyncio.run(first_pieces()) == pieces[:2]


def test_a_disk_that_hangs_costs_a_load_its_time_limit_and_no_more(monkeypatch):
    go_on, plain_open = threading.Event(), os.open

    def hanging_open(path, *args, **options):
        if path == "adapter_model.safetensors":
            assert go_on.wait(10)
        return plain_open(path, *args, **options)

    with LLM(adapters={}, memory_bytes=8 << 20, threads=1, adapter_load_seconds=0.2) as it, monkeypatch.context() as m:
        m.setattr("chorus.memory.files.directory.os.open", hanging_open)
        try:
            with pytest.raises(LoadTimedOut, match="adapter_load_seconds"):
                it.load_adapter("voice", BUILTIN_ADAPTERS / "reverse")
            assert it.generate(f"{TEXT}\n", GREEDY).text == TEXT
            assert "voice" not in it.adapters
        finally:
            go_on.set()


def test_what_is_loaded_is_hashed_as_over_http(monkeypatch):
    hashed = threading.Event()

    def hash_it(manifest):
        known = with_content(manifest)
        assert known.content_hash is not None
        hashed.set()
        return known

    monkeypatch.setattr("chorus.server.engine.adapter_health.with_content", hash_it)
    with LLM(adapters={}, memory_bytes=8 << 20, threads=1) as it:
        it.load_adapter("voice", BUILTIN_ADAPTERS / "reverse")
        assert hashed.wait(60)


def test_requests_without_a_seed_draw_from_the_settings():
    """Answers of equal prompts differ, and those of another start with the same seed are the same."""

    def texts():
        with LLM(memory_bytes=8 << 20, threads=1, seed=3) as it:
            return [answer.text for answer in it.generate([TEXT] * 3, SamplingParams(temperature=2.0, max_tokens=12))]

    first = texts()
    assert len(set(first)) == 3
    assert texts() == first


def test_adapters_come_and_go(tmp_path):
    with LLM(BUILTIN_MODEL, adapters={"voice": BUILTIN_ADAPTERS / "upper"}, memory_bytes=8 << 20, threads=1) as llm:
        assert llm.adapters == ["voice"]
        assert llm.generate(f"{TEXT}\n", GREEDY, adapter="voice").text == TEXT.upper()
        llm.load_adapter("voice", BUILTIN_ADAPTERS / "reverse")
        assert llm.generate(f"{TEXT}\n", GREEDY, adapter="voice").text == TEXT[::-1]
        with pytest.raises(AdapterFormatError):
            llm.load_adapter("voice", tmp_path)
        assert llm.generate(f"{TEXT}\n", GREEDY, adapter="voice").text == TEXT[::-1], "the old version serves on"
        llm.unload_adapter("voice")
        with pytest.raises(UnknownAdapter):
            llm.unload_adapter("voice")
        assert llm.adapters == []


@pytest.mark.wide
def test_importing_the_package_loads_no_engine():
    code = (
        "import sys, chorus; heavy = {'torch', 'transformers', 'starlette', 'pydantic'} & sys.modules.keys();"
        "assert not heavy, heavy; assert 'LLM' in dir(chorus); chorus.LLM; assert 'pydantic' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.wide
def test_examples_run(monkeypatch, capsys):
    """The first as a process, whose end is part of it."""
    monkeypatch.setenv("CHORUS_THREADS", "1")
    monkeypatch.setenv("CHORUS_MEMORY_BYTES", str(8 << 20))
    ran = subprocess.run([sys.executable, EXAMPLES / "offline.py"], capture_output=True, text=True, timeout=200)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == f"hello world\n{'hello world'[::-1]}\nuryyb jbeyq\n"
    runpy.run_path(str(EXAMPLES / "stream.py"), run_name="__main__")
    assert capsys.readouterr().out == "dlrow olleh\n"


def test_a_mass_of_nothing_gives_the_greedy_answer(llm):
    greedy = llm.generate("quiet river\n", SamplingParams(temperature=0, max_tokens=20)).text
    for seed in range(4):
        params = SamplingParams(temperature=1.5, top_p=0, seed=seed, max_tokens=20)
        assert llm.generate("quiet river\n", params).text == greedy
