"""A Unix socket beside the port, and adapters that come over it as descriptors of sealed memory files."""

import base64
import fcntl
import json
import os
import socket
import stat
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import pytest

from chorus.core.config import EngineConfig
from chorus.core.engine import Engine
from chorus.memory.files.config import CONFIG_FILE
from chorus.memory.files.form import WEIGHTS_FILE
from chorus.server.http.unix_socket import MAX_DESCRIPTORS, Unsealed, check_sealed, unix_listener

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")

SHRINK, GROW, WRITE = 2, 4, 8
ALL = SHRINK | GROW | WRITE
ADD_SEALS = 1033
NAME = "policy"
COUNT = 6


@pytest.fixture
def place():
    """A path short enough for a socket."""
    with tempfile.TemporaryDirectory() as directory:
        yield Path(directory) / "chorus.sock"


def memory_file(data=b"weights", seals=ALL):
    fd = os.memfd_create("adapter", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(fd, data)
    if seals:
        fcntl.fcntl(fd, ADD_SEALS, seals)
    return fd


def asked(path, body=None, fds=(), route="/v1/load_lora_adapter"):
    """Status and body of a request over a Unix socket."""
    data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    method = "GET" if body is None else "POST"
    head = (
        f"{method} {route} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        f"content-length: {len(data)}\r\nconnection: close\r\n\r\n"
    )
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(60)
        client.connect(str(path))
        socket.send_fds(client, [head.encode() + data], list(fds))
        answer = b"".join(iter(lambda: client.recv(1 << 16), b""))
    head, _, rest = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), rest.decode()


def memory_files():
    """Number of open descriptors of memory files."""
    links = []
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # closed meanwhile
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
    return sum("memfd:adapter" in link for link in links)


@pytest.mark.parametrize("seals", [0, SHRINK, GROW, WRITE, SHRINK | GROW, GROW | WRITE, SHRINK | WRITE])
def test_a_memory_file_that_can_change_is_refused(seals):
    fd = memory_file(seals=seals)
    with pytest.raises(Unsealed, match="can still change"):
        check_sealed(fd)
    fcntl.fcntl(fd, ADD_SEALS, ALL)
    check_sealed(fd)
    os.close(fd)


def test_what_is_no_memory_file_is_refused(tmp_path):
    (tmp_path / "file").write_bytes(b"x")
    reading, writing = os.pipe()
    fd = os.open(tmp_path / "file", os.O_RDONLY)
    for one in (reading, writing, fd):
        with pytest.raises(Unsealed):
            check_sealed(one)
        os.close(one)


def test_a_socket_is_for_its_user_alone_and_goes_at_the_end(place):
    with unix_listener(place) as bound:
        assert stat.S_IMODE(place.stat().st_mode) == 0o600
        bound.listen()
        with pytest.raises(FileExistsError), unix_listener(place):
            pass
    assert not place.exists()


def test_a_socket_that_an_ended_process_left_is_replaced_and_a_file_is_not(place):
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(place))
    with unix_listener(place):
        pass
    place.write_text("mine")
    with pytest.raises(FileExistsError), unix_listener(place):
        pass
    assert place.read_text() == "mine"


def test_requests_are_answered_over_the_socket_as_over_the_port(start, fake_engine, place):
    live = start(fake_engine, settings={"unix_socket": place})
    status, body = asked(place, {"model": "base", "prompt": "ok", "max_tokens": 2}, route="/v1/completions")
    assert status == 200 and json.loads(body)["choices"]
    assert fake_engine.asked[0].tenant == "at-unix"
    assert live.post(model="base", prompt="ok", max_tokens=2).status_code == 200


def test_descriptors_that_nobody_uses_are_closed(start, fake_engine, place):
    live = start(fake_engine, settings={"unix_socket": place})
    assert asked(place, route="/health")[0] == 200
    fds = [memory_file() for _ in range(3 * MAX_DESCRIPTORS)]
    for _ in range(3):
        assert asked(place, fds=fds, route="/health")[0] == 200
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(place))
        socket.send_fds(client, [b"GET /hea"], fds)
        time.sleep(0.1)
    for fd in fds:
        os.close(fd)
    live.wait_until(lambda: not memory_files())


@pytest.fixture(scope="module")
def reference(subject):
    return subject("wide_heads")


@pytest.fixture
def live(start, reference, tmp_path, place):
    config = EngineConfig(model=reference.model, memory_bytes=8 << 20, threads=1, cpu_kernels="torch")
    settings = {"adapter_uploads": tmp_path / "uploads", "unix_socket": place, "max_adapter_bytes": 1 << 20}
    return start(Engine.from_config(config), adapter_roots=(tmp_path,), settings=settings)


def body_of(path, **fields):
    config = json.loads((path / CONFIG_FILE).read_text())
    return {"lora_name": NAME, "adapter_config": config, "adapter_model": {"descriptor": 0}, **fields}


def tokens(live, reference, content):
    prompt = reference.prompt(content, 9, COUNT, 3)
    options = {"max_tokens": COUNT, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    response = live.post(model=NAME, prompt=prompt, **options)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["token_ids"], reference.greedy(content, prompt, COUNT)


def test_adapters_come_as_descriptors_one_after_the_other(live, reference, place):
    for content in ("r2-qv", "r3-mlp"):
        path = reference.adapters[content]
        fd = memory_file((path / WEIGHTS_FILE).read_bytes())
        status, text = asked(place, body_of(path), [fd])
        os.close(fd)
        assert status == 200, text
        given, expected = tokens(live, reference, content)
        assert given == expected


def test_an_adapter_may_come_as_another_descriptor_than_the_first(live, reference, place):
    path = reference.adapters["r2-qv"]
    fds = [memory_file(b"other"), memory_file((path / WEIGHTS_FILE).read_bytes())]
    assert asked(place, body_of(path, adapter_model={"descriptor": 1}), fds)[0] == 200
    given, expected = tokens(live, reference, "r2-qv")
    assert given == expected
    for fd in fds:
        os.close(fd)


def test_descriptors_that_are_not_taken_change_nothing(live, reference, place, tmp_path):
    path = reference.adapters["r2-qv"]
    weights = (path / WEIGHTS_FILE).read_bytes()

    def refused(fds, status=400, **fields):
        got, text = asked(place, body_of(path, **fields), fds)
        for fd in fds:
            os.close(fd)
        assert got == status, text
        return json.loads(text)["error"]["code"]

    assert refused([memory_file(weights, SHRINK | GROW)]) == "invalid_descriptor"
    assert refused([os.open(path / WEIGHTS_FILE, os.O_RDONLY)]) == "invalid_descriptor"
    assert refused([]) == refused([memory_file(weights)], adapter_model={"descriptor": 1}) == "no_descriptor"
    assert refused([memory_file(weights)], adapter_model={"descriptor": -1}) is None
    assert refused([memory_file(weights[:-8])]) == "invalid_adapter"
    assert refused([memory_file(bytes(2 << 20))], 413) is None
    twice = b'{"adapter_model": "%b", %b' % (base64.b64encode(weights), json.dumps(body_of(path)).encode()[1:])
    fd = memory_file(weights)
    status, text = asked(place, twice, [fd])
    os.close(fd)
    assert status == 400 and "adapter_model: it is given twice; give it once" in text
    over_tcp = live.client.post("/v1/load_lora_adapter", json=body_of(path))
    assert over_tcp.status_code == 400 and over_tcp.json()["error"]["code"] == "no_descriptor"
    assert live.client.get(f"/v1/adapters/{NAME}").status_code == 404
    live.wait_until(lambda: not [one for one in (tmp_path / "uploads").iterdir() if one.is_dir()], 30)
    live.wait_until(lambda: not memory_files())


def test_a_wrong_number_of_a_descriptor_is_named_by_its_whole_path(live, reference, place):
    for given, field in (({"descriptor": -1}, "adapter_model.descriptor"), ({"fd": 0}, "adapter_model.descriptor")):
        status, text = asked(place, body_of(reference.adapters["r2-qv"], adapter_model=given))
        error = json.loads(text)["error"]
        assert status == 400 and error["param"] == field and error["message"].startswith(field), text


def descriptors_to(path):
    """Number of this process's open descriptors of a path."""
    links = []
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # closed meanwhile
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
    return links.count(str(path))


def test_descriptors_of_what_is_no_memory_file_are_told_so_and_closed(live, reference, place, tmp_path):
    path = reference.adapters["r2-qv"]
    os.mkfifo(tmp_path / "fifo")
    for opened, flags in (
        (path, os.O_RDONLY),
        (path / WEIGHTS_FILE, os.O_PATH),
        (tmp_path / "fifo", os.O_RDONLY | os.O_NONBLOCK),
    ):
        for _ in range(3):
            fd = os.open(opened, flags)
            status, text = asked(place, body_of(path), [fd])
            os.close(fd)
            assert status == 400 and json.loads(text)["error"]["code"] == "invalid_descriptor", text
        live.wait_until(lambda opened=opened: not descriptors_to(opened))


def test_a_memory_file_that_was_opened_for_writing_is_told_so(live, reference, place):
    path = reference.adapters["r2-qv"]
    fd = memory_file((path / WEIGHTS_FILE).read_bytes())
    only_written = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY)
    status, text = asked(place, body_of(path), [only_written])
    os.close(fd)
    os.close(only_written)
    assert status == 400 and "opened for reading" in json.loads(text)["error"]["message"], text
    live.wait_until(lambda: not memory_files())


def test_a_descriptor_s_position_is_its_sender_s_own(live, reference, place):
    path = reference.adapters["r2-qv"]
    fd = memory_file((path / WEIGHTS_FILE).read_bytes())
    os.lseek(fd, 5, os.SEEK_SET)
    assert asked(place, body_of(path), [fd])[0] == 200
    assert os.lseek(fd, 0, os.SEEK_CUR) == 5
    os.close(fd)
