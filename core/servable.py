"""Validation: the requests that this engine can serve.

Tests: tests/core/test_engine.py, tests/core/test_json_schemas.py.
"""

from __future__ import annotations

import logging
import secrets
from array import array
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from weakref import WeakSet

from ..memory.adapters.adapter import Adapter
from ..memory.adapters.store import AdapterStore
from ..memory.pages.layout import PageLayout
from ..memory.pages.pool import PagePool
from .config import EngineConfig
from .executors.base import ModelInfo
from .requests.blocks import Blocks, blocks_of
from .requests.grammar import Grammar
from .requests.grammars import InvalidGrammar
from .requests.request import Request
from .requests.request_params import HEAD, InvalidRequest, RequestParams

logger = logging.getLogger(__name__)

_PROCESS = secrets.token_hex(8)


class Servable:
    """Checks requests against the model, the token budget of a step and the arena. Checks raise InvalidRequest."""

    def __init__(
        self, model: ModelInfo, config: EngineConfig, pool: PagePool, store: AdapterStore, layout: PageLayout
    ) -> None:
        self._model, self._config, self._pool, self._store = model, config, pool, store
        self._layout = layout
        self._chunk = config.max_num_batched_tokens
        self._eos_token_ids = frozenset(model.eos_token_ids)
        self._never_invoked: WeakSet[Adapter] = WeakSet()

    def accept(self, request: Request, find: Callable[[str, Request | None, str], Adapter]) -> None:
        """Raise InvalidRequest unless a request can be served; set its adapter, fairness key, lengths and end tokens.

        find: returns the version of an adapter's name for a tenant's new request (`ServedAdapters.find`).
        """
        self.check_length(request)
        name = request.adapter_name
        if name is not None and request.adapter is None:
            request.adapter = find(name, request.sibling, request.tenant)
            name = request.adapter.name
        request.bound = request.adapter
        self.check_tokens(request)
        self._check_images(request)
        self._set_image_ends(request)
        self._set_head(request)
        if request.adapter is not None and request.adapter.manifest.invocation_tokens:
            self._activate(request, request.adapter)
        self._set_blocks(request)
        request.fairness_key = self.fairness_key(request.tenant, name)
        self.limit_output(request)
        self.check_grammar(request.params.grammar)
        self.set_ends(request)

    def _check_images(self, request: Request) -> None:
        """Check a request's images and its placeholders; set what tells its rows from others'."""
        model, media = self._model, request.media
        if media and model.why_blind is not None:
            raise InvalidRequest("messages", f"images are not served: {model.why_blind}")
        most = self._config.limit_mm_per_prompt.get("image", 0)
        if len(media) > most:
            raise InvalidRequest(
                "messages", f"the request has {len(media)} images, at most {most} are taken (limit_mm_per_prompt)"
            )
        if model.most_images is not None and len(media) > model.most_images:
            raise InvalidRequest(
                "messages", f"the request has {len(media)} images, and this model is served with {model.most_images}"
            )
        own = [-1 if model.image_token is None else model.image_token, *model.image_marks]
        prompt = request.token_ids[: request.num_prompt_tokens]
        counts = {token: prompt.count(token) for token in own}
        if sum(counts.values()) != sum(item.num_rows for item in media):
            token = max(own, key=lambda each: counts[each])
            raise InvalidRequest(
                "prompt",
                f"token {token} stands for a part of an image, and the prompt has it without one; leave "
                "it out, and send images as content parts of messages",
            )
        bound = request.bound
        if bound is None or not bound.manifest.tower:
            return
        if media:
            # Files of prefixes outlive this process, in which alone numbers of versions tell adapters apart.
            version = f"{getattr(bound, 'version', bound.label)} of {_PROCESS}"
            request.media_scope = f"@{bound.manifest.content_hash or version}"
        if not bound.manifest.parts and not bound.manifest.vectors:
            request.adapter = None  # it changes images alone

    def _set_image_ends(self, request: Request) -> None:
        """Set which tokens beside images' rows go to experts of images, too."""
        if (ends := self._model.image_ends) is not None:
            prompt = request.token_ids[: request.num_prompt_tokens]
            request.media = tuple(item.with_ends(prompt, ends) for item in request.media)

    def _set_blocks(self, request: Request) -> None:
        """Set which positions of the prompt see each other."""
        if (kind := self._model.image_blocks) is None:
            return
        prompt = request.token_ids[: request.num_prompt_tokens]
        request.blocks = blocks = blocks_of(kind, prompt, request.media, request.media_scope)
        most = self._chunk - self._config.max_num_seqs  # what is left of a step beside sequences that decode
        if blocks.longest > most:
            what = "an image's" if kind is Blocks.IMAGES else "the prompt's"
            needed = blocks.longest + self._config.max_num_seqs
            raise InvalidRequest(
                "messages",
                f"{what} {blocks.longest} tokens see each other, so that one step computes them, which takes {most}; "
                f"raise max_num_batched_tokens to at least {needed}",
            )
        if blocks.prompt and request.lora_from:
            raise InvalidRequest(
                "model",
                f"adapter {request.adapter_name!r} begins within the prompt (alora_invocation_tokens), whose tokens "
                "see each other in this model; use an adapter without these tokens",
            )

    def _set_head(self, request: Request) -> None:
        """Set the head of a request that classifies: its adapter's own, or the model's if it has no adapter."""
        if request.params.pooling is None and not self._model.generates:
            raise InvalidRequest(HEAD, "the model has no language-model head, so it generates no text; ask for vectors")
        if not request.params.classify:
            return
        adapter = request.adapter
        request.head = self._model.head if adapter is None else adapter.manifest.head
        if request.head is None:
            who = "the base model" if adapter is None else f"adapter {request.adapter_name!r}"
            fix = "name an adapter" if adapter is None else "use one"
            raise InvalidRequest(
                HEAD,
                f"{who} has no score head, so it can't classify; {fix} that was trained with task_type SEQ_CLS, whose "
                "modules_to_save has score",
            )

    def _activate(self, request: Request, adapter: Adapter) -> None:
        """Set where an activated LoRA begins; as in PEFT, the base model serves prompts without an invocation."""
        prompt = request.token_ids[: request.num_prompt_tokens]
        begin = _last_occurrence(prompt, adapter.manifest.invocation_tokens)
        if begin >= 0:
            request.lora_from = begin
            return
        request.adapter = None
        if adapter not in self._never_invoked:
            self._never_invoked.add(adapter)
            logger.warning(
                "a prompt for adapter %s has none of its alora_invocation_tokens %s: the base model serves it, as in "
                "PEFT; end the prompt with them (logged once)",
                adapter.name,
                list(adapter.manifest.invocation_tokens),
            )

    def fairness_key(self, tenant: str, adapter_name: str | None) -> str:
        """Return the name that shares are counted by: the tenant's, or the adapter's with `fair_by` adapter."""
        return tenant if self._config.fair_by == "tenant" else adapter_name or ""

    def check_length(self, request: Request) -> None:
        """Check the length of the prompt."""
        limit, count = self._model.max_model_len, request.num_prompt_tokens
        if count == 0:
            raise InvalidRequest("prompt", "the prompt has no tokens; give at least one")
        if count >= limit + (request.params.pooling is not None):
            window = "" if self._model.window is None else ", its sliding window,"
            output = " with its output" if request.params.pooling is None else ""
            raise InvalidRequest(
                "prompt", f"the prompt has {count} tokens, the model takes {limit}{window}{output}; shorten it"
            )

    def check_tokens(self, request: Request) -> None:
        """Check the token ids of the prompt, and those that its parameters name."""
        vocab = self._model.vocab_size
        added = frozenset[int]() if request.adapter is None else request.adapter.manifest.added
        if min(request.token_ids) < 0 or max(request.token_ids) >= vocab:
            bad = next((token for token in request.token_ids if not 0 <= token < vocab and token not in added), None)
            if bad is not None:
                raise InvalidRequest("prompt", f"token id {bad} is outside {_vocabulary(vocab, added)}")
        if wrong := [token for token in request.prediction if not 0 <= token < vocab and token not in added]:
            raise InvalidRequest("prediction", f"token id {wrong[0]} is outside {_vocabulary(vocab, added)}")
        with_logits = request.adapter.manifest.num_tokens if request.adapter is not None else 0
        _check_ids(request.params, vocab, frozenset(token for token in added if token < with_logits))

    def limit_output(self, request: Request) -> None:
        """Set `max_tokens` and `max_length` as the request asks, or to all that there is room for.

        The last sampled token needs no KV: nothing is computed from it.
        """
        count, asked, limit = request.num_prompt_tokens, request.params.max_tokens, self._model.max_model_len
        if request.params.pooling is not None:
            limit = count + 1  # nothing is sampled: the prompt may fill the context
        most = limit if asked is None else min(limit, count + asked)
        if not self._config.chunked_prefill:
            most = self._within_a_step(count, asked, most)
        most = self._within_the_arena(request, asked, most)
        request.max_length = most
        if most - count != asked:
            request.params = replace(request.params, max_tokens=most - count)

    def _within_a_step(self, count: int, asked: int | None, most: int) -> int:
        """Return the most tokens if a step computes a whole prompt or none of it."""
        budget = self._config.max_num_batched_tokens
        if asked is None:
            most = min(most, budget + 1)
        if most - 1 > budget or most <= count:
            raise InvalidRequest(
                "prompt",
                f"prompt and output have {count + (asked or 1)} tokens, a step takes {budget} and chunked prefill "
                "is off; shorten the request or raise max_num_batched_tokens",
            )
        return most

    def _within_the_arena(self, request: Request, asked: int | None, most: int) -> int:
        """Return the most tokens that fit into the arena together with the request's adapter."""
        adapter, usable = request.adapter, self._pool.num_usable
        adapter_pages = 0 if adapter is None else adapter.num_pages
        if pinned := self._store.pins.num_pages:
            usable -= pinned
            if adapter is not None and adapter in self._store.pins:
                usable += adapter_pages
        if asked is None:
            most = min(most, self._layout.tokens_in_pages(usable - adapter_pages, self._chunk, most) + 1)
        tokens = max(most, request.num_prompt_tokens + 1) - 1
        pages = adapter_pages + self._layout.pages_for_tokens(tokens, self._chunk)
        if pages > usable:
            fix = "shorten the prompt" if asked is None else "lower max_tokens, shorten the prompt"
            raise InvalidRequest(
                "prompt" if asked is None else "max_tokens",
                f"prompt, output and adapter may need {pages} pages, the page pool has {usable} to give; "
                f"{fix} or raise memory_bytes",
            )
        return most

    def check_grammar(self, grammar: Grammar | None) -> None:
        if grammar is None:
            return
        if self._model.grammars is None:
            raise InvalidRequest("grammar", "this executor samples no tokens that could match a grammar; omit it")
        try:
            self._model.grammars.compile(grammar)
        except InvalidGrammar as error:
            raise InvalidRequest("grammar", f"the grammar can't be served: {error}") from None

    def set_ends(self, request: Request) -> None:
        """Set the tokens that end the request; at least one token must be allowed."""
        params = request.params
        ends = frozenset() if params.ignore_eos and params.grammar is None else self._eos_token_ids
        request.end_ids = ends.union(params.stop_token_ids) if params.stop_token_ids else ends
        if params.allowed_token_ids is None:
            return
        banned = {word[0] for word in params.bad_words if len(word) == 1}
        if params.min_tokens:
            banned |= self._eos_token_ids.union(params.stop_token_ids)
        if banned.issuperset(params.allowed_token_ids):
            raise InvalidRequest("allowed_token_ids", "bad_words and min_tokens ban all of them; allow others")


def _last_occurrence(tokens: Sequence[int], wanted: Sequence[int]) -> int:
    """Index at which `wanted` last begins in `tokens`; -1 if it does not occur."""
    within, part = array("i", tokens), array("i", wanted)
    data, end = within.tobytes(), len(within) * within.itemsize
    while (found := data.rfind(part.tobytes(), 0, end)) % within.itemsize:
        if found < 0:
            return -1
        end = found + len(part) * within.itemsize - 1  # it was between two tokens
    return found // within.itemsize


def _vocabulary(vocab: int, added: Collection[int]) -> str:
    """The range of token ids, for an error."""
    more = f" and the {len(added)} tokens that its adapter adds" if added else ""
    return f"the vocabulary of {vocab}{more}"


def _check_ids(params: RequestParams, vocab: int, added: Collection[int]) -> None:
    for field, ids in (
        ("logit_bias", params.logit_bias),
        ("stop_token_ids", params.stop_token_ids),
        ("logprob_token_ids", params.logprob_token_ids),
        ("bad_words", [token for word in params.bad_words for token in word]),
        ("allowed_token_ids", params.allowed_token_ids or ()),
    ):
        if ids and (bad := [token for token in ids if not 0 <= token < vocab and token not in added]):
            raise InvalidRequest(field, f"token id {bad[0]} is outside {_vocabulary(vocab, added)}")
