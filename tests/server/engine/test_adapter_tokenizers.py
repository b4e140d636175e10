"""Chat templates and tokenizers that are given next to the model, and those that adapters bring."""

import json
import logging
import shutil
import time

import httpx
import pytest

from chorus import LLM, SamplingParams
from chorus.memory.files.tokens.added_tokens import TEMPLATE_FILE
from chorus.server.demo.builtin import BUILTIN_ADAPTERS, BUILTIN_MODEL
from chorus.server.engine.adapter_tokenizers import MAX_BYTES, own_template
from chorus.server.settings import Settings
from chorus.server.start.checks import LaunchError
from chorus.server.start.launch import build_app, serving

SMALL = {"memory_bytes": 8 << 20, "threads": 1}
TEXT = "quiet river"
MODEL_S = "{{ messages[-1].content + '\\n' }}"
OWN = "{{ '>' + messages[-1].content + '\\n' }}"
USER = [{"role": "user", "content": TEXT}]
ASKED = SamplingParams(temperature=0, max_tokens=2, add_special_tokens=True)


@pytest.fixture
def template(tmp_path):
    path = tmp_path / "base.jinja"
    path.write_text(MODEL_S)
    return path


@pytest.fixture
def adapters(tmp_path):
    """Two of the built-in model's; `reverse` has a template of its own, `upper` one that equals the model's."""
    directory = tmp_path / "adapters"
    for name in ("reverse", "upper"):
        shutil.copytree(BUILTIN_ADAPTERS / name, directory / name)
    (directory / "reverse" / TEMPLATE_FILE).write_text(OWN)
    (directory / "upper" / "tokenizer_config.json").write_text(json.dumps({"chat_template": MODEL_S + "\n"}))
    return directory


def prompt_of(llm, adapter=None):
    return llm.tokenizer.decode(llm.chat(USER, ASKED, adapter).prompt_token_ids)


def test_a_template_of_one_s_own_is_the_model_s(template):
    with LLM(chat_template=template, **SMALL) as llm:
        assert prompt_of(llm) == f"{TEXT}\n"
        assert llm.tokenizer.info()["chat_template"] == MODEL_S


@pytest.mark.parametrize(
    ("content", "words"),
    [("{% for m in messages %}", "line 1: "), (b"\xff\xfe\xff", "must be UTF-8 text"), (None, "there is no such file")],
)
def test_a_template_that_cannot_be_used_stops_the_start(tmp_path, content, words):
    path = tmp_path / "broken.jinja"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(LaunchError, match=words):
        LLM(chat_template=path, **SMALL)


def test_a_tokenizer_from_elsewhere_serves_prompts_and_grammars(tmp_path):
    model, tokenizer = tmp_path / "model", tmp_path / "tokenizer"
    shutil.copytree(BUILTIN_MODEL, model)
    tokenizer.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.move(model / name, tokenizer / name)
    with pytest.raises(LaunchError, match=r"no tokenizer\.json"):
        LLM(model, **SMALL)
    with pytest.raises(LaunchError, match=r"tokenizer is .* no tokenizer\.json"):
        LLM(model, tokenizer=model, **SMALL)
    with LLM(model, tokenizer=tokenizer, **SMALL) as llm:
        assert llm.generate(f"{TEXT}\n", SamplingParams(temperature=0, max_tokens=40)).text == TEXT
        assert llm.generate("x\n", SamplingParams(temperature=0, regex="[ab]{3}")).text.strip("ab") == ""


def test_an_adapter_s_own_template_is_used_where_that_is_asked(template, adapters):
    with LLM(
        adapters=adapters, chat_template=template, adapter_chat_templates=True, model=BUILTIN_MODEL, **SMALL
    ) as llm:
        assert prompt_of(llm, "reverse") == f">{TEXT}\n"
        assert prompt_of(llm, "upper") == prompt_of(llm) == f"{TEXT}\n"
        (adapters / "upper" / TEMPLATE_FILE).write_text(OWN.replace(">", "!"))
        llm.load_adapter("upper", adapters / "upper")
        assert prompt_of(llm, "upper") == f"!{TEXT}\n", "a new version has its own"


def test_http_counts_the_tokens_that_it_answers(template, adapters):
    settings = Settings(
        model=BUILTIN_MODEL, adapters=adapters, chat_template=template, adapter_chat_templates=True, **SMALL
    )
    with serving(build_app(settings), settings) as url, httpx.Client(base_url=url) as client:
        asked = {"model": "reverse", "messages": USER}
        tokens = client.post("/tokenize", json=asked).json()["tokens"]
        body = client.post("/v1/chat/completions", json={**asked, "return_token_ids": True, "max_tokens": 1}).json()
        counted = client.post("/v1/messages/count_tokens", json={**asked, "max_tokens": 1}).json()
        base = client.post("/tokenize", json={"messages": USER}).json()["tokens"]
    assert body["prompt_token_ids"] == tokens and counted["input_tokens"] == len(tokens) == len(base) + 1


def test_templates_that_are_not_used_are_warned_about_in_one_line(template, adapters, caplog):
    def warned():
        return [one.getMessage() for one in caplog.records if "chat template of their own" in one.getMessage()]

    with (
        caplog.at_level(logging.WARNING),
        LLM(adapters=adapters, chat_template=template, model=BUILTIN_MODEL, **SMALL) as llm,
    ):
        assert prompt_of(llm, "reverse") == f"{TEXT}\n"
        deadline = time.monotonic() + 60
        while not warned() and time.monotonic() < deadline:
            time.sleep(0.01)
        (told,) = warned()
        assert told.startswith("1 adapters") and "reverse" in told and "--adapter-chat-templates" in told
        llm.load_adapter("more", adapters / "reverse")
        assert len(warned()) == 2 and "more" in warned()[1]


def test_templates_are_read_from_either_file_and_never_whole_disks(tmp_path):
    assert own_template(tmp_path) is None and own_template(tmp_path / "absent") is None
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "a"}))
    assert own_template(tmp_path) == "a"
    (tmp_path / TEMPLATE_FILE).write_text("b")
    assert own_template(tmp_path) == "b"
    (tmp_path / TEMPLATE_FILE).write_bytes(b"x" * (MAX_BYTES + 1))
    (tmp_path / "tokenizer_config.json").write_text("[" * 100_000)
    assert own_template(tmp_path) is None
