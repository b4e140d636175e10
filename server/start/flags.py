"""Command-line flags generated from the settings' schema, so every setting has one.

Tests: tests/server/cli/test_command.py
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from ...core.config import EngineConfig
from ..access.limits import RequestLimits
from ..errors import field_path
from ..settings import ENV_PREFIX, RENAMED, REPEATABLE, ConfigFileError, Settings
from ..wanted import problem_of
from .advice import ForeignFlag, without_foreign_flags
from .brief_help import FLAGS, HelpAll, brief_help

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

OTHER_VARIABLES = ("API_KEYS", "ADMIN_KEYS", "CHECK_STEPS", "COMMIT", "CPU_ISA", "NVTX", "SHARED", "SITE")
"""Names after `CHORUS_` that are not settings but have a meaning."""

FIRST = ("model", "host", "port", "adapters", "lora_modules", "served_model_name", "memory_bytes", "config")

GROUPS = {
    "what is served, and where": FIRST,
    "access": (
        "api_key",
        "api_key_file",
        "admin_key",
        "admin_key_file",
        "allow_unauthenticated",
        "allowed_hosts",
        "cors_origins",
        "adapter_roots",
        "adapter_source",
        "adapter_source_hosts",
        "trusted_proxies",
        "tenant_header",
        "tenant_gateways",
        "weights",
        "fair_by",
    ),
}
"""Settings that the help shows first; the others follow, grouped by the class that defines them."""

NEAR = 0.8
"""Least similarity at which a name counts as a mistyped one."""


SECRETS = ("api_key", "admin_key")
"""Secret settings; error messages leave out their values."""


_TIME = re.compile(r"(\d+(?:\.\d+)?|\.\d+)\s*(ms|s)")


def read_seconds(text: str) -> float:
    """A flag's duration above 0, such as 500ms or 2s, in seconds."""
    found = _TIME.fullmatch(text.strip())
    if found is None or not float(found[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is no time; give one with a unit, such as 500ms or 2s")
    return float(found[1]) * (1e-3 if found[2] == "ms" else 1.0)


class UsageError(Exception):
    """Wrong flags or settings; the text is one line for the operator."""


class Parser(argparse.ArgumentParser):
    """An argument parser that accepts dashes or underscores in flags and reports an error in one line."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, allow_abbrev=False, formatter_class=_Help, **kwargs)
        self.examples: Sequence[str] = ()
        """Commands that the help shows."""
        self.rare: Sequence[str] = ()
        """Flags, by the attribute that stores them, that like most settings only --help-all shows."""

    def format_help(self) -> str:
        """All flags, or the most important ones of a command with settings."""
        if not any(isinstance(one, HelpAll) for one in self._actions):
            return super().format_help()
        settings = [one for one in self._actions if one.dest.startswith("setting_")]
        own = [
            one
            for one in self._actions
            if one not in settings and one.dest not in ("help", *self.rare) and not isinstance(one, HelpAll)
        ]
        left_out = sum(one.dest.removeprefix("setting_") not in FLAGS for one in settings)
        return brief_help(self, own, self.examples, left_out + len(self.rare))

    def parse(self, args: Sequence[str] | None = None) -> argparse.Namespace:
        """Like `parse_args`; the command's parser reports unknown flags with the nearest known one."""
        given = [_dashes(arg) for arg in (sys.argv[1:] if args is None else args)]
        faults: list[str] = []
        notes: list[str] = []
        if given[:1] in (["serve"], ["cluster"]):
            try:
                given, notes = without_foreign_flags(given)
            except ForeignFlag as error:
                faults, given = error.faults, error.kept
            notes = [f"{self.prog} {given[0]}: {note}" for note in notes]
        try:
            arguments, unknown = self.parse_known_args([self._renamed(arg, notes) for arg in given])
        except UsageError as error:
            raise UsageError("\n".join((*self._told("".join(given[:1]), faults), str(error)))) from None
        parser = self._command_parser(getattr(arguments, "command", None))
        if unknown:
            about = "" if faults else f" (see {parser.prog} --help)"
            faults.append(f"unrecognized arguments: {' '.join(unknown)}{parser.suggestion(unknown)}{about}")
        if faults:
            faults += settings_faults(_settings_in(arguments))
            raise UsageError("\n".join(self._told(given[0], faults)))
        arguments.notes = notes
        return arguments

    def _told(self, command: str, faults: Iterable[str]) -> list[str]:
        return [f"{self.prog} {command}: error: {fault}" for fault in faults]

    def _renamed(self, arg: str, notes: list[str]) -> str:
        """Replace a flag's old name by its new one, and add a note."""
        flag, equals, value = arg.partition("=")
        new = RENAMED.get(flag.removeprefix("--").replace("-", "_"))
        if new is None or not flag.startswith("--"):
            return arg
        new = "--" + new.replace("_", "-")
        notes.append(f"{self.prog}: {flag} is now called {new}; the old name will be removed in the next release")
        return f"{new}{equals}{value}"

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """As argparse does, and say which command or value was probably meant."""
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            near = difflib.get_close_matches(str(value), map(str, action.choices or ()), n=1)
            if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001 - argparse has no public name for it
                error.message = f"{value!r} is no command"
            if near:
                error.message += f"; did you mean {near[0]}?"
            raise

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: error: {message} (see {self.prog} --help)")

    def _command_parser(self, command: str | None) -> Parser:
        for action in self._actions:
            if isinstance(action.choices, dict) and command in action.choices:  # only the commands are groups here
                return action.choices[command]
        return self

    def suggestion(self, unknown: list[str]) -> str:
        """The known flags nearest to those `unknown`, as the end of an error message; empty if none is near."""
        flags = [flag for flag in self._option_string_actions if flag.startswith("--")]
        names = [given.partition("=")[0] for given in unknown]
        near = [found for name in names for found in difflib.get_close_matches(name, flags, n=1)]
        return f"; did you mean {' and '.join(dict.fromkeys(near))}?" if near else ""


class _Help(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=36)


def _dashes(arg: str) -> str:
    flag, equals, value = arg.partition("=")
    return flag.replace("_", "-") + equals + value if flag.startswith("--") else arg


def _group(name: str) -> str:
    """The title under which the help shows a setting."""
    for title, names in GROUPS.items():
        if name in names:
            return title
    if name in RequestLimits.model_fields:
        return "limits of a request"
    return "the engine" if name in EngineConfig.model_fields else "the server"


def add_settings(parser: argparse.ArgumentParser, names: Iterable[str] | None = None) -> None:
    """Add flags for these settings, or all, in groups. Values stay text; the settings' schema parses them."""
    parser.add_argument("--help-all", action=HelpAll)
    groups: dict[str, Any] = dict.fromkeys((*GROUPS, "the engine", "limits of a request", "the server"))
    chosen = [name for name in Settings.model_fields if names is None or name in names]
    chosen.sort(key=lambda name: (list(groups).index(_group(name)), FIRST.index(name) if name in FIRST else len(FIRST)))
    for name in chosen:
        field = Settings.model_fields[name]
        group = groups[_group(name)] = groups[_group(name)] or parser.add_argument_group(_group(name))
        flag = "--" + name.replace("_", "-")
        options: dict[str, Any] = {"dest": f"setting_{name}", "default": argparse.SUPPRESS, "help": _help(field)}
        if field.annotation is bool:
            group.add_argument(flag, action=argparse.BooleanOptionalAction, **options)
        elif field.json_schema_extra == REPEATABLE:
            several = "+" if name == "lora_modules" else None  # vLLM accepts these, too
            action = "extend" if several else "append"
            group.add_argument(flag, action=action, nargs=several, metavar=_metavar(name, field), **options)
        else:
            group.add_argument(flag, metavar=_metavar(name, field), **options)


def _metavar(name: str, field: FieldInfo) -> str:
    choices = getattr(field.annotation, "__args__", ())
    if choices and all(isinstance(choice, str) for choice in choices):
        return "{" + ",".join(choices) + "}"
    special = {
        "model": "DIR",
        "adapters": "DIR",
        "adapter_roots": "DIRS",
        "config": "FILE",
        "lora_modules": "NAME=DIR",
        "adapter_source": "PATTERN=URL",
        "adapter_cache": "DIR",
    }
    return special.get(name, name.rsplit("_", 1)[-1].upper())


def _help(field: FieldInfo) -> str:
    text = (field.description or "").replace("%", "%%")
    if field.default is None or field.default == [] or "default" in text:
        return text
    return f"{text} (default: {field.default})"


def read_settings(arguments: argparse.Namespace) -> Settings:
    """The settings from parsed flags, environment and file; raises UsageError that names all wrong ones."""
    given = _settings_in(arguments)
    _check_environment()
    try:
        return Settings(**given)
    except (ConfigFileError, ValidationError) as error:
        raise UsageError("\n".join(f"chorus: error: {fault}" for fault in _faults_of(error, given))) from None


def _settings_in(arguments: argparse.Namespace) -> dict[str, Any]:
    """The settings among parsed flags."""
    prefix = "setting_"
    return {name.removeprefix(prefix): value for name, value in vars(arguments).items() if name.startswith(prefix)}


def settings_faults(given: dict[str, Any]) -> list[str]:
    """What is wrong with settings; nothing if they can be used."""
    try:
        Settings(**given)
    except (ConfigFileError, ValidationError) as error:
        return _faults_of(error, given)
    return []


def _faults_of(error: ConfigFileError | ValidationError, given: dict[str, Any]) -> list[str]:
    """All faults of settings, each with where it comes from; one for each setting."""
    if isinstance(error, ConfigFileError):
        return [str(error)]
    told: dict[str, str] = {}
    for each in error.errors(include_url=False):
        name = str(each["loc"][0]) if each["loc"] else ""
        whole = each["msg"].removeprefix("Value error, ")
        told.setdefault(name or whole, f"{_origin(name, given)}{_problem(name, each)}" if name else whole)
    return list(told.values())


def _problem(name: str, error: ErrorDetails) -> str:
    """The fault of a setting in words; a secret's value is left out."""
    if name in SECRETS:
        return f" is wrong: {error['msg'].removeprefix('Value error, ')}"
    problem = problem_of(error)
    return f" is {error['input']!r}{problem}" if problem.startswith(":") else problem


def _check_environment() -> None:
    """Raises UsageError for a variable that looks like a mistyped setting: it might be the one that requires keys."""
    for old, new in RENAMED.items():
        variable, name = ENV_PREFIX + old.upper(), ENV_PREFIX + new.upper()
        if (value := os.environ.pop(variable, None)) is not None and os.environ.setdefault(name, value) != value:
            raise UsageError(f"chorus: error: {variable} is the old name of {name}, which has another value; unset it")
    known = [name.upper() for name in Settings.model_fields] + list(OTHER_VARIABLES)
    for variable in sorted(os.environ):
        name = variable.removeprefix(ENV_PREFIX)
        if name == variable or name in known:
            continue
        if near := difflib.get_close_matches(name, known, n=1, cutoff=NEAR):
            raise UsageError(f"chorus: error: {variable} is no setting; did you mean {ENV_PREFIX}{near[0]}?")


def _origin(name: str, given: dict[str, Any]) -> str:
    """Origin of a setting: its flag, its environment variable, or its field in the configuration file."""
    if name in given:
        return "--" + name.replace("_", "-")
    variable = ENV_PREFIX + name.upper()
    return variable if os.environ.get(variable) else f"{field_path((name,))} in the configuration file"
