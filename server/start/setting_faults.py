"""Faults of settings, each told with the flag, environment variable or line that it comes from.

Tests: tests/server/start/test_setting_faults.py
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import ValidationError

from ..errors import field_path
from ..setting_sources import ENV_PREFIX, RENAMED, SourceFault
from ..settings import Settings
from ..wanted import problem_of

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

OTHER_VARIABLES = ("API_KEYS", "ADMIN_KEYS", "CHECK_STEPS", "COMMIT", "CPU_ISA", "NVTX", "SHARED", "SITE")
"""Names after `CHORUS_` that are not settings but have a meaning."""

NEAR = 0.8
"""Least similarity at which a name counts as a mistyped one."""

SECRETS = ("api_key", "admin_key")
"""Secret settings; error messages leave out their values."""


class Fault(NamedTuple):
    """What is wrong with a setting. name: the setting's, or empty for a fault of several, or of a whole source."""

    name: str
    text: str


class WrongSettings(Exception):
    """Settings, or an environment, with faults, each in one line."""

    def __init__(self, faults: list[str]) -> None:
        super().__init__("\n".join(faults))
        self.faults = faults


def checked_settings(given: Mapping[str, Any]) -> Settings:
    """Settings from flags' values, the environment and the configuration file. Raises WrongSettings with all faults."""
    faults = environment_faults()
    try:
        settings = Settings(**given)
    except ValidationError as error:
        faults += [fault.text for fault in faults_of(error, {name: flag_of(name) for name in given})]
        raise WrongSettings(faults) from None
    if faults:
        raise WrongSettings(faults)
    return settings


def environment_faults() -> list[str]:
    """Variables that look like mistyped settings, which might be the one that requires keys. Old names become new ones
    in this process's environment, or are faults if both are set.
    """
    faults = []
    for old, new in RENAMED.items():
        variable, name = ENV_PREFIX + old.upper(), ENV_PREFIX + new.upper()
        if (value := os.environ.get(variable)) is None:
            continue
        if os.environ.setdefault(name, value) == value:
            del os.environ[variable]
        else:
            faults.append(f"{variable} is the old name of {name}, which has another value; unset it")
    known = {name.upper() for name in (*Settings.model_fields, *OTHER_VARIABLES, *RENAMED)}
    for variable in sorted(os.environ):
        name = variable.upper().removeprefix(ENV_PREFIX)
        if name == variable.upper() or name in known:
            continue
        if near := difflib.get_close_matches(name, known, n=1, cutoff=NEAR):
            faults.append(f"{variable} is no setting; did you mean {ENV_PREFIX}{near[0]}?")
    return faults


def faults_of(error: ValidationError, given: Mapping[str, str]) -> list[Fault]:
    """The faults of settings, one for each setting. given: what the user calls the settings that the program or command
    line gives; the others are from the environment or the configuration file.
    """
    told: dict[str, Fault] = {}
    for each in error.errors(include_url=False):
        name = str(each["loc"][0]) if each["loc"] else ""
        if isinstance(each["input"], SourceFault):
            told[each["input"]] = Fault("", each["input"])
        elif name:
            told.setdefault(name, Fault(name, f"{given.get(name) or _source_of(name)}{_problem(name, each)}"))
        else:
            whole = each["msg"].removeprefix("Value error, ")
            told[whole] = Fault("", whole)
    return list(told.values())


def flag_of(name: str) -> str:
    """The flag of a setting."""
    return "--" + name.replace("_", "-")


def _problem(name: str, error: ErrorDetails) -> str:
    """The fault of a setting in words; a secret's value is left out."""
    if name in SECRETS:
        return f" is wrong: {error['msg'].removeprefix('Value error, ')}"
    problem = problem_of(error)
    return f" is {error['input']!r}{problem}" if problem.startswith(":") else problem


def _source_of(name: str) -> str:
    """A setting's environment variable, or its field in the configuration file."""
    variable = ENV_PREFIX + name.upper()
    is_set = any(value and each.upper() == variable for each, value in os.environ.items())
    return variable if is_set else f"{field_path((name,))} in the configuration file"
