"""Faults to plant in the engine, to see that the simulation tests find them: `python -m tests.simulation.faults`.

Prints how many runs each driver needs to find each fault.
"""

from __future__ import annotations

import hashlib
import hmac
import itertools
import math
import sys
from collections.abc import Callable
from dataclasses import replace

from pytest import MonkeyPatch

from chorus.core import engine, kv_identity
from chorus.core.merging.merging import Merging
from chorus.core.requests.record import from_record
from chorus.core.requests.types import StepPlan
from chorus.core.scheduling.queue_order import Turns
from chorus.core.scheduling.request_memory import RequestMemory
from chorus.core.scheduling.scheduler import Scheduler
from chorus.core.scheduling.step_builder import StepBuilder
from chorus.core.served_adapters import ServedAdapters
from chorus.core.speculation.grammar_drafts import GrammarDrafts
from chorus.core.speculation.speculation import Speculation
from chorus.memory.adapters.store import AdapterStore
from chorus.memory.disk.folder import SEAL_BYTES, BlockFolder
from chorus.memory.disk.keys import BlockKeys
from chorus.memory.host.images import HostImages
from chorus.memory.pages.pool import PageKind, PagePool
from chorus.memory.pages.prefix import PrefixCache
from chorus.memory.pages.states import StateSlots
from chorus.memory.transfers import pages_ahead
from chorus.memory.transfers.cached_pages import CachedPages
from chorus.memory.transfers.swapped_kv import SwappedKv
from chorus.perf.report.command import conclude, parser

from . import machine, seeds
from .checked_adapters import CheckedTransfer
from .checked_swaps import SwapCopy

Fault = Callable[[MonkeyPatch], None]


def _plans(patch: MonkeyPatch, change: Callable[[Scheduler, StepPlan], None]) -> None:
    """Change every plan that the scheduler makes."""
    schedule = Scheduler.schedule

    def changed(self: Scheduler) -> StepPlan | None:
        plan = schedule(self)
        if plan is not None:
            change(self, plan)
        return plan

    patch.setattr(Scheduler, "schedule", changed)


# -- pages


def page_freed_twice(patch):
    """The first of several pages that a request gives back is on the free list twice."""
    release = PagePool.release

    def twice(self, pages):
        pages = list(pages)
        release(self, pages)
        if len(pages) > 3 and self.kind(pages[0]) is PageKind.FREE:
            self._free.insert(0, pages[0])

    patch.setattr(PagePool, "release", twice)


def page_lost(patch):
    """The last of several pages that a request gives back stays in use."""
    release = PagePool.release
    patch.setattr(PagePool, "release", lambda self, pages: release(self, (pages := list(pages))[: 3 + len(pages) % 2]))


def shared_page_written(patch):
    """A request goes on in the cached block that begins as it does, although the block's last token differs."""
    match = PrefixCache.match

    def longer(self, version, tokens, *rest):
        found, step = match(self, version, tokens, *rest), self._block_tokens
        if found and len(tokens) > (len(found) + 1) * step:
            found += [
                child
                for key, child in found[-1].children.items()
                if key[:-1] == tuple(tokens[len(found) * step :][: step - 1])
            ][:1]
        return found

    patch.setattr(PrefixCache, "match", longer)


def swapped_page_lost(patch):
    """Of several pages that are copied out, the last one's KV is another's."""
    init = SwappedKv.__init__

    def over_swaps(self, backend, *args):
        init(self, backend, *args)
        if backend is not None:
            copy_out = backend.copy_out
            backend.copy_out = lambda pages, **how: copy_out([*pages[:-1], pages[0]], **how)

    patch.setattr(SwappedKv, "__init__", over_swaps)


def host_bytes_leaked(patch):
    """A host image that is dropped still counts."""
    drop = HostImages.drop

    def leaking(self, key):
        before = self.num_bytes
        drop(self, key)
        self.num_bytes = before

    patch.setattr(HostImages, "drop", leaking)


def hasty_swaps(patch):
    """Pages are free while a copy of a preempted request's KV still reads or writes them."""
    patch.setattr(SwapCopy, "is_quiet", lambda self: True)


def failed_swaps(patch):
    """A copy that failed is taken for one that is done."""
    patch.setattr(SwapCopy, "has_failed", lambda self: False)


def torn_copies(patch):
    """A copy ahead of a page that has had a new owner meanwhile is kept."""
    patch.setattr(CachedPages, "page_left", lambda self, page: None)


def hasty_copies(patch):
    """A copy ahead is taken for complete when it begins, also if it fails."""
    patch.setattr(pages_ahead, "state_of", lambda transfer: "done")


# -- adapters


def pages_of_adapter_reused(patch):
    """An adapter with one user left may be evicted."""

    def release(self, adapter):
        left = adapter.references = adapter.references - 1
        if left <= 1:
            adapter.references = 0
            self._offer(adapter)
            adapter.references = left

    patch.setattr(AdapterStore, "release", release)


def hasty_release(patch):
    """Pages of a cancelled load are free while a copy still writes to them."""
    patch.setattr(CheckedTransfer, "is_quiet", lambda self: True)


def lasting_pins(patch):
    """The pages that a running request holds of its adapter are never given back."""
    patch.setattr(AdapterStore, "release", lambda self, adapter: None)


def adapters_in_wrong_indices(patch):
    """The rows of two adapters get each other's slots."""
    _plans(
        patch, lambda self, plan: plan.adapters.reverse() if len(plan.adapters) == 2 and plan.bucket is None else None
    )


def shadow_outlives_its_adapter(patch):
    """A merged adapter that is replaced or evicted stays in the weights."""
    patch.setattr(Merging, "leave", lambda self, adapter: None)


def removal_spares_requests(patch):
    """Removing an adapter by force ends none of its requests."""
    remove = ServedAdapters.remove
    patch.setattr(ServedAdapters, "remove", lambda self, name, force=False: remove(self, name))


# -- the prefix cache


def blind_prefixes(patch):
    """Cached KV of one adapter version is taken for another's."""
    match, insert = PrefixCache.match, PrefixCache.insert
    patch.setattr(PrefixCache, "match", lambda self, version, *rest: match(self, 0, *rest))
    patch.setattr(PrefixCache, "insert", lambda self, version, *rest, **named: insert(self, 0, *rest, **named))


def stale_versions(patch):
    """Blocks of a version that is gone stay known, and their pages are lost when it comes to the end."""
    patch.setattr(PrefixCache, "_forget", lambda self, block: None)


def shared_cache(patch):
    """A tenant starts from another one's requests."""
    patch.setattr(RequestMemory, "scope", lambda self, request: ("", ""))


def images_cut(patch):
    """A cached prefix ends within an image."""
    usable = PrefixCache.usable
    patch.setattr(PrefixCache, "usable", lambda self, blocks, cut_at=None, **how: usable(self, blocks, **how))


def windows_of_a_longer_prefix(patch):
    """A cached prefix is cut at an image, and pages in windows are there for the longer one. Random runs seldom lose
    just these pages: `tests/core/scheduling/test_prefix_lengths.py` plants it.
    """
    usable = PrefixCache.usable

    def cut(self, blocks, cut_at=None, **how):
        found = usable(self, blocks, **how)
        while found and cut_at is not None and cut_at(len(found) * self._block_tokens) is not None:
            del found[-1]
        return found

    patch.setattr(PrefixCache, "usable", cut)


def chunks_of_a_longer_prefix(patch):
    """If a prefix can't be copied from host memory, its request computes as many tokens as it would have after it."""
    start = RequestMemory.start

    def stubborn(self, request, blocks, count):
        while not start(self, request, blocks, count):
            blocks = self.match(request)
        return True

    patch.setattr(RequestMemory, "start", stubborn)


def scores_of_what_is_left(patch):
    """A prompt of which the beginning is cached gets log-probabilities of the rest only."""
    match = RequestMemory.match

    def as_if_unscored(self, request):
        params, request.params = request.params, replace(request.params, prompt_logprobs=None)
        try:
            return match(self, request)
        finally:
            request.params = params

    patch.setattr(RequestMemory, "match", as_if_unscored)


# -- prefixes in files


def files_of_any_adapter(patch):
    """The key of a block in files does not cover the adapter that computed it."""
    root, after = BlockKeys.root, BlockKeys.after
    patch.setattr(BlockKeys, "root", lambda self, owner, scope: root(self, "", scope))
    patch.setattr(BlockKeys, "after", lambda self, parent, tokens, *branch: after(self, parent, tokens))
    patch.setattr(BlockFolder, "_path", lambda self, place: f"{self.root}/{place.folder.split('/')[0]}/{place.key}")


def files_of_any_dtype(patch):
    """The key of a block in files does not cover the dtype."""
    patch.setattr(kv_identity, "_SETTINGS", tuple(set(vars(kv_identity)["_SETTINGS"]) - {"dtype"}))


def files_of_a_name(patch):
    """The key of a block in files has an adapter's name for its content: stale after a reload."""
    content_of = AdapterStore.content_of

    def name_of(self, version):
        known = content_of(self, version)
        return known and "".join(filter(str.isalnum, self._by_version[version].name))

    patch.setattr(AdapterStore, "content_of", name_of)


def files_of_any_tenant(patch):
    """The key of a block in files does not cover who may hit it."""
    root = BlockKeys.root
    patch.setattr(BlockKeys, "root", lambda self, owner, scope: root(self, owner, ("", "")))
    patch.setattr(BlockFolder, "tenant", lambda self, name: "all")


def files_without_a_seal(patch):
    """A file of the right length is believed."""
    patch.setattr(hmac, "compare_digest", lambda one, other: True)


def files_sealed_without_their_key(patch):
    """A block's seal holds for any block of its length."""
    blake2b = hashlib.blake2b

    def without(data=b"", **options):
        is_name = len(data) == 64 and options.get("digest_size") == SEAL_BYTES and "key" in options
        return blake2b(b"" if is_name else data, **options)

    patch.setattr(hashlib, "blake2b", without)


def files_beyond_the_bound(patch):
    """Files are written however many there are."""
    patch.setattr(BlockFolder, "_evict_to", lambda self, num_bytes: True)


def files_left_by_the_killed(patch):
    """A file that a killed process began stays, and is not counted."""
    patch.setattr(BlockFolder, "_sweep", lambda self: None)
    patch.setattr(BlockFolder, "_all", lambda self: self._walk(f"{self.root}/blocks"))


# -- rows


def forgetful_moves(patch):
    """A request that comes from another engine has lost its sampled tokens."""

    def forget(record, now):
        return from_record({**record, "tokens": record["tokens"][: record["num_prompt_tokens"]]}, now)

    patch.setattr(engine, "from_record", forget)


def rows_of_the_gone(patch):
    """The token that a step ahead has drawn for an aborted request goes to one that came by its name."""
    update = Scheduler.update
    patch.setattr(Scheduler, "update", lambda self, plan, result: update(self, replace(plan, sources=None), result))


def rows_left_ahead(patch):
    """The rows of a step that is not to happen stay where it would have them."""
    patch.setattr(Scheduler, "rollback", lambda self: None)


def shifted_seed(patch):
    """A request that was preempted goes on with another seed."""

    def shift(self, plan):
        for row in plan.sequences:
            request = self.get(row.request_id)
            row.seed = request.seed + (request.num_preemptions > 0)

    _plans(patch, shift)


def late_result_twice(patch):
    """The result of a step that was planned ahead is applied twice, now and then."""
    update = Scheduler.update

    def twice(self, plan, result):
        outputs = update(self, plan, result)
        return outputs + update(self, plan, result) if plan.sources is not None and plan.step_id % 7 == 0 else outputs

    patch.setattr(Scheduler, "update", twice)


def row_recomputed(patch):
    """A prefill computes its last known token once more."""

    def back(self, plan):
        for row in plan.sequences:
            if row.start and plan.bucket is None and self.get(row.request_id).sequence is not row:
                row.start -= 1
                row.tokens = [row.token_ids[row.start], *row.tokens]

    _plans(patch, back)


def bucket_too_small(patch):
    """A step of decode rows is replayed from a graph captured for one row fewer."""
    _plans(patch, lambda self, plan: setattr(plan, "bucket", plan.bucket and max(1, len(plan.sequences) - 1)))


def rows_out_of_order(patch):
    """Decode rows come before prefill rows."""

    def turn(self, plan):
        if plan.bucket is None:
            plan.sequences.reverse()

    _plans(patch, turn)


# -- order


def overtaken_for_good(patch):
    """A request may be overtaken for as long as others come."""
    begin = StepBuilder.begin_admission

    def begin_admission(self):
        begin(self)
        self.overdue_before = -math.inf

    patch.setattr(StepBuilder, "begin_admission", begin_admission)


def turns_forgotten(patch):
    """A tenant may wait for a turn for as long as others were served less."""
    patch.setattr(Turns, "_is_overdue", lambda self, tenant: False)


# -- speculation


def rejected_drafts_computed(patch):
    """The KV of rejected drafts counts as that of the tokens that were sampled instead."""
    advance = vars(Scheduler)["_advance"]

    def over(self, request, sequence, result, info, count, **was_draft):
        if sequence.drafts and len(sequence.tokens) - sequence.drafts == count and not result.after_drafts:
            count = min(len(sequence.tokens), count + 1)
        return advance(self, request, sequence, result, info, count, **was_draft)

    patch.setattr(Scheduler, "_advance", over)


def drafts_without_pages(patch):
    """Proposed tokens are added to a step whether or not there are pages for them."""
    drafts = Speculation.drafts
    patch.setattr(
        Speculation, "drafts", lambda self, requests, left, grow: drafts(self, requests, left, lambda *_: True)
    )


def drafts_against_the_grammar(patch):
    """Proposals are not cut where a request's grammar forbids them."""
    patch.setattr(GrammarDrafts, "allowed", lambda self, request, proposal: proposal)


def drafts_beyond_the_budget(patch):
    """Proposed tokens are added to a step that has no tokens left for them."""
    drafts = Speculation.drafts
    patch.setattr(Speculation, "drafts", lambda self, requests, left, grow: drafts(self, requests, left + 3, grow))


def accepted_drafts_missing(patch):
    """A recurrent state does not take in the drafts that were accepted."""
    patch.setattr(StateSlots, "accepted", property(lambda self: 0, lambda self, count: None), raising=False)


def checkpoints_without_their_drafts(patch):
    """A request that begins at a checkpoint does not take in the accepted drafts after its state."""
    keep = PrefixCache.keep_checkpoint
    patch.setattr(PrefixCache, "keep_checkpoint", lambda self, block, pages, accepted: keep(self, block, pages))


def swapped_states_without_their_drafts(patch):
    """A request that comes back from host memory does not take in the accepted drafts after its state."""
    swap_out = SwappedKv.swap_out

    def forget(self, *args):
        if (image := swap_out(self, *args)) is not None:
            image.accepted = 0
        return image

    patch.setattr(SwappedKv, "swap_out", forget)


FAULTS: tuple[Fault, ...] = (
    page_freed_twice,
    page_lost,
    shared_page_written,
    swapped_page_lost,
    host_bytes_leaked,
    hasty_swaps,
    failed_swaps,
    torn_copies,
    hasty_copies,
    pages_of_adapter_reused,
    hasty_release,
    lasting_pins,
    adapters_in_wrong_indices,
    shadow_outlives_its_adapter,
    removal_spares_requests,
    blind_prefixes,
    stale_versions,
    shared_cache,
    images_cut,
    chunks_of_a_longer_prefix,
    scores_of_what_is_left,
    forgetful_moves,
    rows_of_the_gone,
    rows_left_ahead,
    shifted_seed,
    late_result_twice,
    row_recomputed,
    bucket_too_small,
    rows_out_of_order,
    overtaken_for_good,
    turns_forgotten,
    rejected_drafts_computed,
    drafts_without_pages,
    drafts_against_the_grammar,
    drafts_beyond_the_budget,
    accepted_drafts_missing,
    checkpoints_without_their_drafts,
    swapped_states_without_their_drafts,
)

IN_FILES: tuple[Fault, ...] = (
    files_of_any_adapter,
    files_of_any_dtype,
    files_of_a_name,
    files_of_any_tenant,
    files_without_a_seal,
    files_sealed_without_their_key,
    files_beyond_the_bound,
    files_left_by_the_killed,
)
"""Faults that runs with files are to find."""


def found_after(fault: Fault, runs_until: Callable[[int], int | None], most: int) -> int | None:
    """Return the number of runs that a driver needs to find a planted fault; None if `most` find nothing."""
    with MonkeyPatch.context() as patch:
        fault(patch)
        return runs_until(most)


DRIVERS: dict[str, Callable[[int], int | None]] = {
    "seeds": seeds.runs_until_one_fails,
    "hypothesis": machine.runs_until_one_fails,
}


def main(argv: list[str] | None = None) -> int:
    command = parser(__spec__, __doc__)
    command.add_argument("names", nargs="*", help="faults; without any, all of them")
    command.add_argument("--runs", type=int, default=600, help="runs within which a fault must be found")
    args = command.parse_args(argv)
    print(f"{'runs until it is found':28}", *(f"{name:>12}" for name in DRIVERS))
    found: dict[str, list[int | None]] = {}
    for fault in (each for each in FAULTS if each.__name__ in (args.names or [each.__name__])):
        counts = found[fault.__name__] = [found_after(fault, driver, args.runs) for driver in DRIVERS.values()]
        print(f"{fault.__name__:28}", *(f"{count or 'never':>12}" for count in counts), flush=True)
    for fault in (each for each in IN_FILES if each.__name__ in (args.names or [each.__name__])):
        counts = found[fault.__name__] = [found_after(fault, seeds.runs_of_files_until_one_fails, args.runs)] * 2
        print(f"{fault.__name__:28} {counts[0] or 'never':>12}", flush=True)
    columns = list(zip(*found.values(), strict=True))
    rates = {name: sum(each is not None for each in column) for name, column in zip(DRIVERS, columns, strict=True)}
    missed = any(count is None for count in itertools.chain(*columns))
    return conclude({"faults": len(found), "found": rates, "runs": found}, not missed)


if __name__ == "__main__":
    sys.exit(main())
