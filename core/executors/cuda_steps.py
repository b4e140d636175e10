"""Steps on a GPU: owns the buffers and graphs of ragged and decode steps, and captures them ahead.

Tests: tests/core/executors/test_cuda_interpreted.py, tests/core/executors/test_cuda_executor_gpu.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from ...graphs.buffers import StaticColumns, num_columns, split_columns
from ...graphs.device import CudaDevice, DeviceUpload
from ...graphs.runner import CapturedStep, EagerReason, StepForm, StepPart
from ...memory.adapters.adapter import Adapter
from ...memory.pages.arena import Arena
from ...memory.pages.pool import PagePool
from ...ops.attention.attention import GroupedAttention
from ...ops.attention.attention_backend import GroupedBackend
from ..config import EngineConfig
from ..model.batch import AxisPositions, MediaRows, StepBatch, ragged_batch
from ..model.checkpoints.load_progress import progress
from ..model.decoder import DecoderModel
from ..model.lora.lora_launches import LoraLaunches
from ..model.lora.lora_state_cuda import CudaLoraState, StepLimits
from ..requests.draft_length import most_logits
from ..requests.types import ScheduledSequence, adapter_runs
from . import cuda_decode, cuda_memory, cuda_piecewise
from .cuda_decode import DecodeSteps
from .cuda_float8_gemms import choose_float8_gemms
from .cuda_merged import KEPT_ADDRESSES, MERGED_FORMS, MERGED_PIECES, MergedGraphs
from .cuda_outputs import Outputs, StepOutputs
from .cuda_piecewise import PiecewiseSteps, token_buckets
from .cuda_row_backends import choose_row_backends
from .cuda_sample_rows import largest_rows

logger = logging.getLogger(__name__)

#: Forms of a bucket that are captured when they are needed, for which memory is set aside: with vectors, with room for
#: more tiles, and layers alone.
_MORE_FORMS = 3


class _Capturable(NamedTuple):
    """A kind of graphs."""

    name: str
    steps: DecodeSteps | PiecewiseSteps
    forms: Sequence[StepForm]
    """Those captured ahead; the second has adapters."""


class CudaSteps:
    """Owns a step's buffers and graphs, all allocated once; weights and arena have other owners.

    A step's inputs reach static buffers through pinned memory, and its tokens come back in one copy. The host waits
    only for that copy and for adapters that are still being read. A step launched before the previous step's tokens are
    back gathers them on the device. All work goes to one stream, so a step overwrites static buffers only after earlier
    steps.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: DecoderModel,
        arena: Arena,
        attention: GroupedBackend,
        device: CudaDevice,
        max_model_len: int,
        rival: GroupedBackend | None = None,
    ) -> None:
        """rival: another backend for decode steps, which `choose_attention` compares."""
        self._config, self._device = config, device
        self.decoder = model
        self._max_model_len = max_model_len
        self._layout = layout = arena.layout
        rows, tokens = most_logits(config), config.max_num_batched_tokens
        self._most_padded = padded = min(config.mixed_graph_tokens, tokens)
        self._ragged_attention = attention.ragged()
        self.columns = StaticColumns(num_columns(layout.pages_per_block) + 2, tokens, device)
        """Inputs of ragged steps."""
        self.outputs = StepOutputs(config, model, device)
        adapters = min(config.max_num_seqs, config.max_adapters_per_step or config.max_num_seqs)
        self.lora = CudaLoraState(
            model.config,
            arena.pages,
            layout,
            StepLimits(config.max_lora_rank, adapters, rows, tokens, padded),
            max_stall=config.max_load_stall_seconds,
            make_copy=partial(DeviceUpload, device),
        )
        self.decoding = DecodeSteps(
            config,
            model,
            device,
            attention=(attention,) if rival is None else (attention, rival),
            lora=self.lora,
            outputs=self.outputs,
            max_model_len=max_model_len,
        )
        self.eager = self.decoding.eager
        """Steps that were not captured, since the arena is the final one; ragged ones, too."""
        self.mixed = PiecewiseSteps(
            model,
            device,
            attention=self._ragged_attention,
            lora=self.lora,
            columns=self.columns,
            sizes=token_buckets(padded),
        )
        # TP ranks make merged weights at their own pace, but must capture together: in a step that all of them have
        is_ahead = self.decoding.captures and config.graph_capture == "ahead" and model.ranks is None
        sizes = self.decoding.sizes[::-1] if is_ahead else ()
        ahead = [(bucket, form) for bucket in sizes for form in MERGED_FORMS]
        self.merged_graphs = MergedGraphs(self._capture, self._prepare, ahead)
        pieces = self.mixed.sizes[::-1] if is_ahead else ()
        self.merged_pieces = [(bucket, form) for bucket in pieces for form in MERGED_PIECES]
        """Steps with prompts that are captured at the start for merged weights."""

    def use_arena(self, arena: Arena) -> None:
        """Use another arena of the same layout from now on; nothing may have been captured yet."""
        self.decoder.use_arena(arena)
        self.decoding.use_arena()
        self.lora.use_arena(arena.pages)
        if self._config.graph_capture != "off":
            self.mixed.allow_captures()
        self.eager.clear()

    @property
    def captured(self) -> Sequence[CapturedStep]:
        """The captured buckets and modes, in order of capture, with merged weights last."""
        return [*self.decoding.graphs.report, *self.merged_graphs.report]

    # -- steps

    def ragged(
        self,
        rows: list[ScheduledSequence],
        adapters: Sequence[Adapter],
        sources: Sequence[int] | None = None,
        merged: Adapter | None = None,
        *,
        is_largest: bool = False,
    ) -> Outputs:
        """Run a step with sequences of any length; there are logits of each one's last known token, and of its drafts.

        sources, merged: see `DecodeSteps.run`. is_largest: take the memory of any adapters.
        """
        is_merged, states = merged is not None, self.decoding.states
        _, lengths = runs = adapter_runs(rows)
        num_tokens = sum(lengths)
        sees = any(row.sees for row in rows)
        bucket = None if sees or num_tokens > self._most_padded else self.mixed.bucket(num_tokens)
        lora = self.lora.largest(lengths) if is_largest else self._ragged_lora(bucket, runs, adapters, merged)
        self._count(bucket, lora, sees=sees)
        host = ragged_batch(
            rows,
            self._layout,
            PagePool.DUMMY,
            attention=self._ragged_attention,
            lora=lora,
            merged=is_merged,
            states=states,
        )
        host.look_up(self.decoder.config.image_lookup)
        host.backends = self.mixed.backends.of(bucket or num_tokens)
        assert host.logit_tokens is not None
        if sources is not None:
            places = torch.tensor(sources)
            sampled = places >= 0
            host.token_ids.add_(self.outputs.index_of(0))[host.logit_tokens[sampled]] = places[sampled]
        batch = self._to_device(host, bucket or num_tokens)
        if sources is not None:
            self.outputs.take_sampled(batch.token_ids)
        logits, chosen = self.outputs.of(len(host.logit_tokens))
        if bucket is None:
            logits = self.decoder.forward(batch, logits)
        else:
            graphs = self.merged_graphs if is_merged else None
            x = self.mixed.run(bucket, num_tokens, lora, states, graphs)
            logits = self.decoder.compute_logits(x, batch, logits)
        self.outputs.pick(logits, chosen)
        return logits, chosen

    def _count(self, bucket: int | None, lora: LoraLaunches | None, *, sees: bool) -> None:
        """Count a ragged step that is not captured. sees: it has rows of images."""
        if self._config.graph_capture == "off":
            self.eager[EagerReason.OFF] += 1
        elif sees:
            self.eager[EagerReason.IMAGES] += 1
        elif bucket is None:
            self.eager[EagerReason.TOKENS] += 1
        elif lora is not None and lora.eager is not None:
            self.eager[lora.eager] += 1

    def _ragged_lora(
        self,
        bucket: int | None,
        runs: tuple[Sequence[int], Sequence[int]],
        adapters: Sequence[Adapter],
        merged: Adapter | None,
    ) -> LoraLaunches | None:
        """Write the adapter tables of a ragged step; return its launches. runs: see `adapter_runs`."""
        if bucket is not None:
            return self.mixed.begin(bucket, adapters, *runs, merged)
        if adapters or merged is not None:
            return self.lora.begin_ragged(adapters, *runs, merged)
        return None

    def _to_device(
        self, batch: StepBatch[GroupedAttention, LoraLaunches], tokens: int
    ) -> StepBatch[GroupedAttention, LoraLaunches]:
        """Copy the batch's tensors to the device: to static columns, each with room for `tokens`, but for images'."""
        values = [batch.token_ids, batch.positions, batch.offset, *batch.page]
        indices = {"logit_tokens": batch.logit_tokens, "kept_tokens": batch.kept_tokens}
        wanted = {name: each for name, each in indices.items() if each is not None}
        columns = self.columns.write([*values, *wanted.values()], tokens)
        names = ("token_ids", "positions", "offset", "page")
        inputs = dict(zip(names, split_columns(columns[: len(values), : len(batch.token_ids)]), strict=True))
        rest = zip(wanted.items(), columns[len(values) :], strict=True)
        indices = {name: column[: len(each)] for (name, each), column in rest}
        where = self._device.torch_device
        media = None if batch.media is None else MediaRows(*(each.to(where) for each in batch.media))
        axes = None if batch.axes is None else AxisPositions(*(each.to(where) for each in batch.axes))
        return replace(batch, **inputs, **indices, media=media, axes=axes)

    # -- capture

    def warm_up(self) -> None:
        """Compile LoRA kernels and choose GEMM backends; `largest_step` and captures compile the other kernels."""
        self.lora.warm_up()
        if self._config.fp8_activations:
            choose_float8_gemms(self.decoder, self._config.max_num_batched_tokens, self._device)
        most_rows = max(self._config.max_num_batched_tokens, self.decoding.sizes[-1])
        self.mixed.backends = choose_row_backends(
            self._config.small_gemm,
            self.decoder,
            self._device,
            most_rows=most_rows,
            most_logits=len(self.outputs.logits),
            captures=self.decoding.captures,
        )
        self.decoding.choose_backends(self.mixed.backends)

    def capture_ahead(self) -> None:
        """Capture every bucket of decode steps and of mixed steps, largest first."""
        if self._config.graph_capture != "ahead":
            return
        for what, steps, forms in self._capturable():
            keys = [(bucket, form) for bucket in reversed(steps.sizes) for form in forms]
            with progress(f"capturing {what}", len(keys)) as advance:
                for bucket, form in keys:
                    steps.prepare(bucket)
                    steps.graphs.capture(bucket, form)
                    advance(1)
            report = steps.graphs.report
            seconds, num_bytes = (sum(getattr(it, name) for it in report) for name in ("seconds", "num_bytes"))
            logger.info("captured %d %s in %.1f s, %s", len(keys), what, seconds, cuda_memory.gib(num_bytes))

    def graph_bytes(self) -> int:
        """Estimate the memory of all graphs from the two largest decode steps and the two largest mixed steps.

        They are captured and freed again.
        """
        total = 0
        for _, steps, forms in self._capturable():
            for bucket in steps.sizes[:-3:-1]:
                steps.prepare(bucket)
                steps.graphs.capture(bucket, forms[1])
            first, *second = (step.num_bytes for step in steps.graphs.report)
            most = len(forms) + _MORE_FORMS + KEPT_ADDRESSES * len(MERGED_FORMS)
            total += first + (len(steps.sizes) * most - 1) * sum(second)
        self.decoding.graphs.clear()
        self.mixed.graphs.clear()
        return total

    def _capturable(self) -> list[_Capturable]:
        """Return the kinds of graphs."""
        found = []
        if self.decoding.captures:
            found.append(_Capturable("graphs", self.decoding, cuda_decode.AHEAD))
        if self._config.graph_capture != "off" and self.mixed.sizes:
            found.append(_Capturable("mixed steps", self.mixed, cuda_piecewise.AHEAD))
        return found

    def largest_step(self) -> None:
        """Run the largest possible step; see `largest_rows`."""
        rows = largest_rows(
            self._layout,
            most_rows=len(self.outputs.logits),
            most_tokens=self._config.max_num_batched_tokens,
            max_model_len=self._max_model_len,
            vocab=self.decoder.config.vocab_size,
        )
        logits, chosen = self.ragged(rows, (), is_largest=True)
        logits = self.outputs.whole(logits)
        if self.decoder.ranks is not None and self.decoder.ranks.rank:
            self.outputs.join_prompt_logprobs(rows)
        else:
            self.outputs.sample(rows, logits, chosen)()

    def close(self) -> None:
        """Free the graphs and their memory."""
        self.decoding.graphs.close()
        self.merged_graphs.close()
        self.mixed.graphs.close()

    def _prepare(self, bucket: int, form: StepForm) -> None:
        """Make a form's buffers hold a step without sequences."""
        (self.mixed if form.part is StepPart.PIECES else self.decoding).prepare(bucket)

    def _capture(self, bucket: int, form: StepForm) -> Callable[[], None]:
        """Capture a step with merged weights."""
        steps = self.mixed if form.part is StepPart.PIECES else self.decoding
        return steps.capture(bucket, form)
