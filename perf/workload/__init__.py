"""Workloads: requests with adapters, arrival times and lengths, from laws or from traces.

    spec = WorkloadSpec.load(Path("hour.toml"))
    for request in spec: ...  # TraceRequest, in order of arrival; the same every time

Needs no tensor library.
"""

from .errors import TraceError, WorkloadError
from .request import RequestBatch, TraceRequest
from .spec import WorkloadSpec

__all__ = ["RequestBatch", "TraceError", "TraceRequest", "WorkloadError", "WorkloadSpec"]
