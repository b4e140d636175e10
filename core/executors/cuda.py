"""The CUDA executor: weights, KV cache and adapters on one GPU.

Tests: tests/core/executors/test_cuda_executor.py, tests/core/executors/test_cuda_interpreted.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType

import torch

from ...graphs.device import CudaDevice, DeviceError
from ...graphs.runner import CapturedStep
from ...memory.pages.arena import Arena
from ...memory.transfers.cuda_driver import CupyDriver, MissingCupy
from ...memory.transfers.transfer import ExecutorLost
from ...ops import dependent_launch
from ...ops.attention.attention import AttentionSetup
from ...ops.attention.attention_backend import (
    AttentionUnavailable,
    GroupedBackend,
    choose_attention,
    flashinfer_obstacle,
    rival_attention,
)
from ...ops.library import native_library
from ..config import EngineConfig
from ..media.serving import tower_bytes
from ..model.decoder import DecoderModel
from ..model.lora.step_lora import OFFLOADED
from ..model.moe.experts import ExpertKernels
from ..model.nvtx_spans import span
from ..model.program.torch_heads import scores_of
from ..model.specs.config import UnsupportedModel
from ..model.verification import accept_drafts
from ..model.weights.narrow_bytes import kept_bytes
from ..model.weights.open_weights import open_weights
from ..model.weights.shard import WHOLE, Shard
from ..model.weights.weight_plan import CAST, NARROW
from ..requests.draft_length import most_logits
from ..requests.types import ScheduledSequence, StepPlan, StepResult
from . import cuda_memory
from .adapters import CudaAdapters
from .base import ModelExecutor
from .cuda_float8_gemms import check_float8_gemms
from .cuda_lora_offload import CudaLoraOffload
from .cuda_merged import CudaShadow
from .cuda_outputs import Outputs
from .cuda_rank_memory import DeviceRankContext
from .cuda_steps import CudaSteps
from .swaps import PageSwaps

logger = logging.getLogger(__name__)


class watched:
    """Scope for work on a device; it raises ExecutorLost in place of an error that has ended the device."""

    __slots__ = ("_device", "_scope")

    def __init__(self, device: CudaDevice) -> None:
        self._device = device

    def __enter__(self) -> None:
        try:
            self._scope = self._device.scope()
            self._scope.__enter__()
        except Exception as error:
            self._tell(error)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._scope.__exit__(kind, error, trace)
        if isinstance(error, Exception):
            self._tell(error)

    def _tell(self, error: Exception) -> None:
        if (failure := self._device.failure()) is not None:
            raise ExecutorLost(f"the device failed: {failure}") from error


class CudaShapes(ModelExecutor):
    """The shapes of a checkpoint that GPUs serve, with their defaults."""

    on_gpu = True

    def __init__(self, config: EngineConfig, shard: Shard = WHOLE, *, device: CudaDevice) -> None:
        """Raises UnsupportedModel."""
        self._device = device
        self.state_slots = 3 if config.launches_ahead else 2
        super().__init__(config, shard)
        if config.fp8_activations:
            check_float8_gemms(self._dtype, device.torch_device)
        if config.offload_workers and (further := self._without_offload()):
            raise UnsupportedModel(
                f"offload_workers is {config.offload_workers}, and for GPUs they compute no {', '.join(further)}, "
                "which layers of this model have; set it to 0"
            )
        if not (experts := self.config.num_experts):
            return
        if config.offload_workers:
            raise UnsupportedModel(
                f"offload_workers is {config.offload_workers}, and the model has {experts} experts, which GPUs serve "
                "without; set it to 0, or device to 'cpu'"
            )

    @property
    def torch_device(self) -> torch.device:
        return self._device.torch_device

    def _without_offload(self) -> list[str]:
        """Names of the layers' projections that offload workers do not compute, mixtures' aside."""
        every = (each for layer in self.config.projections.layers for each in layer)
        further = (each for each in every if each.product not in OFFLOADED and not each.is_of_mixture)
        return list(dict.fromkeys(each.module.rpartition(".")[2] for each in further))

    def _within_window(self, config: EngineConfig) -> bool:
        """Where FlashInfer can't serve: beyond a window, prompts attend by PyTorch's operators, slowly."""
        if config.attention not in ("auto", "flashinfer", "xqa"):
            return True
        model, limit = self.config, self.config.max_context
        scores = {scores_of(mixer, limit) for mixer in model.attention_layers}
        where, float8 = self._device.torch_device, config.kv_cache_dtype == "fp8"
        shapes = ((it.num_heads // it.num_kv_heads, it.head_dim) for it in model.attention_shapes if it.window)
        found = (flashinfer_obstacle(*shape, self._dtype, where, scores, float8_kv=float8) for shape in shapes)
        return any(each is not None for each in found)

    def _max_lora_rank(self, config: EngineConfig) -> int:
        return config.max_lora_rank


class CudaExecutor(CudaShapes):
    """Runs steps on one GPU, for the whole model or a TP rank's share. Any one thread at a time may use it."""

    def __init__(
        self,
        config: EngineConfig,
        device: CudaDevice | None = None,
        driver: CupyDriver | None = None,
        rank_context: DeviceRankContext | None = None,
    ) -> None:
        """device: by default the configured GPU; driver: the same device's, for offload workers. rank_context: the TP
        rank that it is, if there are several. Then it only loads its share; `measure` and `open` follow once all ranks
        have loaded. Raises DeviceError, UnsupportedModel and OutOfDeviceMemory.
        """
        device = CudaDevice(_index(config.device)) if device is None else device
        super().__init__(config, WHOLE if rank_context is None else rank_context.shard, device=device)
        check_offload(config, self._dtype)
        self._config, self._rank_context = config, rank_context
        dependent_launch.allow(config.dependent_launch == "auto")
        self._watched = partial(watched, self._device)
        self._plan = replace(NARROW, float8_inputs=config.fp8_activations) if config.small_gemm != "off" else CAST
        self.weight_bytes = kept_bytes(self.whole, self._dtype.itemsize, self._plan, self.shard, self.quantiser)
        with self._device.scope():
            self._free, _ = self._device.memory()  # before anything is loaded
            self._decoder = self._load()
            self._offload = self._open_offload(driver) if config.offload_workers else None
        if rank_context is None:
            self.open(self.measure())

    def measure(self) -> int:
        """Allocate everything that steps need except an arena, and return the number of pages that the arena may have.

        All ranks call it together. Raises OutOfDeviceMemory.
        """
        with self._device.scope():
            if self._rank_context is not None:
                self._decoder.join(self._rank_context.collectives)
            self.steps = self._make_steps(self._decoder)
            self.eager_steps = self.steps.eager
            with torch.inference_mode():
                self.steps.warm_up()
                return self._measure(self._free)

    def open(self, num_pages: int) -> None:
        """Make an arena of `num_pages` pages and capture the graphs for it; all ranks call it together."""
        self.num_pages = num_pages
        with self._device.scope():
            self.arena = Arena(self.layout, self.num_pages, self._dtype, self._device.torch_device)
            self.steps.use_arena(self.arena)
            self.adapters = self._open_adapters()
            self.swaps = PageSwaps(self.arena, self.adapters.dma, self._watched)
            steps = self.steps
            self.shadow = CudaShadow(steps.decoder, self.arena, steps.lora, steps.merged_graphs, self._watched)
            with torch.inference_mode():
                self.shadow.rehearse(steps.lora.whole, self._config.max_lora_rank)
                self.steps.decoding.choose_attention()
                self.steps.capture_ahead()
                if self._config.mode_policy != "manual":
                    self.shadow.capture_ahead(steps.merged_graphs, steps.merged_pieces)
            self._device.synchronize()
            if self._offload is not None:
                self._offload.adapters = self.adapters
                self._offload.measure()
                self.cold_starts = self._offload.starts
                self.steps.lora.offloading = self._offload.offload

    @property
    def captured(self) -> Sequence[CapturedStep]:
        """The captured buckets and modes, in order of capture."""
        return self.steps.captured

    def execute(self, plan: StepPlan) -> StepResult:
        return self.start(plan).result()

    def start(self, plan: StepPlan) -> _Started:
        """Launch a step. Work that depends on its tokens runs in order on the device, whatever the host does."""
        with self._watched(), torch.inference_mode(), span(_name(plan)):
            rows, steps = plan.rows_with_logits(), self.steps
            outputs = self._launch(plan, rows, steps.outputs.asks_logits(rows))
            sample = partial(steps.outputs.sample, rows, *outputs)
            read = None if plan.sources is not None and steps.outputs.look_back(rows) else sample()
            accept = partial(accept_drafts, plan, rows) if plan.num_drafts else None
            late = steps.lora.late_requests(plan.sequences) if plan.adapters else []
            end = partial(self._offload.end, plan) if self._offload is not None and plan.bucket is None else None
            return _Started(self._device, late, sample, _read=read, _accept=accept, _end=end)

    def follow(self, plan: StepPlan, asks_logits: bool) -> list[str]:
        """Launch a step as a rank other than the first, which samples; return the requests with void entries.

        asks_logits: an entry needs more than the largest of its logits.
        """
        with self._watched(), torch.inference_mode(), span(_name(plan)):
            self._launch(plan, plan.rows_with_logits(), asks_logits)
            self.steps.outputs.join_prompt_logprobs(plan.sequences)
            return self.steps.lora.late_requests(plan.sequences) if plan.adapters else []

    def advance(self) -> None:
        """Issue the next copies without waiting. Raises ExecutorLost if the device has failed."""
        with self._watched():
            self.adapters.dma.copies.advance()
            self._device.is_done()

    def close(self) -> None:
        """Free the GPU's memory. The executor can't be used afterwards."""
        self._device.synchronize()
        self.adapters.close()
        self.steps.close()
        if self._offload is not None:
            self._offload.close()
            self._offload = None
        del self._decoder, self.steps, self.arena, self.adapters, self.swaps, self.shadow
        self._device.release()

    def _launch(self, plan: StepPlan, rows: list[ScheduledSequence], asks_logits: bool) -> Outputs:
        self.adapters.dma.copies.advance()
        if plan.merged is not None:
            self.shadow.check(plan.merged)
        if plan.bucket is None:
            logits, chosen = self._ragged(plan)
        else:
            logits, chosen = self.steps.decoding.run(
                plan.bucket,
                rows,
                plan.adapters,
                plan.sources,
                plan.merged,
                merged_graphs=self.steps.merged_graphs,
                drafted=plan.sequences if plan.num_drafts else None,
            )
        return self.steps.outputs.whole(logits) if asks_logits else logits, chosen

    def _ragged(self, plan: StepPlan) -> Outputs:
        launch = partial(self.steps.ragged, plan.sequences, plan.adapters, plan.sources, plan.merged)
        return launch() if self._offload is None else self._offload.launch(launch, plan)

    def _open_offload(self, driver: CupyDriver | None) -> CudaLoraOffload:
        if driver is None:
            try:
                driver = CupyDriver(self._device.torch_device.index or 0, self._device.failure)
            except MissingCupy as error:
                raise DeviceError(
                    f"offload_workers is {self._config.offload_workers}, but exchanges need CuPy; set it to 0, or "
                    f"install CuPy: {error}"
                ) from error
        return CudaLoraOffload(self._config, self.config, self._dtype, self._device, driver)

    def _open_adapters(self) -> CudaAdapters:
        config = self._config
        of_arena = self.config, self.arena, self._dtype, self._watched, self._device.failure, config.max_lora_rank
        # TP ranks use the images of the first process instead
        adapters = CudaAdapters(*of_arena, config.host_bytes if self._rank_context is None else 0)
        adapters.base = self.base_weights
        return adapters

    def _load(self) -> DecoderModel:
        """Load the weights, with an arena of two pages until the size of the real one is known."""
        config, device = self._config, self._device
        where = device.torch_device
        arena = Arena(self.layout, 2, self._dtype, where)
        if self._plan is CAST:
            self.warn_if_dequantised("cuBLAS multiplies")
        with open_weights(
            config.model,
            self.whole,
            self._dtype,
            load_format=config.load_format,
            device=where,
            shard=self.shard,
            quantiser=self.quantiser,
        ) as weights:
            weights.plan = self._plan
            if config.fp8_activations and not weights.asks_float8_inputs:
                raise UnsupportedModel(
                    "fp8_activations is true, but no weights of the model are FP8 with activations in FP8; leave it "
                    "out, or set quantization to 'fp8'"
                )
            if weights.rounds_inputs:
                logger.info(
                    "activations are not rounded to 8 bits on a GPU: it multiplies weights of 8 or 4 bits with them"
                )
            if weights.asks_float8_inputs and not config.fp8_activations:
                logger.info("activations stay in the model's dtype; with fp8_activations they are rounded to FP8")
            cuda_memory.check_weights(weights.num_bytes_kept, *device.memory())
            return DecoderModel(
                self.config, weights, arena, self.model.max_model_len, expert_kernels=ExpertKernels.TILES
            )

    def _make_steps(self, decoder: DecoderModel) -> CudaSteps:
        """Make the static buffers, and choose the attention backend."""
        config, model, device = self._config, self.config, self._device
        limit, layout = self.model.max_model_len, self.layout
        scores = [scores_of(mixer, limit) for mixer in model.kv_layers]
        groups, rivals, most_rows = [], [], most_logits(config)
        try:
            for shape, (layers, window) in zip(decoder.heads, layout.groups, strict=True):
                of_group = AttentionSetup(
                    shape,
                    self._dtype,
                    device.torch_device,
                    max_rows=most_rows,
                    max_pages_per_row=layout.blocks_for_tokens(limit),
                    float8_kv=layout.float8_kv,
                    value_dim=model.kv_layers[layers[0]].cached_value_dim,
                    scores=tuple(dict.fromkeys(scores[layer] for layer in layers)),
                )
                if layout.chunked and window is not None:  # each chunk of a row is a row
                    rows = 2 * most_rows + config.max_num_batched_tokens // window
                    of_group = replace(of_group, max_rows=rows, max_pages_per_row=window // layout.block_tokens)
                chosen = choose_attention(of_group, config.attention)
                groups.append((chosen, window))
                rivals.append(rival_attention(of_group, chosen) if config.attention == "auto" else None)
        except AttentionUnavailable as error:
            raise DeviceError(str(error)) from error
        chunked = layout.chunked
        attention, rival = GroupedBackend(groups, layout.block_tokens, chunked=chunked), None
        if any(each is not None for each in rivals):
            others = [(other or chosen, window) for other, (chosen, window) in zip(rivals, groups, strict=True)]
            rival = GroupedBackend(others, layout.block_tokens, chunked=chunked)
        if groups:
            logger.info("attention by %s: %s", attention.name, attention.reason)
        if attention.fix:
            logger.warning("attention would be faster with FlashInfer; %s: %s", attention.reason, attention.fix)
        return CudaSteps(
            config,
            decoder,
            arena=decoder.arena,
            attention=attention,
            rival=rival,
            device=device,
            max_model_len=self.model.max_model_len,
        )

    def _measure(self, free_at_first: int) -> int:
        """Number of pages of the arena, after the memory of the largest step and the graphs.

        free_at_first: free bytes before anything was loaded.
        """
        config, device, page_bytes = self._config, self._device, self.layout.page_bytes
        activations = device.peak_bytes(self.steps.largest_step)
        graphs = self.steps.graph_bytes()
        device.release()
        free, total = device.memory()
        if self.model.why_blind is None:  # the tower is read with the first image
            free -= tower_bytes(config.model, self.whole, self._dtype)
        use = cuda_memory.MemoryUse(free, total, free_at_first - free, activations, graphs)
        pages = config.num_pages
        if pages is None and config.memory_bytes is not None:
            pages = max(2, config.memory_bytes // (self.shard.size * page_bytes))
        if pages is None:
            needed = self.layout.pages_for_tokens(self.model.max_model_len) + 1
            pages = cuda_memory.num_pages(use, page_bytes, needed, config.gpu_memory_utilization)
        else:
            cuda_memory.check_pages(use, page_bytes, pages)
        logger.info("a page pool of %s (%d pages): %s", cuda_memory.gib(pages * page_bytes), pages, use)
        return pages


@dataclass(slots=True, eq=False)
class _Started:
    """A launched step."""

    _device: CudaDevice
    _late: list[str]
    """Requests whose adapters missed the deadline."""
    _sample: Callable[[], Callable[[], StepResult]]
    """Launches the sampling, and returns the function that waits for the tokens."""
    _read: Callable[[], StepResult] | None
    """Waits for the tokens; None before the sampling is launched."""
    _accept: Callable[[StepResult], None] | None
    """See `accept_drafts`; None for a step without drafts."""
    _end: Callable[[], None] | None
    """See `CudaLoraOffload.end`; None without offload workers."""

    def sample(self) -> None:
        if self._read is None:
            with watched(self._device), torch.inference_mode():
                self._read = self._sample()

    def result(self) -> StepResult:
        if self._read is None:
            raise RuntimeError("sample() must be called before result()")
        with watched(self._device):
            result = self._read()
        if self._accept is not None:
            self._accept(result)
        if self._end is not None:
            self._end()
        for request_id in self._late:
            result.retract(request_id)
        return result


def check_offload(config: EngineConfig, dtype: torch.dtype) -> None:
    """Raise UnsupportedModel if offload workers are configured but can't compute."""
    if config.offload_workers and (reason := native_library.why_unavailable(dtype)) is not None:
        raise UnsupportedModel(
            f"offload_workers is {config.offload_workers}, but they need the native library: {reason}; or set it to 0"
        )


def _index(device: str) -> int:
    return int(device.partition(":")[2] or 0)


def _name(plan: StepPlan) -> str:
    """The step's name for profilers, such as `step.decode.b8.lora` or `step.ragged.base`."""
    kind = "ragged" if plan.bucket is None else f"decode.b{plan.bucket}"
    return f"step.{kind}.{plan.mode}"
