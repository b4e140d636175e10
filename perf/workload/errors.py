"""Errors of workloads, traces and specifications."""

from __future__ import annotations


class WorkloadError(ValueError):
    """A workload that cannot be made; the message names the field, the value and the mend."""


class TraceError(WorkloadError):
    """A trace that cannot be read: file, line, field, value and mend."""

    def __init__(self, path: object, line: int | None, problem: str, mend: str) -> None:
        at = f"{path}:{line}" if line is not None else f"{path}"
        super().__init__(f"{at}: {problem}; {mend}")
