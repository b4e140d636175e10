"""The bytes of tokens, joined, are the text, whatever kind of vocabulary it is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend

from chorus.server.text.vocabulary import Vocabulary


def byte_fallback() -> Backend:
    pieces = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁ab", "€"]
    backend = Backend(
        models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[], unk_token="<unk>", byte_fallback=True)
    )
    strip = decoders.Strip(content=" ", left=1, right=0)
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip])
    backend.add_special_tokens([AddedToken(token, special=True) for token in ("<unk>", "</s>")])
    return backend


def metaspace() -> Backend:
    pieces = ["<unk>", "▁a", "b", "▁ab", "€"]
    backend = Backend(models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[], unk_token="<unk>"))
    backend.decoder = decoders.Metaspace()
    return backend


def wordpiece() -> Backend:
    pieces = ["[UNK]", "a", "##b", "##€", "ab"]
    backend = Backend(models.WordPiece(vocab={p: i for i, p in enumerate(pieces)}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece(cleanup=False)
    return backend


@pytest.fixture(scope="module")
def vocabularies(pretrained):
    backends = [pretrained.backend_tokenizer, byte_fallback(), metaspace(), wordpiece()]
    return [(backend, Vocabulary(backend)) for backend in backends]


@given(data=st.data())
def test_bytes_join_to_the_text(vocabularies, data):
    backend, vocabulary = data.draw(st.sampled_from(vocabularies))
    special = set(backend.get_added_tokens_decoder())
    ids = [i for i in range(backend.get_vocab_size()) if i not in special]
    first = backend.token_to_id("a") or backend.token_to_id("▁a")  # the first token may be decoded in its own way
    tokens = [first, *data.draw(st.lists(st.sampled_from(ids), max_size=12))]
    text = backend.decode(tokens, skip_special_tokens=False)
    joined = b"".join(vocabulary.bytes_of(token) for token in tokens)
    if "\ufffd" not in text:
        assert joined.decode().lstrip(" ") == text.lstrip(" ")


@given(text=st.text(alphabet="ab €😀é\n", max_size=20))
def test_offsets_are_where_tokens_begin(tokenizer, text):
    (token_ids,) = tokenizer.encode_now([text], add_special_tokens=False)
    spelt = b""
    for token, offset in zip(token_ids, tokenizer.offsets(token_ids), strict=True):
        assert offset == len(spelt.decode(errors="ignore"))
        spelt += tokenizer.vocabulary.bytes_of(token)
    assert spelt.decode() == text


def test_names(tokenizer):
    vocabulary = tokenizer.vocabulary
    assert vocabulary.name_of(97) == "a" and vocabulary.bytes_of(97) == b"a"
    assert vocabulary.name_of(256) == "<bos>" and vocabulary.bytes_of(256) == b"<bos>"
    assert vocabulary.name_of(258) == "bytes:\\x20\\xe2" and vocabulary.bytes_of(258) == b" \xe2"
    assert vocabulary.name_of(9999) == "token_id:9999" and vocabulary.bytes_of(9999) == b""


def test_names_of_pieces_keep_their_space():
    vocabulary = Vocabulary(byte_fallback())
    assert [vocabulary.name_of(token) for token in (258, 260, 259, 261, 0)] == [" ", " ab", "a", "€", "<unk>"]
    assert vocabulary.bytes_of(2 + 0xE2) == b"\xe2" and vocabulary.name_of(2 + 10) == "\n"
