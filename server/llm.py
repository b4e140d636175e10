r"""`LLM`: a model with its adapters in this process, the library's main class.

from chorus import LLM, SamplingParams

with LLM() as llm:
    print(llm.generate("hello world\n", SamplingParams(temperature=0), adapter="reverse").text)
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from functools import wraps
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, Never, ParamSpec, TypeVar, Unpack, overload

from ..core.model.pooling_config import PoolingConfig
from ..core.requests.request_params import InvalidRequest
from ..memory.adapters.store import UnknownAdapter
from ..memory.adapters.versions import versioned
from ..memory.pages.block import Medium
from .api.adapters.adapter_api import AddAdapter, checked_name, pin_adapter
from .api.engine_control import mediums_of
from .api.generation_builder import GenerationBuilder
from .api.near import nearest
from .api.pooling.pooling_builder import PoolingBuilder
from .api.sampling_defaults import SamplingDefaults
from .engine.adapter_loader import AdapterLoader
from .engine.adapter_tokenizers import AdapterTokenizers
from .engine.engine_view import AdapterState
from .engine.load_source import LoadSource
from .engine.sourced_adapters import SourcedAdapters
from .engine.telemetry import Telemetry
from .errors import validated
from .executors import DaemonPool
from .library.absent import refuse
from .library.adapter_files import AdapterFiles
from .library.arguments import refuse_unknown
from .library.asking import Asking, PromptRequest
from .library.completion import Completion as Completion
from .library.embedding import Classification, Embedding
from .library.loop import LoopThread
from .library.option_types import Options
from .library.options import settings_of
from .library.params import SamplingParams, python_errors
from .library.progress import progress_bar
from .library.prompts import Messages, Prompt, conversations_of, for_each, prompts_of
from .library.streams import Stream
from .settings import Settings
from .start.launch import load

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")
P = ParamSpec("P")

IN_FLIGHT = 256
"""Completions in the engine at once; the others follow as these end."""

Params = SamplingParams | Sequence[SamplingParams] | None
AdapterChoice = str | Sequence[str | None] | None


def _in_loop(
    work: Callable[Concatenate[LLM, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[LLM, P], Coroutine[Any, Any, T]]:
    """The method for a program with an event loop of its own: the work is done in the engine's."""

    @wraps(work)
    async def awaited(self: LLM, *args: P.args, **options: P.kwargs) -> T:
        return await asyncio.wrap_future(self._loop.submit(work(self, *args, **options)))

    return awaited


def _blocking(method: Callable[Concatenate[LLM, P], Coroutine[Any, Any, T]]) -> Callable[Concatenate[LLM, P], T]:
    """The method of `_in_loop` for a program without an event loop. Its name lacks the `a`."""
    work: Callable[..., Coroutine[Any, Any, T]] = inspect.unwrap(method)

    @wraps(method)
    def waited(self: LLM, *args: P.args, **options: P.kwargs) -> T:
        return self._loop.run(work(self, *args, **options))

    waited.__name__ = method.__name__.removeprefix("a")
    waited.__qualname__ = method.__qualname__.replace(method.__name__, waited.__name__)  # pickle finds it by this
    return waited


class LLM:
    """An engine on its own thread, with its tokenizer. Use it as a context manager, or call `close`.

    Any thread may call any method. Requests that run at the same time share the engine's steps, whatever adapters they
    use. Prompts, parameters and limits are the same as over HTTP: docs/reference/parameters.md.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        adapters: str | Path | Mapping[str, str | Path] | None = None,
        **options: Unpack[Options],
    ) -> None:
        """Load a model and register adapters.

        model: a checkpoint directory, or the name of one that `chorus pull` fetched; default: the built-in model with
        its adapters. adapters: a directory of adapter directories, or adapter directories by name. options: any setting
        of `chorus serve` that makes sense without HTTP, such as `dtype` or `memory_bytes`. Raises InvalidRequest for a
        wrong option, LaunchError for a model that can't be served, AdapterFormatError for an adapter.
        """
        named = adapters if isinstance(adapters, Mapping) else {}
        given: dict[str, Any] = {**options}
        if model is not None:
            given["model"] = Path(model)
        if adapters is not None and not isinstance(adapters, Mapping):
            given["adapters"] = Path(adapters)
        self._open(settings_of(given))
        try:
            for name, path in named.items():
                self.load_adapter(name, path)
        except BaseException:
            self.close()
            raise

    @classmethod
    def of(cls, settings: Settings) -> LLM:
        """An LLM from a server's settings."""
        llm = cls.__new__(cls)
        llm._open(settings)  # noqa: SLF001 - another constructor
        return llm

    def _open(self, settings: Settings) -> None:
        self._settings = settings
        defaults = SamplingDefaults.of(settings)
        self._worker, self.tokenizer = load(settings)
        self._threads = DaemonPool("text", threads=2)
        self._files = AdapterFiles(settings, self._worker.adapters)
        tokenizers = AdapterTokenizers(
            self.tokenizer, self._worker.adapters, self._threads, used=settings.adapter_chat_templates
        )
        places = settings.adapter_places
        self._loads = AdapterLoader(self._worker, settings.adapter_load_seconds, places, self._files.loaded, tokenizers)
        self._sourced = SourcedAdapters(settings, self._worker.adapters, self._loads)
        tokenizers.bring = self._sourced.bring
        builder = GenerationBuilder(
            worker=self._worker,
            tokenizer=self.tokenizer,
            settings=settings,
            defaults=defaults,
            telemetry=Telemetry(),
            threads=self._threads,
            tokenizers=tokenizers,
        )
        self._loop = LoopThread()
        pooling = PoolingBuilder(builder, PoolingConfig.read(settings.model, settings.classifier_from_token))
        self._asking = Asking(builder, pooling, self._sourced, IN_FLIGHT)
        self._loads.start()

    # -- answers

    # a str is a Sequence[str], too, and Python has no type for all the others
    @overload
    async def agenerate(  # pyright: ignore[reportOverlappingOverload]
        self,
        prompts: str | Mapping[str, Any] | Sequence[int],
        params: SamplingParams | None = None,
        adapter: str | None = None,
        *,
        stop: str | Sequence[str] = (),
        use_tqdm: bool | None = None,
    ) -> Completion: ...

    @overload
    async def agenerate(
        self,
        prompts: Sequence[Prompt],
        params: Params = None,
        adapter: AdapterChoice = None,
        *,
        stop: str | Sequence[str] = (),
        use_tqdm: bool | None = None,
    ) -> list[Completion]: ...

    @_in_loop
    async def agenerate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params = None,
        adapter: AdapterChoice = None,
        *,
        stop: str | Sequence[str] = (),
        use_tqdm: bool | None = None,
        **unknown: Never,
    ) -> Completion | list[Completion]:
        """Complete one prompt, or a list of them in order. `agenerate` is for a program with an event loop: cancelling
        it ends the requests.

        prompts: a text, a list of token ids, `{"prompt": text}` or `{"prompt_token_ids": ids}`, or a list of these.
        params, adapter: one for all prompts, or one for each; no adapter is the base model, `NAME@VERSION` an earlier
        version. stop: texts that end a completion. use_tqdm: show a progress bar; None: for several prompts in a
        terminal. Raises InvalidRequest, which names the prompt, for invalid values,
        and GenerationFailed if a completion ends with an error; the other prompts are then cancelled.
        """
        given, alone = prompts_of(prompts)
        answers = await self._all(self._asked(given, params, adapter, stop, unknown, is_chat=False), use_tqdm)
        return answers[0] if alone else answers

    generate = _blocking(agenerate)

    @overload
    async def achat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        adapter: str | None = None,
        *,
        stop: str | Sequence[str] = (),
        use_tqdm: bool | None = None,
    ) -> Completion: ...

    @overload
    async def achat(
        self,
        messages: Sequence[Messages],
        params: Params = None,
        adapter: AdapterChoice = None,
        *,
        stop: str | Sequence[str] = (),
        use_tqdm: bool | None = None,
    ) -> list[Completion]: ...

    @_in_loop
    async def achat(
        self,
        messages: Messages | Sequence[Messages],
        params: Params = None,
        adapter: AdapterChoice = None,
        *,
        stop: str | Sequence[str] = (),
        use_tqdm: bool | None = None,
        **unknown: Never,
    ) -> Completion | list[Completion]:
        """Continue a conversation through the model's chat template, or a list of conversations.

        messages: OpenAI's, with `role` and `content`. The other arguments are those of `generate`; tools are fields of
        params.
        """
        given, alone = conversations_of(messages)
        answers = await self._all(self._asked(given, params, adapter, stop, unknown, is_chat=True), use_tqdm)
        return answers[0] if alone else answers

    chat = _blocking(achat)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        adapter: AdapterChoice = None,
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> Embedding | list[Embedding]:
        """Vectors of prompts: one for a prompt, a list for a list. Keywords are those of POST /v1/embeddings."""
        return self._pooled(
            self._asking.embed,
            prompts,
            adapter,
            dimensions=dimensions,
            normalize=normalize,
            truncate_prompt_tokens=truncate_prompt_tokens,
        )

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        adapter: AdapterChoice = None,
        *,
        use_activation: bool | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> Classification | list[Classification]:
        """Classes of prompts by a head: one for a prompt, a list for a list. Keywords are those of POST /classify."""
        fields = {"use_activation": use_activation, "truncate_prompt_tokens": truncate_prompt_tokens}
        return self._pooled(self._asking.classify, prompts, adapter, **fields)

    def score(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        adapter: str | None = None,
        *,
        use_activation: bool | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> float | list[float]:
        """How well texts fit: a number for two texts, a list if either is a list.

        One query is scored with each document; else there are as many of both. Keywords are those of POST /score.
        """
        first, second = ([each] if isinstance(each, str) else list(each) for each in (queries, documents))
        if len(first) == 1:
            first = first * len(second)
        if len(first) != len(second):
            counts = f"there are {len(first)} queries and {len(second)} documents"
            raise InvalidRequest("queries", f"{counts}; give one query, or as many as documents")
        fields = {"use_activation": use_activation, "truncate_prompt_tokens": truncate_prompt_tokens}
        found = self._loop.run(self._asking.score(list(zip(first, second, strict=True)), adapter, fields))
        return found[0] if isinstance(queries, str) and isinstance(documents, str) else found

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        adapter: str | None = None,
        *,
        stop: str | Sequence[str] = (),
        **unknown: Never,
    ) -> Stream:
        """A completion's text as it comes, for `for` or `async for`; leaving the loop early frees its pages."""
        prompts, alone = prompts_of(prompt)
        if not alone:
            raise InvalidRequest("prompt", "a stream has one prompt; call stream for each")
        return self._stream(self._asked(prompts, params, adapter, stop, unknown, is_chat=False))

    def stream_chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        adapter: str | None = None,
        *,
        stop: str | Sequence[str] = (),
        **unknown: Never,
    ) -> Stream:
        """The same for a conversation: the content. The stream's completion has reasoning and tool calls."""
        given, alone = conversations_of(messages)
        if not alone:
            raise InvalidRequest("messages", "a stream has one conversation; call stream_chat for each")
        return self._stream(self._asked(given, params, adapter, stop, unknown, is_chat=True))

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer, as transformers has it: a copy, which a program may change."""
        return self.tokenizer.copied()

    # -- adapters

    @property
    def adapters(self) -> list[str]:
        """Names of the registered adapters, sorted; a kept earlier version is `NAME@VERSION`."""
        return sorted(self._worker.adapters.names().result())

    def adapter(self, name: str) -> AdapterState:
        """An adapter's current state: its version, tier and pages. Raises UnknownAdapter."""
        return self._of_known(name, lambda: self._worker.adapters.state(name).result())

    def load_adapter(  # noqa: PLR0913  # every field has a name
        self,
        name: str,
        path: str | Path | None = None,
        *,
        config: Mapping[str, Any] | str | bytes | None = None,
        weights: Mapping[str, Any] | bytes | None = None,
        files: Mapping[str, str | bytes] | None = None,
        keep_versions: int | None = None,
        replace: bool = True,
        pinned: bool | None = None,
    ) -> str:
        """Register an adapter, or replace one: running requests finish with the old version. Returns NAME@VERSION.

        name: `NAME`, or `NAME@VERSION` to set the version's label. path: a PEFT directory; without one, config is the
        contents of adapter_config.json, and weights are adapter_model.safetensors' bytes or its tensors by name; files
        are the contents of its own tokenizer.json, chat_template.jinja and the like, by name.
        keep_versions: number of versions of the name to keep, including the newest; default: the setting's. pinned:
        True keeps it resident. Raises InvalidRequest for wrong arguments, AdapterFormatError if it can't be served, in
        which case nothing changes, FileExistsError for an existing version, or a name that it may not `replace`, and
        LoadTimedOut if its disk takes longer than `adapter_load_seconds`.
        """
        given = {"name": name, "keep_versions": keep_versions, "path": None if path is None else str(path)}
        with python_errors():
            asked = validated(AddAdapter, given)
            plain, label = checked_name(self._settings, asked.name, "name")
        if (path is None) == (config is None and weights is None and files is None):
            raise InvalidRequest("path", "give a directory as path, or config and weights (and files), and not both")
        keep = keep_versions or self._settings.keep_versions
        if path is not None:
            source = LoadSource(Path(path).absolute)
            state, _ = self._loads.load(plain, source, replace=replace, label=label or None, keep=keep).result()
        else:
            with self._files.draft(config, weights, files) as draft:
                source = LoadSource.upload(draft)
                state, _ = self._loads.load(plain, source, replace=replace, label=label or None, keep=keep).result()
        if pinned is not None:
            (self.pin_adapter if pinned else self.unpin_adapter)(plain)
        return versioned(plain, state.label)

    def reset_prefix_cache(
        self, *, reset_running_requests: bool = False, tiers: str | Collection[str] = tuple(Medium)
    ) -> bool:
        """Forget cached prefixes; True, as it always succeeds. tiers: some of `pool`, `host` and `disk`, in a list, or
        with commas between them. Raises InvalidRequest for others.

        reset_running_requests: running requests compute their KV again, too; else they go on with it, and no other
        request will use it if the tiers include `pool` and `host`.
        """
        mediums = mediums_of(tiers.split(",") if isinstance(tiers, str) else tiers)
        self._worker.reset_prefix_cache(reset_running_requests=reset_running_requests, tiers=mediums).result()
        return True

    def pin_adapter(self, name: str) -> None:
        """Keep an adapter resident. Raises InvalidRequest if there is no room for it, and UnknownAdapter."""

        def pin() -> None:
            with python_errors():
                self._loop.run(pin_adapter(self._worker.adapters, name, self._settings.adapter_load_seconds))

        self._of_known(name, pin)

    def unpin_adapter(self, name: str) -> None:
        """Allow its pages to be evicted again. Raises UnknownAdapter."""
        self._of_known(name, self._worker.adapters.unpin(name).result)

    def pause_adapter(self, name: str, *, paused: bool = True) -> None:
        """Refuse new requests for all versions of an adapter, or accept them again. Raises UnknownAdapter."""
        self._of_known(name, lambda: self._loop.run(self._loads.pause(name, paused=paused)))

    def unload_adapter(self, name: str, *, force: bool = False) -> None:
        """Remove an adapter, or a version of it; running requests finish with it or, with `force`, end with an error.
        Raises UnknownAdapter.
        """
        self._of_known(name, lambda: self._loads.remove_now(name, force=force))
        self._sourced.forget(name)

    # -- start and stop

    def close(self) -> None:
        """Cancel running requests and free the model's memory."""
        self._loop.stop()
        self._sourced.stop()
        self._loads.stop()
        self._worker.stop()
        self._threads.shutdown()
        self._files.close()

    if not TYPE_CHECKING:  # else a type checker would take any name for an attribute

        def __getattr__(self, name: str) -> Never:
            refuse(self, name)

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # -- common

    def _pooled(
        self,
        ask: Callable[[Sequence[Any], Sequence[str | None], Mapping[str, Any]], Coroutine[Any, Any, list[T]]],
        prompts: Prompt | Sequence[Prompt],
        adapter: AdapterChoice,
        **fields: Any,
    ) -> T | list[T]:
        given, alone = prompts_of(prompts)
        adapters = for_each(adapter, len(given), "adapter", (str, type(None)), "an adapter's name")
        found = self._loop.run(ask(given, adapters, fields))
        return found[0] if alone else found

    async def _all(self, asked: Sequence[PromptRequest], use_tqdm: Any) -> list[Completion]:
        with progress_bar(len(asked), use_tqdm, "prompts") as advance:
            return await self._asking.all(asked, advance)

    def _asked(
        self, given: Sequence[Any], params: Any, adapter: Any, stop: Any, unknown: Mapping[str, Any], *, is_chat: bool
    ) -> list[PromptRequest]:
        """The prompts with their parameters. Raises InvalidRequest for arguments that don't fit."""
        refuse_unknown(unknown)
        count = len(given)
        all_params = for_each(params or SamplingParams(), count, "params", SamplingParams, "SamplingParams")
        all_adapters = for_each(adapter, count, "adapter", (str, type(None)), "an adapter's name")
        what = "conversation" if is_chat else "prompt"
        return [
            PromptRequest(prompt, _with_stop(one, stop), name, is_chat, f"{what} {index}: ")
            for index, (prompt, one, name) in enumerate(zip(given, all_params, all_adapters, strict=True))
        ]

    def _stream(self, asked: Sequence[PromptRequest]) -> Stream:
        (one,) = asked
        if (one.params.n or 1) > 1:
            raise InvalidRequest("n", f"n is {one.params.n}, but a stream has one completion; leave n out")
        ended: list[Completion] = []
        return Stream(self._loop, self._asking.pieces(one, ended), ended)

    def _of_known(self, name: str, act: Callable[[], T]) -> T:
        """The result of `act`; raises UnknownAdapter with the most similar name."""
        try:
            return act()
        except UnknownAdapter:
            near = nearest(name, self.adapters)
            hint = f"did you mean {near!r}?" if near else "llm.adapters lists them"
            raise UnknownAdapter(f"there is no adapter {name!r}; {hint}") from None


def _with_stop(params: SamplingParams, stop: str | Sequence[str]) -> SamplingParams:
    """The parameters with additional stop texts."""
    if not stop:
        return params
    if params.given.get("stop"):
        raise InvalidRequest("stop", "stop is given twice, in params and as an argument; leave one out")
    return params.replace(stop=stop)
