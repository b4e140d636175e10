"""Streamed text: whole characters, equal to decoding at once, cut before the first stop string."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from chorus.server.text.detokenizer import Detokenizer
from chorus.server.text.tokenizer import Tokenizer

pytestmark = pytest.mark.wide

REPLACEMENT = "\ufffd"


def wrap(backend: Backend) -> Tokenizer:
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))


def byte_fallback() -> Backend:
    """Like Llama 2: pieces with ▁ for spaces, bytes for all else, one leading space stripped."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁▁", "a", "b", "▁ab", "€"]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    backend = Backend(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    backend.add_special_tokens([AddedToken(t, special=True) for t in ("<unk>", "<s>", "</s>")])
    return backend


def metaspace() -> Backend:
    pieces = ["<unk>", "▁", "▁a", "b", "▁ab", "€", "!"]
    backend = Backend(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], unk_token="<unk>"))
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(["<eos>"])
    return backend


def wordpiece() -> Backend:
    pieces = ["[UNK]", "a", "##b", "##c", "ab", ".", "€"]
    backend = Backend(models.WordPiece(vocab={piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece(cleanup=False)
    backend.add_special_tokens(["[SEP]"])
    return backend


@pytest.fixture(scope="module", params=[byte_fallback, metaspace, wordpiece, "byte level"])
def any_tokenizer(request, tokenizer):
    return tokenizer if request.param == "byte level" else wrap(request.param())


def stream(tokenizer: Tokenizer, ids: list[int], stops: list[str], skip: bool = True) -> tuple[str, list[str], bool]:
    """The text, its pieces, and whether a stop string ended it."""
    text_stream = tokenizer.text_stream(stops, skip_special_tokens=skip)
    pieces = []
    for token_id in ids:
        pieces.append(text_stream.push(token_id))
        if text_stream.stopped_by is not None:
            break
    else:
        pieces.append(text_stream.finish())
    return "".join(pieces), pieces, text_stream.stopped_by is not None


def reference(tokenizer: Tokenizer, ids: list[int], stops: list[str], skip: bool) -> tuple[str, bool]:
    """Texts that `stream` must give, by decoding everything again after every token.

    A trailing replacement character may stand for a character that isn't complete yet, so it counts only at the end.
    """
    for count in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:count], skip_special_tokens=skip).rstrip(REPLACEMENT)
        hits = [at for stop in stops if (at := text.find(stop)) >= 0]
        if hits:
            return text[: min(hits)], True
    text = tokenizer.decode(ids, skip_special_tokens=skip)
    hits = [at for stop in stops if (at := text.find(stop)) >= 0]
    return (text[: min(hits)], True) if hits else (text, False)


def token_ids(draw, tokenizer: Tokenizer) -> list[int]:
    """Random tokens, or tokens of text, with a few unknown ones between."""
    size = tokenizer.backend.get_vocab_size()
    if draw(st.booleans()):
        text = draw(st.text(alphabet="ab €😀é.\n!c", max_size=20))
        return tokenizer.encode_now([text], add_special_tokens=draw(st.booleans()))[0]
    return draw(st.lists(st.integers(0, size + 2), max_size=30))


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_stream_equals_whole_text_up_to_first_stop(any_tokenizer, data):
    ids = token_ids(data.draw, any_tokenizer)
    stops = data.draw(st.lists(st.text(alphabet="ab €😀é.\n!c", min_size=1, max_size=4), max_size=3))
    skip = data.draw(st.booleans())
    text, pieces, stopped = stream(any_tokenizer, ids, stops, skip)
    assert (text, stopped) == reference(any_tokenizer, ids, stops, skip)
    whole = any_tokenizer.decode(ids, skip_special_tokens=skip)
    if REPLACEMENT not in whole:
        assert all(REPLACEMENT not in piece for piece in pieces)
    if not stops:
        assert text == whole


def nested_byte_level(tokenizer: Tokenizer) -> Tokenizer:
    """A byte-level vocabulary whose decoder is wrapped, so that its tokens' bytes can't be told one by one."""
    backend = Backend.from_str(tokenizer.backend.to_str())
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
    return wrap(backend)


INVALID = [0x80, 0xBF, 0xC0, 0xE2, 0x82, 0xAC, 0xED, 0xA0, 0xF0, 0x9F, 0x98, 0xF4, 0xFF]


@pytest.mark.wide
@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_bytes_of_any_kind_stream_as_the_whole_text(tokenizer, data):
    """Valid and invalid bytes, in runs of every length, in all three kinds of vocabulary that have bytes."""
    kind = data.draw(st.sampled_from(["byte level", "nested", "fallback"]))
    byte = st.one_of(st.sampled_from(INVALID), st.integers(0, 255))
    part = st.one_of(
        st.lists(byte, max_size=6).map(bytes),
        st.text(alphabet="ab €😀é", max_size=20).map(str.encode),
        st.builds(
            lambda piece, count: piece * count,
            st.sampled_from([b"\x80", b"\xe2\x82", b"a", "😀".encode()]),
            st.integers(0, 60),
        ),
    )
    parts = data.draw(st.lists(part, max_size=5))
    if kind == "fallback":
        subject = wrap(byte_fallback())
        ids = []
        for spelt in parts:
            ids += [3 + value for value in spelt] + data.draw(
                st.lists(st.sampled_from([0, 259, 261, 263, 264]), max_size=2)
            )
    else:
        subject = tokenizer if kind == "byte level" else nested_byte_level(tokenizer)
        ids = [value for spelt in parts for value in spelt]
    whole = subject.decode(ids)
    text, _, _ = stream(subject, ids, [])
    assert text == whole
    stops = data.draw(st.lists(st.text(alphabet="ab €😀", min_size=1, max_size=3), max_size=2))
    assert stream(subject, ids, stops)[::2] == reference(subject, ids, stops, True)


@pytest.mark.parametrize("kind", ["byte level", "nested", "fallback"])
def test_endless_invalid_bytes_are_sent_as_they_come_from_a_bounded_window(tokenizer, kind, monkeypatch):
    subject = {"byte level": lambda: tokenizer, "nested": lambda: nested_byte_level(tokenizer)}.get(
        kind, lambda: wrap(byte_fallback())
    )()
    token = 0x80 + (3 if kind == "fallback" else 0)
    longest = 0
    decode = Detokenizer.__init__

    def spy(self, how, *rest):
        def counting(token_ids):
            nonlocal longest
            longest = max(longest, len(token_ids))
            return how(token_ids)

        decode(self, counting, *rest)

    monkeypatch.setattr(Detokenizer, "__init__", spy)
    text_stream = subject.text_stream()
    pieces = [text_stream.push(token) for _ in range(2000)]
    assert longest <= 64, "every token decodes all those before it again"
    assert len("".join(pieces)) >= 1999, "nothing is sent until the end"
    assert "".join(pieces) + text_stream.finish() == REPLACEMENT * 2000


def test_an_endless_run_of_valid_fallback_bytes_is_decoded_once(monkeypatch):
    """Its text is open until it ends, as one invalid byte would spoil it; but no byte costs more than the first."""
    subject = wrap(byte_fallback())
    decoded = 0
    init = Detokenizer.__init__

    def spy(self, how, *rest):
        def counting(token_ids):
            nonlocal decoded
            decoded += len(token_ids)
            return how(token_ids)

        init(self, counting, *rest)

    monkeypatch.setattr(Detokenizer, "__init__", spy)
    ids = [3 + value for value in "😀é".encode() * 300]
    text_stream = subject.text_stream(["zzz"])
    shown = "".join(text_stream.push(token) for token in ids) + text_stream.finish()
    assert shown == "😀é" * 300
    assert decoded <= 3 * len(ids)


def test_no_half_character_is_given_out(tokenizer):
    text_stream = tokenizer.text_stream()
    pieces = [text_stream.push(byte) for byte in "a€😀".encode()]
    assert pieces == ["a", "", "", "€", "", "", "", "😀"]
    assert text_stream.finish() == ""


def test_an_unfinished_character_comes_out_at_the_end(tokenizer):
    text_stream = tokenizer.text_stream()
    assert [text_stream.push(byte) for byte in b"a\xe2\x82"] == ["a", "", ""]
    assert "a" + text_stream.finish() == tokenizer.decode([*b"a\xe2\x82"]) == "a" + REPLACEMENT


def test_text_is_held_back_only_while_it_may_be_a_stop_string(tokenizer):
    text_stream = tokenizer.text_stream(["END"])
    assert [text_stream.push(byte) for byte in b"xEENEND"] == ["x", "", "E", "", "EN", "", ""]
    assert text_stream.stopped_by == "END"
    assert text_stream.push(65) == ""
    assert text_stream.finish() == ""


def test_what_was_held_back_comes_out_at_the_end(tokenizer):
    text_stream = tokenizer.text_stream(["END"])
    assert [*map(text_stream.push, b"xEN")] == ["x", "", ""]
    assert text_stream.finish() == "EN"


def test_tokens_after_the_stop_string_are_not_taken(tokenizer):
    text_stream = tokenizer.text_stream(["b"])
    assert [*map(text_stream.push, b"abcd")] == ["a", "", "", ""]


def test_the_earliest_of_several_stop_strings_counts(tokenizer):
    assert stream(tokenizer, [*b"abcabc"], ["ca", "b", "zzz"])[0] == "a"


def test_a_byte_fallback_newline_stops_at_once():
    tokenizer = wrap(byte_fallback())
    newline = 3 + ord("\n")
    text_stream = tokenizer.text_stream(["\n"])
    assert [*map(text_stream.push, (261 + 1, newline, newline))] == [tokenizer.decode([262]), "", ""]


def test_tokenizers_without_fast_version_are_refused():
    class Slow:
        pass

    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        Tokenizer(Slow())


def test_regex_decoders_are_streamed_too():
    backend = byte_fallback()
    backend.decoder = decoders.Sequence([decoders.Replace(Regex("▁"), " "), decoders.Fuse()])
    tokenizer = wrap(backend)
    ids = [259, 261, 263, 262, 264]
    assert stream(tokenizer, ids, [])[0] == tokenizer.decode(ids)
