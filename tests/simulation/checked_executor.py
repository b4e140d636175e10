"""An executor without tensors that remembers the content of each position of the arena and checks every step."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from chorus.core.config import EngineConfig
from chorus.core.executors.base import ExecutorBase, ModelInfo
from chorus.core.requests.blocks import Blocks
from chorus.core.requests.draft_length import MOST_DRAFTS
from chorus.core.requests.types import BASE_LORA_INDEX, ScheduledSequence, StepPlan, StepResult, TokenLogprobs
from chorus.graphs.runner import DecodeBuckets
from chorus.memory.adapters.adapter import Adapter
from chorus.memory.pages.layout import PageLayout
from chorus.memory.pages.pool import PageKind, PagePool
from chorus.memory.pages.prefix import PrefixCache
from chorus.memory.pages.states import StateShape

from .asked import Asked, Violation, promise
from .checked_adapters import CheckedAdapters
from .checked_shadow import CheckedShadow
from .checked_swaps import CheckedSwaps
from .made_up_grammar import allowed, made_up_grammars, sees
from .made_up_images import are_whole
from .made_up_model import EOS, MAX_MODEL_LEN, VOCAB, Memory, content_of, kv_of, next_token, seconds_of
from .virtual_reads import VirtualClock


class CheckedExecutor(ExecutorBase):
    """Executes plans on the memory of contents. A wrong plan raises Violation. The engine turns it into a request's
    error, so it is kept in `violations`, too.

    shadow, swaps: None where it has no merged mode, or KV is only computed again. asked: requests by id. on_plan: is
    called with each new plan, but not with the rows of a failed step that run alone. begins_anew: set before each step
    of the engine, as a step that is dropped is planned again under its number.
    """

    def __init__(
        self,
        config: EngineConfig,
        adapters: CheckedAdapters,
        clock: VirtualClock,
        memory: Memory,
        asked: Mapping[str, Asked],
        reached: Counter[str],
        shadow: CheckedShadow | None = None,
        swaps: CheckedSwaps | None = None,
        windows: tuple[int | None, ...] = (None,),
        state_pages: int = 0,
        image_blocks: Blocks | None = None,
    ) -> None:
        """windows: of the layers of the made-up model with attention; none: there are none, and tokens take no page.
        state_pages: of a state of its other layers; with speculation, one page more has the inputs of drafts.
        image_blocks: the positions that see each other, if it takes images.
        """
        super().__init__()
        assert config.num_pages is not None
        self.config = config
        self.model = ModelInfo(VOCAB, MAX_MODEL_LEN, EOS, grammars=made_up_grammars())
        if image_blocks is not None:
            sees = {"vocab_size": VOCAB + 1, "why_blind": None, "image_token": VOCAB, "image_blocks": image_blocks}
            self.model = replace(self.model, **sees)
        sizes = len(windows), 1, 8, config.block_tokens, 4
        self.layout = PageLayout(*sizes, windows, state_page_bytes=64 * config.block_tokens)
        if state_pages:
            floats = self.layout.page_elems
            shape = StateShape(
                num_layers=1,
                conv_elems=floats,
                num_heads=state_pages - 1,
                head_elems=floats,
                draft_elems=floats // MOST_DRAFTS,
                most_drafts=MOST_DRAFTS if config.speculates else 0,
            )
            self.layout = replace(self.layout, state=shape, state_slots=3)
        self.num_pages = config.num_pages
        self.shadow, self.swaps = shadow, swaps
        self.start = None
        self.adapters = adapters
        self.violations: list[Exception] = []
        self.raises_for: set[str] = set()
        self.sick: set[str] = set()
        self.glitches = 0
        self.begins_anew = True
        self.on_plan: Callable[[StepPlan], None]
        self.pool: PagePool
        self.prefix: PrefixCache
        self.memory = memory
        self._buckets = DecodeBuckets(config.max_num_seqs).sizes
        self._step_id = 0
        self._asked = asked
        self._reached = reached
        self._clock = clock

    def execute(self, plan: StepPlan) -> StepResult:
        self._clock.advance(seconds_of(plan))
        try:
            if self.begins_anew or plan.step_id != self._step_id:
                self.begins_anew, self._step_id = False, plan.step_id
                self.on_plan(plan)
            if self.glitches:
                self.glitches -= 1
                raise RuntimeError("a passing fault")
            self._check(plan)
            return self._run(plan)
        except (AssertionError, LookupError) as error:
            self.violations.append(error)
            raise

    def close(self) -> None:
        """Nothing is held."""

    def _check(self, plan: StepPlan) -> None:
        """Check the shape of a step: its limits, the order of its rows, its bucket and its slots."""
        rows, most = plan.sequences, self.config.max_adapters_per_step
        promise(0 < len(rows) <= self.config.max_num_seqs, "rows beyond max_num_seqs")
        promise(plan.num_tokens <= self.config.max_num_batched_tokens, "tokens beyond the step's budget")
        promise(len({row.request_id for row in rows}) == len(rows), "a request has two rows")
        promise(most is None or plan.num_adapters <= most, "too many adapters in a step")
        single = [len(row.tokens) == 1 for row in rows]
        promise(single == sorted(single), "a decode row before a prefill row")
        for kind in (True, False):
            lora_indices = [row.lora_index for row, one in zip(rows, single, strict=True) if one is kind]
            promise(
                len(list(itertools.groupby(lora_indices))) == len(set(lora_indices)),
                "rows of a slot are apart: {}",
                lora_indices,
            )
        if any(row.is_ragged for row in rows):
            promise(plan.bucket is None, "a step with a prompt has a bucket")
        else:
            exact = plan.num_tokens if plan.num_drafts else min(each for each in self._buckets if each >= len(rows))
            is_right = plan.bucket == exact
            promise(is_right, "bucket {}, {} rows", plan.bucket, len(rows))
        promise(len(set(map(id, plan.adapters))) == len(plan.adapters), "an adapter has two slots")
        used = {row.lora_index for row in rows} - {BASE_LORA_INDEX}
        promise(used == set(range(len(plan.adapters))), "a slot without rows")
        owner: dict[int, str] = {PagePool.DUMMY: "padding"}
        for adapter in plan.adapters:
            promise(adapter.references > 0, "{} is not in use", adapter)
            self._claim(adapter, owner)
        if plan.merged is not None:
            self._check_merged(plan.merged, owner)
        self._check_rows(plan, owner)

    def _claim(self, adapter: Adapter, owner: dict[int, str]) -> None:
        """Check that an adapter's pages are its own."""
        if len(adapter.pages) != adapter.num_pages:
            raise Violation(f"{adapter} is not resident")
        for page in adapter.pages:
            if self.pool.kind(page) is not PageKind.ADAPTER or owner.setdefault(page, adapter.name) != adapter.name:
                raise Violation(f"page {page} of {adapter} is of another kind, or another's")

    def _check_merged(self, merged: Adapter, owner: dict[int, str]) -> None:
        promise(self.shadow is not None, "a merged step without a shadow")
        assert self.shadow is not None
        promise(merged.transfer is None, f"{merged} is merged before it is there")
        self._claim(merged, owner)
        self._check_bytes(merged)
        for page in self.shadow.check(merged, self.pool):
            promise(owner.setdefault(page, "shadow") == "shadow", f"page {page} of the shadow is also {owner[page]}'s")
        self._reached["merged step"] += 1

    def _check_bytes(self, adapter: Adapter) -> None:
        want = [(content_of(adapter), index, adapter.layout.num_layers) for index in range(adapter.num_pages)]
        if [self.memory[page][0] for page in adapter.pages] != want:
            raise Violation(f"{adapter} was overwritten")

    def _check_rows(self, plan: StepPlan, owner: dict[int, str]) -> None:
        """Check that pages cover the rows' tokens, and that no page is written which another row has or the cache
        knows.
        """
        block, pool, most = self.config.block_tokens, self.pool, self.layout.table_width(MAX_MODEL_LEN)
        step = self.layout.pages_per_block
        for row in plan.sequences:
            promise(bool(row.tokens) and row.kv_len * step <= len(row.pages) * block, "pages don't cover the tokens")
            promise(len(row.pages) <= most, "more pages than the longest request has")
            held = [page for page in row.pages if page]
            promise(len(set(held)) == len(held), "{} has a page twice", row.request_id)
            first = row.start // block * step  # the first page written
            self._reached["page that left"] += len(held) < len(row.pages)
            self._claim_states(row, owner)
            for index, page in enumerate(row.pages):
                if not page and index < first:
                    continue
                if page in owner or pool.kind(page) is not PageKind.KV:
                    raise Violation(f"page {page} of {row.request_id} is of another kind, or another's")
                if index >= first:
                    if pool.references(page) != 1 or page in self.prefix.by_page:
                        raise Violation(f"{row.request_id} writes page {page}, which is shared or cached")
                    owner[page] = row.request_id
        for row in plan.sequences:
            for page in filter(None, row.pages):
                if owner.get(page, row.request_id) != row.request_id:
                    raise Violation(f"{row.request_id} reads page {page}, which {owner[page]} writes")
                self._reached["shared page"] += page not in owner and pool.references(page) > 1

    def _claim_states(self, row: ScheduledSequence, owner: dict[int, str]) -> None:
        """Check that the pages of a row's next state are its own."""
        promise(
            (row.states is not None) == bool(self.layout.state_pages), "{} has no states, or has some", row.request_id
        )
        if row.states is None:
            return
        for page in row.states.written_by(row.state_step):
            is_own = self.pool.references(page) == 1 and page not in self.prefix.by_page
            if not is_own or owner.setdefault(page, row.request_id) != row.request_id:
                raise Violation(f"{row.request_id} writes page {page} of a state, which is shared or cached")

    def _run(self, plan: StepPlan) -> StepResult:
        result = StepResult()
        late = self._late(plan)
        for row in plan.sequences:
            if row.request_id in self.raises_for:
                raise RuntimeError(f"a fault of {row.request_id}")
            asked = self._asked[row.request_id]
            adapter = None if row.lora_index == BASE_LORA_INDEX else plan.adapters[row.lora_index]
            self._check_row(row, adapter, asked, plan.sources is not None)
            if row.lora_index in late:
                self._reached["computed in vain"] += 1
                self._write(row, ["void"] * row.kv_len)
                for page in row.states.written_by(row.state_step) if row.states else ():
                    self.memory[page][:] = ["void"] * self.config.block_tokens
                result.retract(row.request_id)
                continue
            content = content_of(adapter)
            tokens, changed_from = known_and_drafts(row)[: row.kv_len], row.lora_from if content else 0
            want = kv_of(content, asked.inputs(tokens), changed_from, self.config.dtype)
            self._check_state(row, want)
            self._write(row, want)
            self._check_seen(row, want)
            self._reached["an adapter that begins within a chunk"] += 0 < row.num_base_tokens < len(row.tokens)
            self._answer(row, content, result)
        return result

    def _check_seen(self, row: ScheduledSequence, want: Sequence[object]) -> None:
        """Check the KV of every page group that a row's tokens see."""
        step = self.layout.pages_per_block
        for group, window in enumerate(self.layout.group_windows):
            first = 0 if window is None else max(0, row.start - window + 1)
            block = first // self.config.block_tokens
            pages = row.pages[block * step + group :: step]
            held = itertools.chain.from_iterable(map(self.memory.__getitem__, pages))
            begin = first - block * self.config.block_tokens
            seen = list(itertools.islice(held, begin, begin + row.kv_len - first))
            if seen != [of_group(group, value) for value in want[first:]]:
                raise Violation(f"KV of {row.request_id} is not its own")

    def _check_state(self, row: ScheduledSequence, kv: Sequence[object]) -> None:
        """Check the state that a row reads, and write the next. kv: of all its tokens."""
        if row.states is None:
            return
        states, layout = row.states, self.layout.states
        assert layout is not None
        read, written = states.read_by(row.state_step), states.written_by(row.state_step)
        if row.start and state_in(self.memory, self.layout, read, states.accepted) != kv[row.start - 1]:
            raise Violation(f"the state of {row.request_id} is not its own, or of another token")
        self._reached["state that takes in drafts"] += states.accepted > 0
        kept, drafts = kv[len(kv) - row.drafts - 1], tuple(kv[len(kv) - row.drafts :])
        values = state_of(kept, layout.first_draft_page) + [("drafts", kept, drafts)] * bool(drafts)
        for page, value in zip(written, values, strict=False):
            self.memory[page][:] = [value] * self.config.block_tokens

    def _write(self, row: ScheduledSequence, values: Sequence[object]) -> None:
        """Write the value that a row computes from the values of all its positions."""
        block, step = self.config.block_tokens, self.layout.pages_per_block
        for position in range(row.start, row.kv_len):
            for group in range(step):
                page = row.pages[position // block * step + group]
                self.memory[page][position % block] = of_group(group, values[position])

    def _check_row(self, row: ScheduledSequence, adapter: Adapter | None, asked: Asked, is_async: bool) -> None:
        """Check a row against its request and the tokens that it has been given. is_async: one more is not read yet."""
        id, tokens, known = row.request_id, row.token_ids, asked.tokens
        promise(row.lora_from == asked.changed_from, "{} begins its adapter at another token", id)
        wanted = asked.adapter if row.kv_len > row.lora_from else None
        promise(adapter is wanted, "{} runs on {}, not on {}", id, adapter, wanted)
        promise(tokens[: len(known)] == known, "{} runs on other tokens than its own", id)
        promise(len(tokens) <= len(known) + is_async, "a token of {} was not returned", id)
        tokens, end = known_and_drafts(row), row.kv_len - row.drafts
        promise(row.tokens == tokens[row.start : row.kv_len], "{} computes tokens of another position", id)
        promise(row.samples == (end == len(row.token_ids)), "{} draws a token at the wrong position", id)
        decodes = row.samples and end - row.start == 1 and row.start >= row.num_prompt_tokens
        promise(not row.drafts or decodes, "{} has drafts and does not decode", id)
        promise(not row.drafts or row.kv_len < asked.request.max_length, "{} has drafts beyond its last token", id)
        promise(row.params == asked.request.params, "{} runs with other parameters than its own", id)
        promise(row.num_prompt_tokens == len(asked.prompt), "{} has another prompt's length", id)
        promise(are_whole(asked.request.blocks, row.start, row.kv_len), "a step of {} has a part of an image", id)
        self._reached["image after a cached prefix"] += bool(row.start and row.sees)

    def _late(self, plan: StepPlan) -> set[int]:
        """Slots of adapters that don't load within `max_load_stall_seconds`; the other adapters' bytes are checked."""
        late = set()
        for lora_index, adapter in enumerate(plan.adapters):
            transfer = adapter.transfer
            if transfer is not None and not transfer.wait_layer(
                adapter.layout.num_layers - 1, self.config.max_load_stall_seconds
            ):
                late.add(lora_index)
            else:
                self._check_bytes(adapter)
        return late

    def _answer(self, row: ScheduledSequence, content: int, result: StepResult) -> None:
        if row.wants_prompt_logprobs:
            positions = range(row.start + 1, min(row.kv_len + 1, row.num_prompt_tokens))
            scores = [TokenLogprobs(row.token_ids[position], -float(position)) for position in positions]
            result.prompt_logprobs[row.request_id] = scores
        if not row.samples:
            return
        if row.request_id in self.sick:
            result.errors[row.request_id] = "not finite"
            return
        seed = row.seed if row.params.temperature else None
        sees(row)
        inputs = self._asked[row.request_id].inputs
        token = result.tokens[row.request_id] = _next_of(row, content, inputs(row.token_ids), seed)
        if row.params.logprobs is not None:
            result.logprobs[row.request_id] = TokenLogprobs(token, -1.0)
        self._answer_drafts(row, content, seed, result)

    def _answer_drafts(self, row: ScheduledSequence, content: int, seed: int | None, result: StepResult) -> None:
        drafts = known_and_drafts(row)[len(row.token_ids) :]
        token = result.tokens[row.request_id]
        self._reached["drafts"] += len(drafts)
        if drafts and row.params.grammar is not None:
            self._check_grammar(row, drafts)
        for index, draft in enumerate(drafts):
            if token != draft:
                return
            self._reached["accepted draft"] += 1
            self._reached["accepted draft of a grammar"] += row.params.grammar is not None
            if index == len(result.after_drafts):
                result.after_drafts.append(StepResult())
            after = result.after_drafts[index]
            inputs = self._asked[row.request_id].inputs(row.token_ids + drafts[: index + 1])
            token = _next_of(row, content, inputs, seed)
            after.tokens[row.request_id] = token
            if row.params.logprobs is not None:
                after.logprobs[row.request_id] = TokenLogprobs(token, -1.0)

    def _check_grammar(self, row: ScheduledSequence, drafts: Sequence[int]) -> None:
        """Check that a grammar allows each draft after those before it."""
        assert row.params.grammar is not None
        answer = row.token_ids[row.num_prompt_tokens :]
        for draft in drafts:
            may = allowed(row.params.grammar, answer)
            promise(draft in may, "draft {} of {} violates its grammar", draft, row.request_id)
            self._reached["forced draft"] += len(may) == 1
            answer.append(draft)


def _next_of(row: ScheduledSequence, content: int, inputs: Sequence[int], seed: int | None) -> int:
    """The token of a row's request that follows `inputs`."""
    return next_token(content, inputs, seed, row.lora_from, row.params.grammar, row.num_prompt_tokens)


def known_and_drafts(row: ScheduledSequence) -> list[int]:
    """The known tokens of a row's request, and its drafts."""
    return row.token_ids + row.tokens[len(row.tokens) - row.drafts :]


def state_of(kv: object, num_pages: int) -> list[object]:
    """A state after a token with this KV, page by page."""
    return [("state", page, kv) for page in range(num_pages)]


def state_in(memory: Memory, layout: PageLayout, pages: Sequence[int], accepted: int) -> object:
    """The KV of the last token that a state has seen, with its accepted drafts; None if the pages hold no state."""
    assert layout.states is not None
    first = layout.states.first_draft_page
    held = [memory[page][0] for page in pages]
    kv = held[0][2] if isinstance(held[0], tuple) and len(held[0]) == 3 else None
    if kv is None or held[:first] != state_of(kv, first):
        return None
    if not accepted:
        return kv
    found = held[first]
    if not isinstance(found, tuple) or found[:2] != ("drafts", kv) or len(found[2]) < accepted:
        return None
    return found[2][accepted - 1]


def of_group(group: int, value: object) -> object:
    """The KV of a token in a page group's pages."""
    return (group, value) if group else value
