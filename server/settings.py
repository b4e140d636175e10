"""All settings, from flags, the environment, a TOML file and defaults, in this order."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, TypeAdapter, field_validator, model_validator
from pydantic.config import JsonDict
from pydantic_settings import BaseSettings, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict

from ..core.config import EngineConfig
from ..memory.adapters.adapter import MAX_NAME_CHARACTERS, check_name
from .access.addresses import Networks
from .access.keys import Keys, NamedKey, check_key, read_keys
from .access.limits import RequestLimits
from .checkpoints.pull import PullError, cache_dir, hub_name, resolve_model
from .demo.builtin import BUILTIN_ADAPTERS, BUILTIN_MODEL, BUILTIN_NAME
from .log_lines import LogFormat
from .setting_sources import ENV_PREFIX, ConfigFile, KeyLists
from .stores.allowed import Allowed
from .stores.rules import Rule, Rules

AdapterName = Annotated[str, Field(max_length=MAX_NAME_CHARACTERS), AfterValidator(check_name)]
REPEATABLE: JsonDict = {"repeatable": True}

_UNITS = {
    "": 1,
    "k": 1000,
    "m": 1000**2,
    "g": 1000**3,
    "t": 1000**4,
    "ki": 1 << 10,
    "mi": 1 << 20,
    "gi": 1 << 30,
    "ti": 1 << 40,
}
SIZES = (
    "memory_bytes",
    "host_cache_bytes",
    "kv_cache_disk_bytes",
    "encoder_cache_bytes",
    "max_grammar_bytes",
    "max_pattern_bytes",
    "max_tool_bytes",
    "max_body_bytes",
    "max_held_body_bytes",
    "max_held_image_bytes",
    "adapter_source_bytes",
    "adapter_cache_bytes",
    "max_adapter_bytes",
    "max_uploaded_bytes",
)
"""Settings in bytes, which may be given with a unit."""
_SIZE = re.compile(r"(\d{1,18}(?:\.\d{1,9})?)\s*([kmgt]?i?)b?", re.IGNORECASE)


class LoraModule(NamedTuple):
    """An adapter's name and its directory."""

    name: str
    path: Path


def _split(given: Any) -> Any:
    return [part.strip() for part in given.split(",") if part.strip()] if isinstance(given, str) else given


def _read_key(key: Any) -> str:
    return check_key(key.get_secret_value() if isinstance(key, SecretStr) else str(key))


def _checked(check: Callable[[list[str]], object]) -> AfterValidator:
    """A validator of texts, which stay unchanged. check: raises ValueError for wrong ones."""

    def read(texts: list[str] | None) -> list[str] | None:
        check(texts or [])
        return texts

    return AfterValidator(read)


def _check_pair(tokens: list[str]) -> None:
    if tokens and len(tokens) != 2:
        raise ValueError(f"two tokens are needed, false's and true's, such as no,yes; got {len(tokens)}")


def _read_weights(weights: Any) -> Any:
    if not isinstance(weights, str):
        return weights
    pairs = [part.rpartition("=") for part in weights.split(",") if part.strip()]
    for name, equals, weight in pairs:
        if not equals or not name.strip():
            raise ValueError(f"{weight.strip()!r} is not NAME=WEIGHT, such as support=2")
    return {name.strip(): weight.strip() for name, _, weight in pairs}


def _read_object(given: Any) -> Any:
    """A JSON object, given as text or already parsed. Raises ValueError."""
    if not isinstance(given, str):
        return given
    try:
        read = json.loads(given)
    except json.JSONDecodeError as error:
        raise ValueError(f"this must be a JSON object: {error}") from None
    if not isinstance(read, dict):
        raise ValueError('this must be a JSON object, such as {"temperature": 0.5}')
    return read


def _split_roots(roots: Any) -> Any:
    if not isinstance(roots, str):
        return roots
    return [] if roots == "none" else [part for part in roots.split(os.pathsep) if part]


def read_lora_module(given: Any) -> LoraModule:
    """An adapter given as `NAME=DIR`, or as vLLM's JSON object with `name` and `path`. Raises ValueError."""
    if isinstance(given, str) and given.lstrip().startswith("{"):
        try:
            given = json.loads(given)
        except json.JSONDecodeError as error:
            raise ValueError(f"this must be a JSON object: {error}") from None
    if isinstance(given, dict):
        name, path = given.get("name"), given.get("path")
    elif isinstance(given, str):
        name, _, path = given.partition("=")
    else:
        name, path = given
    if not name or not path:
        raise ValueError("an adapter must be given as NAME=DIR")
    return LoraModule(TypeAdapter(AdapterName).validate_python(name), Path(path))


Commas = BeforeValidator(_split)
Words = BeforeValidator(lambda given: given.split() if isinstance(given, str) else given)
Texts = Annotated[list[str] | None, NoDecode, Commas]
Nets = Annotated[Texts, _checked(Networks)]
Secrets = Annotated[
    list[Annotated[SecretStr, BeforeValidator(_read_key)]],
    NoDecode,  # an empty key between commas is kept, and refused later: dropping it could open the server
    BeforeValidator(lambda given: given.split(",") if isinstance(given, str) else given),
]


# pydantic's own BaseSettings gives BaseModel's `model_config` a narrower type
class Settings(BaseSettings, EngineConfig, RequestLimits):  # pyright: ignore[reportIncompatibleVariableOverride]
    """The engine's configuration and the server's. Flags are given as arguments, which win."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, extra="forbid", env_ignore_empty=True)

    model: Path = Field(
        default=BUILTIN_MODEL,
        description="directory of a Hugging Face checkpoint (config.json, *.safetensors), ORG/MODEL in this "
        "machine's Hub cache, or a model that `chorus pull` fetched, such as smollm2; default: the "
        "built-in model",
    )
    config: Path | None = Field(default=None, description="TOML file with any of these settings")
    host: str = Field(default="127.0.0.1", description="address to listen on")
    port: int = Field(default=8000, ge=0, le=65535, description="port to listen on; 0 picks a free one")
    unix_socket: Path | None = Field(
        default=None,
        description="Unix socket to listen on as well, for programs of the server's own user (mode 0600). An adapter's "
        "weights may come over it as the descriptor of a sealed memory file. Default: none",
    )
    max_body_bytes: int = Field(default=8 << 20, ge=1024, description="largest request body that is accepted")
    max_held_body_bytes: int = Field(
        default=256 << 20,
        ge=1024,
        description="maximum bytes of request bodies being read at once; a tenant may hold at most as many as "
        "are free for others",
    )
    max_held_image_bytes: int = Field(
        default=256 << 20,
        ge=1024,
        description="maximum bytes of the image files of requests in progress; a tenant may hold at most as many as "
        "are free for others",
    )
    generation_config: Literal["auto", "vllm"] = Field(
        default="auto",
        description="sampling defaults: auto: the model's generation_config.json; vllm: OpenAI's defaults, as in vLLM",
    )
    override_generation_config: Annotated[dict[str, Any], NoDecode, BeforeValidator(_read_object)] = Field(
        default={},
        description="JSON object of sampling defaults that override the model's, such as '{\"temperature\": 0.5}', "
        "as in vLLM",
    )
    chat_template: Path | None = Field(
        default=None, description="file with a Jinja chat template that replaces the model's"
    )
    classifier_from_token: Annotated[Texts, _checked(_check_pair)] = Field(
        default=None,
        description="tokens of a reranker that answers with one of two, false's and true's, such as no,yes for "
        "Qwen3-Reranker: /score and /rerank compare their logits; default: classifier_from_token of config.json",
    )
    tool_call_format: str | None = Field(
        default=None,
        description="format in which the model writes tool calls; default: as its chat template tells",
    )
    adapter_chat_templates: bool = Field(
        default=False,
        description="use an adapter's own chat_template.jinja if it differs from the model's. Templates are "
        "programs: enable this only for adapters of people you trust",
    )
    enable_force_include_usage: bool = Field(
        default=False,
        description="include usage in every chunk of a stream, even if the request does not ask for it; for "
        "gateways that count tokens",
    )
    return_tokens_as_token_ids: bool = Field(
        default=False,
        description="write every token in log-probabilities as token_id:ID, as if each request asked for it",
    )
    enable_tokenizer_info_endpoint: bool = Field(
        default=False,
        description="serve GET /tokenizer_info: the tokenizer's special tokens and the chat template, for lm-eval",
    )
    adapter_roots: Annotated[list[Path] | None, NoDecode, BeforeValidator(_split_roots)] = Field(
        default=None,
        description="directories, separated by ':', that adapters loaded over HTTP must be in; none: adapters "
        "can't be changed over HTTP; default: the adapters directory",
    )
    adapter_uploads: Path | None = Field(
        default=None,
        description="directory for uploaded adapters and for the names of all adapters loaded over HTTP, which "
        "are served again after a restart. Each server or cluster needs its own. Default: uploads "
        "are refused",
    )
    max_adapter_bytes: int = Field(default=1 << 30, ge=1024, description="maximum bytes of an uploaded adapter")
    max_uploaded_bytes: int = Field(
        default=16 << 30, ge=1024, description="maximum bytes of all uploaded adapters together"
    )
    keep_versions: int = Field(
        default=1,
        ge=1,
        le=1000,
        description="versions of an adapter that stay available as NAME@VERSION, including the newest, unless a "
        "load says otherwise",
    )
    adapter_source: Annotated[list[str], NoDecode, Words, _checked(lambda given: list(map(Rule.parse, given)))] = Field(
        default=[],
        json_schema_extra=REPEATABLE,
        description="source of adapters that a request names but that are not registered, as PATTERN=URL with a "
        "* in both, such as 'acme/*=https://adapters.acme.example/*.tar.gz' or 'hf/*=hf://*'. The "
        "URL is a directory, hf://, https://, s3:// or gs://, and its host must be in "
        "--adapter-source-hosts; repeatable; default: none",
    )
    adapter_source_hosts: Annotated[list[str], NoDecode, Commas, _checked(Allowed)] = Field(
        default=[],
        description="comma-separated hosts that adapters may be fetched from, including redirects: "
        "store.example, *.store.example, http://minio:9000, s3://BUCKET, gs://BUCKET, and private "
        "addresses or networks such as 10.1.0.0/16; default: none",
    )
    adapter_source_bytes: int = Field(default=2 << 30, ge=1, description="maximum bytes of a fetched adapter")
    adapter_source_seconds: float = Field(default=60, gt=0, description="time limit for fetching an adapter")
    adapter_cache: Path | None = Field(
        default=None,
        description="directory of fetched adapters, not shared with another server; default: in the user's cache "
        "directory",
    )
    adapter_cache_bytes: int = Field(
        default=20 << 30,
        ge=1,
        description="maximum bytes of fetched adapters; the least recently used are removed first",
    )
    lora_modules: Annotated[list[Annotated[LoraModule, BeforeValidator(read_lora_module)]], NoDecode, Words] = Field(
        default=[],
        json_schema_extra=REPEATABLE,
        description="adapter to serve from anywhere on this machine, as NAME=DIR; repeatable",
    )
    adapter_as_base: AdapterName | None = Field(
        default=None,
        description="adapter that serves requests for the base model's name, until it is removed; with one API server "
        "and without a registry of adapters",
    )
    api_key: Secrets = Field(
        default=[],
        json_schema_extra=REPEATABLE,
        description="API key that clients must send as 'Authorization: Bearer KEY' to every route but /, the health "
        "checks and the files of /ui; repeatable, or comma-separated in CHORUS_API_KEYS. Other users of this machine "
        "can see flags: prefer the environment or --api-key-file",
    )
    api_key_file: Path | None = Field(
        default=None,
        description="file with API keys: one per line, optionally followed by a tenant name and rights; # starts "
        "a comment",
    )
    admin_key: Secrets = Field(
        default=[],
        json_schema_extra=REPEATABLE,
        description="key that may change adapters and do everything that API keys may; repeatable. Without one, "
        "API keys without a tenant's name may change adapters, see --tenants-change-adapters",
    )
    admin_key_file: Path | None = Field(
        default=None, description="file with admin keys, in the format of --api-key-file"
    )
    tenants_change_adapters: bool = Field(
        default=False,
        description="without an admin key, let the keys of tenants that may use all adapters load, replace, pin, pause "
        "and remove adapters, those of other tenants, too",
    )
    allow_unauthenticated: bool = Field(
        default=False,
        description="listen on other than loopback addresses although no API key is set: any client that reaches the "
        "port may use the server",
    )
    allowed_hosts: Texts = Field(
        default=None,
        description="comma-separated names that a request's Host header may have; '*' is any, '*.example.com' "
        "any below it. Default: the loopback names and --host; if that is every address, any address "
        "and the machine's name, and with API keys any name",
    )
    root_path: str = Field(
        default="",
        pattern=r"^(/[A-Za-z0-9._~-]+)*$",
        description="path prefix under which a proxy forwards to the server without removing it, such as /llm: "
        "/llm/v1/models then serves /v1/models",
    )
    cors_origins: Texts = Field(
        default=None,
        description="comma-separated origins of web pages that may call the server; '*' is any; default: none",
    )
    limit_mm_per_prompt: Annotated[dict[str, Annotated[int, Field(ge=0, le=256)]], NoDecode] = Field(
        default={"image": 16}, description=EngineConfig.model_fields["limit_mm_per_prompt"].description
    )
    allowed_media_domains: Annotated[list[str], NoDecode, Commas, _checked(Allowed.of_hosts)] = Field(
        default=[],
        description="comma-separated domains that images of requests may be fetched from by URL: images.example, "
        "*.images.example, http://files:9000 for one without TLS, and private addresses or networks such as "
        "10.1.0.0/16 that names may lead to; redirects are not followed; default: none",
    )
    weights: Annotated[dict[str, float], NoDecode, BeforeValidator(_read_weights)] = Field(
        default={},
        description="shares of tenants or adapters, as comma-separated NAME=WEIGHT: weight 2 gets twice as much "
        "of a busy engine as weight 1, the default. A tenant's name is the one in the tenant header "
        "or the key file, or else the one that /metrics shows",
    )
    tenant_header: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z0-9-]{1,64}$",
        description="request header that names the tenant, for a gateway that serves several tenants. Any client "
        "with a key may then name any tenant. Default: each key is a tenant and, without keys, each "
        "address",
    )
    tenant_gateways: Nets = Field(
        default=None,
        description="comma-separated addresses and networks of gateways whose tenant header is trusted; other "
        "clients' headers are ignored. The header is --tenant-header, or llm-d's "
        "x-llm-d-inference-fairness-id. In a request with a key it names a part of the key's tenant. "
        "Gateways must overwrite the header that clients send. Default: with --tenant-header every "
        "client is trusted, else none",
    )
    kv_events_endpoint: str | None = Field(
        default=None,
        pattern=r"^(tcp|ipc|inproc)://\S+$",
        description="ZMQ endpoint on which to publish, as vLLM does, which KV blocks are cached, for routers; "
        "such as tcp://127.0.0.1:5557. The server listens if the address is '*' or loopback, else it "
        "connects to a subscriber. Prompts can be read from the events. Default: nothing is published",
    )
    kv_events_replay_endpoint: str | None = Field(
        default=None,
        pattern=r"^(tcp|ipc|inproc)://\S+$",
        description="ZMQ endpoint on which subscribers request KV events that they missed, such as "
        "tcp://127.0.0.1:5558",
    )
    kv_events_topic: str = Field(
        default="", max_length=256, description="topic of the KV events; llm-d expects kv@ADDRESS:PORT@MODEL"
    )
    ui: bool = Field(
        default=True,
        description="serve the operator's page at /ui; if keys are set, its data need an admin key",
    )
    record: Path | None = Field(
        default=None,
        description="CSV file to which a row is appended for each finished request, for `chorus plan`: arrival, "
        "adapter, rank, prompt and output tokens, and a hash of the tenant. It never holds prompts "
        "or outputs, but guessable tenant names can be found from their hashes. Default: none",
    )
    usage_file: Path | None = Field(
        default=None,
        description="CSV file to which what each tenant has used of each model is appended every 5 seconds, for "
        "`chorus usage`: requests, errors, tokens and seconds of pages. It never holds prompts or outputs. Default: "
        "none",
    )
    metric_series: int = Field(
        default=100,
        ge=0,
        le=10_000,
        description="maximum adapters, and maximum tenants, with series of their own in /metrics: those with the most "
        "traffic; all others together are `other`",
    )
    otlp_traces_endpoint: str | None = Field(
        default=None,
        pattern=r"^https?://\S+$",
        description="OTLP endpoint that receives a span for each request, such as "
        "http://127.0.0.1:4318/v1/traces. OpenTelemetry's own environment variables apply, too. "
        "Default: no spans unless OTEL_EXPORTER_OTLP_ENDPOINT is set",
    )
    max_connections: int | None = Field(
        default=None, ge=16, description="maximum open connections; default: derived from the limit of file descriptors"
    )
    max_connections_per_address: int | None = Field(
        default=None,
        ge=1,
        description="maximum open connections from one address, or one IPv6 /64; default: half of max_connections",
    )
    trusted_proxies: Nets = Field(
        default=["127.0.0.1", "::1"],
        description="comma-separated addresses and networks of proxies: they may open any number of connections, "
        "and X-Forwarded-For from them gives the client's address; default: this machine",
    )
    head_seconds: float = Field(default=10, gt=0, description="time limit for a request's line and headers")
    body_seconds: float = Field(default=20, gt=0, description="longest pause between two parts of a request body")
    whole_body_seconds: float = Field(
        default=45, gt=0, description="time limit for a request body, plus one second per body_bytes_per_second bytes"
    )
    body_bytes_per_second: int = Field(
        default=32 << 10, ge=1, description="minimum rate of a request body that takes longer than whole_body_seconds"
    )
    send_seconds: float = Field(
        default=20, gt=0, description="how long a client may accept no bytes of a response (on Linux)"
    )
    idle_seconds: float = Field(default=20, gt=0, description="how long a connection may be idle between two requests")
    grace_seconds: float = Field(
        default=20, ge=0, description="how long requests in progress may continue after a stop signal"
    )
    stall_seconds: float = Field(
        default=8,
        gt=0,
        description="how long a step may take before /health returns 503; raise it if steps are that slow",
    )
    give_up_seconds: float = Field(
        default=30, gt=0, description="how long a step may take before its requests end with an error"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="lowest level that is logged"
    )
    log_format: LogFormat = Field(default="text", description="format of log lines; json: one object per line")
    access_log: bool = Field(default=False, description="log every HTTP request")

    @field_validator(*SIZES, mode="before")
    @classmethod
    def _sizes_have_units(cls, size: Any) -> Any:
        return read_size(size) if isinstance(size, str) else size

    @model_validator(mode="after")
    def _pulled_models_have_names(self) -> Settings:
        with suppress(PullError):  # loading reports a model that is not found
            if (model := resolve_model(self.model, tokenizer=self.tokenizer is None)) != self.model:
                self.model = model
        return self

    @model_validator(mode="after")
    def _builtin_model_has_adapters(self) -> Settings:
        if "model" not in self.model_fields_set and self.adapters is None and BUILTIN_ADAPTERS.is_dir():
            self.adapters = BUILTIN_ADAPTERS
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings, KeyLists(settings_cls), ConfigFile(settings_cls)

    def client_keys(self) -> Keys:
        """The API and admin keys, from settings and key files. Raises InvalidKey for a file without a valid key."""
        return Keys(
            [*(NamedKey(key.get_secret_value()) for key in self.api_key), *_keys_of(self.api_key_file)],
            [*(NamedKey(key.get_secret_value()) for key in self.admin_key), *_keys_of(self.admin_key_file)],
            tenants_change=self.tenants_change_adapters,
        )

    @property
    def is_builtin(self) -> bool:
        return self.model == BUILTIN_MODEL

    @property
    def base_name(self) -> str:
        """The base model's name in the API."""
        if self.served_model_name is not None:
            return self.served_model_name
        return BUILTIN_NAME if self.is_builtin else hub_name(self.model) or _directory_name(self.model)

    @property
    def model_root(self) -> str:
        """Source of the base model for the API: ORG/MODEL, or a directory's name."""
        return hub_name(self.model) or self.model.name

    @property
    def loadable_from(self) -> tuple[Path, ...]:
        """The directories that may contain adapters loaded over HTTP."""
        if self.adapter_roots is not None:
            return tuple(self.adapter_roots)
        return () if self.adapters is None else (self.adapters,)

    @property
    def adapter_places(self) -> tuple[Path, ...]:
        """The directories of adapters: a broken adapter below them may be repaired."""
        start = () if self.adapters is None else (self.adapters,)
        fetched = (self.fetched_adapters,) if self.adapter_source else ()
        uploads = () if self.adapter_uploads is None else (self.adapter_uploads,)
        return (*self.loadable_from, *start, *(path for _, path in self.lora_modules), *fetched, *uploads)

    @property
    def fetched_adapters(self) -> Path:
        """The directory of adapters fetched from stores."""
        return cache_dir() / "adapters" if self.adapter_cache is None else self.adapter_cache

    @property
    def adapter_rules(self) -> Rules:
        """The rules for fetching adapters that are not registered."""
        return Rules(map(Rule.parse, self.adapter_source))

    def is_reserved(self, name: str) -> bool:
        """True if a request that names this model means the base model, rather than an adapter."""
        return name == self.base_name or name.startswith(f"{self.base_name}:")

    def engine_config(self) -> EngineConfig:
        """The engine's settings. Fields that no flag, variable or file sets stay unset: the device chooses some."""
        values = {
            name: value
            for name, field in EngineConfig.model_fields.items()
            if (value := getattr(self, name)) != field.default or name in self.model_fields_set
        }
        if self.fair_by == "tenant" and (weights := {**self.client_keys().weights, **self.weights}):
            values["weights"] = weights
        return EngineConfig(**{**values, "served_model_name": self.base_name})


@lru_cache(maxsize=64)
def _directory_name(path: Path) -> str:
    """A directory's name, links followed; cached, because every request needs it on the event loop."""
    return path.resolve().name


def _keys_of(path: Path | None) -> list[NamedKey]:
    return [] if path is None else read_keys(path)


def read_size(text: str) -> int:
    """Bytes: `2147483648`, `512MB` (of 1000), `2GiB` (of 1024). Raises ValueError."""
    found = _SIZE.fullmatch(text.strip().replace("_", ""))
    if found is None or found[2].lower() not in _UNITS:
        raise ValueError("a size must be a number of bytes, or have a unit, such as 512MB or 2GiB")
    number, unit = found[1], _UNITS[found[2].lower()]
    return int(float(number) * unit) if "." in number else int(number) * unit
