"""Downloads from stores, some of them hostile: redirects and addresses, sizes and times."""

import gzip
import hashlib
import io
import json
import socket
import struct
import tarfile
import time
import tracemalloc
import zipfile
from types import SimpleNamespace

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from huggingface_hub import constants
from hypothesis import given, settings
from hypothesis import strategies as st

from chorus.memory.files.tokens.added_tokens import TEXT_FILES
from chorus.memory.files.uploads.content_store import ContentStore
from chorus.server.stores import guarded_http
from chorus.server.stores.allowed import Allowed
from chorus.server.stores.archive import SUFFIXES, Archive
from chorus.server.stores.deadline import Deadline
from chorus.server.stores.download import download, missing_package
from chorus.server.stores.errors import NotInStore, StoreAway, StoreRefused
from chorus.server.stores.rules import Location

from .store_server import hang, redirect, send, store_server

pytestmark = pytest.mark.wide

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
FILES = {CONFIG: b'{"r": 4}', WEIGHTS: bytes(range(256)) * 64}
TEXT = {name: f"{name}'s text".encode() for name in TEXT_FILES}
WITH_TEXT = {**TEXT, **FILES}
MAX_BYTES = 1 << 20
AWAY = pytest.raises(StoreAway)


@pytest.fixture
def content(tmp_path):
    return ContentStore(tmp_path / "cache", MAX_BYTES, 1 << 30)


@pytest.fixture
def get(content, store):
    """Download a location; returns its files by name."""

    def run(url, sha256=None, hosts=None, seconds=20):
        allowed = Allowed([store.url] if hosts is None else hosts)
        with content.draft() as draft:
            download(Location(url, sha256), content, draft, allowed, seconds)
            path = draft.seal()
        return {file.name: file.read_bytes() for file in path.iterdir()}

    yield run
    assert not [path for path in content.root.iterdir() if path.name.startswith(".")], "nothing half done is left"


def tar(files=FILES, parent="x/", mode="w:gz", extra=()):
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode=mode) as archive:
        for info, body in [*extra, *((tarfile.TarInfo(parent + name), body) for name, body in files.items())]:
            info.size = len(body or b"")
            archive.addfile(info, io.BytesIO(body or b""))
    return data.getvalue()


def zipped(files=FILES, parent="x/", infos=()):
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, body in [*infos, *((parent + name, body) for name, body in files.items())]:
            archive.writestr(name, body)
    return data.getvalue()


def serve(store, files=FILES, at="/one"):
    store.paths.update({f"{at}/{name}": body for name, body in files.items()})
    return f"{store.url}{at}"


# --- honest stores


def test_a_directory_and_archives_hold_the_two_files(store, get):
    assert get(serve(store)) == FILES
    for suffix, data in (("tar.gz", tar()), ("tgz", tar(parent="")), ("tar", tar(mode="w")), ("zip", zipped())):
        store.paths[f"/a.{suffix}"] = data
        assert get(f"{store.url}/a.{suffix}", hashlib.sha256(data).hexdigest()) == FILES
    assert get(f"{store.url}/one/", hashlib.sha256(FILES[WEIGHTS]).hexdigest()) == FILES


def test_an_adapters_own_tokenizer_and_template_come_along(store, get):
    assert get(serve(store, WITH_TEXT)) == WITH_TEXT
    for suffix, data in (("tar", tar(WITH_TEXT, mode="w")), ("zip", zipped(WITH_TEXT)), ("tgz", tar(WITH_TEXT, ""))):
        store.paths[f"/a.{suffix}"] = data
        assert get(f"{store.url}/a.{suffix}") == WITH_TEXT
    some = dict([*FILES.items(), *list(TEXT.items())[1:3]])
    assert get(serve(store, some, "/some")) == some


def test_a_tokenizer_of_another_directory_is_not_the_adapters(store, get):
    """Such as that of a checkpoint of the training beside it."""
    other = {f"checkpoint-5/{name}": b"other" for name in TEXT}
    for suffix, data in (("tar", tar({**other, **WITH_TEXT}, mode="w")), ("zip", zipped({**FILES, **other}))):
        store.paths[f"/a.{suffix}"] = data
    assert get(f"{store.url}/a.tar") == WITH_TEXT
    assert get(f"{store.url}/a.zip") == FILES


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_tokenizer_that_the_store_does_not_give_is_left_out(store, get, status):
    """A bucket that may not be listed answers 403 for a file that it doesn't have."""
    for name in TEXT:
        store.paths[f"/one/{name}"] = lambda handler: handler.send_error(status)
    assert get(serve(store)) == FILES


def test_a_store_that_is_away_for_a_tokenizer_is_asked_again(store, get):
    url = serve(store)
    store.paths["/one/tokenizer.json"] = lambda handler: handler.send_error(503)
    with AWAY:
        get(url)


def test_a_tokenizer_counts_in_an_adapters_bytes(store, get):
    for suffix, data in (
        ("zip", zipped({"tokenizer.json": bytes(MAX_BYTES + 1)})),
        ("tar", tar({**FILES, "vocab/tokenizer.json": bytes(2 * MAX_BYTES)}, mode="w")),
    ):
        store.paths[f"/a.{suffix}"] = data
        with pytest.raises(StoreRefused, match="adapter_source_bytes"):
            get(f"{store.url}/a.{suffix}")
    with pytest.raises(StoreRefused, match="adapter_source_bytes"):
        get(serve(store, {**FILES, "tokenizer.json": bytes(MAX_BYTES)}))


def test_another_checksum_is_refused(store, get):
    store.paths["/a.tar.gz"] = tar()
    for url in (serve(store), f"{store.url}/a.tar.gz"):
        with pytest.raises(StoreRefused, match="checksum"):
            get(url, "0" * 64)


def test_answers_other_than_a_file(store, get):
    with pytest.raises(NotInStore):
        get(f"{store.url}/none")
    for status, error in ((403, StoreRefused), (500, StoreAway), (429, StoreAway), (204, StoreRefused)):
        store.paths[f"/one/{CONFIG}"] = lambda handler, status=status: handler.send_error(status)
        with pytest.raises(error, match=str(status)):
            get(f"{store.url}/one")
    packed = gzip.compress(FILES[CONFIG])
    store.paths[f"/one/{CONFIG}"] = lambda handler: send(handler, packed, content_encoding="gzip")
    with pytest.raises(StoreRefused, match="compressed"):
        get(f"{store.url}/one")


# --- where it leads


def test_nothing_is_asked_that_is_not_listed(store, get):
    url = serve(store)
    for hosts in ((), ["store.example"], [store.host], ["127.0.0.0/8"], [f"http://localhost:{store.server_port}"]):
        with pytest.raises(StoreRefused):
            get(url, hosts=hosts)
    assert not store.asked


def test_a_redirect_is_followed_to_listed_hosts_only(store, get):
    url = serve(store, at="/real")
    for name in FILES:
        store.paths[f"/one/{name}"] = redirect(f"{url}/{name}")
    assert get(f"{store.url}/one") == FILES
    with store_server() as inner:
        for target in (
            f"{inner.url}/{CONFIG}",
            f"https://{store.host}/x",
            "file:///etc/passwd",
            "ftp://127.0.0.1/x",
            f"http://localhost:{store.server_port}/real/{CONFIG}",
            f"http://[::ffff:127.0.0.1]:{inner.server_port}/x",
            "http://169.254.169.254/latest/meta-data",
        ):
            store.paths[f"/one/{CONFIG}"] = redirect(target)
            with pytest.raises(StoreRefused, match="allow"):
                get(f"{store.url}/one")
        assert not inner.asked
    store.paths[f"/one/{CONFIG}"] = redirect(f"{store.url}/one/{CONFIG}")
    with pytest.raises(StoreRefused, match="redirects"):
        get(f"{store.url}/one")


def test_a_listed_name_that_leads_to_a_private_address_is_not_connected_to(store, get, monkeypatch):
    serve(store)
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda *args, **options: [(socket.AF_INET, 1, 6, "", ("127.0.0.1", args[1]))]
    )
    name = f"http://store.example:{store.server_port}"
    with pytest.raises(StoreRefused, match="address"):
        get(f"{name}/one", hosts=[name])
    assert not store.asked
    assert get(f"{name}/one", hosts=[name, "127.0.0.1/32"]) == FILES


def test_the_address_that_was_checked_is_the_one_that_is_connected_to(store, get, monkeypatch):
    """A name is resolved once for each connection, which then goes to an address. A change of the name a moment later
    (rebinding) does not matter.
    """
    serve(store)
    resolve, connect, asked, connected = socket.getaddrinfo, socket.create_connection, [], []

    def resolve_once(host, port, *args, **options):
        if host != "store.example":
            return resolve(host, port, *args, **options)
        asked.append(host)
        return [(socket.AF_INET, 1, 6, "", ("127.0.0.1", port))]

    def note(address, *args, **options):
        connected.append(address)
        return connect(address, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", resolve_once)
    monkeypatch.setattr(socket, "create_connection", note)
    name = f"http://store.example:{store.server_port}"
    assert get(f"{name}/one", hosts=[name, "127.0.0.1/32"]) == FILES
    assert connected == [("127.0.0.1", store.server_port)] * len(asked)


def test_proxies_of_the_environment_are_not_used(store, get, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    assert get(serve(store)) == FILES


# --- how much it sends, and how long it takes


def endless(handler):
    handler.send_response(200)
    handler.end_headers()
    while not handler.server.over.is_set():
        handler.wfile.write(bytes(1 << 16))


def trickle(handler):
    handler.send_response(200)
    handler.send_header("content-length", "1000000")
    handler.end_headers()
    while not handler.server.over.wait(0.05):
        handler.wfile.write(b" ")


def trickled_headers(handler):
    while not handler.server.over.wait(0.05):
        handler.wfile.write(b"H" if handler.server.asked["sent"] else b"HTTP/1.1 200 OK\r\nx: ")
        handler.server.asked["sent"] += 1


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS, "archive"])
def test_an_endless_body_is_refused(store, get, name):
    serve(store)
    store.paths[f"/one/{name}"] = store.paths["/a.tar"] = endless
    with pytest.raises(StoreRefused, match="larger"):
        get(f"{store.url}/a.tar" if name == "archive" else f"{store.url}/one")


@pytest.mark.parametrize("answer", [trickle, trickled_headers, hang])
def test_a_store_that_sends_slowly_is_given_up_at_the_deadline(store, get, answer):
    serve(store)
    store.paths[f"/one/{WEIGHTS}"] = answer
    with AWAY:
        get(f"{store.url}/one", seconds=0.5)


def test_a_store_that_falls_silent_is_given_up(store, get, monkeypatch):
    monkeypatch.setattr("chorus.server.stores.deadline.SILENT_SECONDS", 0.2)
    monkeypatch.setattr(guarded_http, "SILENT_SECONDS", 0.2)
    serve(store)
    store.paths[f"/one/{WEIGHTS}"] = hang
    with AWAY:
        get(f"{store.url}/one", seconds=3600)


def test_a_body_of_another_length_than_announced_is_not_taken(store, get):
    serve(store)
    store.paths[f"/one/{WEIGHTS}"] = lambda handler: send(handler, FILES[WEIGHTS], len(FILES[WEIGHTS]) + 1)
    with AWAY:
        get(f"{store.url}/one", seconds=5)
    store.paths[f"/one/{WEIGHTS}"] = lambda handler: send(handler, FILES[WEIGHTS], 10)
    assert get(f"{store.url}/one")[WEIGHTS] == FILES[WEIGHTS][:10]  # such weights the engine refuses


def test_files_that_change_between_two_reads_are_not_taken(store, get):
    serve(store)
    store.paths[f"/one/{CONFIG}"] = lambda handler: send(handler, json.dumps({"r": time.monotonic()}).encode())
    with pytest.raises(StoreAway, match="changed"):
        get(f"{store.url}/one")


# --- archives


def member(name, kind=tarfile.REGTYPE, target=""):
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


def long_header():
    """A tar file of which an extended header says that it is of a gigabyte."""
    info = member("pax", tarfile.XHDTYPE)
    info.size = 1 << 30
    return info.tobuf()


ZEROS = bytes(MAX_BYTES + 1)
ARCHIVES = {
    "out.tar": (tar(extra=[(member(f"../{CONFIG}"), b"{}")], mode="w"), "leads out"),
    "deep.tar": (tar(extra=[(member(f"x/../../{CONFIG}"), b"{}")], mode="w"), "leads out"),
    "absolute.tar": (tar(extra=[(member("/etc/cron.d/x"), b"x")], mode="w"), "leads out"),
    "link.tar": (
        tar({WEIGHTS: b"x"}, extra=[(member(f"x/{CONFIG}", tarfile.SYMTYPE, "/etc/passwd"), b"")], mode="w"),
        "not a regular file",
    ),
    "hard.tar": (
        tar({WEIGHTS: b"x"}, extra=[(member(f"x/{CONFIG}", tarfile.LNKTYPE, "/etc/passwd"), b"")], mode="w"),
        "not a regular file",
    ),
    "pipe.tar": (
        tar({WEIGHTS: b"x"}, extra=[(member(f"x/{CONFIG}", tarfile.FIFOTYPE), b"")], mode="w"),
        "not a regular file",
    ),
    "bomb.tar.gz": (tar({**FILES, WEIGHTS: ZEROS}), "larger|more than"),
    "beside.tar.gz": (tar(extra=[(member("x/readme"), bytes(8 * MAX_BYTES))]), "more than"),
    "header.tar": (long_header() + bytes(1024), "header"),
    "twice.tar": (tar(extra=[(member(f"y/{CONFIG}"), b"{}")], mode="w"), "twice"),
    "apart.tar": (tar({CONFIG: b"{}"}, extra=[(member(f"y/{WEIGHTS}"), b"x")], mode="w"), "one directory"),
    "half.tar": (tar({CONFIG: b"{}"}, mode="w"), "one directory"),
    "cut.tar.gz": (tar()[:200], "broken"),
    "none.tar.gz": (b"hello", "broken"),
    "none.zip": (b"hello", "directory"),
    "out.zip": (zipped(infos=[(f"../{CONFIG}", b"{}")]), "leads out"),
    "windows.zip": (zipped(infos=[("..\\x", b"{}")]), "leads out"),
    "bomb.zip": (zipped({**FILES, WEIGHTS: ZEROS}), "larger"),
    "cut.zip": (zipped()[20:], "broken"),
    "directory.zip": (b"PK\5\6" + struct.pack("<4H2LH", 0, 0, 1, 1, 1 << 30, 0, 0), "too long"),
    "many.tar.gz": (tar(extra=[(member(str(index)), b"") for index in range(5000)]), "members"),
}


def symlink_zip():
    info = zipfile.ZipInfo(f"x/{CONFIG}")
    info.external_attr = 0o120777 << 16
    return zipped({WEIGHTS: b"x"}, infos=[(info, b"/etc/passwd")])


ARCHIVES["link.zip"] = (symlink_zip(), "not a regular file")


@pytest.mark.parametrize("name", ARCHIVES)
def test_an_archive_that_is_hostile_or_broken_is_refused(store, get, name):
    data, reason = ARCHIVES[name]
    store.paths[f"/{name}"] = data
    with pytest.raises(StoreRefused, match=reason):
        get(f"{store.url}/{name}")


def sparse_chain(blocks):
    """A tar file whose first member has a sparse map of so many blocks."""
    info = member("hole", tarfile.GNUTYPE_SPARSE)
    header = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    entries = (b"%011o\0" % 1) * 2
    header[386:482] = entries * 4
    header[482] = 1  # the map goes on
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    block = entries * 21 + b"\1" + bytes(7)
    return bytes(header) + block * blocks


def pax_record(text):
    length = len(text) + 2
    while len(b"%d %s\n" % (length, text)) != length:
        length += 1
    return b"%d %s\n" % (length, text)


def pax(records, count=1, members=0):
    """A tar file of members, each but the last after so many equal PAX headers."""
    content = b"".join(map(pax_record, records))
    info = member("pax", tarfile.XHDTYPE)
    info.size = len(content)
    headers = (info.tobuf() + content + bytes(-len(content) % 512)) * count
    return (headers + member("x").tobuf()) * members + headers + tar(mode="w")


def zip64(data):
    """A zip file with the records of a zip64 directory, which say that it has gigabytes."""
    end = data.rfind(b"PK\5\6")
    record = b"PK\6\6" + struct.pack("<Q2H2L4Q", 44, 45, 45, 0, 0, 1 << 25, 1 << 25, 1 << 31, 0)
    return data[:end] + record + b"PK\6\7" + struct.pack("<LQL", 0, end, 1) + data[end:]


def packed_by(method):
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", method) as archive:
        for name, body in FILES.items():
            archive.writestr(f"x/{name}", body)
    return data.getvalue()


MAP = b"GNU.sparse.map=" + b",".join([b"1"] * 20_000)
GREEDY = {
    "chain.tar.gz": (gzip.compress(sparse_chain(1 << 15), 1), "sparse"),
    "chain.tar": (sparse_chain(1 << 15), "sparse"),
    "map.tar": (pax([b"GNU.sparse.major=0", b"GNU.sparse.size=9", MAP]), "sparse"),
    "map1.tar": (pax([b"GNU.sparse.major=1", b"GNU.sparse.minor=0", b"GNU.sparse.realsize=9"]), "sparse"),
    "moved.tar": (pax([b"size=1099511627776"]), "size"),
    "headers.tar.gz": (gzip.compress(pax([b"comment=x"], 5000), 1), "extended header"),
    "keys.tar.gz": (gzip.compress(pax([b"k%d=%s" % (i, b"v" * 900) for i in range(60)], 7, 3), 1), "extended header"),
    "zip64.zip": (zip64(zipped()), "zip64"),
    "members.zip": (zipped(infos=[(f"x/{index}", b"") for index in range(5000)]), "members"),
    "lzma.zip": (packed_by(zipfile.ZIP_LZMA), "deflate"),
    "bzip2.zip": (packed_by(zipfile.ZIP_BZIP2), "deflate"),
    "ends.zip": (zipped() + zipped(), "more than one"),
}


@pytest.mark.parametrize("name", GREEDY)
def test_an_archive_takes_no_memory_beyond_its_bound(content, name):
    """Where the standard library alone would take any number of bytes."""
    data, reason = GREEDY[name]
    kind = next(suffix for suffix in SUFFIXES if name.endswith(suffix))
    archive = io.BytesIO(data)
    tracemalloc.start()
    try:
        with content.draft() as draft, pytest.raises(StoreRefused, match=reason):
            Archive(archive, kind, 64 << 20, Deadline(20)).unpack(tuple(FILES), TEXT_FILES, draft, io.BytesIO())
        assert tracemalloc.get_traced_memory()[1] < 6 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.wide
@settings(max_examples=300)
@given(data=st.data())
def test_a_damaged_archive_is_refused_or_gives_files(data):
    """Whatever the libraries raise."""
    name, whole = data.draw(
        st.sampled_from(
            [
                (".tar", tar(mode="w")),
                (".tar", tar(WITH_TEXT, mode="w")),
                (".tar", pax([b"comment=x"])),
                (".tar.gz", tar()),
                (".zip", zipped()),
                (".tar", sparse_chain(2)),
                (".zip", zip64(zipped())),
            ]
        )
    )
    damaged = bytearray(whole)
    for at, value in data.draw(st.lists(st.tuples(st.integers(0, len(whole) - 1), st.integers(0, 255)), max_size=9)):
        damaged[at] = value
    written = {}
    draft = SimpleNamespace(write=lambda name, chunk: written.setdefault(name, bytearray()).extend(chunk))
    try:
        archive = Archive(io.BytesIO(bytes(damaged)), name, MAX_BYTES, Deadline(20))
        archive.unpack(tuple(FILES), TEXT_FILES, draft, io.BytesIO())
    except StoreRefused:
        return
    assert set(written) <= {*FILES, *TEXT_FILES}


# --- the Hub


@pytest.fixture
def hub(store, monkeypatch, tmp_path):
    """A Hub on loopback: `main` is the commit of `a`s, whose files are kept by another host, as the real one's are."""
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template.replace(constants.ENDPOINT, store.url))
    monkeypatch.setattr(constants, "ENDPOINT", store.url)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    commit, seen = "a" * 40, []

    def answer(name):
        def run(handler):
            seen.append(handler.headers.get("authorization"))
            send(handler, FILES[name], x_repo_commit=commit)

        return run

    for name in FILES:
        store.paths[f"/org/repo/resolve/{commit}/{name}"] = answer(name)
    store.paths[f"/org/repo/resolve/main/{CONFIG}"] = answer(CONFIG)
    return seen


def keep_in_hub_cache(root, files=FILES, revision="main"):
    repo = root / "hub" / "models--org--repo"
    snapshot = repo / "snapshots" / ("b" * 40)
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / revision).write_text("b" * 40)
    for name, body in files.items():
        (snapshot / name).write_bytes(body)


def test_all_files_of_a_repository_come_from_one_commit(store, get, hub):
    assert get("hf://org/repo") == FILES
    assert get("hf://org/repo@" + "a" * 40) == FILES
    assert set(hub) == {"Bearer hf_secret"}
    for name in ("org/none", "../x", "org"):
        with pytest.raises(NotInStore):
            get(f"hf://{name}")


def test_the_token_stays_with_the_hub(store, get, hub):
    with store_server() as other:
        seen = []

        def answer(handler):
            seen.append(handler.headers.get("authorization"))
            send(handler, FILES[WEIGHTS])

        other.paths["/blob"] = answer
        store.paths[f"/org/repo/resolve/{'a' * 40}/{WEIGHTS}"] = redirect(f"{other.url}/blob")
        with pytest.raises(StoreRefused):
            get("hf://org/repo")
        assert get("hf://org/repo", hosts=[store.url, other.url]) == FILES
        assert seen == [None]


def test_the_hub_has_to_be_listed(store, get, hub):
    with pytest.raises(StoreRefused):
        get("hf://org/repo", hosts=["store.example"])
    assert not store.asked


@pytest.mark.parametrize("offline", [True, False])
def test_the_hubs_cache_serves_while_the_hub_is_away(store, get, hub, monkeypatch, tmp_path, offline):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    store.paths[f"/org/repo/resolve/main/{CONFIG}"] = lambda handler: handler.send_error(503)
    with AWAY:
        get("hf://org/repo")
    keep_in_hub_cache(tmp_path)
    asked = store.asked.total()
    assert get("hf://org/repo") == FILES
    assert (store.asked.total() == asked) == offline


# --- buckets


@pytest.fixture
def bucket(monkeypatch):
    """A bucket in memory, in the place of S3."""
    files = MemoryFileSystem()
    monkeypatch.setattr(fsspec, "filesystem", lambda *args, **options: files)
    for name, body in FILES.items():
        files.pipe_file(f"s3://bucket/one/{name}", body)
    files.pipe_file("s3://bucket/a.tar.gz", tar())
    yield files
    MemoryFileSystem.store.clear()


def test_a_bucket_that_is_listed(get, bucket):
    for path in ("one", "one/", "a.tar.gz"):
        assert get(f"s3://bucket/{path}", hosts=["s3://bucket"]) == FILES
    with pytest.raises(NotInStore):
        get("s3://bucket/none", hosts=["s3://bucket"])
    with pytest.raises(StoreRefused, match="bucket"):
        get("s3://bucket/one", hosts=["s3://other", "gs://bucket"])


def test_a_bucket_whose_files_change_or_are_too_large(get, bucket, monkeypatch):
    infos = iter(range(100))
    real = bucket.info
    with monkeypatch.context() as changing, pytest.raises(StoreAway, match="changed"):
        changing.setattr(bucket, "info", lambda path: real(path) | {"ETag": next(infos)})
        get("s3://bucket/one", hosts=["s3://bucket"])
    bucket.pipe_file(f"s3://bucket/one/{WEIGHTS}", ZEROS)
    with pytest.raises(StoreRefused, match="larger"):
        get("s3://bucket/one", hosts=["s3://bucket"])


def test_a_package_that_a_bucket_needs_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert [missing_package(Location(url)) for url in ("s3://b/x", "gs://b/x", "hf://x/y", "/x")] == [
        "s3fs",
        "gcsfs",
        None,
        None,
    ]


@pytest.mark.integration
def test_an_s3_server(get, monkeypatch):
    """moto's, over the network as any other."""
    moto_server = pytest.importorskip("moto.server")
    pytest.importorskip("s3fs")
    import boto3

    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        for name, value in {
            "AWS_ACCESS_KEY_ID": "x",
            "AWS_SECRET_ACCESS_KEY": "x",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        }.items():
            monkeypatch.setenv(name, value)
        client = boto3.client("s3")
        client.create_bucket(Bucket="bucket")
        for name, body in {**{f"one/{name}": body for name, body in FILES.items()}, "a.tar.gz": tar()}.items():
            client.put_object(Bucket="bucket", Key=name, Body=body)
        for path in ("one", "a.tar.gz"):
            assert get(f"s3://bucket/{path}", hosts=["s3://bucket"]) == FILES
        with pytest.raises(NotInStore):
            get("s3://bucket/none", hosts=["s3://bucket"])
    finally:
        server.stop()


def test_a_deadline_ends():
    with AWAY:
        Deadline(0.0).left()
