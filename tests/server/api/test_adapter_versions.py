"""Adapters that learn: bytes, versions, pauses, and swaps under load, with a real engine of a tiny model."""

import itertools
import shutil
import threading

import pytest

from chorus.core.config import EngineConfig
from chorus.core.engine import Engine
from chorus.server.errors import ApiError
from chorus.server.http.form import Piece, boundary_of, pieces

from ...attacks.swaps import FILES, HEADER, NAME, Swaps

CONTENTS = ("r2-qv", "r3-mlp", "r8-attention")
COUNT = 6


@pytest.fixture(scope="module")
def reference(subject):
    return subject("wide_heads")


@pytest.fixture
def root(tmp_path):
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


@pytest.fixture
def serve(start, reference, root, tmp_path):
    """Start a server on the tiny model; its uploads stay for the next one."""

    def serve(**settings):
        config = EngineConfig(model=reference.model, memory_bytes=8 << 20, threads=1, cpu_kernels="torch")
        uploads = {"adapter_uploads": tmp_path / "uploads", **settings}
        return start(Engine.from_config(config), adapter_roots=(root,), settings=uploads)

    return serve


def push(live, path, name=NAME, **fields):
    files = {file: (file, (path / file).read_bytes()) for file in FILES}
    return live.client.post("/v1/load_lora_adapter", data={"lora_name": name, **fields}, files=files)


def error_of(response, status):
    assert response.status_code == status, response.text
    return response.json()["error"]["code"]


def answer(live, reference, model, content):
    """The header of an answer that is `content`'s."""
    prompt = reference.prompt(content, 9, COUNT, 3)
    asked = {"max_tokens": COUNT, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    response = live.post(model=model, prompt=prompt, **asked)
    assert response.status_code == 200, response.text
    assert response.json()["choices"][0]["token_ids"] == reference.greedy(content, prompt, COUNT)
    return response.headers[HEADER]


def directories(tmp_path):
    return [path for path in (tmp_path / "uploads").iterdir() if path.is_dir()]


def test_versions_come_as_bytes_and_the_oldest_go(serve, reference, tmp_path):
    live = serve()
    headers = {}
    for number, content in enumerate(CONTENTS):
        response = push(live, reference.adapters[content], f"{NAME}@step.{number}", keep_versions="2")
        assert response.status_code == 200, response.text
        headers[content] = answer(live, reference, NAME, content)
        assert headers[content] == response.headers[HEADER]
        assert headers[content].startswith(f"{NAME}@step.{number}; sha256=")
    assert answer(live, reference, f"{NAME}@step.1", CONTENTS[1]) == headers[CONTENTS[1]]
    assert answer(live, reference, f"{NAME}@step.2", CONTENTS[2]) == headers[CONTENTS[2]]
    assert error_of(live.post(model=f"{NAME}@step.0", prompt=[5]), 404) == "model_not_found"
    assert len(directories(tmp_path)) == 2
    names = [card["id"] for card in live.client.get("/v1/models").json()["data"]]
    assert names == ["base", NAME, f"{NAME}@step.1"]
    assert error_of(push(live, reference.adapters["r2-qv"], f"{NAME}@step.2"), 400) == "adapter_already_loaded"
    assert error_of(push(live, reference.adapters["r2-qv"], f"{NAME}@a b"), 400) is None
    assert live.client.delete(f"/v1/adapters/{NAME}@step.1").status_code == 200
    assert live.client.delete(f"/v1/adapters/{NAME}").status_code == 200
    assert directories(tmp_path) == []


def test_bytes_that_are_not_taken_change_nothing(serve, reference, tmp_path):
    live = serve(max_adapter_bytes=200_000)
    good = reference.adapters["r2-qv"]
    assert push(live, good).status_code == 200
    config, weights = ((good / file).read_bytes() for file in FILES)
    cut, large, broken = tmp_path / "cut", tmp_path / "large", tmp_path / "broken"
    for path, data in ((cut, weights[:-8]), (large, weights + bytes(300_000)), (broken, b"{}")):
        path.mkdir()
        (path / FILES[0]).write_bytes(config)
        (path / FILES[1]).write_bytes(data)
    assert error_of(push(live, cut), 400) == error_of(push(live, broken), 400) == "invalid_adapter"
    assert error_of(push(live, large), 413) is None
    post = live.client.post("/v1/load_lora_adapter", data={"lora_name": NAME}, files={FILES[0]: ("x", config)})
    assert post.status_code == 400 and post.json()["error"]["param"] == "adapter_model"
    json = {"lora_name": NAME, "adapter_config": config.decode(), "adapter_model": "no base64!"}
    assert live.post("/v1/load_lora_adapter", **json).json()["error"]["param"] == "adapter_model"
    assert live.post("/v1/load_lora_adapter", **json, lora_path="x").status_code == 400
    assert live.client.get(f"/v1/adapters/{NAME}").json()["version"] == 1
    answer(live, reference, NAME, "r2-qv")
    live.wait_until(lambda: len(directories(tmp_path)) == 1, 30)  # at the keeper's next turn


def test_bytes_are_refused_without_a_directory_for_them(shared, reference):
    assert error_of(push(shared, reference.adapters["r2-qv"]), 403) == "adapter_uploads_disabled"
    form = {"data": {"model": "alice"}, "files": {"prompt": ("x", b"y")}}
    assert error_of(shared.client.post("/v1/completions", **form), 415) == "unsupported_media_type"


def test_a_paused_adapter_takes_no_requests_and_drains(serve, reference):
    live = serve()
    push(live, reference.adapters["r2-qv"])
    path, long = f"/v1/adapters/{NAME}", {"prompt": [5, 6], "max_tokens": 100, "ignore_eos": True, "stream": True}
    with live.client.stream("POST", "/v1/completions", json={"model": NAME, **long}) as stream:
        lines = stream.iter_lines()
        next(lines)
        assert live.client.patch(path, json={"paused": True}).json()["paused"] is True
        refused = live.post(model=f"{NAME}@1", prompt=[5])
        assert error_of(refused, 503) == "adapter_paused" and refused.headers["retry-after"] == "1"
        assert live.post(prompt=[5]).status_code == 200
        drained = threading.Thread(target=lambda: live.post(f"{path}/drain", seconds=60).raise_for_status())
        drained.start()
        assert push(live, reference.adapters["r3-mlp"]).status_code == 200
        assert sum(line.startswith("data: {") for line in lines) > 50, "what runs goes on"
    drained.join(60)
    assert live.post(f"{path}/drain").json()["drained"] is True
    assert error_of(live.post(model=NAME, prompt=[5]), 503) == "adapter_paused"
    assert live.client.patch(path, json={"paused": False}).json()["paused"] is False
    assert "@2; sha256=" in answer(live, reference, NAME, "r3-mlp")


def test_names_and_versions_are_there_after_a_restart(serve, reference, root, tmp_path):
    live = serve(keep_versions=2)
    for content in CONTENTS:
        assert push(live, reference.adapters[content]).status_code == 200
    shutil.copytree(reference.adapters["r2-qv"], root / "moved")
    for name in ("other", "gone"):
        assert live.post("/v1/adapters", name=name, path="moved").status_code == 201
    assert live.client.delete("/v1/adapters/gone").status_code == 200
    live.client.patch("/v1/adapters/other", json={"paused": True})
    before = live.client.get("/v1/adapters").json()["data"]
    shutil.copytree(tmp_path / "uploads", tmp_path / "later")  # as a process that is killed leaves it
    again = serve(adapter_uploads=tmp_path / "later")
    known = ("name", "version", "content_hash", "paused")
    after = again.client.get("/v1/adapters").json()["data"]
    assert [{key: one[key] for key in known} for one in after] == [{key: one[key] for key in known} for one in before]
    assert answer(again, reference, f"{NAME}@2", CONTENTS[1])
    assert push(again, reference.adapters["r2-qv"]).status_code == 200
    assert again.client.get(f"/v1/adapters/{NAME}").json()["version"] == len(CONTENTS) + 1, "numbers go on"


def test_no_answer_is_of_two_versions(serve, reference, root):
    """The quick form of `python -m tests.attacks.swaps`."""
    live = serve()
    candidates = (reference.prompt(CONTENTS[0], 9, COUNT, seed) for seed in itertools.count())
    clear = (one for one in candidates if all(reference.is_clear(content, one, COUNT) for content in CONTENTS[1:]))
    contents = [reference.adapters[one] for one in CONTENTS]
    life = Swaps(live.url, contents, list(itertools.islice(clear, 2)), root, {"max_tokens": COUNT})
    life.learn()
    life.run(24, 3)
    assert life.wrong == [] and life.num_answers > 24


@pytest.mark.parametrize("size", [1, 3, 50, 1000])
@pytest.mark.anyio
async def test_a_form_is_read_in_any_pieces(size):
    body = (
        b'preamble\r\n--b\r\ncontent-disposition: form-data; name="a"\r\n\r\nyes\r\n--b\r\n'
        b'Content-Disposition: form-data; name="f"; filename="x.bin"\r\ncontent-type: x/y\r\n\r\n'
        b'\r\n-\r\n--\r\n--c\r\n--b\r\ncontent-disposition: form-data; name="e"\r\n\r\n\r\n--b--\r\nepilogue'
    )[len(b"preamble\r\n") :]

    async def sent():
        for first in range(0, len(body), size):
            yield body[first : first + size]

    assert boundary_of("application/json") is None
    parts: dict[str, bytes] = {}
    async for piece in pieces(sent(), boundary_of("multipart/form-data; boundary=b")):
        assert isinstance(piece, Piece) and (piece.file_name == "x.bin") is (piece.name == "f")
        parts[piece.name] = parts.get(piece.name, b"") + piece.data
    assert parts == {"a": b"yes", "f": b"\r\n-\r\n--\r\n--c", "e": b""}


@pytest.mark.anyio
@pytest.mark.parametrize(
    "body",
    [
        b"", b"--b\r\n", b"--b\r\nx: y\r\n\r\nz\r\n--b--", b"x" * 9000,
        b'--b\r\ncontent-disposition: form-data; name="a"\r\n\r\nhalf',
    ],
)  # fmt: skip
async def test_what_is_no_form(body):
    async def sent():
        yield body

    with pytest.raises(ApiError):
        async for _ in pieces(sent(), boundary_of("multipart/form-data; boundary=b")):
            pass
