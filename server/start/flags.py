"""Command-line flags generated from the settings' schema, so every setting has one.

Tests: tests/server/cli/test_command.py
"""

from __future__ import annotations

import argparse
import difflib
import itertools
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NoReturn

from pydantic.fields import FieldInfo

from ...core.config import EngineConfig
from ..access.limits import RequestLimits
from ..setting_sources import RENAMED
from ..settings import REPEATABLE, Settings
from .advice import ForeignFlag, without_foreign_flags
from .brief_help import FLAGS, HelpAll, brief_help
from .setting_faults import WrongSettings, checked_settings, flag_of

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
        "allowed_media_domains",
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
        self.wrong: list[str] = []
        """Faults of the values that were read last; the commands have lists of their own."""

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
        """Like `parse_args`; all faults are told, those of settings and of the environment, too, and unknown flags with
        the nearest known one.
        """
        given, notes, faults = self._without_foreign([_dashes(arg) for arg in (sys.argv[1:] if args is None else args)])
        *_, command = commands = list(self._chosen(given))
        for each in commands:
            each.wrong.clear()
        arguments, unknown, ended = argparse.Namespace(), [], []
        try:
            arguments, unknown = self.parse_known_args([self._renamed(arg, notes) for arg in given])
        except UsageError as error:
            ended.append(str(error))
            unknown = _unknown(given, commands)
        faults += itertools.chain.from_iterable(each.wrong for each in commands)
        if unknown:
            about = "" if faults else f" (see {command.prog} --help)"
            faults.append(f"unrecognized arguments: {' '.join(unknown)}{command.suggestion(unknown)}{about}")
        if faults or ended:
            settings = _unread_settings(given) if ended else _settings_in(arguments)
            of_settings = command.faults_of_settings(settings)
            raise UsageError("\n".join((*command.told(faults), *ended, *command.told(of_settings))))
        arguments.notes = notes
        return arguments

    def _without_foreign(self, given: list[str]) -> tuple[list[str], list[str], list[str]]:
        """Arguments of `serve` and `cluster` without other servers' flags, with notes and faults."""
        if given[:1] not in (["serve"], ["cluster"]):
            return given, [], []
        try:
            kept, notes = without_foreign_flags(given)
        except ForeignFlag as error:
            return error.kept, [], error.faults
        return kept, [f"{self.prog} {given[0]}: {note}" for note in notes], []

    def _chosen(self, given: Sequence[str]) -> Iterator[Parser]:
        """This parser, and those of the commands that the arguments name."""
        yield self
        parser = self
        for arg in given:
            commands = next((each.choices for each in parser._actions if isinstance(each.choices, dict)), {})
            if arg in commands:
                parser = commands[arg]
                yield parser

    def told(self, faults: Iterable[str]) -> list[str]:
        """Faults as lines for the operator."""
        return [f"{self.prog}: error: {fault}" for fault in faults]

    def faults_of_settings(self, given: dict[str, Any]) -> list[str]:
        """What is wrong with settings and the environment; nothing for a command without settings."""
        if not any(isinstance(each, HelpAll) for each in self._actions):
            return []
        try:
            checked_settings(given)
        except WrongSettings as error:
            return error.faults
        return []

    def _renamed(self, arg: str, notes: list[str]) -> str:
        """Replace a flag's old name by its new one, and add a note."""
        flag, equals, value = arg.partition("=")
        new = RENAMED.get(flag.removeprefix("--").replace("-", "_"))
        if new is None or not flag.startswith("--"):
            return arg
        new = flag_of(new)
        notes.append(f"{self.prog}: {flag} is now called {new}; the old name will be removed in the next release")
        return f"{new}{equals}{value}"

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        """As argparse does, but a wrong value is noted, so that all of them are told."""
        try:
            return super()._get_value(action, arg_string)
        except argparse.ArgumentError as error:
            self.wrong.append(str(error))
            return None

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """As argparse does, and say which command or value was probably meant."""
        if value is None:  # a wrong value, which is noted
            return
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            near = difflib.get_close_matches(str(value), map(str, action.choices or ()), n=1)
            is_command = isinstance(action, argparse._SubParsersAction)  # noqa: SLF001 - argparse has no public name for it
            if is_command:
                error.message = f"{value!r} is no command"
            if near:
                error.message += f"; did you mean {near[0]}?"
            if is_command:
                raise
            self.wrong.append(str(error))

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: error: {message} (see {self.prog} --help)")

    def suggestion(self, unknown: list[str]) -> str:
        """The known flags nearest to those `unknown`, as the end of an error message; empty if none is near."""
        flags = [flag for flag in self._option_string_actions if flag.startswith("--")]
        names = [given.partition("=")[0] for given in unknown]
        near = [found for name in names for found in difflib.get_close_matches(name, flags, n=1)]
        return f"; did you mean {' and '.join(dict.fromkeys(near))}?" if near else ""


class _Help(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=36)


def _unknown(given: Sequence[str], commands: Sequence[Parser]) -> list[str]:
    """Flags among arguments that none of the commands has."""
    flags = [arg for arg in itertools.takewhile(lambda arg: arg != "--", given) if arg.startswith("--")]
    known = {name for each in commands for name in each._option_string_actions}  # noqa: SLF001 - of this class
    return [flag for flag in flags if flag.partition("=")[0] not in known]


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
        flag = flag_of(name)
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
    try:
        return checked_settings(_settings_in(arguments))
    except WrongSettings as error:
        raise UsageError("\n".join(f"chorus: error: {fault}" for fault in error.faults)) from None


def _settings_in(arguments: argparse.Namespace) -> dict[str, Any]:
    """The settings among parsed flags."""
    prefix = "setting_"
    return {name.removeprefix(prefix): value for name, value in vars(arguments).items() if name.startswith(prefix)}


def _unread_settings(given: Sequence[str]) -> dict[str, Any]:
    """Settings that have flags in arguments that can't be parsed: as if the flags gave the defaults."""
    flags = {arg.partition("=")[0] for arg in given}
    return {name: field.default for name, field in Settings.model_fields.items() if flag_of(name) in flags}
