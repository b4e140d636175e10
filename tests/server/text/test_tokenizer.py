"""Encoding, conversations and their refusals."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import AddedToken, normalizers
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from chorus.core.requests.request_params import InvalidRequest
from chorus.server.demo.builtin import BUILTIN_MODEL
from chorus.server.errors import ApiError
from chorus.server.executors import DaemonPool
from chorus.server.text.conversation import Conversation
from chorus.server.text.tokenizer import THREAD_CHARACTERS, Tokenizer

BOS = 256


def test_encoding_and_decoding(tokenizer):
    assert tokenizer.encode_now(["a€", ""]) == [[BOS, *"a€".encode()], [BOS]]
    assert tokenizer.encode_now(["a"], add_special_tokens=False) == [[97]]
    assert tokenizer.decode([BOS, 97]) == "a"
    assert tokenizer.decode([BOS, 97], skip_special_tokens=False) == "<bos>a"


@pytest.mark.parametrize("normalizer", [normalizers.Lowercase(), normalizers.Prepend("_"), normalizers.NFKC()])
def test_a_special_token_that_is_normalised_is_hidden_in_streams_and_whole_texts(normalizer):
    """The library hides one only if its normalised text is a special token's, too."""
    backend = Backend.from_file(str(BUILTIN_MODEL / "tokenizer.json"))
    backend.normalizer = normalizer
    backend.add_special_tokens([AddedToken("<X y>", normalized=True), AddedToken("\uff21", normalized=True)])
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))
    ids = [257, 97, 259, 98, 260, 99]
    for skip, text in ((True, "abc"), (False, backend.decode(ids, skip_special_tokens=False))):
        stream = tokenizer.text_stream(skip_special_tokens=skip)
        assert (
            "".join(map(stream.push, ids)) + stream.finish() == tokenizer.decode(ids, skip_special_tokens=skip) == text
        )


def test_long_texts_are_encoded_beside_the_event_loop(tokenizer, monkeypatch):
    used = []
    run = DaemonPool.run

    async def spy(self, function, *args, **options):
        used.append(function.__name__)
        return await run(self, function, *args, **options)

    monkeypatch.setattr(DaemonPool, "run", spy)

    async def main():
        assert len((await tokenizer.encode(["a" * 10]))[0]) == 11
        assert used == []
        assert len((await tokenizer.encode(["a" * THREAD_CHARACTERS, "b"]))[0]) == THREAD_CHARACTERS + 1
        await tokenizer.encode_chat(Conversation([{"role": "user", "content": "a" * (THREAD_CHARACTERS + 1)}]))

    asyncio.run(main())
    assert used == ["encode_now", "encode_chat_now"]


def test_a_conversation_gets_no_second_begin_token(tokenizer):
    tokens = tokenizer.encode_chat_now([{"role": "user", "content": "hi"}])
    assert tokens == [*b"user: hi\nassistant: "]


def test_conversations_that_the_template_refuses(tokenizer):
    with pytest.raises(InvalidRequest, match="no system role here") as caught:
        tokenizer.encode_chat_now([{"role": "system", "content": "x"}])
    assert caught.value.field == "messages"


def test_a_model_without_template(pretrained):
    bare = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=pretrained.backend_tokenizer))
    assert not bare.has_chat_template
    with pytest.raises(InvalidRequest, match="/v1/completions"):
        bare.encode_chat_now([{"role": "user", "content": "x"}])


def test_saved_truncation_is_ignored(pretrained, tmp_path):
    pretrained.save_pretrained(tmp_path)
    backend = Backend.from_file(str(tmp_path / "tokenizer.json"))
    backend.enable_truncation(5)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert len(Tokenizer.load(tmp_path).encode_now(["x" * 50])[0]) == 51


def test_a_directory_without_fast_tokenizer(tmp_path):
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        Tokenizer.load(Path(tmp_path))


def test_of_a_text_far_too_long_only_the_beginning_is_encoded(pretrained, monkeypatch):
    """A vocabulary with a long token says nothing about ordinary texts, so a part of them is looked at first."""
    backend = Backend.from_str(pretrained.backend_tokenizer.to_str())
    backend.add_tokens(["=" * 200])
    wrapped = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))
    encoded = []

    class Spy:
        def __getattr__(self, name):
            return getattr(backend, name)

        def encode_batch_fast(self, texts, **options):
            encoded.append(max(map(len, texts)))
            return backend.encode_batch_fast(texts, **options)

    backend = wrapped.backend
    monkeypatch.setattr(wrapped, "backend", Spy())
    with pytest.raises(ApiError) as caught:
        wrapped.encode_now(["x" * 150_000], most=1000)
    assert caught.value.code == "context_length_exceeded" and max(encoded) <= 8000
    dense = "=" * 150_000
    assert len(wrapped.encode_now([dense], most=1000)[0]) == 751, "few tokens: it fits, however long it is"
    assert len(wrapped.encode_now(["x" * 9000], most=1000)[0]) == 9001, "the engine says how long it is"


@pytest.mark.wide
def test_a_tokenizer_without_code_of_its_own_is_read_without_torch_as_transformers_reads_it():
    code = f"""
import json, sys
from pathlib import Path
from chorus.server.text.tokenizer import Tokenizer
model = Path({str(BUILTIN_MODEL)!r})
mine = Tokenizer.load(model)
mine.encode_chat_now([{{"role": "user", "content": "hello"}}])
assert "torch" not in sys.modules
kind = type(mine._tokenizer)
print(json.dumps([kind.__module__, kind.__name__, mine.backend.to_str(), mine._tokenizer.chat_template]))
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, timeout=120, stdout=subprocess.PIPE, text=True)
    theirs = AutoTokenizer.from_pretrained(BUILTIN_MODEL)
    wanted = type(theirs).__module__, type(theirs).__name__, theirs.backend_tokenizer.to_str(), theirs.chat_template
    assert json.loads(done.stdout.splitlines()[-1]) == list(wanted)
