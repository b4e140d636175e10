"""The benchmark's result files: one per section, so a second call runs only missing sections, and one of all."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import orjson

DONE, FAILED, RUNNING = "done", "failed", "running"
RESULT = "result.json"


class OtherSettings(ValueError):
    """The directory holds results measured with other settings."""


class ResultStore:
    """Section files in a directory. settings: must be equal for results to belong together."""

    def __init__(self, directory: Path, settings: Mapping[str, Any]) -> None:
        self.directory = directory
        self.settings = dict(settings)
        directory.mkdir(parents=True, exist_ok=True)

    def check(self, sections: Iterable[str]) -> None:
        """Raise OtherSettings if a section's file was written with other settings."""
        for section in sections:
            record = self.load(section)
            if record is not None and record["settings"] != self.settings:
                raise OtherSettings(
                    f"{self.path(section)} was measured with {_shown(record['settings'])}, this run has "
                    f"{_shown(self.settings)}; choose another --out or remove the folder"
                )

    def path(self, section: str) -> Path:
        return self.directory / f"{section}.json"

    def load(self, section: str) -> dict[str, Any] | None:
        """A section's record; None if there is none."""
        try:
            return json.loads(self.path(section).read_text("utf-8"))
        except FileNotFoundError:
            return None

    def status(self, section: str) -> str | None:
        """`RUNNING`: it has rows and no end, because its process is running or was killed. None without a record."""
        record = self.load(section)
        return record["status"] if record else None

    def values(self, section: str, *, partial: bool = False) -> dict[str, Any]:
        """Results of a finished section; partial: of any section with some. Raises LookupError if there are none."""
        record = self.load(section)
        if record is None or "values" not in record or not (partial or record["status"] == DONE):
            raise LookupError(f"section {section} has no results in {self.directory}; run it first")
        return record["values"]

    def save(self, section: str, seconds: float, environment: Mapping[str, Any], values: Mapping[str, Any]) -> None:
        """Write the rows of a running section."""
        self._record(section, RUNNING, seconds, environment, values=values)

    def write(self, section: str, seconds: float, environment: Mapping[str, Any], **outcome: Any) -> None:
        """Write how a section ended. outcome: its `values`, or the `error`, a traceback or the last output.

        With an error, the rows that were saved before stay.
        """
        if "error" in outcome and "values" not in outcome and (found := self.load(section)) and "values" in found:
            outcome["values"] = found["values"]
        self._record(section, FAILED if "error" in outcome else DONE, seconds, environment, **outcome)

    def _record(
        self, section: str, status: str, seconds: float, environment: Mapping[str, Any], **outcome: Any
    ) -> None:
        record = {"section": section, "status": status, "seconds": round(seconds, 1), "settings": self.settings}
        self._write(self.path(section), {**record, "environment": environment, **outcome})

    def forget(self, section: str) -> None:
        self.path(section).unlink(missing_ok=True)

    def combine(self, sections: Iterable[str], environment: Mapping[str, Any]) -> dict[str, Any]:
        """Write and return all sections' values, with failed and missing sections.

        environment: used if no section has finished; otherwise the last finished one gives it. partial: the values of
        sections that failed or did not end. one_commit: all came from one commit without local changes.
        """
        records = {section: self.load(section) for section in sections}
        known = {section: record for section, record in records.items() if record is not None}
        done = {section: record for section, record in known.items() if record["status"] == DONE}
        rest = {section: record for section, record in known.items() if section not in done}
        commits = [record["environment"]["commit"] for record in known.values()]
        found: dict[str, Any] = {
            "settings": self.settings,
            "environment": [environment, *(record["environment"] for record in done.values())][-1],
            "sections": {section: record["values"] for section, record in done.items()},
            "partial": {section: record["values"] for section, record in rest.items() if "values" in record},
            "seconds": {section: record["seconds"] for section, record in known.items()},
            "failed": {
                section: record.get("error", "it did not end")
                for section, record in known.items()
                if section not in done
            },
            "missing": [section for section in records if section not in known],
            "one_commit": bool(commits) and all(each == commits[0] for each in commits) and not commits[0]["dirty"],
        }
        self._write(self.directory / RESULT, found)
        return found

    def _write(self, path: Path, value: Any) -> None:
        """Write atomically: a reader never sees half a file."""
        text = orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS)  # infinity is null there
        draft = path.with_name(f".{path.name}-draft")
        draft.write_bytes(text)
        os.replace(draft, path)


def _shown(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items())
