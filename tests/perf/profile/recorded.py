"""A trace as torch.profiler writes it for two decode steps on a GPU: one replayed, one launched kernel by kernel. The
kernels of the first begin after its span, as those of a step that is launched while the one before it runs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

#: Name, begin and microseconds of the kernels of a step.
KERNELS = [
    ("rms_norm_rows", 100.0, 5.0),
    ("multiply_rows", 106.0, 40.0),
    ("shrink_decode", 146.0, 6.0),
    ("expand_decode", 150.0, 8.0),  # it begins before the one before it ends: dependent launch
    ("void flashinfer::BatchDecodeWithPagedKVCacheKernel<128>(Params)", 160.0, 20.0),
    ("nvjet_tst_64x16_64x13_4x1_v_bz_TNT", 182.0, 60.0),
    ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, ArgMaxOps>>", 245.0, 4.0),
]


def events(begin: float, *, graph: bool) -> list[dict[str, Any]]:
    """Events of one step that begins at `begin`; graph: its kernels are nodes of one launch, which runs later."""
    span = {"ph": "X", "pid": 1, "tid": 1, "ts": begin, "dur": 300.0, "name": "chorus.step"}
    found = [{**span, "cat": "user_annotation"}, {**span, "cat": "gpu_user_annotation", "ts": begin + 100, "dur": 150}]
    for index, (name, start, duration) in enumerate(KERNELS):
        args: dict[str, Any] = {"device": 0, "context": 1, "stream": 7, "correlation": 900 if graph else 901 + index}
        kernel = {"ph": "X", "cat": "kernel", "pid": 0, "tid": 7, "dur": duration, "name": name}
        found.append({**kernel, "ts": begin + start + (400 if graph else 0), "args": args})
        if index == 0 or not graph:
            launch = {"ph": "X", "cat": "cuda_runtime", "pid": 1, "tid": 1, "ts": begin + 20 + index, "dur": 0.5}
            name = "cudaGraphLaunch" if graph else "cudaLaunchKernelExC"
            found.append({**launch, "name": name, "args": {"correlation": args["correlation"]}})
    return found


def write(path: Path) -> Path:
    other = {"ph": "X", "cat": "kernel", "pid": 0, "tid": 7, "ts": 900.0, "dur": 9.0, "name": "warm_up", "args": {}}
    trace = {"schemaVersion": 1, "traceEvents": [*events(0.0, graph=True), other, *events(1000.0, graph=False)]}
    path.write_text(json.dumps(trace), "utf-8")
    return path
