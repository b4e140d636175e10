"""Tokenizers that fail within the library: an adapter's goes into quarantine, a text that no tokenizer reads is
refused, and neither ends a thread or the server.
"""

from __future__ import annotations

import json
import shutil

import httpx
import pytest
from tokenizers import Regex, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer, LlamaTokenizer

from chorus.core.requests.request_params import InvalidRequest
from chorus.memory.files.directory import AdapterDirectory
from chorus.memory.files.error import AdapterFormatError
from chorus.memory.files.tokens.added_tokens import AddedToken, OwnTokens, own_tokens
from chorus.memory.files.tokens.base_tokens import BaseTokens
from chorus.server.demo.builtin import BUILTIN_ADAPTERS, BUILTIN_MODEL
from chorus.server.settings import Settings
from chorus.server.start.launch import build_app, serving
from chorus.server.text.own_tokenizer import CalledTokenizer, is_panic, own_backend
from chorus.server.text.tokenizer import Tokenizer

SLOW = "x" * 60
"""A text that the regular expression of `panicking` gives up on."""


def panicking():
    """The built-in model's tokenizer with a pre-tokenizer that panics for `SLOW`."""
    found = Backend.from_file(str(BUILTIN_MODEL / "tokenizer.json"))
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
    plain = Backend.from_file(str(BUILTIN_MODEL / "tokenizer.json"))
    made = own_backend(CalledTokenizer(panicking()), own, RuntimeError)
    assert made.encode("a<tool>").ids[-1] == 259
    with pytest.raises(InvalidRequest):
        made.encode(SLOW)
    broken = CalledTokenizer(panicking(), CalledTokenizer(plain), RuntimeError)
    with pytest.raises(RuntimeError, match="Onig"):
        broken.encode(SLOW)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """The directory of a tokenizer as Llama 2 was published: spaces are put before each part between added tokens."""
    path = tmp_path_factory.mktemp("llama")
    letters = ["▁", *"abdehlorw", "▁h", "el", "lo", "hel", "hello", "▁hello"]
    vocabulary = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    merges = [("e", "l"), ("l", "o"), ("h", "el"), ("hel", "lo"), ("▁", "hello"), ("▁", "h")]
    made = LlamaTokenizer({text: id_ for id_, text in enumerate(vocabulary)}, merges, legacy=True)
    made.save_pretrained(path)
    config = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps({**config, "legacy": True}))
    return path


def saved(base, path, times):
    """An adapter's tokenizer with two more tokens, which was loaded and saved so many times."""
    for time in range(times):
        found = AutoTokenizer.from_pretrained(path if time else base)
        found.add_tokens(["<tool>", "<end>"])
        found.save_pretrained(path)
    return path


def own_of(base, path):
    with AdapterDirectory(path, ()) as directory:
        return own_tokens(directory, BaseTokens(base), None)


TEXTS = ("hello<tool>hello world", "<tool> hello<end>hello", " hello", "<s>hello</s>hello")


@pytest.mark.parametrize("times", [1, 2, 3])
def test_what_transformers_makes_of_the_base_when_it_is_saved_and_loaded_again_is_served(llama, tmp_path, times):
    """transformers drops `legacy` when it saves: what is saved from then on has spaces before the first part only."""
    own = own_of(llama, saved(llama, tmp_path, times))
    assert own is not None
    made = Tokenizer.load(llama).with_tokens(own)
    trained = AutoTokenizer.from_pretrained(llama if times == 1 else tmp_path)
    trained.add_tokens(["<tool>", "<end>"])
    for text in TEXTS:
        for marks in (False, True):
            want = trained(text, add_special_tokens=marks)["input_ids"]
            assert made.backend.encode(text, add_special_tokens=marks).ids == want
    spaces = {tuple(one.backend.encode("<s>hello").ids) for one in (made, Tokenizer.load(llama))}
    assert len(spaces) == (1 if times == 1 else 2)


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("pre_tokenizer", {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "never", "split": False}),
        ("pre_tokenizer", None),
        ("normalizer", {"type": "Lowercase"}),
    ],
)
def test_parts_that_no_form_of_the_base_has_are_refused_with_the_way(llama, tmp_path, part, value):
    file = saved(llama, tmp_path, 2) / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), part: value}))
    with pytest.raises(
        AdapterFormatError, match=f"its {part} is not that of the base .* AutoTokenizer.from_pretrained"
    ):
        own_of(llama, tmp_path)


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
