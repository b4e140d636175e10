r"""A model with its adapters in this process: the library's front door.

from chorus import LLM, SamplingParams

with LLM() as llm:
    print(llm.generate("hello world\n", SamplingParams(temperature=0), adapter="reverse").text)
"""

from __future__ import annotations

import itertools
import queue
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, overload

from ..core.requests.request import Request
from ..core.requests.sampling_params import InvalidRequest, SamplingParams, Seeds
from ..core.requests.types import FinishReason, RequestOutput, TokenLogprobs
from .engine.adapter_loads import AdapterLoads
from .engine.generation import Choice, Generation
from .errors import GenerationFailed
from .settings import Settings
from .start.launch import load

if TYPE_CHECKING:
    from .engine.backend import Backend

Prompt = str | Sequence[int]
"""Text, or the tokens of one."""

IN_FLIGHT = 256
"""Prompts that the engine is given at once; the others follow as these end."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One prompt's answer. finish_reason: `stop` or `length`. logprobs: one per token where params ask for them."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    prompt_token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()


class LLM:
    """An engine on a thread of its own, with its tokenizer. Use as a context manager, or call `close`.

    Any thread may call any method; requests in progress at the same time share the engine's steps, whatever adapters
    they use.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        adapters: str | Path | Mapping[str, str | Path] | None = None,
        **options: Any,
    ) -> None:
        """Load a model and register adapters.

        model: a checkpoint directory, or the name of one that `chorus pull` fetched; default: the built-in model with
        its adapters. adapters: a directory of adapter directories, or adapter directories by name. options: any
        setting of `chorus serve`, such as `dtype` or `memory_bytes`.
        Raises LaunchError for a model that can't be served, AdapterFormatError for an adapter.
        """
        named = adapters if isinstance(adapters, Mapping) else {}
        if model is not None:
            options["model"] = Path(model)
        if adapters is not None and not isinstance(adapters, Mapping):
            options["adapters"] = Path(adapters)
        self._open(Settings(**options))
        try:
            for name, path in named.items():
                self.load_adapter(name, path)
        except BaseException:
            self.close()
            raise

    @classmethod
    def of(cls, settings: Settings) -> LLM:
        """A model as the settings of a server name it."""
        llm = cls.__new__(cls)
        llm._open(settings)  # noqa: SLF001 - another constructor
        return llm

    def _open(self, settings: Settings) -> None:
        self._settings = settings
        self._worker, self.tokenizer = load(settings)
        self._ids = itertools.count()
        self._seeds = Seeds(settings.seed)
        self._loads = AdapterLoads(self._worker, settings.adapter_load_seconds, settings.adapter_places)
        self._loads.start()

    # -- answers

    # a str is a Sequence[str] too, and Python has no type for all the others
    @overload
    def generate(  # pyright: ignore[reportOverlappingOverload]
        self, prompts: str, params: SamplingParams | None = None, adapter: str | None = None, *,
        stop: Sequence[str] = (),
    ) -> Completion: ...  # fmt: skip

    @overload
    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None,
        adapter: str | Sequence[str | None] | None = None, *, stop: Sequence[str] = (),
    ) -> list[Completion]: ...  # fmt: skip

    def generate(
        self,
        prompts: str | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        adapter: str | Sequence[str | None] | None = None,
        *,
        stop: Sequence[str] = (),
    ) -> Completion | list[Completion]:
        """Answer one text, or a list of texts or token lists, in the order of the prompts.

        params, adapter: one for all prompts, or one for each; no adapter is the base model. stop: texts that end an
        answer. Raises InvalidRequest, naming the prompt, for what can't be served as asked, and GenerationFailed when
        an answer ends with an error; the other prompts are then given up.
        """
        if isinstance(prompts, str):
            return self._run([prompts], params, adapter, stop)[0]
        return self._run(list(prompts), params, adapter, stop)

    def chat(
        self, messages: list[dict[str, Any]], params: SamplingParams | None = None, adapter: str | None = None, *,
        stop: Sequence[str] = (),
    ) -> Completion:  # fmt: skip
        """Answer a conversation through the model's chat template. messages: OpenAI's, with `role` and `content`."""
        return self._run([self.tokenizer.encode_chat_now(messages)], params, adapter, stop)[0]

    async def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, adapter: str | None = None, *,
        stop: Sequence[str] = (),
    ) -> AsyncIterator[str]:  # fmt: skip
        """Yield an answer's text as it comes; leaving the loop early ends the request and frees its pages."""
        choice = self._choice(0, f"llm-{next(self._ids)}", prompt, params or SamplingParams(), adapter, stop)
        generation = Generation(self._worker, [choice], id=choice.request.id, model=adapter or self._settings.base_name)
        await generation.start()
        try:
            async for delta in generation:
                if delta.text:
                    yield delta.text
        finally:
            generation.close()

    # -- adapters

    @property
    def adapters(self) -> list[str]:
        """Names of the registered adapters, sorted."""
        return [one.name for one in self._worker.adapters.listing().result().adapters()]

    def load_adapter(self, name: str, path: str | Path) -> None:
        """Register a PEFT directory under a name, or replace one: answers in progress finish with the old version.

        Raises AdapterFormatError, and leaves what was there, when the directory can't be served; LoadTimedOut when its
        disk takes longer than `adapter_load_seconds`.
        """
        self._loads.load(name, lambda: Path(path)).result()

    def unload_adapter(self, name: str, *, force: bool = False) -> None:
        """Forget an adapter; answers in progress finish with it or, with `force`, end with an error."""
        self._worker.adapters.remove(name, force=force).result()

    # -- life

    def close(self) -> None:
        """End what is in progress and give back the model's memory."""
        self._loads.stop()
        self._worker.stop()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _run(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        adapter: str | Sequence[str | None] | None,
        stop: Sequence[str],
    ) -> list[Completion]:
        count = len(prompts)
        all_params = _each(params or SamplingParams(), count, "params", SamplingParams)
        all_adapters = _each(adapter, count, "adapter", (str, type(None)))
        call = f"llm-{next(self._ids)}"
        choices = [
            self._choice(index, call, prompt, one, name, stop)
            for index, (prompt, one, name) in enumerate(zip(prompts, all_params, all_adapters, strict=True))
        ]
        batch = _Batch(self._worker, choices)
        try:
            batch.run()
        finally:
            batch.close()
        return [
            Completion(
                choice.text, tuple(choice.token_ids), str(choice.finish_reason), tuple(choice.prompt_token_ids),
                tuple(choice.logprobs),
            )
            for choice in choices
        ]  # fmt: skip

    def _choice(
        self, index: int, call: str, prompt: Prompt, params: SamplingParams, adapter: str | None, stop: Sequence[str]
    ) -> Choice:
        tokens = self.tokenizer.encode_now([prompt])[0] if isinstance(prompt, str) else list(prompt)
        request = Request(f"{call}-{index}", tokens, self._seeds.fill(params), adapter)
        return Choice(index, request, self.tokenizer.text_stream(list(stop), min_tokens=params.min_tokens))


class _Batch:
    """The choices of one call, at most `IN_FLIGHT` of them in the engine."""

    def __init__(self, worker: Backend, choices: Sequence[Choice]) -> None:
        self._worker = worker
        self._outputs: queue.SimpleQueue[RequestOutput | BaseException] = queue.SimpleQueue()
        self._to_come = iter(choices)
        self._open: dict[str, Choice] = {}

    def run(self) -> None:
        for choice in itertools.islice(self._to_come, IN_FLIGHT):
            self._submit(choice)
        while self._open:
            output = self._outputs.get()
            if isinstance(output, BaseException):
                raise output
            choice = self._open.get(output.request_id)
            if choice is None:
                continue
            self._take(choice, output)
            if choice.finish_reason is not None:
                for following in itertools.islice(self._to_come, 1):
                    self._submit(following)

    def close(self) -> None:
        """Abort what still runs."""
        for request_id in self._open:
            self._worker.abort(request_id)
        self._open.clear()

    def _take(self, choice: Choice, output: RequestOutput) -> None:
        if output.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
            del self._open[output.request_id]
            raise GenerationFailed(f"prompt {choice.index}: {output.error or 'the engine ended this request'}")
        choice.add_output(output)
        if choice.finish_reason is not None:
            del self._open[output.request_id]
            if output.finish_reason is None:  # a stop text, which the engine does not look for
                self._worker.abort(output.request_id)

    def _submit(self, choice: Choice) -> None:
        """Give a choice to the engine without waiting for the step in progress; a refusal comes as an output does."""
        self._open[choice.request.id] = choice

        def refused(future: Future[None]) -> None:
            if isinstance(error := future.exception(), InvalidRequest):
                error = InvalidRequest(error.field, f"prompt {choice.index}: {error}")
            if error is not None:
                self._outputs.put(error)

        self._worker.submit(choice.request, self._outputs.put).add_done_callback(refused)


def _each(value: Any, count: int, name: str, single: type | tuple[type, ...]) -> list[Any]:
    """One value for every prompt."""
    if isinstance(value, single):
        return [value] * count
    values = list(value)
    if len(values) != count:
        raise InvalidRequest(name, f"there are {len(values)} {name} for {count} prompts; give one, or one for each")
    return values
