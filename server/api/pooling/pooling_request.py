"""Bodies of the routes that return vectors and scores, with vLLM's fields.

Tests: tests/server/api/pooling/test_pooling_api.py
"""

from __future__ import annotations

from itertools import chain
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from ....core.requests.request_params import InvalidRequest
from ...access.limits import RequestLimits
from ...text.conversation import RESERVED_FOR_TEMPLATE, Conversation
from ..chat_request import ChatCompletionRequest
from ..completion_request import is_token_list
from ..openai import MAX_NAME_CHARACTERS, Name
from ..translation import OtherBody, RefusedFields

_OF_CONVERSATIONS = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "mm_processor_kwargs")

MAX_INSTRUCTION_CHARACTERS = 1 << 16

Input = str | list[int]
"""A text, or its token ids."""


class PoolingBody(OtherBody):
    """Fields that these routes have in common."""

    harmless: ClassVar = ("user", "custom_labels", "metadata", "safety_identifier")
    refused: ClassVar[RefusedFields] = {
        "priority": ((0,), "requests are served by their tenants' shares; leave it out"),
        "embed_dtype": (("float32",), "vectors are float32; leave it out"),
        "endianness": (("native", "little"), "vectors are little-endian; leave it out"),
    }

    model: Name | None = None
    lora_path: Annotated[str, Field(max_length=MAX_NAME_CHARACTERS)] | None = None
    add_special_tokens: bool = True
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    cache_salt: Annotated[str, Field(max_length=256)] = ""
    request_id: Annotated[str, Field(pattern="^[A-Za-z0-9._:-]{1,128}$")] | None = None


class InputBody(PoolingBody):
    """Texts, each of which has a result, or a conversation, which has one."""

    input: Any = None
    messages: Any = None
    add_generation_prompt: bool = False
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}
    mm_processor_kwargs: dict[str, Any] = {}

    def conversation(self, limits: RequestLimits) -> Conversation | None:
        """The conversation, which the chat template makes a text of; None if texts are given. Raises an ApiError."""
        if self.messages is None:
            unasked = set() if self.mm_processor_kwargs else {"mm_processor_kwargs"}
            given = self.model_fields_set & {*_OF_CONVERSATIONS} - unasked
            if given:
                name = min(given)
                raise InvalidRequest(name, f"{name} is of conversations; give messages, or leave it out")
            return None
        if self.input is not None:
            raise InvalidRequest("messages", "input and messages are both given; give one of them")
        fields = self.model_dump(include={"messages", *_OF_CONVERSATIONS, "add_special_tokens"}, exclude_unset=True)
        fields.setdefault("add_generation_prompt", False)
        return ChatCompletionRequest.of(fields, limits).conversation()

    def inputs(self, limits: RequestLimits) -> list[Input]:
        """One entry per result. Raises InvalidRequest."""
        given = self.input
        if isinstance(given, str) or is_token_list(given):
            return [given]
        if not isinstance(given, list) or not given:
            raise InvalidRequest("input", "input must be a string, a list of token ids, or a non-empty list of either")
        check_count("input", len(given), limits)
        for index, entry in enumerate(given):
            if not (isinstance(entry, str) or is_token_list(entry)):
                raise InvalidRequest(f"input[{index}]", f"input[{index}] must be a string or a list of token ids")
        return given


class EmbeddingsBody(InputBody):
    """Texts to make vectors of."""

    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(ge=1)] | None = None
    normalize: bool | None = None
    use_activation: bool | None = None

    @property
    def normalises(self) -> bool | None:
        """Whether vectors are to have length 1; None: as the model says."""
        return self.use_activation if self.normalize is None else self.normalize


class _ScoringBody(PoolingBody):
    """Fields of routes that return scores."""

    use_activation: bool | None = None
    activation: bool | None = None

    @property
    def activates(self) -> bool:
        """True if scores become probabilities."""
        return next((each for each in (self.use_activation, self.activation) if each is not None), True)


class ClassifyBody(InputBody, _ScoringBody):
    """Texts to classify."""


class PairBody(_ScoringBody):
    """Pairs of texts, which a reranker's chat template may write."""

    refused: ClassVar[RefusedFields] = {
        **PoolingBody.refused,
        "mm_processor_kwargs": (({},), "texts alone are served; leave it out"),
    }

    instruction: Annotated[str, Field(max_length=MAX_INSTRUCTION_CHARACTERS)] | None = None
    chat_template_kwargs: dict[str, Any] = {}

    def variables(self) -> dict[str, Any]:
        """The template's variables. Raises InvalidRequest for names that have another meaning."""
        for name in self.chat_template_kwargs:
            if name in RESERVED_FOR_TEMPLATE:
                message = f"{name} can't be given in chat_template_kwargs"
                raise InvalidRequest("chat_template_kwargs", message)
        own = {} if self.instruction is None else {"instruction": self.instruction}
        return {**own, **self.chat_template_kwargs}

    def refuse_variables(self, why: str) -> None:
        """Raises InvalidRequest if there are any: no template uses them. why: the reason."""
        for name in ("instruction", "chat_template_kwargs"):
            if getattr(self, name):
                raise InvalidRequest(name, f"{name} is not used: {why}, or leave it out")


class ScoreBody(PairBody):
    """Pairs of texts to score: one with each of several, or as many of both. The fields have several names."""

    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    queries: str | list[str] | None = None
    documents: str | list[str] | None = None
    items: str | list[str] | None = None
    data_1: str | list[str] | None = None
    data_2: str | list[str] | None = None

    def names(self) -> tuple[str, str]:
        """The fields of the first and of the second texts. Raises InvalidRequest unless they are one pair of names."""
        given = self.model_fields_set & set(chain.from_iterable(_PAIRS))
        for pair in _PAIRS:
            if given == set(pair):
                return pair
        begun = next((pair for pair in _PAIRS if given <= set(pair)), None)
        if begun is None:
            name = max(given)
            others = ", ".join(sorted(given - {name}))
            raise InvalidRequest(
                name, f"{name} is given beside {others}; give text_1 and text_2, or queries and documents"
            )
        missing = begun[0] if begun[0] not in given else begun[1]
        raise InvalidRequest(missing, f"{missing} is missing; give the texts of both sides")

    def pairs(self, limits: RequestLimits) -> list[tuple[str, str]]:
        """Raises InvalidRequest."""
        first_name, second_name = self.names()
        first, second = ([each] if isinstance(each, str) else each for each in self._given())
        for name, texts in ((first_name, first), (second_name, second)):
            if not texts:
                raise InvalidRequest(name, f"{name} is empty; give at least one text")
            check_count(name, len(texts), limits)
        if len(first) == 1:
            first = first * len(second)
        if len(first) != len(second):
            counts = f"{first_name} has {len(first)} texts and {second_name} {len(second)}"
            raise InvalidRequest(first_name, f"{counts}; give one, or as many as of {second_name}")
        return list(zip(first, second, strict=True))

    def _given(self) -> tuple[str | list[str], str | list[str]]:
        first, second = (getattr(self, name) for name in self.names())
        return first, second


_PAIRS = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))


class Document(OtherBody):
    """A document as an object."""

    text: str


class RerankBody(PairBody):
    """Documents to sort by how well they answer a query."""

    query: str
    documents: list[str | Document]
    top_n: Annotated[int, Field(ge=0)] = 0
    return_documents: bool = True

    def texts(self, limits: RequestLimits) -> list[str]:
        """The documents' texts. Raises InvalidRequest."""
        if not self.documents:
            raise InvalidRequest("documents", "documents is empty; give at least one")
        check_count("documents", len(self.documents), limits)
        return [each if isinstance(each, str) else each.text for each in self.documents]


def check_count(name: str, count: int, limits: RequestLimits) -> None:
    if count > limits.max_inputs:
        raise InvalidRequest(name, f"{name} has {count} entries, this server accepts {limits.max_inputs} per request")
