"""Decode steps on a GPU: one token per entry in a bucket's static buffers, captured once per bucket and form.

Tests: tests/core/executors/test_cuda_interpreted.py, tests/core/executors/test_cuda_gemm_backends.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import accumulate

from ...graphs.buffers import DeviceDecodeBuffers
from ...graphs.device import CudaDevice
from ...graphs.runner import DecodeBuckets, EagerReason, GraphRunner, StepForm, StepMode, StepPart
from ...memory.adapters.adapter import Adapter
from ...memory.pages.pool import PagePool
from ...ops import dependent_launch
from ...ops.attention.attention import GroupedAttention
from ...ops.attention.attention_backend import GroupedBackend
from ...ops.gemm.small_gemm_schedule import MAX_ROWS
from ...ops.lora.sgmv_tiles import MERGED_TERMS
from ..config import EngineConfig
from ..model.batch import BY_LIBRARY, GemmBackends, RowBackends, StepBatch
from ..model.decoder import DecoderModel
from ..model.lora.lora_launches import LoraLaunches
from ..model.lora.lora_state_cuda import CudaLoraState
from ..model.lora.sample_adapters import SampleAdapters, random_numbers
from ..model.paged_states_cuda import CudaPagedStates
from ..model.program.torch_step import Residual
from ..model.specs.layers import has_axes
from ..requests.draft_length import most_logits
from ..requests.types import BASE_LORA_INDEX, ScheduledSequence
from .cuda_attention_choice import choose_decode_attention
from .cuda_gemm_backends import choose_gemm_backends, compile_late
from .cuda_merged import MERGED_MODES, MergedGraphs
from .cuda_outputs import Outputs, StepOutputs
from .cuda_sample_rows import scattered_rows

#: Forms of decode steps that are captured ahead.
AHEAD = (StepForm(StepMode.BASE), StepForm(StepMode.LORA))


class DecodeSteps:
    """Fills a bucket's static buffers and replays its graph; what changes embeddings or logits runs around the graph.

    A step reads and writes only static buffers, so it can be captured. Eager and captured steps give the same bits.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: DecoderModel,
        device: CudaDevice,
        *,
        attention: Sequence[GroupedBackend],
        lora: CudaLoraState,
        outputs: StepOutputs,
        max_model_len: int,
    ) -> None:
        """attention: the usual backend, and perhaps another that `choose_attention` compares with it."""
        self._config, self._decoder, self._device = config, model, device
        self._has_axes = has_axes(model.config.layers)
        self._lora, self._outputs, self._max_model_len = lora, outputs, max_model_len
        layout, usual, self._most_rows = model.arena.layout, attention[0], most_logits(config)
        self._buckets = DecodeBuckets(config.max_num_seqs, self._most_rows)
        self.sizes = sizes = self._buckets.sizes
        self._buffers = DeviceDecodeBuffers(
            sizes,
            max_pages_per_row=layout.table_width(max_model_len),
            block_tokens=layout.block_tokens,
            dummy_page=PagePool.DUMMY,
            device=device,
            groups=layout.pages_per_block,
        )
        self.states = self._new_states()
        """Of sequences in layers with a recurrent mixer; None for a model without them."""
        is_capturable = usual.captures or device.torch_device.type == "cpu"
        is_capturable &= model.config.lookup is None  # rows of its tables are fetched from the host's memory
        self.captures = config.graph_capture != "off" and is_capturable
        self.eager: Counter[EagerReason] = Counter()
        """Steps that were not captured."""
        self._attention, *others = ({size: each.decode(size) for size in sizes} for each in attention)
        self._rivals, self._attention_names = others, [each.name for each in attention]
        self.launches = {size: lora.bucket(size) for size in sizes}
        self.mixture_launches = {size: lora.bucket(size, MERGED_TERMS) for size in sizes}
        self.backends: Mapping[int, GemmBackends] = dict.fromkeys(sizes, BY_LIBRARY)
        """The backends of each bucket's GEMMs."""
        self._late: set[int] = set()  # buckets without adapters' launches in whose steps no kernel begins early
        self.graphs: GraphRunner[None] = GraphRunner(self.capture, lambda: device.memory()[0])
        # inputs and outputs of layers captured alone: embeddings, the residual stream, and its pending addend
        self._residual = [model.new_rows(sizes[-1]) for _ in range(3)]
        self._per_layer = model.new_per_layer_embeddings(sizes[-1])

    def use_arena(self) -> None:
        """Use the model's present arena from now on."""
        self.states = self._new_states()

    def _new_states(self) -> CudaPagedStates | None:
        decoder = self._decoder
        has_states = decoder.config.recurrent is not None
        return CudaPagedStates(decoder.config, decoder.arena, self._most_rows) if has_states else None

    def run(
        self,
        bucket: int,
        rows: list[ScheduledSequence],
        adapters: Sequence[Adapter],
        sources: Sequence[int] | None = None,
        merged: Adapter | None = None,
        *,
        merged_graphs: MergedGraphs,
        drafted: Sequence[ScheduledSequence] | None = None,
    ) -> Outputs:
        """Run a step with one token per sequence in the bucket's static buffers, captured if steps are.

        drafted: the sequences of a step with drafts; rows are then of `positions_of`, and each has its last token only.
        Those of one sequence have the same pages: a layer writes K and V of all tokens before any attends. Their number
        is padded to the next bucket.
        sources: see `StepOutputs.indices`. Until the tokens are gathered, the token-id buffer holds indices. merged:
        the adapter added to its weights, for which there are `merged_graphs`.
        """
        if drafted is not None:
            bucket = self._buckets.pick(bucket)
        self._fill(bucket, rows, self._outputs.indices(rows, sources), drafted)
        if sources is not None:
            self._outputs.take_sampled(self._buffers.views[bucket].token_ids)
        mode, launches, graphs = StepMode.BASE, None, self.graphs
        if merged is not None:
            graphs = merged_graphs
            padding = adapters.index(merged) if merged in adapters else BASE_LORA_INDEX
            lora_indices = [row.lora_index for row in rows] + [padding] * (bucket - len(rows))
            launches = self._lora.begin_bucket(adapters, lora_indices, self.mixture_launches[bucket], merged)
            mode = StepMode.MERGED if launches is None else StepMode.MIXTURE
        elif adapters:
            mode = StepMode.LORA
            lora_indices = [row.lora_index for row in rows] + [BASE_LORA_INDEX] * (bucket - len(rows))
            launches = self._lora.begin_bucket(adapters, lora_indices, self.launches[bucket])
        self._decoder.kept_states = None  # a replay does not call `forward`, which resets it
        eager = EagerReason.OFF if not self.captures else None if launches is None else launches.eager
        if eager is not None:
            self.eager[eager] += 1
            return self._step(bucket, launches, merged is not None)()
        if launches is None:
            graphs.replay(bucket, StepForm(mode))
        elif self._lora.of_model.segments.rows:
            batch = self._batch(bucket, launches, merged is not None)
            form = _form(mode, StepPart.LAYERS, launches)
            return self._around_layers(batch, partial(graphs.replay, bucket, form))
        else:
            graphs.replay(bucket, _form(mode, StepPart.WHOLE, launches))
        return self._outputs.of(bucket)

    def _around_layers(self, batch: StepBatch[GroupedAttention, LoraLaunches], layers: Callable[[], None]) -> Outputs:
        """Run a decode step whose adapters change embeddings or logits, which are computed before and after layers."""
        bucket = len(batch.token_ids)
        embedded, rows, added = (each[:bucket] for each in self._residual)
        self._decoder.embed(batch, embedded)
        if (embeddings := self._decoder.make_per_layer_embeddings(batch, embedded)) is not None:
            self._per_layer[:bucket].copy_(embeddings)
        layers()
        logits, chosen = self._outputs.of(bucket)
        logits = self._decoder.compute_logits(Residual(rows, added), batch, logits)
        self._outputs.pick(logits, chosen)
        return logits, chosen

    def _fill(
        self,
        bucket: int,
        rows: Sequence[ScheduledSequence],
        indices: Sequence[int] | None = None,
        drafted: Sequence[ScheduledSequence] | None = None,
    ) -> None:
        """indices: written in place of the sequences' tokens. drafted: see `run`."""
        tokens = [row.tokens[-1] for row in rows] if indices is None else indices
        positions = [row.start for row in rows] if drafted is None else [row.kv_len - 1 for row in rows]
        shifts = _shifts(rows) if self._has_axes else ()
        views = self._buffers.fill(bucket, tokens, positions, [row.pages for row in rows], shifts=shifts)
        self._attention[bucket].plan(range(bucket + 1), views.page_table, views.kv_lens, views.tables)
        if self.states is not None:
            qo_indptr = range(bucket + 1) if drafted is None else _padded_indptr(drafted, bucket)
            self.states.set_step(rows if drafted is None else drafted, qo_indptr)

    def _batch(
        self, bucket: int, lora: LoraLaunches | None, merged: bool = False, backends: GemmBackends | None = None
    ) -> StepBatch[GroupedAttention, LoraLaunches]:
        """A bucket's batch in static buffers. backends: others than the bucket's own."""
        views = self._buffers.views[bucket]
        return StepBatch(
            token_ids=views.token_ids,
            positions=views.positions,
            offset=views.offset,
            page=views.page,
            attention=self._attention[bucket],
            lora=lora,
            merged=merged,
            backends=self.backends[bucket] if backends is None else backends,
            states=self.states,
        )

    def _step(
        self, bucket: int, lora: LoraLaunches | None, merged: bool = False, backends: GemmBackends | None = None
    ) -> Callable[[], Outputs]:
        """Make a bucket's step, from static buffers to static buffers, but for logits that adapters change. backends:
        see `_batch`.
        """
        batch = self._batch(bucket, lora, merged, backends)
        memory, chosen = self._outputs.of(bucket)

        def step() -> Outputs:
            logits = self._decoder.forward(batch, memory)
            self._outputs.pick(logits, chosen)
            return logits, chosen

        return step

    def _layers(self, bucket: int, lora: LoraLaunches | None, merged: bool) -> Callable[[], None]:
        """Make the layers of a bucket's step, from static buffers to static buffers."""
        batch = self._batch(bucket, lora, merged)
        embedded, rows, added = (each[:bucket] for each in self._residual)
        per_layer = None if self._decoder.config.per_layer_embeddings is None else self._per_layer[:bucket]

        def layers() -> None:
            rows.copy_(embedded)  # layers may run twice when they are captured
            x = self._decoder.run_layers(rows, batch, per_layer)
            added.zero_() if x.added is None else added.copy_(x.added)

        return layers

    # -- before the first step

    def choose_backends(self, by_rows: RowBackends) -> None:
        """Choose the GEMM backends of each bucket, and the buckets whose kernels begin early.

        by_rows: those chosen for steps of more rows than the kernels for few take.
        """
        few = choose_gemm_backends(
            self._config.small_gemm,
            self._decoder,
            self._lora,
            self.sizes,
            self._device,
            seconds=self._seconds if self.captures else None,
        )
        self.backends = {size: by_rows.of(size) if size > MAX_ROWS else each for size, each in few.items()}
        if self.captures and dependent_launch.begins_early(self._device.torch_device):
            compile_late(self._decoder, self.backends)
            self._late = dependent_launch.better_late(
                self.sizes, lambda bucket: self._seconds(bucket, self.backends[bucket], None)
            )

    def _seconds(self, bucket: int, backends: GemmBackends, samples: SampleAdapters | None) -> float:
        """Return the device time of a bucket's captured step. samples: its adapters; None: it has none."""
        self._fill(bucket, [])
        launches = None if samples is None else samples.launches(bucket)
        return self._device.seconds(self._step(bucket, launches, backends=backends))

    def choose_attention(self) -> None:
        """Choose each bucket's decode attention, where there are two; the arena must be the final one, without data,
        and nothing captured.
        """
        if self._rivals and self.captures:
            with random_numbers(self._decoder.arena.pages):  # as KV
                self._attention = choose_decode_attention(
                    dict(self._attention),
                    self._rivals[0],
                    self._attention_names,
                    self._decoder,
                    self._device,
                    plan=self._plan_samples,
                    seconds=lambda bucket: self._device.seconds(self._step(bucket, None)),
                )

    def _plan_samples(self, bucket: int, attention: GroupedAttention) -> None:
        self._attention[bucket] = attention
        self._fill(bucket, scattered_rows(bucket, self._decoder.arena, self._max_model_len))

    def prepare(self, bucket: int) -> None:
        """Make a bucket's buffers and the adapter tables hold a step without sequences."""
        self._fill(bucket, [])
        self._lora.rest()

    def capture(self, bucket: int, form: StepForm) -> Callable[[], None]:
        """Capture a bucket; its attention must have been planned. See `GraphRunner`."""
        mode, launches = form.mode, {StepMode.LORA: self.launches, StepMode.MIXTURE: self.mixture_launches}
        lora = launches[mode][bucket].variant(form.scales, form.room, form.mixture) if mode in launches else None
        make = self._layers if form.part is StepPart.LAYERS else self._step
        is_late = mode in (StepMode.BASE, StepMode.MERGED) and bucket in self._late  # the same launches
        with dependent_launch.only(False) if is_late else nullcontext():
            return self._device.capture(make(bucket, lora, mode in MERGED_MODES))


def _shifts(rows: Sequence[ScheduledSequence]) -> list[int]:
    """Each entry's position in rope, less its index in its sequence: images may take fewer positions than tokens."""
    return [row.position_shift for row in rows]


def _form(mode: StepMode, part: StepPart, lora: LoraLaunches) -> StepForm:
    return StepForm(mode, part, lora.scales, lora.room, lora.mixture_groups)


def _padded_indptr(sequences: Sequence[ScheduledSequence], bucket: int) -> Sequence[int]:
    """See `PagedStates.set_step`: after the sequences, padding of one token each, then of none, to `bucket` entries."""
    ends = list(accumulate(len(sequence.tokens) for sequence in sequences))
    padded = [0, *ends, *range(ends[-1] + 1, bucket + 1)]
    return padded + [bucket] * (bucket + 1 - len(padded))
