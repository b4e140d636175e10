"""What strangers send is bounded in bytes and in what it becomes: every kind of input, with the memory of its worst
case and the longest time that it keeps others waiting, counted in steps.

Files of tokenizers are in tests/memory/files/test_hostile_files.py.
"""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from types import SimpleNamespace

import pytest

from chorus.memory.files.config import CONFIG_FILE, MAX_CONFIG_BYTES
from chorus.memory.files.form import WEIGHTS_FILE
from chorus.memory.files.strict_json import loads
from chorus.memory.files.tensor_file import MAX_HEADER_BYTES, MAX_TENSORS
from chorus.memory.files.tokens.added_tokens import TEXT_FILES
from chorus.server.access.limits import LARGE, MOST_TIMES, RequestLimits, check_json
from chorus.server.api.adapters import adapter_bytes
from chorus.server.api.chat_request import ChatCompletionRequest
from chorus.server.api.completion_request import CompletionRequest
from chorus.server.engine.adapter_tokenizers import MAX_BYTES, own_template
from chorus.server.errors import ApiError
from chorus.server.http.form import MAX_HEADER_BYTES as MAX_PART_HEADER
from chorus.server.http.form import MAX_HEADERS, MAX_PARTS, pieces
from chorus.server.http.json_strings import STEPS, LongStrings, TooManyMarks
from chorus.server.settings import Settings
from chorus.server.stores.archive import MAX_MEMBERS, MAX_ZIP_DIRECTORY_BYTES
from chorus.server.stores.tar_headers import MAX_EXTENDED_BYTES

from ..memory.files.test_hostile_files import HOSTILE

MAX_BODY = Settings.model_fields["max_body_bytes"].default
LIMITS = RequestLimits()

#: Bytes of every input that is parsed whole. One of more than a mebibyte is checked below, or read piece by piece.
PARSED = {
    CONFIG_FILE: MAX_CONFIG_BYTES,
    "the header of the weights": MAX_HEADER_BYTES,
    "a chat template": MAX_BYTES,
    "the fields of a form": adapter_bytes.MAX_FIELD_BYTES,
    "the headers of a form's parts": MAX_PARTS * MAX_HEADERS * MAX_PART_HEADER,
    "a grammar": LIMITS.max_grammar_bytes,
    "a request's tools": LIMITS.max_tool_bytes,
    "extended headers of a tar file": MAX_EXTENDED_BYTES,
    "the directory of a zip file": MAX_ZIP_DIRECTORY_BYTES,
    "headers of a tar file": MAX_MEMBERS * 512,
    "a request's body": MAX_BODY,
}
READ_IN_PIECES = {"the headers of a form's parts", "headers of a tar file", "a request's body"}


def test_whatever_is_parsed_whole_is_small():
    assert {name for name, most in PARSED.items() if most > LARGE} <= READ_IN_PIECES


def test_every_file_of_an_adapter_is_attacked():
    attacked = {file for _, file, _, _ in HOSTILE} | {"chat_template.jinja"}
    assert attacked >= {CONFIG_FILE, WEIGHTS_FILE, *TEXT_FILES}


def filled(begin, entry, end, count, size):
    """A JSON text of so many entries, made long by a string."""
    text = begin + ",".join(entry.format(index) for index in range(count)) + end
    return (text[:-1] + ',"user":"' + "x" * max(0, size - len(text) - 10) + '"}').encode()


BODIES = {
    "numbers": lambda count, size: filled('{"prompt":[', "1{:06d}", "]}", count, size),
    "strings": lambda count, size: filled('{"prompt":[', '"a{:03d}"', "]}", count, size),
    "lists": lambda count, size: filled('{"prompt":[', "[]", "]}", count, size),
    "objects": lambda count, size: filled('{"prompt":[', '{{"a":1}}', "]}", count, size),
    "names": lambda count, size: filled('{"chat_template_kwargs":{', '"k{:06d}":1', "}}", count, size),
}


@pytest.mark.parametrize("size", [LARGE + 1, 2 * LARGE])
@pytest.mark.parametrize("kind", BODIES)
def test_a_long_body_takes_at_most_so_many_times_its_bytes(kind, size):
    count = LIMITS.max_json_values
    while True:  # the most values that are accepted
        body = BODIES[kind](count, size)
        try:
            check_json(body, LIMITS.max_json_values)
            break
        except ApiError:
            count = count * 3 // 4
    assert len(body) > LARGE
    tracemalloc.start()
    try:
        found = json.loads(body)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found and peak <= MOST_TIMES * len(body)


@pytest.mark.parametrize("kind", [CompletionRequest, ChatCompletionRequest])
def test_one_that_would_take_more_is_refused_before_it_is_parsed(kind, monkeypatch):
    monkeypatch.setattr(kind, "model_validate_json", None)
    with pytest.raises(ApiError, match="times its own") as told:
        kind.parse(BODIES["names"](130_000, LARGE + 1), LIMITS)
    assert told.value.status == 400


@pytest.mark.parametrize("flood", ["[", '["",', "[],", '{"a":1,', '"a":1,', "x"])
def test_an_adapter_in_json_lets_others_have_turns_while_it_is_read(flood):
    text = ("{" + flood * 60_000).encode()
    reader = LongStrings({"w"}, 100_000)
    try:
        turns = [piece for field, piece in reader.feed(text) if not field]
    except TooManyMarks:
        turns = [b""] * (100_000 // STEPS)
    marks = sum(text.count(mark.encode()) for mark in '"[]{}:,')
    assert len(turns) >= min(marks, 100_000) // STEPS - 1


def test_an_adapter_in_json_has_only_so_many_values():
    async def flood():
        for _ in range(100):
            yield b"[]," * 20_000

    request = SimpleNamespace(stream=flood, headers={})
    room = SimpleNamespace(take=lambda count: None)
    settings = Settings(max_json_values=1000)
    with pytest.raises(ApiError, match="more than the 1000 values"):
        asyncio.run(adapter_bytes._read_json(request, None, None, room, settings))  # noqa: SLF001


def test_the_fields_of_a_form_are_bounded_together():
    part = b'--b\r\nContent-Disposition: form-data; name="%d"\r\n\r\n' + b"x" * 4096 + b"\r\n"

    async def form():
        for index in range(MAX_PARTS):
            yield part % index
        yield b"--b--"

    class Upload:
        async def begin(self, expected):
            pass

    request = SimpleNamespace(stream=form, headers={})
    room = SimpleNamespace(take=lambda count: None)
    with pytest.raises(ApiError, match=f"more than {adapter_bytes.MAX_FIELD_BYTES} bytes"):
        asyncio.run(adapter_bytes._read_form(request, Upload(), room, b"b"))  # noqa: SLF001

    async def count():
        return [each async for each in pieces(form(), b"b")]

    assert len(asyncio.run(count())) >= MAX_PARTS


def test_headers_of_weights_and_configurations_take_little():
    worst = {
        "metadata": json.dumps({"__metadata__": {f"{index:04d}": "" for index in range(60_000)}}),
        "tensors": json.dumps(
            {f"t{i}": {"dtype": "F32", "shape": [1], "data_offsets": [4 * i, 4 * i + 4]} for i in range(MAX_TENSORS)}
        ),
    }
    for name, text in worst.items():
        data = text.encode()
        assert len(data) <= MAX_HEADER_BYTES, name
        tracemalloc.start()
        try:
            loads(data)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak <= 24 << 20, name


def test_a_template_is_read_up_to_its_limit(tmp_path):
    (tmp_path / "chat_template.jinja").write_text("x" * (MAX_BYTES + 1))
    assert own_template(tmp_path) is None
