"""Sources of settings besides flags and single environment variables: lists of keys, and the configuration file.

Tests: tests/server/test_settings.py, tests/server/start/test_setting_faults.py
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo
from pydantic_settings import PydanticBaseSettingsSource

ENV_PREFIX = "CHORUS_"

RENAMED = {"assist_workers": "offload_workers"}
"""New names of renamed settings, by their old names; both are accepted for one release."""


class SourceFault(str):
    """What is wrong with an environment variable or the configuration file, in one line. A source has it under a name
    that is no setting, so validation reports it with all other faults.
    """


class _Source(PydanticBaseSettingsSource):
    """A source that is read as a whole, not field by field."""

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        return None, field_name, False


class KeyLists(_Source):
    """Lists of keys from the environment: CHORUS_API_KEYS and CHORUS_ADMIN_KEYS.

    A variable of keys that is set but empty, for example because a secret is missing, is a fault: it would open the
    server.
    """

    def __call__(self) -> dict[str, Any]:
        variables = {name.upper(): value for name, value in os.environ.items()}
        found: dict[str, Any] = {}
        for name in ("API_KEY", "API_KEYS", "API_KEY_FILE", "ADMIN_KEY", "ADMIN_KEYS", "ADMIN_KEY_FILE"):
            variable = f"{ENV_PREFIX}{name}"
            if not variables.get(variable, name).strip():
                found[variable] = SourceFault(
                    f"{variable} is set and empty; give it a value, or unset it to go without"
                )
        for name in ("api_key", "admin_key"):
            if keys := variables.get(f"{ENV_PREFIX}{name.upper()}S"):
                found[name] = keys
        return found


class ConfigFile(_Source):
    """The TOML file that earlier sources name in `config`."""

    def __call__(self) -> dict[str, Any]:
        if (path := self.current_state.get("config")) is None:
            return {}
        return read_config_file(Path(path), [name for name in self.settings_cls.model_fields if name != "config"])


def read_config_file(path: Path, known: Sequence[str]) -> dict[str, Any]:
    """The settings of a TOML file, and what is wrong with it. known: names that it may set."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {str(path): SourceFault(f"the configuration file {path} does not exist")}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        return {str(path): SourceFault(f"the configuration file {path} can't be read: {error}")}
    values = {name.replace("-", "_"): value for name, value in values.items()}
    faults: list[str] = []
    for old, new in RENAMED.items():
        if old in values and values.setdefault(new, values[old]) != values.pop(old):
            faults.append(f"sets {old} and {new}, which are the same setting; leave out {old}")
    for name in [name for name in values if name not in known]:
        del values[name]
        near = difflib.get_close_matches(name, known, n=1)
        faults.append(f"sets {name}, which does not exist{f'; did you mean {near[0]}?' if near else ''}")
    return {**values, **{f"{path} {fault}": SourceFault(f"{path} {fault}") for fault in faults}}
