"""One layer of Gated DeltaNet by the native library, as a call of its own: for tests and measurements.

The native decoder has the same in its steps.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import accumulate

import torch

from ..library.native_layout import layout_of
from ..library.native_library import required
from ..mixers.gated_delta import DeltaWeights
from ..mixers.recurrent import RecurrentState


def run_delta(
    mixed: torch.Tensor,
    weights: DeltaWeights,
    state: RecurrentState,
    qo_indptr: Sequence[int],
    *,
    begins: Sequence[bool] = (),
    after: RecurrentState | None = None,
    accepted: Sequence[int] = (),
    drafts: Sequence[int] = (),
    threads: int = 1,
    times: int = 1,
) -> tuple[torch.Tensor, float]:
    """As `DeltaWeights.mix`, in float32, with sequences in any order. Returns the seconds of one time, too.

    begins: sequences whose state is zero, whatever `state` holds; by default none. after: where the states after the
    step go, instead of their own place; with drafts it must be given. accepted, drafts: see
    `DeltaWeights.mix`. times: how often the layer is computed.
    """
    found = required()
    count, v_heads, k_dim, v_dim = state.recurrent.shape
    channels = state.conv.shape[2]
    after = after or state
    out = torch.empty(len(mixed), v_heads * v_dim)
    indptr = torch.tensor(qo_indptr, dtype=torch.int32)
    fresh = torch.tensor(begins or [False] * count, dtype=torch.int32)
    accepted_before = torch.tensor([0, *accumulate(accepted or [0] * count)], dtype=torch.int32)
    last = torch.tensor(drafts or [0] * count, dtype=torch.int32)
    most = 0 if state.drafts is None else state.drafts.shape[1]
    if max(*accepted, *drafts, 0, 0) > most or (any(drafts) and after is state):
        raise ValueError(f"states keep the inputs of {most} drafts, and those of a step go to another place")
    step = layout_of(found).filled(
        "DeltaDesc",
        shape={
            "k_heads": (channels - v_heads * v_dim) // (2 * k_dim),
            "v_heads": v_heads,
            "k_dim": k_dim,
            "v_dim": v_dim,
            "conv_size": len(weights.conv),
            "eps": weights.eps,
            "beta": weights.beta,
            "by_channel": weights.by_channel,
        },
        weights={
            "taps": _pointer(weights.conv),
            "dt_bias": _pointer(weights.dt_bias),
            "a_log": _pointer(weights.a_log),
            "delta_norm": _pointer(weights.norm),
        },
        rows=count,
        qo_indptr=indptr.data_ptr(),
        begins=fresh.data_ptr(),
        accepted=accepted_before.data_ptr(),
        drafts=last.data_ptr(),
        most_drafts=most,
        conv_in=_pointer(state.conv),
        recurrent_in=_pointer(state.recurrent),
        drafts_in=None if state.drafts is None else _pointer(state.drafts),
        conv_out=_pointer(after.conv),
        recurrent_out=_pointer(after.recurrent),
        drafts_out=None if after.drafts is None else _pointer(after.drafts),
        mixed=_pointer(mixed),
        out=_pointer(out),
    )
    return out, found.chorus_delta_run(threads, ctypes.addressof(step), times)


def _pointer(tensor: torch.Tensor) -> int:
    if tensor.dtype != torch.float32 or not tensor.is_contiguous():
        raise ValueError("the native library needs contiguous tensors of float32 here")
    return tensor.data_ptr()
