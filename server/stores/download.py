"""Downloads of an adapter from a web server, the Hugging Face Hub or a bucket: its configuration and weights, and the
files of its own tokenizer and template, if the store has them.

Tests: tests/server/stores/test_download.py
"""

from __future__ import annotations

import hashlib
import importlib.util
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import httpx

from ...memory.files.config import CONFIG_FILE
from ...memory.files.form import WEIGHTS_FILE
from ...memory.files.tokens.added_tokens import TEXT_FILES
from ...memory.files.tokens.tokenizer_json import MAX_BYTES
from ...memory.files.uploads.content_store import ContentStore, StagedUpload, TooLarge
from .allowed import Allowed
from .archive import SUFFIXES, Archive
from .deadline import Deadline
from .errors import NoAccess, NotInStore, StoreAway, StoreError, StoreRefused
from .guarded_http import guarded_client
from .plugins import PluginStore
from .rules import Location

MAX_CONFIG_BYTES = 1 << 20
"""Most bytes of a configuration that are read here; configurations that can be served are smaller
(docs/reference/adapter-files.md).
"""

_FILES = (CONFIG_FILE, WEIGHTS_FILE)
_PACKAGES = {"s3": "s3fs", "gs": "gcsfs"}
_CHUNK_BYTES = 4 << 20
_TOO_LONG = "it is larger than an adapter may be (adapter_source_bytes)"


class Store(Protocol):
    """A source of an adapter's files."""

    def read(self, name: str) -> Iterable[bytes]:
        """The bytes of the file `name`, or of the location itself for an empty name. Raises StoreError."""
        ...


def missing_package(location: Location) -> str | None:
    """Name of an optional package that a location needs and that is not installed."""
    package = _PACKAGES.get(location.scheme)
    return package if package is not None and importlib.util.find_spec(package) is None else None


def download(location: Location, content: ContentStore, draft: StagedUpload, allowed: Allowed, seconds: float) -> None:
    """Write an adapter's files into an empty staged upload of a content store. Raises StoreError."""
    deadline = Deadline(seconds)
    try:
        if location.scheme == "hf":
            _download_from_hub(location, draft, allowed, deadline)
            return
        with _store(location, allowed, deadline) as store:
            kind = next((suffix for suffix in SUFFIXES if urlsplit(location.url).path.endswith(suffix)), None)
            if kind is None:
                _write_files(store, location, draft)
                return
            with tempfile.TemporaryFile(dir=content.root) as archive, tempfile.TemporaryFile(dir=content.root) as aside:
                digest = hashlib.sha256()
                for chunk in _bounded(store.read(""), content.max_bytes):
                    digest.update(chunk)
                    archive.write(chunk)
                _check_sum(location, digest.hexdigest())
                Archive(archive, kind, content.max_bytes, deadline).unpack(_FILES, TEXT_FILES, draft, aside)
    except TooLarge:
        raise StoreRefused(_TOO_LONG) from None


def _write_files(store: Store, location: Location, draft: StagedUpload, otherwise: Store | None = None) -> None:
    """Write the files. The configuration is read before and after the others: if it has not changed, they belong
    together. otherwise: used instead if the store is away.
    """
    try:
        config = _config(store)
    except StoreAway:
        if otherwise is None:
            raise
        store, config = otherwise, _config(otherwise)
    digest = hashlib.sha256()
    for chunk in store.read(WEIGHTS_FILE):
        digest.update(chunk)
        draft.write(WEIGHTS_FILE, chunk)
    _check_sum(location, digest.hexdigest())
    for name in TEXT_FILES:
        with suppress(NotInStore, NoAccess):  # a bucket that may not be listed refuses access to what it doesn't have
            for chunk in _bounded(store.read(name), MAX_BYTES):
                draft.write(name, chunk)
    if _config(store) != config:
        raise StoreAway("its files changed in the store while they were read")
    draft.write(CONFIG_FILE, config)


def _config(store: Store) -> bytes:
    return b"".join(_bounded(store.read(CONFIG_FILE), MAX_CONFIG_BYTES))


def _bounded(content: Iterable[bytes], limit: int) -> Iterator[bytes]:
    size = 0
    for chunk in content:
        size += len(chunk)
        if size > limit:
            raise StoreRefused(_TOO_LONG)
        yield chunk


def _check_sum(location: Location, sha256: str) -> None:
    if location.sha256 is not None and sha256 != location.sha256:
        raise StoreRefused("its files in the store do not match the configured checksum", f"SHA-256 is {sha256}")


@contextmanager
def _store(location: Location, allowed: Allowed, deadline: Deadline) -> Iterator[Store]:
    if location.scheme in _PACKAGES:
        allowed.check_bucket(location.scheme, urlsplit(location.url).netloc)
        yield _Bucket(location, deadline)
        return
    if location.scheme not in ("http", "https"):
        yield PluginStore(location.scheme, location.url, deadline)
        return
    with guarded_client(allowed, deadline) as client:
        yield _Web(client, location.url)


# --- web servers ---


class _Web:
    """A directory, or one file, on a web server."""

    def __init__(self, client: httpx.Client, url: str) -> None:
        self._client = client
        self._url = url

    def read(self, name: str) -> Iterator[bytes]:
        with _answer(self._client, f"{self._url.rstrip('/')}/{name}" if name else self._url) as response:
            yield from response.iter_raw(_CHUNK_BYTES)


@contextmanager
def _answer(client: httpx.Client, url: str) -> Iterator[httpx.Response]:
    """A successful response, its body still unread. Raises StoreError for others, and if the body breaks off."""
    try:
        with client.stream("GET", url) as response:
            status = response.status_code
            if status in (404, 410):
                raise NotInStore("its store does not have it", f"{response.url} is {status}")
            if status == 429 or status >= 500:
                raise StoreAway(f"its store answers {status}", f"{response.url} is {status}")
            if status in (401, 403):
                raise NoAccess(f"its store answers {status}", f"{response.url} is {status}")
            if status != 200:
                raise StoreRefused(f"its store answers {status}", f"{response.url} is {status}")
            if response.headers.get("content-encoding", "identity") != "identity":
                raise StoreRefused("its store sends it compressed without being asked")
            yield response
    except httpx.TooManyRedirects:
        raise StoreRefused("its store redirects too often") from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise StoreAway("its store does not answer, or breaks off", f"{type(error).__name__}: {error}") from None


# --- the Hugging Face Hub ---


class _Hub:
    """A repository of the Hub. All files come from the commit of the first."""

    def __init__(self, client: httpx.Client, repo: str, revision: str) -> None:
        self._client = client
        self._repo = repo
        self._revision = revision

    def read(self, name: str) -> Iterator[bytes]:
        from huggingface_hub import constants, hf_hub_url

        url = hf_hub_url(self._repo, name, revision=self._revision, endpoint=constants.ENDPOINT)
        with _answer(self._client, url) as response:
            for one in (*response.history, response):  # the Hub's own response, before it redirects to its storage
                self._revision = one.headers.get("x-repo-commit", self._revision)
            yield from response.iter_raw(_CHUNK_BYTES)


class _HubCache:
    """A repository in this machine's cache of `huggingface_hub`."""

    def __init__(self, paths: dict[str, Path]) -> None:
        self._paths = paths

    @classmethod
    def find(cls, repo: str, revision: str) -> _HubCache | None:
        """The repository, if its configuration and weights are there."""
        from huggingface_hub import try_to_load_from_cache

        found = {name: try_to_load_from_cache(repo, name, revision=revision) for name in (*_FILES, *TEXT_FILES)}
        paths = {name: Path(path) for name, path in found.items() if isinstance(path, str)}
        return cls(paths) if paths.keys() >= {*_FILES} else None

    def read(self, name: str) -> Iterator[bytes]:
        if name not in self._paths:
            raise NotInStore("its store does not have it", f"{name} is not in the Hub's cache")
        with self._paths[name].open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                yield chunk


def _download_from_hub(location: Location, draft: StagedUpload, allowed: Allowed, deadline: Deadline) -> None:
    """Write the files of `hf://ORG/REPO[@REVISION]`; from the Hub's cache on this machine if the Hub is away."""
    from huggingface_hub import constants
    from huggingface_hub.utils import build_hf_headers

    repo, _, revision = location.url.removeprefix("hf://").partition("@")
    revision = revision or "main"
    endpoint = urlsplit(constants.ENDPOINT)
    allowed.check_url(endpoint.scheme, endpoint.hostname or "", endpoint.port)
    try:
        cached = _HubCache.find(repo, revision)
        if constants.HF_HUB_OFFLINE:
            if cached is None:
                raise StoreAway("the Hub is switched off (HF_HUB_OFFLINE), and its cache here does not have it")
            _write_files(cached, location, draft)
            return
        headers = {name: value for name, value in build_hf_headers().items() if value}
        with guarded_client(allowed, deadline, headers) as client:
            _write_files(_Hub(client, repo, revision), location, draft, cached)
    except ValueError as error:  # the library's error for an invalid repository name
        raise NotInStore("its store does not have it", str(error)) from None


# --- buckets ---


class _Bucket:
    """A directory, or one file, in a bucket, through fsspec. Credentials and endpoints come from the environment."""

    def __init__(self, location: Location, deadline: Deadline) -> None:
        import fsspec

        self._url = location.url.rstrip("/")
        self._deadline = deadline
        options: dict[str, Any] = {"use_listings_cache": False}
        if location.scheme == "s3":
            seconds = round(deadline.left()) or 1
            options["config_kwargs"] = {
                "connect_timeout": seconds,
                "read_timeout": seconds,
                "retries": {"max_attempts": 1},
            }
        try:
            self._files: Any = fsspec.filesystem(location.scheme, **options)
        except ImportError as error:
            reason = f"the server lacks the package that reads {location.scheme}://"
            raise StoreRefused(reason, f"{error}; run: pip install 'chorus-lora[stores]'") from None

    def read(self, name: str) -> Iterator[bytes]:
        path = f"{self._url}/{name}" if name else self._url
        before = self._ask("info", path)
        for start in range(0, before["size"], _CHUNK_BYTES):
            yield self._ask("cat_file", path, start=start, end=min(start + _CHUNK_BYTES, before["size"]))
        if _version(self._ask("info", path)) != _version(before):
            raise StoreAway("its files changed in the store while they were read")

    def _ask(self, method: str, path: str, **options: Any) -> Any:
        """The result of the file system's method. fsspec runs stores' methods on its own loop, which a hanging store
        does not block.
        """
        from fsspec.asyn import AsyncFileSystem, sync

        call = getattr(self._files, method)
        if isinstance(self._files, AsyncFileSystem):
            call = partial(sync, self._files.loop, getattr(self._files, f"_{method}"), timeout=self._deadline.left(60))
        try:
            return call(path, **options)
        except FileNotFoundError as error:
            raise NotInStore("its store does not have it", str(error)) from None
        except PermissionError as error:
            raise NoAccess("its store refuses access", str(error)) from None
        except StoreError:
            raise
        except Exception as error:  # each kind of store raises its own errors
            raise StoreAway("its store does not answer, or breaks off", f"{type(error).__name__}: {error}") from None


def _version(info: dict[str, Any]) -> list[Any]:
    return [info.get(key) for key in ("size", "ETag", "etag", "generation", "LastModified", "mtime")]
