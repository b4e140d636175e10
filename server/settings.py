"""Everything that can be set, from flags, the environment, a TOML file and defaults, in this order."""

from __future__ import annotations

import difflib
import os
import tomllib
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict

from ..core.config import EngineConfig
from .demo.builtin import BUILTIN_ADAPTERS, BUILTIN_MODEL, BUILTIN_NAME
from .pull import PullError, resolve_model


class ConfigFileError(ValueError):
    """A configuration file that can't be read, or that sets what doesn't exist."""


class Settings(BaseSettings, EngineConfig):
    """The engine's configuration and the server's. Flags are given as arguments, which win."""

    model_config = SettingsConfigDict(env_prefix="CHORUS_", extra="forbid", env_ignore_empty=True)

    model: Path = Field(
        default=BUILTIN_MODEL,
        description="directory of a Hugging Face checkpoint (config.json, *.safetensors), or a model that "
        "`chorus pull` fetched, such as smollm2; default: the built-in model",
    )
    config: Path | None = Field(default=None, description="TOML file with any of these settings")
    host: str = Field(default="127.0.0.1", description="address to listen on")
    port: int = Field(default=8000, ge=0, le=65535, description="port to listen on; 0 picks a free one")
    served_model_name: str | None = Field(
        default=None, min_length=1, description="the base model's name in the API; default: its directory's name"
    )
    max_body_bytes: int = Field(default=8 << 20, ge=1024, description="largest request body that is taken")
    max_prompts: int = Field(default=128, ge=1, description="most prompts in one call, times the answers to each")
    adapter_roots: Annotated[list[Path] | None, NoDecode] = Field(
        default=None,
        description="directories, with ':' between them, below which adapters may be loaded over HTTP; none: adapters "
        "can't be changed over HTTP; default: the adapters directory",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(default="info", description="what is logged")
    access_log: bool = Field(default=False, description="log every HTTP request")

    @field_validator("adapter_roots", mode="before")
    @classmethod
    def _split_roots(cls, roots: Any) -> Any:
        if not isinstance(roots, str):
            return roots
        return [] if roots == "none" else [part for part in roots.split(os.pathsep) if part]

    @model_validator(mode="after")
    def _pulled_models_have_names(self) -> Settings:
        with suppress(PullError):  # what is nowhere is told when it is loaded
            if (model := resolve_model(self.model)) != self.model:
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
        return init_settings, env_settings, _ConfigFile(settings_cls)

    @property
    def is_builtin(self) -> bool:
        return self.model == BUILTIN_MODEL

    @property
    def base_name(self) -> str:
        """The base model's name in the API."""
        if self.served_model_name is not None:
            return self.served_model_name
        return BUILTIN_NAME if self.is_builtin else self.model.resolve().name

    @property
    def loadable_from(self) -> tuple[Path, ...]:
        """The directories below which adapters may be loaded over HTTP."""
        if self.adapter_roots is not None:
            return tuple(self.adapter_roots)
        return () if self.adapters is None else (self.adapters,)

    def engine_config(self) -> EngineConfig:
        return EngineConfig(**{name: getattr(self, name) for name in EngineConfig.model_fields})


class _ConfigFile(PydanticBaseSettingsSource):
    """The TOML file that the sources before this one name in `config`."""

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        return None, field_name, False  # asked for field by field it has nothing: the file is read as a whole

    def __call__(self) -> dict[str, Any]:
        path = self.current_state.get("config")
        return {} if path is None else read_config_file(Path(path))


def read_config_file(path: Path) -> dict[str, Any]:
    """The settings of a TOML file; raises ConfigFileError that says what is wrong with it."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigFileError(f"there is no configuration file {path}") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigFileError(f"the configuration file {path} can't be read: {error}") from None
    values = {name.replace("-", "_"): value for name, value in values.items()}
    known = [name for name in Settings.model_fields if name != "config"]
    for name in values:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigFileError(f"{path} sets {name}, which does not exist{hint}")
    return values
