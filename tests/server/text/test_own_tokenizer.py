"""Tokenizers that fail within the library: an adapter's goes into quarantine, a text that no tokenizer reads is
refused, and neither ends a thread or the server.
"""

from __future__ import annotations

import json
import shutil

import httpx
import pytest
from tokenizers import Regex, Tokenizer, pre_tokenizers

from chorus.core.requests.request_params import InvalidRequest
from chorus.memory.files.added_tokens import AddedToken, OwnTokens
from chorus.server.demo.builtin import BUILTIN_ADAPTERS, BUILTIN_MODEL
from chorus.server.settings import Settings
from chorus.server.start.launch import build_app, serving
from chorus.server.text.own_tokenizer import CalledTokenizer, is_panic, own_backend

SLOW = "x" * 60
"""A text that the regular expression of `panicking` gives up on."""


def panicking():
    """The built-in model's tokenizer with a pre-tokenizer that panics for `SLOW`."""
    found = Tokenizer.from_file(str(BUILTIN_MODEL / "tokenizer.json"))
    split = pre_tokenizers.Split(Regex("(x+x+)+y"), "isolated")
    found.pre_tokenizer = pre_tokenizers.Sequence([split, found.pre_tokenizer])
    return found


def test_the_library_panics_and_the_call_does_not():
    with pytest.raises(BaseException, match="retry-limit") as told:
        panicking().encode(SLOW)
    assert is_panic(told.value) and not isinstance(told.value, Exception)
    called = CalledTokenizer(panicking())
    assert len(called.encode("a").ids) == 2
    with pytest.raises(InvalidRequest, match="tokenizer can't read this text: Onig"):
        called.encode_batch_fast([SLOW])


def test_only_a_fault_that_the_base_model_s_tokenizer_lacks_is_the_adapter_s():
    own = OwnTokens((AddedToken(259, "<tool>", special=True),))
    plain = Tokenizer.from_file(str(BUILTIN_MODEL / "tokenizer.json"))
    made = own_backend(CalledTokenizer(panicking()), own, RuntimeError)
    assert made.encode("a<tool>").ids[-1] == 259
    with pytest.raises(InvalidRequest):
        made.encode(SLOW)
    broken = CalledTokenizer(panicking(), CalledTokenizer(plain), RuntimeError)
    with pytest.raises(RuntimeError, match="Onig"):
        broken.encode(SLOW)


@pytest.fixture
def serves_panicking(tmp_path, monkeypatch):
    """A server with two adapters that have the same token of their own, and a third with another; the tokenizers of the
    first token panic.
    """
    for name, token in (("one", "<tool>"), ("two", "<tool>"), ("other", "<end>")):
        shutil.copytree(BUILTIN_ADAPTERS / "upper", tmp_path / name)
        (tmp_path / name / "added_tokens.json").write_text(json.dumps({token: 259}))

    def own(base, own, broken):
        made = own_backend(base, own, broken)
        is_bad = any(token.text == "<tool>" for token in own.tokens)
        return CalledTokenizer(panicking(), base, broken) if is_bad else made

    monkeypatch.setattr("chorus.server.text.tokenizer.own_backend", own)
    settings = Settings(model=BUILTIN_MODEL, adapters=tmp_path, memory_bytes=8 << 20, threads=1)
    with serving(build_app(settings), settings) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
def test_it_goes_into_quarantine_with_all_adapters_of_its_tokens(serves_panicking, path):
    def ask(model, prompt=SLOW):
        body = {"model": model, "prompt": prompt}
        return serves_panicking.post(path, json={**body, "max_tokens": 1} if "completions" in path else body)

    assert ask("one", "a").status_code == 200
    told = ask("one")
    assert told.status_code == 424 and "its tokenizer can't be used: Onig" in told.json()["error"]["message"]
    while len(aside := serves_panicking.get("/v1/adapters").json()["quarantined"]) < 2:
        pass
    assert [one["name"] for one in aside] == ["one", "two"] and "Onig" in aside[0]["reason"]
    told = ask("two", "a")
    assert told.status_code == 424 and "'two' is not served" in told.json()["error"]["message"]
    for model in ("other", None):
        assert ask(model).status_code == 200
