"""Results of `LLM`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from ...core.requests.types import TokenLogprobs
from ...memory.adapters.versions import full_name
from ..engine.generation import Choice, Delta, Generation
from ..text.output_parts import ParsedMessage, Part, PartKind, ToolCall


@dataclass(frozen=True, slots=True)
class Completion:
    """One completion of a prompt or a conversation."""

    text: str
    """The generated text; for a conversation without reasoning and tool calls."""
    token_ids: tuple[int, ...]
    finish_reason: str
    """`stop`, `length` or `tool_calls`."""
    prompt_token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One per token, if requested."""
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    """One per token of the prompt, None for the first, if requested."""
    stop_reason: int | str | None = None
    """The stop string, or the requested stop token, that ended it."""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    adapter: str | None = None
    """`NAME@VERSION` of the adapter used; None: the base model."""
    others: tuple[Completion, ...] = field(default=(), repr=False)
    """The further choices for the same prompt, if `n` > 1."""

    @property
    def choices(self) -> tuple[Completion, ...]:
        """All choices for the prompt."""
        return (self, *self.others)


@dataclass(slots=True)
class Collected:
    """Collects the deltas of a streamed choice."""

    text: list[str] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    def add(self, delta: Delta) -> str:
        """Take a delta; return the text that it adds."""
        self.logprobs += delta.logprobs
        if delta.parts is None:
            self.text.append(delta.text)
            return delta.text
        self.parts += delta.parts
        return "".join(part.text for part in delta.parts if part.kind is PartKind.CONTENT)


def completion_of(generation: Generation, begun: str = "") -> Completion:
    """The completion from a finished generation. begun: text before it, under `echo`."""
    first, *others = (_completion(one, begun, one.text, one.parts, one.logprobs) for one in generation.choices)
    return replace(first, others=tuple(others))


def streamed_completion(generation: Generation, collected: Collected, begun: str = "") -> Completion:
    """The same for a generation whose choice was streamed and keeps no text."""
    return _completion(generation.choices[0], begun, "".join(collected.text), collected.parts, collected.logprobs)


def _completion(
    choice: Choice, begun: str, text: str, parts: Iterable[Part], logprobs: Sequence[TokenLogprobs]
) -> Completion:
    said = ParsedMessage(content=text)
    if choice.reads:
        said = ParsedMessage()
        said.add(parts)
    scored = choice.prompt_logprobs
    return Completion(
        begun + said.content,
        token_ids=tuple(choice.token_ids),
        finish_reason=str(choice.finish_reason),
        prompt_token_ids=tuple(choice.prompt_token_ids),
        logprobs=tuple(logprobs),
        prompt_logprobs=None if scored is None else (None, *scored),
        stop_reason=choice.stop_reason,
        reasoning=said.reasoning,
        tool_calls=tuple(said.calls),
        adapter=used_adapter(choice),
    )


def used_adapter(choice: Choice) -> str | None:
    """`NAME@VERSION` of the adapter that a choice used; None: the base model."""
    bound = choice.request.bound
    return None if bound is None else full_name(bound.name, bound.label)
