"""Workloads: requests with adapters, arrival times and lengths, from laws or from traces.

    spec = WorkloadSpec.load(Path("hour.toml"))
    for request in spec: ...  # TraceRequest, in order of arrival; the same every time

Needs no tensor library.
"""

from .fields import WorkloadError
from .request import TraceRequest
from .spec import WorkloadSpec

__all__ = ["TraceRequest", "WorkloadError", "WorkloadSpec"]
