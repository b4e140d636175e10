"""Long JSON texts that are read piece by piece: the values of `json`, limits, and how much is parsed at once."""

from __future__ import annotations

import json
import random

import pytest

from chorus.memory.files import strict_json
from chorus.memory.files.json_stream import MAX_ENTRIES, MAX_KEY, MAX_VALUE, PIECE_BYTES, JsonStream, MalformedJson

TEXT = {"a": [1, -2.5, 1e20, True, None, 'é\n"\\', "𝄞"], "b": {"c": {}, "d": []}, "": "x" * 300, "n": 12345678901}


def pieces(data, size):
    return (data[at : at + size] for at in range(0, len(data), size))


def whole(stream):
    """A value, read by its members and entries."""
    mark = stream.next_mark()
    if mark == "{":
        return {key: whole(stream) for key in stream.members()}
    return [whole(stream) for _ in stream.entries()] if mark == "[" else stream.value()


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 4096])
@pytest.mark.parametrize("indent", [None, 2])
def test_pieces_of_any_size_give_the_values_of_the_whole(size, indent):
    data = json.dumps(TEXT, ensure_ascii=False, indent=indent).encode()
    stream = JsonStream(pieces(data, size))
    assert whole(stream) == TEXT
    stream.finish()
    assert stream.num_bytes == len(data)
    stream = JsonStream(pieces(data, size))
    stream.skip()
    stream.finish()


def test_the_position_is_that_of_the_next_value_in_bytes():
    data = '{"é": "𝄞", "model": {"é": 5}} '.encode()
    for size in range(1, len(data)):
        stream = JsonStream(pieces(data, size))
        for key in stream.members():
            if key == "model":
                assert data[stream.position :].lstrip() == b'{"\xc3\xa9": 5}} '
            stream.skip()


def test_texts_that_are_not_json_are_refused_wherever_they_end():
    data, rng = json.dumps(TEXT).encode(), random.Random(5)
    for end in range(1, len(data)):
        stream = JsonStream(pieces(data[:end], rng.randint(1, 50)))
        with pytest.raises(MalformedJson):
            whole(stream)
    for wrong in (b"", b"{]", b'{"a" 1}', b'{"a": 1,}', b"[1 2]", b'{"a": 1} x', b"\xff", b'"\xed\xa0\x80"', b"{1: 2}"):
        stream = JsonStream.of(wrong)
        with pytest.raises(MalformedJson):
            whole(stream)
            stream.finish()


def test_a_value_is_counted_before_it_is_parsed(monkeypatch):
    """Of a text without an end, no more is parsed at once, and none that becomes much more memory than its text."""
    longest, plain = [0], strict_json.decoder

    def decoder():
        found = plain()
        decode = found.raw_decode

        def raw_decode(text, at):
            longest[0] = max(longest[0], len(text) - at)
            return decode(text, at)

        monkeypatch.setattr(found, "raw_decode", raw_decode)
        return found

    monkeypatch.setattr(strict_json, "decoder", decoder)
    for begin, more in ((b'"', b"a"), (b"[", b"{},"), (b"[", b"1.5,"), (b'{"a":1', b',"ab":1'), (b"[" * 9, b"[")):
        endless = iter(lambda more=more: more * (PIECE_BYTES // len(more)), None)
        stream = JsonStream(piece for source in ((begin,), endless) for piece in source)
        with pytest.raises(MalformedJson):
            stream.value()
        assert stream.num_bytes <= MAX_VALUE + 2 * PIECE_BYTES
    assert MAX_KEY < longest[0] <= MAX_VALUE + PIECE_BYTES + 1
    with pytest.raises(MalformedJson, match=f"{MAX_ENTRIES} entries"):
        JsonStream.of(json.dumps([0] * (MAX_ENTRIES + 2)).encode()).value()


def test_nesting_and_length_are_limited_where_values_are_skipped():
    for data, words in (
        (b'[["' + b"a" * (2 * MAX_KEY) + b'"]]', f"more than {MAX_KEY} characters"),
        (b"[" * 70_000 + b"]" * 70_000, "inside each other"),
    ):
        with pytest.raises(MalformedJson, match=words):
            JsonStream.of(data).skip()
