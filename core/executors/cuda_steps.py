"""Steps on a GPU: ragged steps run eagerly or in pieces, decode steps in static buffers, captured once per bucket.

Tests: tests/core/executors/test_cuda_interpreted.py, tests/core/executors/test_cuda_executor_gpu.py.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from ...graphs.buffers import DeviceDecodeBuffers, num_columns, split_columns
from ...graphs.device import CudaDevice, DeviceUpload, Download
from ...graphs.runner import (
    CapturedStep,
    DecodeBuckets,
    EagerReason,
    GraphRunner,
    StepForm,
    StepMode,
    StepPart,
)
from ...memory.adapters.adapter import Adapter
from ...memory.pages.arena import Arena
from ...memory.pages.pool import PagePool
from ...memory.pages.states import StateSlots
from ...ops import dependent_launch
from ...ops.attention import GroupedAttention
from ...ops.attention_backend import GroupedBackend
from ...ops.ranks import Collectives
from ...ops.sampling import TorchSampling
from ..config import EngineConfig
from ..model.batch import BY_LIBRARY, GemmBackends, StepBatch, column_width, ragged_batch
from ..model.decoder import DecoderModel
from ..model.layer import Residual
from ..model.load_progress import progress
from ..model.lora_launches import LoraLaunches
from ..model.lora_state_cuda import CudaLoraState, StepLimits
from ..model.pooling import add_pooled
from ..model.sampler import (
    DeviceSampling,
    add_prompt_logprobs,
    max_fetched_values,
    needs_logits,
    prompt_logprob_slices,
    sample_tokens,
)
from ..requests.draft_length import most_logits
from ..requests.grammars import grammars_of
from ..requests.request_params import MAX_ALLOWED_TOKENS, RequestParams
from ..requests.types import BASE_LORA_INDEX, ScheduledSequence, StepResult, adapter_runs
from . import cuda_memory, cuda_piecewise
from .cuda_attention_choice import choose_decode_attention
from .cuda_gemm_backends import choose_gemm_backends
from .cuda_merged import KEPT_PLACES, MERGED_FORMS, MERGED_MODES, PlacedGraphs
from .cuda_piecewise import PiecewiseSteps, token_buckets

logger = logging.getLogger(__name__)

#: Tokens of each sequence in a step that attention is timed with.
_SAMPLE_TOKENS = 1024

#: Forms of a bucket that are captured when they are needed, for which memory is set aside: with vectors, with room for
#: more tiles, and layers alone.
_MORE_FORMS = 3

#: A step's logits, at least one row per sequence; and `[2, rows]` int64: the argmax, and 1 if it is defined (no NaN or
#: +inf). Both are on the device, perhaps still being computed. With several TP ranks, only the first rank's `[2, rows]`
#: is valid.
Outputs = tuple[torch.Tensor, torch.Tensor]


class _Asks(NamedTuple):
    """Needs of any sequence in a step."""

    logits: bool
    """More than the argmax of its logits."""
    prompt_logprobs: bool
    """Log-probabilities of its prompt."""
    pooled: bool
    """Sums of its hidden states."""
    tokens: bool
    """Its previous tokens on the host."""


#: Forms of decode steps that are captured ahead.
_AHEAD = (StepForm(StepMode.BASE), StepForm(StepMode.LORA))


class _Capturable(NamedTuple):
    """A kind of graphs."""

    name: str
    graphs: GraphRunner[None]
    prepare: Callable[[int], None]
    """Fills a bucket's buffers with an empty step."""
    sizes: Sequence[int]
    forms: Sequence[StepForm]
    """Those captured ahead; the second has adapters."""


class CudaSteps:
    """Owns a step's buffers and graphs, all allocated once; weights and arena have other owners.

    A step's inputs reach static buffers through pinned memory, and its tokens come back in one copy. The host waits
    only for that copy and for adapters that are still being read. A step launched before the previous step's tokens are
    back gathers them on the device. All work goes to one stream, so a step overwrites static buffers only after earlier
    steps.

    Each TP rank has its columns of the logits in the static buffers. The first rank finds the argmax over all ranks
    within the step. If a sequence needs more than that, it gathers whole rows. It also samples.
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
        self._config = config
        self.decoder = model
        self._device = device
        self._max_model_len = max_model_len
        self._layout = layout = arena.layout
        rows, tokens, where = most_logits(config), config.max_num_batched_tokens, device.torch_device
        self._most_padded = padded = min(config.mixed_graph_tokens, tokens)
        self._most_rows, self._buckets = rows, DecodeBuckets(config.max_num_seqs, rows)
        self._sizes = sizes = self._buckets.sizes
        self._ragged_attention = attention.ragged()
        self._attention = {size: attention.decode(size) for size in sizes}
        self._rivals = {} if rival is None else {size: rival.decode(size) for size in sizes}
        self._attention_names = attention.name, "" if rival is None else rival.name
        self._buffers = DeviceDecodeBuffers(
            sizes,
            max_pages_per_row=layout.table_width(max_model_len),
            block_tokens=layout.block_tokens,
            dummy_page=PagePool.DUMMY,
            device=device,
            groups=layout.pages_per_block,
        )
        self.logits = torch.zeros(rows, model.logits_width, device=where)
        vocab = torch.arange(model.config.vocab_size, device=where)
        self._samplable = torch.cat((torch.zeros(2 * rows, dtype=torch.long, device=where), vocab))
        """The tokens sampled by the last step, and the other outputs of `_pick`; followed by every token id of the
        vocabulary.
        """
        self._chosen = self._samplable[: 2 * rows]
        self._views: dict[int, Outputs] = {}  # of logits and `_chosen`, by number of rows
        self._download = Download(device, 8 * max_fetched_values(rows))
        self._inputs = torch.zeros(
            (num_columns(layout.pages_per_block) + 2) * (tokens + 1), dtype=torch.long, device=where
        )
        self._upload = DeviceUpload(device, self._inputs.numel() * self._inputs.itemsize)
        adapters = min(config.max_num_seqs, config.max_adapters_per_step or config.max_num_seqs)
        self.lora = CudaLoraState(
            model.config,
            arena.pages,
            layout,
            StepLimits(config.max_lora_rank, adapters, rows, tokens, padded),
            max_stall=config.max_load_stall_seconds,
            make_copy=partial(DeviceUpload, device),
        )
        self.bucket_lora = {size: self.lora.bucket(size) for size in sizes}
        self.mixture_lora = {size: self.lora.bucket(size, passes=2) for size in sizes}
        self.mixed = PiecewiseSteps(
            model,
            device,
            attention=self._ragged_attention,
            lora=self.lora,
            columns=self._inputs,
            sizes=token_buckets(padded),
        )
        # the backends of each bucket's GEMMs
        self.backends: Mapping[int, GemmBackends] = dict.fromkeys(sizes, BY_LIBRARY)
        self._late: set[int] = set()  # buckets of whose base steps no kernel begins before another ends
        self.graphs: GraphRunner[None] = GraphRunner(self._capture, lambda: device.memory()[0])
        # embeddings, residual stream, and what is to be added to it, of layers that are captured alone
        self._residual = [model.new_rows(rows) for _ in range(3)]
        self.eager: Counter[EagerReason] = Counter()
        """Steps that were not captured, since the arena is the final one."""
        self._sampling = TorchSampling()
        self._grammars = grammars_of(config.tokenizer_dir, model.config.vocab_size, model.config.eos_token_ids)
        # for the last list of rows
        self._last_asks: tuple[Sequence[ScheduledSequence], _Asks] = (), _Asks(False, False, False, False)
        self._states = model.new_states(rows)
        can_capture = attention.captures or where.type == "cpu"
        self._captures = config.graph_capture != "off" and can_capture
        # TP ranks make merged weights at their own pace, but must capture together: in a step that all of them have
        is_ahead = self._captures and config.graph_capture == "ahead" and model.ranks is None
        ahead = sizes[::-1] if is_ahead else ()
        self.merged_graphs = PlacedGraphs(self._capture, self._prepare, ahead)

    def use_arena(self, arena: Arena) -> None:
        """Use another arena of the same layout from now on; nothing may have been captured yet."""
        self.decoder.use_arena(arena)
        self._states = self.decoder.new_states(self._most_rows)
        self.lora.use_arena(arena.pages)
        if self._config.graph_capture != "off":
            self.mixed.allow_captures()
        self.eager.clear()

    @property
    def captured(self) -> Sequence[CapturedStep]:
        """The captured buckets and modes, in order of capture, with merged weights last."""
        return [*self.graphs.report, *self.merged_graphs.report]

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

        sources: as in `decode`. merged: the adapter added to its weights. is_largest: take the memory of any adapters.
        """
        is_merged = merged is not None
        _, lengths = runs = adapter_runs(rows)
        num_tokens = sum(lengths)
        bucket = None if num_tokens > self._most_padded else self.mixed.bucket(num_tokens)
        lora = self.lora.largest(lengths) if is_largest else self._ragged_lora(bucket, runs, adapters, merged)
        if self._config.graph_capture == "off":
            self.eager[EagerReason.OFF] += 1
        elif bucket is None:
            self.eager[EagerReason.TOKENS] += 1
        elif lora is not None and lora.eager is not None:
            self.eager[lora.eager] += 1
        host = ragged_batch(
            rows,
            self._layout,
            PagePool.DUMMY,
            attention=self._ragged_attention,
            lora=lora,
            merged=is_merged,
            states=self._states,
        )
        assert host.logit_tokens is not None
        if sources is not None:
            places = torch.tensor(sources)
            sampled = places >= 0
            host.token_ids.add_(len(self._chosen))[host.logit_tokens[sampled]] = places[sampled]
        batch = self._to_device(host, bucket or num_tokens)
        if sources is not None:
            self._take_sampled(batch.token_ids)
        logits, chosen = self._outputs(len(host.logit_tokens))
        if bucket is None:
            self.decoder.forward(batch, logits)
        else:
            graphs = self.merged_graphs if is_merged else None
            x = self.mixed.run(bucket, num_tokens, lora, self._states, graphs)
            self.decoder.compute_logits(x, batch, logits)
        self._pick(logits, chosen)
        return logits, chosen

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

    def decode(
        self,
        bucket: int,
        rows: list[ScheduledSequence],
        adapters: Sequence[Adapter],
        sources: Sequence[int] | None = None,
        merged: Adapter | None = None,
        *,
        has_drafts: bool = False,
    ) -> Outputs:
        """Run a step with one token per sequence in the bucket's static buffers, captured if steps are.

        has_drafts: rows are of `positions_of`, and each has its last token only. Those of one sequence have the same
        pages: a layer writes K and V of all tokens before any attends. Their number is padded to the next bucket.
        sources: for each entry the index in the last step of the sequence that sampled its token, or -1 if the entry
        has its own token; None if all have. Until the tokens are gathered, the token-id buffer holds indices into
        `_samplable`. merged: as in `ragged`.
        """
        if has_drafts:
            bucket = self._buckets.pick(bucket)
        self._fill(bucket, rows, self._places(rows, sources), has_drafts=has_drafts)
        if sources is not None:
            self._take_sampled(self._buffers.views[bucket].token_ids)
        mode, launches, graphs = StepMode.BASE, None, self.graphs
        if merged is not None:
            graphs = self.merged_graphs
            padding = adapters.index(merged) if merged in adapters else BASE_LORA_INDEX
            lora_indices = [row.lora_index for row in rows] + [padding] * (bucket - len(rows))
            launches = self.lora.begin_bucket(adapters, lora_indices, self.mixture_lora[bucket], merged)
            mode = StepMode.MERGED if launches is None else StepMode.MIXTURE
        elif adapters:
            mode = StepMode.LORA
            lora_indices = [row.lora_index for row in rows] + [BASE_LORA_INDEX] * (bucket - len(rows))
            launches = self.lora.begin_bucket(adapters, lora_indices, self.bucket_lora[bucket])
        self.decoder.kept_states = None  # a replay does not call `forward`, which resets it
        eager = EagerReason.OFF if not self._captures else None if launches is None else launches.eager
        if eager is not None:
            self.eager[eager] += 1
            self._step(bucket, launches, merged is not None)()
        elif launches is None:
            graphs.replay(bucket, StepForm(mode))
        elif self.lora.model_segments.rows:
            batch = self._batch(bucket, launches, merged is not None)
            form = _form(mode, StepPart.LAYERS, launches)
            self._around_layers(batch, partial(graphs.replay, bucket, form))
        else:
            graphs.replay(bucket, _form(mode, StepPart.WHOLE, launches))
        return self._outputs(bucket)

    def _around_layers(self, batch: StepBatch[GroupedAttention, LoraLaunches], layers: Callable[[], None]) -> None:
        """Run a decode step whose adapters change embeddings or logits, which are computed before and after layers."""
        bucket = len(batch.token_ids)
        embedded, rows, added = (each[:bucket] for each in self._residual)
        self.decoder.embed(batch, embedded)
        layers()
        logits, chosen = self._outputs(bucket)
        self.decoder.compute_logits(Residual(rows, self.decoder.config.norm, added), batch, logits)
        self._pick(logits, chosen)

    def sample(
        self, rows: Sequence[ScheduledSequence], logits: torch.Tensor, chosen: torch.Tensor
    ) -> Callable[[], StepResult]:
        """Sample the tokens of the last step, and compute its prompt log-probabilities; the returned function waits for
        both.
        """
        eos, asks = self.decoder.config.eos_token_ids, self._asks_of(rows)
        if asks.logits:
            begun = DeviceSampling(
                rows, chosen, logits, eos_token_ids=eos, fetch=self._download, grammars=self._grammars
            )
            self._chosen[: len(begun.tokens)].copy_(begun.tokens)
            read = begun.result
        else:
            fetched = self._download(chosen)

            def read() -> StepResult:
                tokens, healthy = fetched().tolist()
                if 0 in healthy:
                    tokens = [token if good else -1 for token, good in zip(tokens, healthy, strict=True)]
                return sample_tokens(rows, tokens, None, self._sampling, eos)

        return partial(self._read_kept_states, rows, read) if asks.prompt_logprobs or asks.pooled else read

    @torch.inference_mode()
    def _read_kept_states(self, rows: Sequence[ScheduledSequence], read: Callable[[], StepResult]) -> StepResult:
        """Add prompt log-probabilities and pooled states to the result that `read` returns."""
        result, asks = read(), self._asks_of(rows)
        if asks.prompt_logprobs:
            vocab = self.decoder.config.vocab_size
            add_prompt_logprobs(rows, self.decoder.prompt_logits, self._sampling, vocab, result)
        if asks.pooled:
            add_pooled(rows, self.decoder.hidden_states, result)
        return result

    def whole(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the last step's logits with all ranks' columns, on the first rank; all ranks must call it."""
        return self.decoder.gathered(logits)

    def join_prompt_logprobs(self, rows: Sequence[ScheduledSequence]) -> None:
        """Do another rank's share of the prompt log-probabilities that `sample` computes on the first rank."""
        for begin, end in prompt_logprob_slices(rows, self.decoder.config.vocab_size):
            self.decoder.prompt_logits(begin, end)

    def asks_logits(self, rows: Sequence[ScheduledSequence]) -> bool:
        """True if a sequence needs more than the argmax of its logits."""
        return self._asks_of(rows).logits

    def look_back(self, rows: Sequence[ScheduledSequence]) -> bool:
        """True if sampling for a sequence needs its previous tokens on the host; see `ScheduledSequence.looks_back`."""
        return self._asks_of(rows).tokens

    def _asks_of(self, rows: Sequence[ScheduledSequence]) -> _Asks:
        """Return the needs of a step, found once per list: decode steps reuse their list, and its needs stay the
        same.
        """
        if rows is not self._last_asks[0]:
            logits, prompt_logprobs = any(map(needs_logits, rows)), any(row.wants_prompt_logprobs for row in rows)
            pooled = any(row.params.pooling is not None for row in rows)
            self._last_asks = rows, _Asks(logits, prompt_logprobs, pooled, any(row.looks_back for row in rows))
        return self._last_asks[1]

    def _places(self, rows: Sequence[ScheduledSequence], sources: Sequence[int] | None) -> Sequence[int] | None:
        """Indices of the entries' tokens in `_samplable`; None if the entries have their tokens."""
        if sources is None or -1 not in sources:
            return sources
        own = len(self._chosen)
        return [own + row.tokens[0] if at < 0 else at for row, at in zip(rows, sources, strict=True)]

    def _take_sampled(self, token_ids: torch.Tensor) -> None:
        """Replace indices into `_samplable` by the tokens there, in stream order; the first rank has sampled them."""
        if (ranks := self.decoder.ranks) is not None:
            ranks.lead(self._chosen)
        token_ids.copy_(self._samplable.index_select(0, token_ids))

    def _fill(
        self,
        bucket: int,
        rows: list[ScheduledSequence],
        places: Sequence[int] | None = None,
        *,
        has_drafts: bool = False,
    ) -> None:
        tokens = [row.tokens[-1] for row in rows] if places is None else places
        positions = [row.kv_len - 1 for row in rows] if has_drafts else [row.start for row in rows]
        views = self._buffers.fill(bucket, tokens, positions, [row.pages for row in rows])
        self._attention[bucket].plan(range(bucket + 1), views.page_table, views.kv_lens, views.tables)
        if self._states is not None:
            self._states.set_step(rows, range(bucket + 1))

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
            states=self._states,
        )

    def _step(
        self, bucket: int, lora: LoraLaunches | None, merged: bool = False, backends: GemmBackends | None = None
    ) -> Callable[[], None]:
        """Make a bucket's step, from static buffers to static buffers. backends: see `_batch`."""
        batch = self._batch(bucket, lora, merged, backends)
        logits, chosen = self._outputs(bucket)

        def step() -> None:
            self.decoder.forward(batch, logits)
            self._pick(logits, chosen)

        return step

    def _layers(self, bucket: int, lora: LoraLaunches | None, merged: bool) -> Callable[[], None]:
        """Make the layers of a bucket's step, from static buffers to static buffers."""
        batch = self._batch(bucket, lora, merged)
        embedded, rows, added = (each[:bucket] for each in self._residual)

        def layers() -> None:
            x = Residual(rows.copy_(embedded), self.decoder.config.norm)  # layers may run twice when they are captured
            self.decoder.run_layers(x, batch)
            assert x.added is not None
            added.copy_(x.added)

        return layers

    def _pick(self, logits: torch.Tensor, out: torch.Tensor) -> None:
        """Write to out `[2, rows]` int64 the argmax of each row, and 1 if it is defined: no NaN and no +inf."""
        best, tokens = logits.max(-1)
        if (ranks := self.decoder.ranks) is not None:
            found = _of_all_ranks(best, tokens, ranks, self.decoder.config.vocab_size)
            if found is None:
                return
            best, tokens = found
        out[0].copy_(tokens)
        out[1].copy_(best.isfinite())

    def _outputs(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Static logits `[rows, vocab]`, and the output `[2, rows]` of `_pick`, contiguous."""
        if (found := self._views.get(rows)) is None:
            found = self._views[rows] = self.logits[:rows], self._chosen[: 2 * rows].view(2, rows)
        return found

    def _to_device(
        self, batch: StepBatch[GroupedAttention, LoraLaunches], tokens: int
    ) -> StepBatch[GroupedAttention, LoraLaunches]:
        """Copy the batch's tensors to static buffers on the device, in one copy; each has room for `tokens`, padded
        with zeros.
        """
        wanted = batch.logit_tokens, batch.kept_tokens
        indices = [each for each in wanted if each is not None]
        values = [batch.token_ids, batch.positions, batch.offset, *batch.page, *indices]
        columns = torch.zeros(len(values), column_width(tokens), dtype=torch.long)
        for column, value in zip(columns, values, strict=True):
            column[: len(value)] = value
        static = self._inputs[: columns.numel()].view(columns.shape)
        self._upload(static, columns)
        inputs = split_columns(static[: len(values) - len(indices), : len(batch.token_ids)])
        names = ("token_ids", "positions", "offset", "page")
        rest = [
            column[: len(value)] for column, value in zip(static[len(values) - len(indices) :], indices, strict=True)
        ]
        moved = dict(zip(("logit_tokens", "kept_tokens"), rest, strict=False))
        return replace(batch, **dict(zip(names, inputs, strict=True)), **moved)

    # -- capture

    def warm_up(self) -> None:
        """Compile LoRA kernels and choose GEMM backends; `largest_step` and captures compile the other kernels."""
        self.lora.warm_up()
        self.backends = choose_gemm_backends(
            self._config.small_gemm,
            self.decoder,
            self.lora,
            self._sizes,
            self._device,
            seconds=self._seconds if self._captures else None,
        )
        if self._captures and dependent_launch.begins_early(self._device.torch_device):
            self._late = dependent_launch.better_late(
                self._sizes, lambda bucket: self._seconds(bucket, self.backends[bucket], False)
            )

    def _seconds(self, bucket: int, backends: GemmBackends, has_lora: bool) -> float:
        """Return the device time of a bucket's captured step. has_lora: with the sample adapters of `lora.samples`."""
        self._fill(bucket, [])
        launches = self.lora.sample(bucket) if has_lora else None
        return self._device.seconds(self._step(bucket, launches, backends=backends))

    def choose_attention(self) -> None:
        """Choose each bucket's decode attention, where there are two; the arena must be the final one, without data,
        and nothing captured.
        """
        if self._rivals and self._captures:
            with self.lora.samples():
                self._attention = choose_decode_attention(
                    dict(self._attention),
                    self._rivals,
                    self._attention_names,
                    self.decoder,
                    self._device,
                    plan=self._plan_samples,
                    seconds=lambda bucket: self._device.seconds(self._step(bucket, None)),
                )

    def _plan_samples(self, bucket: int, attention: GroupedAttention) -> None:
        self._attention[bucket] = attention
        self._fill(bucket, self._sample_rows(bucket))

    def _sample_rows(self, count: int) -> list[ScheduledSequence]:
        """Decoding sequences whose pages lie all over the arena."""
        length, num_pages = min(_SAMPLE_TOKENS, self._max_model_len), len(self.lora.arena)
        width = self._layout.table_width(length)
        return [
            self._row(index, [0], length - 1, [(index * width + at) % num_pages for at in range(width)])
            for index in range(count)
        ]

    def _row(
        self, index: int, tokens: list[int], start: int, pages: list[int], params: RequestParams | None = None
    ) -> ScheduledSequence:
        """A sequence of no request, of the base model."""
        return ScheduledSequence(
            request_id=str(index),
            lora_index=BASE_LORA_INDEX,
            tokens=tokens,
            start=start,
            pages=pages,
            params=params or RequestParams(),
            seed=0,
            samples=True,
            token_ids=tokens,
            num_prompt_tokens=start + len(tokens),
            states=StateSlots([[PagePool.DUMMY] * self._layout.state_pages]) if self._layout.states else None,
        )

    def capture_ahead(self) -> None:
        """Capture every bucket of decode steps and of mixed steps, largest first."""
        if self._config.graph_capture != "ahead":
            return
        for what, graphs, prepare, sizes, forms in self._capturable():
            keys = [(bucket, form) for bucket in reversed(sizes) for form in forms]
            with progress(f"capturing {what}", len(keys)) as advance:
                for bucket, form in keys:
                    prepare(bucket)
                    graphs.capture(bucket, form)
                    advance(1)
            seconds, num_bytes = (sum(getattr(it, name) for it in graphs.report) for name in ("seconds", "num_bytes"))
            logger.info("captured %d %s in %.1f s, %s", len(keys), what, seconds, cuda_memory.gib(num_bytes))

    def graph_bytes(self) -> int:
        """Estimate the memory of all graphs from the two largest decode steps and the two largest mixed steps.

        They are captured and freed again.
        """
        total = 0
        for _, graphs, prepare, sizes, forms in self._capturable():
            for bucket in sizes[:-3:-1]:
                prepare(bucket)
                graphs.capture(bucket, forms[1])
            first, *second = (step.num_bytes for step in graphs.report)
            most = len(forms) + _MORE_FORMS + KEPT_PLACES * len(MERGED_FORMS)
            total += first + (len(sizes) * most - 1) * sum(second)
        self.graphs.clear()
        self.mixed.graphs.clear()
        return total

    def _capturable(self) -> list[_Capturable]:
        """Return the kinds of graphs."""
        found = []
        if self._captures:
            found.append(_Capturable("graphs", self.graphs, self._prepare, self._sizes, _AHEAD))
        if self._config.graph_capture != "off" and self.mixed.sizes:
            mixed = self.mixed
            found.append(_Capturable("mixed steps", mixed.graphs, mixed.prepare, mixed.sizes, cuda_piecewise.AHEAD))
        return found

    def largest_step(self) -> None:
        """Run the largest possible step, with KV in the dummy page: a prefill of the most tokens, sampling, prompt
        logprobs.

        It samples for as many sequences as a step may have, and computes log-probabilities of as many prompt tokens.
        The last sequence has one token, so kernels for decoding sequences among prompts are loaded, too.
        """
        config, vocab = self._config, self.decoder.config.vocab_size
        allowed = tuple(range(min(vocab, MAX_ALLOWED_TOKENS)))
        params = RequestParams(
            top_k=max(1, vocab // 2), top_p=0.9, min_p=0.1, prompt_logprobs=1, allowed_token_ids=allowed
        )
        decoding = [1] * (self._most_rows > 1)
        lengths, left = [], config.max_num_batched_tokens - len(decoding)
        while left and len(lengths) < self._most_rows - len(decoding):
            lengths.append(min(left, self._max_model_len))
            left -= lengths[-1]
        rows = []
        for length in lengths + decoding:
            tokens, pages = [0] * length, [PagePool.DUMMY] * self._layout.table_width(length)
            rows.append(self._row(len(rows), tokens, 0, pages, params))
        logits, chosen = self.ragged(rows, (), is_largest=True)
        logits = self.whole(logits)
        if self.decoder.ranks is not None and self.decoder.ranks.rank:
            self.join_prompt_logprobs(rows)
        else:
            self.sample(rows, logits, chosen)()

    def close(self) -> None:
        """Free the graphs and their memory."""
        self.graphs.close()
        self.merged_graphs.close()
        self.mixed.graphs.close()

    def _prepare(self, bucket: int) -> None:
        """Make a bucket's buffers and the adapter tables hold a step without sequences."""
        self._fill(bucket, [])
        self.lora.rest()

    def _capture(self, bucket: int, form: StepForm) -> Callable[[], None]:
        """Capture a bucket; its attention must have been planned."""
        if form.part is StepPart.PIECES:
            return self.mixed.capture(bucket, form)
        mode, launches = form.mode, {StepMode.LORA: self.bucket_lora, StepMode.MIXTURE: self.mixture_lora}
        lora = launches[mode][bucket].variant(form.scales, form.room, form.mixture) if mode in launches else None
        make = self._layers if form.part is StepPart.LAYERS else self._step
        is_late = mode is StepMode.BASE and bucket in self._late
        with dependent_launch.only(False) if is_late else nullcontext():
            return self._device.capture(make(bucket, lora, mode in MERGED_MODES))


def _form(mode: StepMode, part: StepPart, lora: LoraLaunches) -> StepForm:
    return StepForm(mode, part, lora.scales, lora.room, lora.mixture_groups)


def _of_all_ranks(
    best: torch.Tensor, tokens: torch.Tensor, ranks: Collectives, vocab: int
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the largest logit of each row and its token over all ranks; None on ranks other than the first.

    NaN counts as the largest, as in `max`. Token ids are exact in float32 below 2^24.
    """
    first = vocab * ranks.rank // ranks.size
    pairs = ranks.gather(torch.stack((best, (tokens + first).to(best.dtype)), -1), 2 * ranks.size)
    if ranks.rank:
        return None
    best, at = pairs[:, ::2].max(-1)
    return best, pairs[:, 1::2].gather(-1, at[:, None])[:, 0].long()
