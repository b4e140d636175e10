"""Choice of attention: FlashInfer where it can serve, torch's where it can't; and why."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Protocol

import torch

from .attention import Attention, PagedAttention


class AttentionBackend(Protocol):
    """Makes the attention objects of one executor.

    name: for logs. reason: why this one serves. captures: whether `decode` may be captured in a CUDA graph; if not,
    every step is run eagerly.
    """

    name: str
    reason: str
    captures: bool

    def ragged(self) -> Attention:
        """For steps of any rows: prefill chunks first, then rows of one token."""
        ...

    def decode(self, bucket: int) -> Attention:
        """For exactly `bucket` rows of one token."""
        ...


class TorchBackend:
    """`PagedAttention`: on any device, in any dtype, eager."""

    name = "torch"
    captures = False

    def __init__(
        self, num_heads: int, kv_heads: int, head_dim: int, block_tokens: int, device: torch.device, reason: str
    ) -> None:
        self.reason = reason
        self._shape = (num_heads, kv_heads, head_dim, block_tokens, device)

    def ragged(self) -> PagedAttention:
        return PagedAttention(*self._shape)

    def decode(self, bucket: int) -> PagedAttention:
        return PagedAttention(*self._shape)


def choose_attention(
    num_heads: int,
    kv_heads: int,
    head_dim: int,
    block_tokens: int,
    dtype: torch.dtype,
    device: torch.device | str,
    *,
    max_rows: int,
    max_pages_per_row: int,
) -> AttentionBackend:
    """The backend for a model's heads on a device.

    max_rows: most rows of a step. max_pages_per_row: most pages of a row.
    """
    device = torch.device(device)
    if (obstacle := flashinfer_obstacle(num_heads // kv_heads, head_dim, dtype, device)) is not None:
        return TorchBackend(num_heads, kv_heads, head_dim, block_tokens, device, obstacle)
    from .attention_flashinfer import FlashInferBackend

    return FlashInferBackend(
        num_heads, kv_heads, head_dim, block_tokens, dtype, device, max_rows=max_rows,
        max_pages_per_row=max_pages_per_row,
        num_sms=torch.cuda.get_device_properties(device).multi_processor_count,
    )  # fmt: skip


def flashinfer_obstacle(group: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """Reason why FlashInfer cannot serve, None if it can. group: heads that share a KV head."""
    from .attention_flashinfer import DTYPES, HEAD_DIMS, unavailable_modules

    if device.type != "cuda":
        return f"FlashInfer needs a CUDA device, this one is {device}"
    if dtype not in DTYPES:
        return f"FlashInfer takes bfloat16 and float16, the model is in {str(dtype).removeprefix('torch.')}"
    if head_dim not in HEAD_DIMS:
        return f"FlashInfer takes heads of {', '.join(map(str, HEAD_DIMS))} elements, the model's have {head_dim}"
    if (capability := torch.cuda.get_device_capability(device)) < (8, 0):
        return f"FlashInfer needs compute capability 8.0, {device} has {'.'.join(map(str, capability))}"
    try:
        version("flashinfer-python")
    except PackageNotFoundError:
        return "FlashInfer is not installed: pip install 'chorus-lora[cuda13]' or 'chorus-lora[cuda12]'"
    try:
        missing, cause = unavailable_modules(group, head_dim, dtype, device)
    except (ImportError, OSError, RuntimeError) as error:
        return f"FlashInfer cannot be loaded ({error})"
    if missing:
        return f"FlashInfer has no compiled {' and no '.join(missing)}, and {cause}"
    return None
