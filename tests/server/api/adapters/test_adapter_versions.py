"""Adapters that learn: bytes, versions, pauses, and swaps under load, with a real engine of a tiny model."""

import base64
import itertools
import json
import re
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from chorus.core.config import EngineConfig
from chorus.core.engine import Engine
from chorus.core.served_adapters import ServedAdapters
from chorus.memory.adapters import registry_store
from chorus.memory.files.error import AdapterFormatError
from chorus.server.errors import ApiError
from chorus.server.http.form import Piece, boundary_of, pieces

from ....attacks.swaps import FILES, HEADER, NAME, Swaps

pytestmark = pytest.mark.wide

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
    """Start a server on the tiny model; its uploads stay for the next one. adapters: registered at the start."""

    def serve(adapters=None, **settings):
        config = EngineConfig(model=reference.model, memory_bytes=8 << 20, threads=1, cpu_kernels="torch")
        uploads = {"adapter_uploads": tmp_path / "uploads", **settings}
        engine = Engine.from_config(config)
        for name, path in (adapters or {}).items():
            engine.store.register(name, path)
        return start(engine, adapter_roots=(root,), settings=uploads)

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


def test_the_error_of_an_upload_names_the_client_s_own_field(serve, reference, tmp_path):
    """The server's own directory for it is nobody's business."""
    live = serve()
    config, weights = ((reference.adapters["r2-qv"] / file).read_bytes() for file in FILES)
    small = config.replace(b'"r": 2', b'"r": "two"')
    assert small != config
    for files, field in (((config, weights[:-8]), "adapter_model"), ((small, weights), "adapter_config")):
        for number, data in enumerate(files):
            (tmp_path / FILES[number]).write_bytes(data)
        error = push(live, tmp_path).json()["error"]
        assert error["param"] == field and error["code"] == "invalid_adapter"
        assert error["message"].startswith(f"{field}.") and "draft" not in error["message"], error
    for given, kind in (([1], "list"), (7, "int"), (True, "bool")):
        body = {"lora_name": NAME, "adapter_config": given, "adapter_model": base64.b64encode(weights).decode()}
        error = live.post("/v1/load_lora_adapter", **body).json()["error"]
        assert error["param"] == "adapter_config" and f"must be an object, or its text, not {kind}" in error["message"]
    body = {"lora_name": NAME, "adapter_model": base64.b64encode(weights).decode()}
    assert "it is missing" in live.post("/v1/load_lora_adapter", **body).json()["error"]["message"]


@pytest.mark.wide
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
    files = {FILES[0]: ("x", config), FILES[1]: ("y", weights), "notes.md": ("notes.md", b"# Mine")}
    post = live.client.post("/v1/load_lora_adapter", data={"lora_name": NAME}, files=files)
    assert post.status_code == 400 and post.json()["error"]["param"] == "notes.md"
    body = {"lora_name": NAME, "adapter_config": config.decode(), "adapter_model": "no base64!"}
    assert live.post("/v1/load_lora_adapter", **body).json()["error"]["param"] == "adapter_model"
    assert live.post("/v1/load_lora_adapter", **body, lora_path="x").status_code == 400
    assert live.client.get(f"/v1/adapters/{NAME}").json()["version"] == 1
    answer(live, reference, NAME, "r2-qv")
    live.wait_until(lambda: len(directories(tmp_path)) == 1, 30)  # at the health checker's next turn


def test_bytes_are_refused_without_a_directory_for_them(shared, reference):
    assert error_of(push(shared, reference.adapters["r2-qv"]), 403) == "adapter_uploads_disabled"
    form = {"data": {"model": "alice"}, "files": {"prompt": ("x", b"y")}}
    assert error_of(shared.client.post("/v1/completions", **form), 415) == "unsupported_media_type"


@pytest.mark.wide
def test_what_an_upload_becomes_is_limited_too(serve, reference, tmp_path):
    """LoKr's small factors become matrices of LoRA that are many times as large."""
    from peft import LoKrConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    targets = ["q_proj", "o_proj", "up_proj", "down_proj"]
    lokr = LoKrConfig(r=2, alpha=3, target_modules=targets, task_type="CAUSAL_LM", init_weights=False)
    get_peft_model(AutoModelForCausalLM.from_pretrained(reference.model), lokr).save_pretrained(tmp_path / "lokr")
    most = 2 * sum((tmp_path / "lokr" / file).stat().st_size for file in FILES)
    live = serve(max_adapter_bytes=most)
    refused = push(live, tmp_path / "lokr")
    assert error_of(refused, 400) == "invalid_adapter"
    assert re.search(rf"becomes \d+ bytes of LoRA, and {most} are allowed", refused.json()["error"]["message"])
    assert push(live, reference.adapters["r2-qv"]).status_code == 200, "whose file is as large as what it becomes"
    shutil.rmtree(tmp_path / "uploads")
    assert push(serve(), tmp_path / "lokr").status_code == 200


@pytest.mark.wide
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


def test_labels_of_other_servers_and_their_pause_are_there_after_a_restart(serve, reference, tmp_path):
    live = serve()
    for name, content in (("a@5", 0), ("a@3", 1), ("b@x", 0), ("b", 1), ("b@y", 2)):
        assert push(live, reference.adapters[CONTENTS[content]], name).status_code == 200
    live.client.patch("/v1/adapters/a", json={"paused": True})
    before = live.client.get("/v1/adapters").json()["data"]
    assert [one["name"] for one in before] == ["a@3", "a@5", "b", "b@x", "b@y"]
    shutil.copytree(tmp_path / "uploads", tmp_path / "later")
    again = serve(adapter_uploads=tmp_path / "later")
    known = ("name", "version", "content_hash", "paused")
    after = again.client.get("/v1/adapters").json()["data"]
    assert [{key: one[key] for key in known} for one in after] == [{key: one[key] for key in known} for one in before]
    assert error_of(again.post(model="a", prompt=[5]), 503) == "adapter_paused"
    assert answer(again, reference, "b", CONTENTS[1]).startswith("b@1;")
    again.client.patch("/v1/adapters/a", json={"paused": False})
    assert answer(again, reference, "a", CONTENTS[1]).startswith("a@3;"), "the one that was loaded last"


def test_an_adapter_of_the_start_stays_paused_after_a_restart(serve, reference, tmp_path, caplog):
    adapters = {"first": reference.adapters["r2-qv"], "second": reference.adapters["r3-mlp"]}
    live = serve(adapters)
    for name in adapters:
        assert live.client.patch(f"/v1/adapters/{name}", json={"paused": True}).json()["paused"] is True
    again = live
    for number, second in enumerate(["r3-mlp", "r2-qv"]):  # the same files, and others under the name
        shutil.copytree(tmp_path / "uploads", tmp_path / f"later-{number}")
        caplog.clear()
        there = {**adapters, "second": reference.adapters[second]}
        again = serve(there, adapter_uploads=tmp_path / f"later-{number}")
        for name in adapters:
            assert error_of(again.post(model=name, prompt=[5]), 503) == "adapter_paused"
        skipped = [each.getMessage() for each in caplog.records if "is not served" in each.getMessage()]
        assert len(skipped) == number
        assert all("second of an earlier run" in each and "holds another adapter" in each for each in skipped)
    assert again.client.patch("/v1/adapters/second", json={"paused": False}).json()["paused"] is False
    assert answer(again, reference, "second", "r2-qv")


def test_a_pinned_adapter_is_replaced_whatever_the_load_of_its_pages_raises(serve, reference, tmp_path, monkeypatch):
    live = serve()
    push(live, reference.adapters["r2-qv"])
    assert live.client.patch(f"/v1/adapters/{NAME}", json={"pinned": True}).json()["pinned"] is True

    def fails(self, name):
        raise RuntimeError("no copy")

    with monkeypatch.context() as patch:
        patch.setattr(ServedAdapters, "pin", fails)
        assert push(live, reference.adapters["r3-mlp"]).status_code == 200
    assert live.client.get(f"/v1/adapters/{NAME}").json()["pinned"] is False
    assert "@2; sha256=" in answer(live, reference, NAME, "r3-mlp")
    shutil.copytree(tmp_path / "uploads", tmp_path / "later")
    again = serve(adapter_uploads=tmp_path / "later")
    assert "@2; sha256=" in answer(again, reference, NAME, "r3-mlp"), "what is served is what was recorded"


@pytest.mark.wide
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
        b"",
        b"--b\r\n",
        b"--b\r\nx: y\r\n\r\nz\r\n--b--",
        b"x" * 9000,
        b'--b\r\ncontent-disposition: form-data; name="a"\r\n\r\nhalf',
    ],
)
async def test_what_is_no_form(body):
    async def sent():
        yield body

    with pytest.raises(ApiError):
        async for _ in pieces(sent(), boundary_of("multipart/form-data; boundary=b")):
            pass


@pytest.mark.parametrize(
    "parameters",
    [
        "name*; name*0",
        "name*0; name*",
        "name=a; filename*=idna''%ff",
        "name=a; filename*=\"x\0y\"''a",
        "name=a; filename*=undefined''%ff",
        "name*0",
    ],
)
@pytest.mark.anyio
async def test_parameters_in_parts_that_cannot_be_put_together_are_a_400(parameters):
    """`email` raises a TypeError or a UnicodeError for them, which was a 500."""

    async def sent():
        yield f"--b\r\ncontent-disposition: form-data; {parameters}\r\n\r\n1\r\n--b--".encode()

    with pytest.raises(ApiError) as refused:
        async for _ in pieces(sent(), b"b"):
            pass
    assert refused.value.status == 400


@pytest.mark.parametrize("parameters", ["boundary*; boundary*0", "boundary*=idna''%ff", "boundary*0"])
def test_a_boundary_that_cannot_be_put_together_is_a_400(parameters):
    with pytest.raises(ApiError):
        boundary_of(f"multipart/form-data; {parameters}")


def as_json(path, **fields):
    config, weights = ((path / file).read_bytes() for file in FILES)
    return {"adapter_config": json.loads(config), "adapter_model": base64.b64encode(weights).decode(), **fields}


def test_numbers_count_per_name(serve, reference):
    live = serve(keep_versions=3)
    for name in ("one", "two"):
        for number, content in enumerate(CONTENTS[:2], 1):
            push(live, reference.adapters[content], name)
            assert live.client.get(f"/v1/adapters/{name}").json()["version"] == number
    assert push(live, reference.adapters["r2-qv"], "one@7").status_code == 200
    assert live.client.get("/v1/adapters/one").json()["version"] == 7
    push(live, reference.adapters["r3-mlp"], "one")
    assert live.client.get("/v1/adapters/one").json()["version"] == 8
    assert error_of(push(live, reference.adapters["r3-mlp"], "one@5"), 400) == "adapter_already_loaded"
    live.client.delete("/v1/adapters/two")
    push(live, reference.adapters["r3-mlp"], "two")
    assert live.client.get("/v1/adapters/two").json()["version"] == 3, "a number never means two contents"


@pytest.mark.parametrize("kept", [1, 3])
def test_a_version_means_one_content_for_good(serve, reference, kept):
    live = serve(keep_versions=kept)
    first, second = (reference.adapters[content] for content in CONTENTS[:2])
    push(live, first, f"{NAME}@a")
    again = live.post("/v1/adapters", **as_json(first, name=f"{NAME}@a"))
    assert again.status_code == 200 and again.json()["version"] == "a", "the same bytes under the same label"
    assert error_of(push(live, second, f"{NAME}@a"), 400) == "adapter_already_loaded"
    push(live, second, f"{NAME}@b")
    taken = push(live, second, f"{NAME}@a")
    assert error_of(taken, 400) == "adapter_already_loaded"
    message = taken.json()["error"]["message"]
    assert message.count("another version") == 1, message
    assert ("was retired" if kept == 1 else "already") in taken.json()["error"]["message"]
    again = live.post("/v1/adapters", **as_json(first, name=f"{NAME}@a"))
    assert again.status_code == 200 and again.json()["version"] == "a"
    newest = live.client.get(f"/v1/adapters/{NAME}").json()["version"]
    assert newest == ("a" if kept == 1 else "b"), "a version that is there stays where it is; a retired one comes back"
    live.client.delete(f"/v1/adapters/{NAME}")
    assert error_of(push(live, second, f"{NAME}@a"), 400) == "adapter_already_loaded"
    assert push(live, first, f"{NAME}@a").status_code == 200


@pytest.mark.parametrize("name", ["v@a@b", "v@a@1", "@a", "v@", "v@@a"])
def test_a_name_has_no_mark(serve, reference, name):
    live = serve()
    push(live, reference.adapters["r2-qv"], "v@a")
    before = live.client.get("/v1/adapters").json()["data"]
    refused = push(live, reference.adapters["r3-mlp"], name)
    assert error_of(refused, 400) is None and refused.json()["error"]["param"] == "lora_name"
    assert "a name must not contain @" in refused.json()["error"]["message"]
    assert live.client.get("/v1/adapters").json()["data"] == before


def test_the_newest_version_is_removed_and_the_one_before_is_newest(serve, reference):
    live = serve(keep_versions=3)
    for content in CONTENTS:
        push(live, reference.adapters[content])
    assert live.client.delete(f"/v1/adapters/{NAME}@3").status_code == 200
    assert answer(live, reference, NAME, CONTENTS[1]).startswith(f"{NAME}@2;")
    assert answer(live, reference, f"{NAME}@1", CONTENTS[0]).startswith(f"{NAME}@1;")
    assert live.client.delete(f"/v1/adapters/{NAME}@2").status_code == 200
    assert live.client.delete(f"/v1/adapters/{NAME}@1").status_code == 200
    assert live.client.get("/v1/adapters").json()["data"] == []
    assert error_of(live.client.delete(f"/v1/adapters/{NAME}@1"), 404) == "adapter_not_found"


def test_versions_are_paused_together(serve, reference):
    live = serve(keep_versions=2)
    for content in CONTENTS[:2]:
        push(live, reference.adapters[content])
    for version in (1, 2):
        refused = live.client.patch(f"/v1/adapters/{NAME}@{version}", json={"paused": True})
        assert error_of(refused, 400) is None and refused.json()["error"]["param"] == "paused"
        assert f"PATCH /v1/adapters/{NAME}" in refused.json()["error"]["message"]
    assert answer(live, reference, NAME, CONTENTS[1])


def test_a_removal_by_force_ends_requests_while_the_engine_is_paused(serve, reference):
    live = serve()
    push(live, reference.adapters["r2-qv"])
    room = live.engine.model.max_model_len - 2
    long = {"model": NAME, "prompt": [5, 6], "max_tokens": room, "ignore_eos": True, "stream": True}
    with live.client.stream("POST", "/v1/completions", json=long) as stream:
        lines = stream.iter_lines()
        next(lines)
        assert live.client.post("/pause", params={"mode": "keep"}).status_code == 200
        removed = live.client.delete(f"/v1/adapters/{NAME}", params={"force": "true"})
        assert removed.json()["ended_requests"] == 1
        assert any("was removed" in line for line in lines), "no wait for /resume"
    assert live.client.post("/resume").status_code == 200
    assert live.post(prompt=[5], max_tokens=1).status_code == 200


@pytest.fixture
def full_disk(monkeypatch):
    """Once set, no change can be written down."""
    full, commit = threading.Event(), registry_store.RegistryStore.change

    def failing(self, *arguments, **about):
        if full.is_set():
            raise registry_store.RegistryError("names.sqlite can't be written: database or disk is full")
        return commit(self, *arguments, **about)

    monkeypatch.setattr(registry_store.RegistryStore, "change", failing)
    return full


def test_what_can_not_be_written_down_is_not_made(serve, reference, full_disk):
    live = serve()
    push(live, reference.adapters["r2-qv"])
    before = live.client.get("/v1/adapters").json()["data"]
    full_disk.set()
    changes = [
        push(live, reference.adapters["r3-mlp"]),
        push(live, reference.adapters["r3-mlp"], "other"),
        live.client.delete(f"/v1/adapters/{NAME}"),
        live.client.patch(f"/v1/adapters/{NAME}", json={"paused": True}),
    ]
    assert [error_of(one, 503) for one in changes] == ["storage_unavailable"] * 4
    assert live.client.get("/v1/adapters").json()["data"] == before
    assert answer(live, reference, NAME, "r2-qv")
    full_disk.clear()
    assert push(live, reference.adapters["r3-mlp"]).status_code == 200
    assert live.client.get(f"/v1/adapters/{NAME}").json()["version"] == 2


def test_what_can_not_be_made_is_taken_back(serve, reference, monkeypatch, tmp_path):
    live = serve()
    push(live, reference.adapters["r2-qv"])
    with monkeypatch.context() as patch:

        def put(*_, **__):
            raise AdapterFormatError("there is no room for it")

        patch.setattr(type(live.worker.adapters), "put", put)
        assert error_of(push(live, reference.adapters["r3-mlp"], f"{NAME}@x"), 400) == "invalid_adapter"
    shutil.copytree(tmp_path / "uploads", tmp_path / "later")
    again = serve(adapter_uploads=tmp_path / "later")
    assert again.client.get(f"/v1/adapters/{NAME}").json()["version"] == 1
    assert answer(again, reference, NAME, "r2-qv")
    assert push(again, reference.adapters["r8-attention"], f"{NAME}@x").status_code == 200, "the label is free"


def test_a_file_of_names_that_hangs_changes_nothing(serve, reference, monkeypatch):
    live = serve(adapter_load_seconds=0.5)
    push(live, reference.adapters["r2-qv"])
    go_on, commit = threading.Event(), registry_store.RegistryStore.change

    def hanging(*arguments, **about):
        go_on.wait(60)
        return commit(*arguments, **about)

    monkeypatch.setattr(registry_store.RegistryStore, "change", hanging)
    assert error_of(live.client.delete(f"/v1/adapters/{NAME}"), 503) == "storage_unavailable"
    assert live.client.get("/ping").status_code == 200
    go_on.set()
    monkeypatch.undo()
    live.wait_until(lambda: push(live, reference.adapters["r3-mlp"]).status_code == 200, 60)
    assert live.client.get(f"/v1/adapters/{NAME}").json()["version"] == 2, "what was late has been undone"


def test_parallel_uploads_stay_within_the_bound(serve, reference, tmp_path):
    size = sum((reference.adapters["r2-qv"] / file).stat().st_size for file in FILES)
    live = serve(max_uploaded_bytes=3 * size + 4096, keep_versions=1)
    (tmp_path / "many").mkdir()
    paths = []
    for number in range(12):
        path = shutil.copytree(reference.adapters["r2-qv"], tmp_path / "many" / str(number))
        (path / FILES[0]).write_text((path / FILES[0]).read_text() + " " * number)
        paths.append(path)
    with ThreadPoolExecutor(12) as threads:
        answers = list(threads.map(lambda path: push(live, path, f"n{path.name}").status_code, paths))
    assert set(answers) <= {200, 503} and 503 in answers and 200 in answers
    kept = sum(file.stat().st_size for path in directories(tmp_path) for file in path.iterdir())
    assert kept <= 3 * size + 4096


@pytest.mark.wide
def test_a_large_upload_in_json_takes_little_memory(serve, reference):
    """It is decoded and written as it comes; the body is larger than all that may be held of bodies."""
    live = serve(max_body_bytes=64 << 10, max_held_body_bytes=3 << 20)
    path = reference.adapters["r2-qv"]
    body = as_json(path, name=NAME)
    assert live.post("/v1/adapters", **body).status_code == 201
    large = {**body, "name": "large", "adapter_model": base64.b64encode(bytes(24 << 20)).decode()}
    refused = live.post("/v1/adapters", **large)
    assert error_of(refused, 400) == "invalid_adapter"
    assert live.app.state.gate.bodies.total == 0
    twice = json.dumps(body).removesuffix("}") + f', "adapter_model": {json.dumps(body["adapter_model"])}}}'
    refused = live.client.post("/v1/adapters", content=twice, headers={"content-type": "application/json"})
    assert refused.status_code == 400 and "twice" in refused.json()["error"]["message"]
    assert live.post("/v1/adapters", name=NAME, user="x" * (128 << 10)).status_code == 413
