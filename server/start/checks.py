"""Checks that run before anything heavy is imported, to report mistakes at once."""

from __future__ import annotations

from pathlib import Path

from ...core.base_name import named_base
from ...core.model.config_json import UnsupportedModel
from ...core.model.pooling_config import PoolingConfig
from ...memory.disk.folder import FolderRefused, check_folder
from ...memory.files.format import is_adapter_dir
from ..access.hosts import is_loopback
from ..access.keys import InvalidKey
from ..checkpoints.pull import PullError, resolve_model
from ..settings import Settings
from ..stores.download import missing_package


class LaunchError(Exception):
    """The server can't start with these settings; the text is for the operator."""


def check_model(settings: Settings) -> None:
    """Raises LaunchError unless the directories that the settings name exist."""
    try:
        resolve_model(settings.model, tokenizer=settings.tokenizer is None)
    except PullError as error:
        raise LaunchError(str(error)) from None
    if not (settings.model / "config.json").is_file():
        raise LaunchError(f"{settings.model} holds no model: {_why_no_model(settings.model)}")
    _check_pooling(settings)
    if settings.tokenizer is not None and not (settings.tokenizer / "tokenizer.json").is_file():
        raise LaunchError(
            f"tokenizer is {settings.tokenizer}, which has no tokenizer.json; name a directory that has one"
        )
    if settings.chat_template is not None and not settings.chat_template.is_file():
        raise LaunchError(f"chat_template is {settings.chat_template}, but there is no such file; name another")
    if settings.adapters is not None and not settings.adapters.is_dir():
        raise LaunchError(f"adapters is {settings.adapters}, but there is no such directory; make it, or name another")
    for root in settings.adapter_roots or ():
        if not root.is_dir():
            raise LaunchError(f"adapter_roots has {root}, but there is no such directory; make it, or leave it out")
    _check_kv_cache(settings)
    for rule in settings.adapter_rules:
        if (package := missing_package(rule.location)) is not None:
            command = "pip install 'chorus-lora[stores]'"
            raise LaunchError(f"{rule.location.url} needs the package {package}; run: {command}")
    _check_names(settings)


def _check_kv_cache(settings: Settings) -> None:
    if settings.kv_cache_dir is not None:
        try:
            check_folder(settings.kv_cache_dir)
        except FolderRefused as error:
            raise LaunchError(str(error)) from None


def _check_pooling(settings: Settings) -> None:
    try:
        PoolingConfig.read(settings.model, settings.classifier_from_token)
    except UnsupportedModel as error:
        raise LaunchError(str(error)) from None


def _why_no_model(path: Path) -> str:
    """A description of a directory without a `config.json`, as far as its files tell."""
    if not is_adapter_dir(path):
        return "it has no config.json"
    model = named_base(path) or "BASE"
    return (
        "it is a LoRA adapter. Serve the model that it was trained on, and the adapter with it: "
        f"chorus serve {model[:200]} --lora-modules {path.resolve().name}={path}"
    )


def _check_names(settings: Settings) -> None:
    names = set()
    for name, _ in settings.lora_modules:
        if name in names or settings.is_reserved(name):
            taken = "twice" if name in names else "like the base model"
            raise LaunchError(f"--lora-modules names an adapter {name} {taken}; names must differ")
        names.add(name)


def warn_of_rights(settings: Settings) -> str | None:
    """Return a warning if keys of tenants may change each other's adapters, or if no key may change any; else None."""
    keys = settings.client_keys()
    if keys.has_admins or not keys.guarded or not settings.loadable_from:
        return None
    changing = keys.changing_adapters
    if not changing:
        return (
            "no key may change adapters: give one admin=yes or set --admin-key-file; --tenants-change-adapters lets "
            "the keys of all tenants change them"
        )
    if len(changing) > 1:
        return (
            f"there is no admin key: the keys of {len(changing)} tenants may change and remove each other's adapters; "
            "give one key admin=yes, or set --admin-key-file, and only that key may"
        )
    return None


def check_access(settings: Settings) -> str | None:
    """Return a warning if other machines can reach the server without an API key, else None.

    Raises LaunchError if `allow_unauthenticated` is not set in that case, or if a key can't be used.
    """
    if settings.host.startswith(("unix:", "/")):
        raise LaunchError(f"--host is {settings.host!r}: a host is an address; use --unix-socket for a Unix socket")
    try:
        keys = settings.client_keys()
    except InvalidKey as error:
        raise LaunchError(str(error)) from None
    if keys.guarded or is_loopback(settings.host):
        return None
    if not settings.allow_unauthenticated:
        raise LaunchError(
            f"without an API key any client that reaches {settings.host} may use the server: set --api-key-file (or "
            "CHORUS_API_KEY), or start it with --allow-unauthenticated"
        )
    return f"listening on {settings.host} without an API key: any client that reaches the port may use the server"
