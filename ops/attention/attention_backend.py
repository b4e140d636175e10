"""Chooses the attention backend: FlashInfer if it can serve, else the Triton decode kernel, else PyTorch.

Tests: tests/ops/attention/test_attention_flashinfer.py, tests/ops/attention/test_attention_xqa.py,
tests/ops/attention/test_attention_gpu.py.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Literal, NamedTuple, Protocol

import torch

from ..elementwise.float8_kv import DTYPE as FLOAT8
from .attention import PLAIN, Attention, AttentionSetup, GroupedAttention, HeadShape, PagedAttention, Scores
from .attention_schedule import BLOCK_H, largest_head
from .block_attention import BlockAttention
from .latent_attention import LatentAttention

#: Backends that a configuration may name; auto: the first of FlashInfer, Triton and torch that can serve. xqa:
#: FlashInfer, with XQA's kernel for decode steps.
Wanted = Literal["auto", "flashinfer", "xqa", "triton", "torch"]


_BUILD = (
    "install nvcc of CUDA's toolkit and leave FLASHINFER_DISABLE_JIT unset, or install its modules built ahead, which "
    "PyPI does not have: pip install flashinfer-jit-cache=={version} --index-url https://flashinfer.ai/whl/cu130 (or "
    "cu128: the CUDA version of PyTorch)"
)


class AttentionUnavailable(RuntimeError):
    """The configured attention backend can't serve this model on this device."""


class Obstacle(NamedTuple):
    """Why a backend can't serve."""

    reason: str
    fix: str = ""
    """The package to install, or the setting, that fixes it; empty if nothing helps."""

    def __str__(self) -> str:
        return f"{self.reason}: {self.fix}" if self.fix else self.reason


_LATENTS = Obstacle("FlashInfer is not asked for latents, and the model's layers keep them")


class AttentionBackend(Protocol):
    """Makes the attention objects of one executor."""

    name: str
    """Name for logs."""
    reason: str
    """Why this backend was chosen."""
    fix: str
    """How to get a faster one; empty if that is impossible."""
    captures: bool
    """True if `decode` may be captured in a CUDA graph; otherwise every step runs eagerly."""

    def ragged(self) -> Attention:
        """Attention for steps of any sequences: prefill chunks first, then sequences of one token."""
        ...

    def decode(self, bucket: int) -> Attention:
        """Attention for exactly `bucket` sequences of one token."""
        ...


class TorchBackend:
    """`PagedAttention`: runs on any device, in any dtype, eagerly."""

    name = "torch"
    captures = False

    def __init__(
        self,
        heads: HeadShape,
        device: torch.device,
        reason: str,
        fix: str = "",
        kind: type[PagedAttention] = PagedAttention,
    ) -> None:
        self.reason, self.fix = reason, fix
        self._shape, self._kind = (heads, device), kind

    def ragged(self) -> PagedAttention:
        return self._kind(*self._shape)

    def decode(self, bucket: int) -> PagedAttention:
        return self._kind(*self._shape)


class GroupedBackend:
    """The backends of a model's page groups, as one."""

    def __init__(
        self, groups: Sequence[tuple[AttentionBackend, int | None]], block_tokens: int, *, chunked: bool = False
    ) -> None:
        """groups: backend and window of each. A backend serves one group: a plan of it holds that group's pages.
        chunked: see `GroupedAttention`.
        """
        self._groups, self._block_tokens, self._chunked = groups, block_tokens, chunked
        backends = [backend for backend, _ in groups]
        self.name = ", ".join(dict.fromkeys(each.name for each in backends))
        self.reason = "; ".join(dict.fromkeys(each.reason for each in backends))
        self.fix = "; ".join(dict.fromkeys(each.fix for each in backends if each.fix))
        self.captures = all(each.captures for each in backends)

    def ragged(self) -> GroupedAttention:
        """See `AttentionBackend.ragged`."""
        return self._grouped([(each.ragged(), window) for each, window in self._groups])

    def decode(self, bucket: int) -> GroupedAttention:
        """See `AttentionBackend.decode`."""
        return self._grouped([(each.decode(bucket), window) for each, window in self._groups])

    def _grouped(self, groups: Sequence[tuple[Attention, int | None]]) -> GroupedAttention:
        return GroupedAttention(groups, self._block_tokens, chunked=self._chunked)


def paged_kind(value_dim: int | None, *, blocks: bool) -> type[PagedAttention]:
    """Attention by PyTorch's operators. value_dim: of latents, None for others. blocks: blocks of keys are chosen."""
    return BlockAttention if blocks else PagedAttention if value_dim is None else LatentAttention


def choose_attention(setup: AttentionSetup, wanted: Wanted = "auto") -> AttentionBackend:
    """Return the backend for a page group's layers on a device.

    wanted: raises AttentionUnavailable if it names a backend that can't serve.
    """
    heads, dtype, device = setup.heads, setup.dtype, setup.device
    theirs = ours = None
    kind = paged_kind(setup.value_dim, blocks=any(each.key_block for each in setup.scores))
    if wanted == "torch":
        return TorchBackend(heads, device, "attention is torch", kind=kind)
    if wanted != "triton":
        theirs = _LATENTS
        if setup.value_dim is None:
            theirs = flashinfer_obstacle(
                heads.group, heads.head_dim, dtype, device, setup.scores, float8_kv=setup.float8_kv
            )
        if theirs is None:
            from .attention_flashinfer import FlashInferBackend

            chosen = FlashInferBackend(setup, _num_sms(device))
            theirs = _wrong_values(setup, chosen)
            if theirs is None:
                return _with_xqa(setup, chosen) if wanted == "xqa" else chosen
    if wanted not in ("flashinfer", "xqa"):
        # query heads of latents are divided among programs
        group, width = (heads.group, heads.head_dim) if setup.value_dim is None else (1, setup.value_dim)
        ours = triton_obstacle(group, width, dtype, device, setup.scores, float8_kv=setup.float8_kv)
        ours = ours or _latents_obstacle(setup)
        if ours is None:
            from .attention_triton import TritonBackend

            reason, fix = theirs or Obstacle("attention is triton")
            return TritonBackend(setup, _num_sms(device), reason=reason, fix=fix)
    if wanted != "auto":
        raise AttentionUnavailable(f"attention is {wanted}, but {theirs or ours}")
    reason = "; ".join(obstacle.reason for obstacle in (theirs, ours) if obstacle is not None)
    return TorchBackend(heads, device, reason, theirs.fix if theirs is not None else "", kind)


def _latents_obstacle(setup: AttentionSetup) -> Obstacle | None:
    """Return why the Triton decode kernel can't serve these latents; None if it can, or there are none."""
    if setup.value_dim is None:
        return None
    if any(each.window is not None for each in setup.scores):
        return Obstacle("the decode kernel has no windows over latents, and the model has them")
    if setup.heads.head_dim == setup.value_dim:
        return Obstacle("the decode kernel reads a rotated key behind each latent, and the model's have none")
    return None


def _wrong_values(setup: AttentionSetup, backend: AttentionBackend) -> Obstacle | None:
    """Why a version of FlashInfer that has not run on a GPU can't serve; None if it can."""
    from .attention_flashinfer import VERSION, has_run
    from .attention_values import values_problem

    if has_run(found := version("flashinfer-python")) or (problem := values_problem(setup, backend)) is None:
        return None
    return Obstacle(
        f"FlashInfer {found} gives wrong values here ({problem})", f"pip install flashinfer-python=={VERSION}.*"
    )


def _xqa_obstacle(setup: AttentionSetup) -> str | None:
    """Why XQA can't serve decode steps where FlashInfer serves; None if it can."""
    from .attention_flashinfer import VERSION, has_run
    from .attention_xqa import xqa_obstacle

    if not has_run(found := version("flashinfer-python")):
        return f"XQA is called as FlashInfer {VERSION} has it, and {found} is installed"
    return xqa_obstacle(setup, torch.cuda.get_device_capability(setup.device))


def _with_xqa(setup: AttentionSetup, chosen: AttentionBackend) -> AttentionBackend:
    """XQA for decode steps, and `chosen` for others. Raises AttentionUnavailable."""
    from .attention_flashinfer import why_none_is_built
    from .attention_xqa import XqaBackend, missing_modules

    obstacle = _xqa_obstacle(setup)
    if obstacle is None and (cause := why_none_is_built()) and (missing := missing_modules(setup)):
        obstacle = f"FlashInfer has no compiled {' and no '.join(missing)}, and {cause}"
    if obstacle is not None:
        raise AttentionUnavailable(f"attention is xqa, but {obstacle}")
    return XqaBackend(setup, _num_sms(setup.device), chosen)


def rival_attention(setup: AttentionSetup, chosen: AttentionBackend) -> AttentionBackend | None:
    """Return another backend for decode steps that may be faster than the chosen one; None if there is none.

    That is XQA next to FlashInfer, if its modules are built ahead: a compiler would take minutes.
    """
    if not chosen.name.startswith("flashinfer") or setup.device.type != "cuda":
        return None
    from .attention_xqa import XqaBackend, missing_modules

    if _xqa_obstacle(setup) is not None or missing_modules(setup):
        return None
    return XqaBackend(setup, _num_sms(setup.device), chosen)


def _num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def triton_obstacle(
    group: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    scores: Collection[Scores] = (PLAIN,),
    *,
    float8_kv: bool = False,
) -> Obstacle | None:
    """Return why the Triton decode kernel can't serve; None if it can. group: heads that share a KV head."""
    if device.type != "cuda":
        return Obstacle(f"the decode kernel needs a CUDA device, this one is {device}")
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return Obstacle(f"the decode kernel does not support {str(dtype).removeprefix('torch.')}")
    if float8_kv and dtype == torch.float32:  # without matrix instructions, widened tiles would spill registers
        return Obstacle("the decode kernel reads a KV cache in FP8 for bfloat16 and float16, the model is in float32")
    if any(each.has_slopes for each in scores):
        return Obstacle("the decode kernel has no slopes of ALiBi, and the model has them")
    if any(each.has_relative for each in scores):
        return Obstacle("the decode kernel has no relative attention, and the model has it")
    if any(each.top_k is not None for each in scores):
        return Obstacle("the decode kernel has no attention to tokens that an indexer chooses, and the model has it")
    if not 16 <= head_dim <= largest_head(dtype.itemsize):
        sizes = f"16 to {largest_head(dtype.itemsize)} elements in {str(dtype).removeprefix('torch.')}"
        return Obstacle(f"the decode kernel supports heads of {sizes}, the model's have {head_dim}")
    if group > BLOCK_H:
        return Obstacle(f"the decode kernel supports up to {BLOCK_H} heads per KV head, the model has {group}")
    if (capability := torch.cuda.get_device_capability(device)) < (8, 0):
        return Obstacle(f"the decode kernel needs compute capability 8.0, {device} has {_dotted(capability)}")
    if find_spec("triton") is None:
        return Obstacle("Triton is not installed", "pip install 'chorus-lora[cuda13]' or 'chorus-lora[cuda12]'")
    return None


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def flashinfer_obstacle(
    group: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    scores: Collection[Scores] = (PLAIN,),
    *,
    float8_kv: bool = False,
) -> Obstacle | None:
    """Return why FlashInfer can't serve; None if it can. group: heads that share a KV head."""
    from .attention_flashinfer import DTYPES, HEAD_DIMS, VERSION, is_supported, unavailable_modules

    if device.type != "cuda":
        return Obstacle(f"FlashInfer needs a CUDA device, this one is {device}")
    if dtype not in DTYPES:
        return Obstacle(f"FlashInfer needs bfloat16 or float16, the model is in {str(dtype).removeprefix('torch.')}")
    if head_dim not in HEAD_DIMS:
        sizes = ", ".join(map(str, HEAD_DIMS))
        return Obstacle(f"FlashInfer supports heads of {sizes} elements, the model's have {head_dim}")
    if any(each.has_sinks for each in scores):
        return Obstacle("FlashInfer is not asked for attention sinks, and the model has them")
    if any(each.has_slopes for each in scores):
        return Obstacle("FlashInfer is not asked for slopes of ALiBi, and the model has them")
    if any(each.has_relative for each in scores):
        return Obstacle("FlashInfer is not asked for relative attention, and the model has it")
    if any(each.key_block for each in scores):
        return Obstacle("FlashInfer is not asked for chosen blocks of keys, and the model has them")
    if (capability := torch.cuda.get_device_capability(device)) < (8, 0):
        return Obstacle(f"FlashInfer needs compute capability 8.0, {device} has {_dotted(capability)}")
    try:
        found = version("flashinfer-python")
    except PackageNotFoundError:
        return Obstacle("FlashInfer is not installed", "pip install 'chorus-lora[cuda13]' or 'chorus-lora[cuda12]'")
    if not is_supported(found):
        return Obstacle(
            f"FlashInfer {found} is installed, which is not supported; {VERSION}, and 0.7.2 up to 0.8, are",
            f"pip install flashinfer-python=={VERSION}.*",
        )
    try:
        kv_dtype = FLOAT8 if float8_kv else dtype
        missing, cause = unavailable_modules(group, head_dim, dtype, device, scores, kv_dtype=kv_dtype)
    except (ImportError, OSError, RuntimeError) as error:
        return Obstacle(
            f"FlashInfer cannot be loaded ({error})", "install versions of its packages that fit each other"
        )
    if missing:
        return Obstacle(
            f"FlashInfer has no compiled {' and no '.join(missing)}, and {cause}", _BUILD.format(version=found)
        )
    return None
