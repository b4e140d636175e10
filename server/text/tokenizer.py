"""The model's tokenizer: text to tokens, conversations to prompts, tokens to text."""

from __future__ import annotations

import copy
import difflib
import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...core.requests.request_params import InvalidRequest
from ...memory.files.tokens.torchvision import mend_torchvision
from ..errors import clipped, too_long
from ..executors import DaemonPool
from .chat_templates import drops_texts, names_in, read_template, variables_of
from .conversation import ROLES, Conversation
from .detokenizer import ByteDetokenizer, Decoder, Detokenizer, TextStream
from .output_syntax import OutputSyntax
from .own_tokenizer import CalledTokenizer, own_backend
from .spelt_specials import SpeltSpecials, new_mark
from .tool_call_formats import FORMAT_NAMES, REASONING_FIELDS, declared, is_known, output_syntax_of
from .vocabulary import Vocabulary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ...memory.files.tokens.added_tokens import OwnTokens

GENERIC = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Classes of tokenizers without code of their own."""

THREAD_CHARACTERS = 8192
"""Texts longer than this are encoded on a thread; on the event loop they would take milliseconds."""

THREAD_MESSAGES = 32
"""Messages, or bad words, above which a thread is used, too."""

TAG = re.compile(r"<.*>", re.DOTALL)
"""An added token that llguidance takes for a special one, whether it is or not."""

THREADS = 2

TYPICAL_CHARACTERS = 8
"""Characters per token that most texts stay below: of much longer texts the beginning is encoded first."""

CUT_TOKENS = 64

Tokens = list[list[int]]

_KEPT = frozenset((*ROLES, *REASONING_FIELDS, "role", "content", "type", "text", "image"))
"""Strings of the API that stay as they are in a template's text, as those that it looks for."""


log = logging.getLogger(__name__)


INFO_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")
INFO_FLAGS = ("add_bos_token", "add_eos_token", "add_prefix_space", "clean_up_tokenization_spaces")


def _is_generic(model: Path, found: Path) -> bool:
    """True if AutoTokenizer would only find that the tokenizer is entirely in tokenizer.json.

    AutoTokenizer imports torch and the classes of all models for this: 6 s of CPU time and 340 MiB.
    """
    try:
        config, own = (
            json.loads(path.read_bytes()) for path in (model / "config.json", found / "tokenizer_config.json")
        )
        kind, auto_map = own.get("tokenizer_class"), own.get("auto_map")
        return config.get("model_type") == "llama" and kind in GENERIC and auto_map is None
    except (OSError, ValueError, AttributeError, TypeError):  # AutoTokenizer reports the fault
        return False


def _with_texts(conversation: Conversation, change: Callable[[Any], Any]) -> Conversation:
    """The conversation with all that a client wrote changed; the same if nothing is."""
    given = conversation.messages, conversation.tools, conversation.variables
    messages, tools, variables = map(change, given)
    if all(a is b for a, b in zip(given, (messages, tools, variables), strict=True)):
        return conversation
    return replace(conversation, messages=messages, tools=tools, variables=variables)


class Tokenizer:
    """A fast (`tokenizer.json`) Hugging Face tokenizer. Safe to use from several threads."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ValueError("the model's tokenizer has no fast version; add a tokenizer.json to its directory")
        # The backend is used directly: the wrapper sets truncation per call, which two threads can't share.
        backend.no_truncation()
        backend.no_padding()
        self._tokenizer = tokenizer
        self.tokens: OwnTokens | None = None
        """The adapter's that this is the tokenizer of; None: it is the model's."""
        self.own: Mapping[str, int] = {}
        """Ids of an adapter's tokens that the model's tokenizer lacks."""
        self.own_end: int | None = None
        """The end-of-sequence token of an adapter's tokenizer."""
        self._threads = DaemonPool("tokenizer", THREADS)
        self.tool_call_format: str | None = None
        """Name of the format of tool calls; None: as the chat template tells."""
        self.window: int | None = None
        """The model's sliding window, if it limits the context: errors about long texts mention it."""
        self._use(CalledTokenizer(backend))

    def copied(self) -> PreTrainedTokenizerBase:
        """A copy of the library's tokenizer: its calls change its state, which threads of the server can't share."""
        return copy.deepcopy(self._tokenizer)

    def _use(self, backend: CalledTokenizer) -> None:
        """Take the library's own tokenizer."""
        self.backend = backend
        added = backend.get_added_tokens_decoder()
        self._special = frozenset(i for i, token in added.items() if token.special)
        marks = {
            token.content: i
            for i, token in added.items()
            if token.content and (token.special or TAG.fullmatch(token.content))
        }
        self.specials_in = lru_cache(64)(lambda text: {word: i for word, i in marks.items() if word in text})
        """Ids of the tokens written in a text that can't be part of a grammar's texts: the special ones, and other
        added ones in angle brackets, such as Qwen3's <think>, which llguidance takes for special ones.
        """
        self._recognised = lru_cache(8)(
            lambda template, name: output_syntax_of(template, self.is_token, self._declared, name)
        )
        self._spelt = SpeltSpecials(backend)
        self.vocabulary = Vocabulary(backend)

    @classmethod
    def load(
        cls,
        model: Path,
        directory: Path | None = None,
        chat_template: Path | None = None,
        tool_call_format: str | None = None,
    ) -> Tokenizer:
        """Read the tokenizer of a checkpoint, or of another directory.

        chat_template: a file to use instead of its own template. tool_call_format: name of the format of tool calls;
        None: as the chat template tells. Raises ValueError or OSError without a fast tokenizer, or for an invalid
        template.
        """
        found = directory or model
        if not (found / "tokenizer.json").is_file():
            raise ValueError(f"{found} has no tokenizer.json; save the model's fast tokenizer there")
        if _is_generic(model, found):
            from transformers import PreTrainedTokenizerFast as Loader
        else:
            mend_torchvision()
            from transformers import AutoTokenizer as Loader
        loaded = cls(Loader.from_pretrained(str(found), local_files_only=True))
        loaded = loaded if chat_template is None else loaded.with_chat_template(read_template(chat_template))
        if tool_call_format is not None and tool_call_format not in FORMAT_NAMES:
            names = ", ".join(sorted(FORMAT_NAMES))
            raise ValueError(f"tool_call_format is {tool_call_format!r}, but must be one of {names}")
        loaded.tool_call_format = tool_call_format
        if not loaded.knows_calls:
            log.warning(
                "the chat template writes tools in a format that is not known: calls are read as hermes writes them, "
                "and may stay in the content; name the format with --tool-call-format"
            )
        return loaded

    def with_chat_template(self, template: str) -> Tokenizer:
        """The same tokenizer with another chat template; everything else is shared."""
        other = copy.copy(self)
        other._tokenizer = copy.copy(self._tokenizer)  # noqa: SLF001 - of this class
        other._tokenizer.chat_template = template  # noqa: SLF001
        return other

    def with_tokens(self, own: OwnTokens, broken: Callable[[str], Exception] = ValueError) -> Tokenizer:
        """The tokenizer of an adapter that adds tokens; the vocabulary, and the chat template, are shared.

        broken: makes the error for a call that fails within the library because of these tokens, of the reason. Raises
        ValueError for tokens that the library numbers otherwise.
        """
        other = copy.copy(self)
        other._use(own_backend(self.backend, own, broken))  # noqa: SLF001 - of this class
        other.own = {token.text: token.id for token in own.tokens if not self.is_token(token.text)}
        other.tokens, named = own, dict(own.named)
        other.own_end = other.backend.token_to_id(named.get("eos_token", ""))
        other._tokenizer = changed = copy.copy(self._tokenizer)  # noqa: SLF001
        changed._special_tokens_map = {**self._tokenizer._special_tokens_map, **named}  # noqa: SLF001
        return other

    @property
    def has_chat_template(self) -> bool:
        return bool(self._tokenizer.chat_template)

    @property
    def chat_template(self) -> str:
        """The text of the model's chat template, or of all if it has several."""
        template = self._tokenizer.chat_template or ""
        return template if isinstance(template, str) else "\n".join(map(str, template.values()))

    @property
    def output_syntax(self) -> OutputSyntax:
        """How the model writes calls, reasoning and answers: as its checkpoint declares, or its chat template tells."""
        return self._recognised(self.chat_template, self.tool_call_format)

    @property
    def knows_calls(self) -> bool:
        """False if the chat template writes tools, but in no format that is known: then calls may be content."""
        return self.tool_call_format is not None or self._declared.calls is not None or is_known(self.chat_template)

    @property
    def _declared(self) -> OutputSyntax:
        return declared(getattr(self._tokenizer, "response_template", None))

    def info(self) -> dict[str, Any]:
        """Data for writing prompts, under transformers' names: special tokens, the chat template, the class."""
        own = self._tokenizer
        flags = {name: own.init_kwargs[name] for name in INFO_FLAGS if isinstance(own.init_kwargs.get(name), bool)}
        return {
            "tokenizer_class": type(own).__name__,
            **{name: str(token) if token else None for name in INFO_TOKENS for token in [getattr(own, name, None)]},
            **flags,
            "model_max_length": own.model_max_length,
            "chat_template": self.chat_template or None,
        }

    def is_token(self, text: str) -> bool:
        return self.backend.token_to_id(text) is not None

    async def encode(
        self,
        texts: Sequence[str],
        *,
        add_special_tokens: bool = True,
        most: int | None = None,
        what: str = "prompt",
    ) -> Tokens:
        """The tokens of each text; long texts don't block the event loop. For `most` and `what` see `encode_now`."""
        options = {"add_special_tokens": add_special_tokens, "most": most, "what": what}
        if sum(map(len, texts)) > THREAD_CHARACTERS:
            return await self._threads.run(self.encode_now, texts, **options)
        return self.encode_now(texts, **options)

    async def rewritten(self, several: Sequence[Sequence[int]]) -> Tokens:
        """For each sequence of tokens, those that the tokenizer gives for its text."""
        if not several:
            return []
        texts = await self._threads.run(lambda: [self.decode(each, skip_special_tokens=False) for each in several])
        return await self.encode(texts, add_special_tokens=False)

    async def encode_chat(self, conversation: Conversation, most: int | None = None) -> list[int]:
        """The tokens of the prompt that asks the model to continue a conversation; see `apply_chat_template`."""
        messages = conversation.messages
        length = sum(len(m["content"]) for m in messages)
        large = len(messages) > THREAD_MESSAGES or length > THREAD_CHARACTERS or conversation.num_images > 0
        more = any(message.keys() - {"role", "content"} for message in messages)  # such as tool calls, of any number
        if (
            large
            or more
            or conversation.tools
            or conversation.variables
            or self._torn(conversation, "0") is not conversation
        ):
            return await self._threads.run(self.encode_chat_now, conversation, most)
        return self.encode_chat_now(conversation, most)

    async def encode_chats(self, conversations: Sequence[Conversation], most: int | None = None) -> Tokens:
        """The tokens of the prompt of each conversation."""
        if len(conversations) == 1:
            return [await self.encode_chat(conversations[0], most)]
        return await self._threads.run(lambda: [self.encode_chat_now(each, most) for each in conversations])

    async def encode_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The token sequences of bad words; see `bad_words`."""
        return await self._threads.run(self.bad_words, words) if len(words) > THREAD_MESSAGES else self.bad_words(words)

    async def encode_pairs(
        self, pairs: Sequence[tuple[str, str]], *, add_special_tokens: bool = True, most: int | None = None
    ) -> Tokens:
        """The tokens of each pair of texts, as the tokenizer joins them; raises as `encode_now`."""
        long = sum(len(text) for pair in pairs for text in pair) > THREAD_CHARACTERS
        if long:
            return await self._threads.run(
                self.encode_pairs_now, pairs, add_special_tokens=add_special_tokens, most=most
            )
        return self.encode_pairs_now(pairs, add_special_tokens=add_special_tokens, most=most)

    def encode_pairs_now(
        self, pairs: Sequence[tuple[str, str]], *, add_special_tokens: bool = True, most: int | None = None
    ) -> Tokens:
        """See `encode_pairs`."""
        for pair in pairs:
            for text in pair:
                self._check_length(text, most, "prompt")
        if not pairs:
            return []
        return [e.ids for e in self.backend.encode_batch_fast(list(pairs), add_special_tokens=add_special_tokens)]

    @property
    def scores_pairs(self) -> bool:
        """True if the chat template writes a query and a document, as those of rerankers do."""
        return self._names_role("query") and self._names_role("document")

    def pair(
        self, query: str, document: str, variables: Mapping[str, Any], *, add_special_tokens: bool = True
    ) -> Conversation:
        """A query and a document as a conversation for a template that `scores_pairs`; an `instruction` is a variable
        of the template or the system's message. Raises InvalidRequest for a template without either.
        """
        messages = [{"role": "query", "content": query}, {"role": "document", "content": document}]
        variables = dict(variables)
        if "instruction" in variables and "instruction" not in variables_of(self.chat_template):
            if not self._names_role("system"):
                message = "instruction is read neither as a variable nor as the system's message by the model's chat"
                raise InvalidRequest("instruction", f"{message} template; leave it out")
            messages.insert(0, {"role": "system", "content": str(variables.pop("instruction"))})
        return Conversation(messages, begins_output=False, variables=variables, add_special_tokens=add_special_tokens)

    @property
    def cuts_left(self) -> bool:
        """True if the tokenizer truncates a text at its beginning."""
        return self._tokenizer.truncation_side == "left"

    def encode_now(
        self,
        texts: Sequence[str],
        *,
        add_special_tokens: bool = True,
        most: int | None = None,
        what: str = "prompt",
    ) -> Tokens:
        """The tokens of each text. Raises an ApiError for a text that must have more than `most` tokens by its length
        alone. what: the texts' field, which the error names.
        """
        for text in texts:
            self._check_length(text, most, what)
        return self._encode(texts, add_special_tokens)

    def _encode(self, texts: Sequence[str], add_special_tokens: bool) -> Tokens:
        if not texts:
            return []
        # In batches even for a single text: unlike `encode`, they run without the interpreter lock.
        return [e.ids for e in self.backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)]

    def encode_chat_now(self, conversation: Conversation | list[dict[str, Any]], most: int | None = None) -> list[int]:
        """The tokens of a conversation's prompt, or of its messages. Only the template's tokens are special."""
        if not isinstance(conversation, Conversation):
            conversation = Conversation(conversation)
        mark = new_mark()
        marked, torn = self._marked(conversation, mark), self._torn(conversation, mark)
        prompt = self._rendered(marked, mark)
        if torn is not conversation:
            other = self._rendered(torn, mark)
            if self._spelt.in_order(prompt) != self._spelt.in_order(other):  # texts side by side spell some
                marked, prompt = torn, other
        prompt = conversation.with_images(prompt)
        if marked is conversation and not self._spelt.may_be_respelt:
            self._check_length(prompt, most, "messages")
            return self._encode([prompt], conversation.add_special_tokens)[0]
        self._check_length(prompt.replace(mark, ""), most, "messages")
        return self._spelt.encode(prompt, mark, add_special_tokens=conversation.add_special_tokens)

    def _marked(self, conversation: Conversation, mark: str) -> Conversation:
        """The conversation with a mark in each special token; the same if there is none."""
        return _with_texts(conversation, lambda value: self._spelt.marked(value, mark))

    def _torn(self, conversation: Conversation, mark: str) -> Conversation:
        """The conversation with marks where texts may spell special tokens together; the same if none can."""
        names = names_in(self.chat_template) | _KEPT
        return _with_texts(conversation, lambda value: self._spelt.torn(value, mark, names))

    def _rendered(self, conversation: Conversation, mark: str) -> str:
        try:
            return self.apply_chat_template(conversation)
        except InvalidRequest as error:
            raise InvalidRequest(error.field, str(error).replace(mark, "")) from None

    def _check_length(self, text: str, most: int | None, what: str) -> None:
        """Raise an ApiError for a text of more than `most` tokens, if that can be seen without encoding all of it."""
        if most is None:
            return
        if len(text) > most * self.vocabulary.longest_token:
            least = -(-len(text) // self.vocabulary.longest_token)
            raise too_long(most, what, f"at least {least} tokens", self.window)
        beginning = most * TYPICAL_CHARACTERS
        if len(text) > 2 * beginning:
            tokens = len(self._encode([text[:beginning]], False)[0])
            if tokens >= most + CUT_TOKENS:  # cutting a text changes only a few of its tokens
                raise too_long(most, what, f"more than {tokens - CUT_TOKENS} tokens", self.window)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of tokens, as the vocabulary spells it (no clean-up of spaces)."""
        # The library itself doesn't skip a special token that it normalises.
        shown = [each for each in token_ids if each not in self._special] if skip_special_tokens else list(token_ids)
        return self.backend.decode(shown, skip_special_tokens=False)

    def names(self, token_ids: Sequence[int]) -> list[str]:
        """The vocabulary's own entries, with its marks for spaces and bytes."""
        return [self.backend.id_to_token(token_id) or "" for token_id in token_ids]

    def apply_chat_template(self, conversation: Conversation) -> str:
        """The prompt that asks the model to continue a conversation.

        Raises InvalidRequest for models without a template and for conversations that the template refuses.
        """
        if not self.has_chat_template:
            raise InvalidRequest("messages", "this model has no chat template; send a plain prompt (/v1/completions)")
        self._check_roles(conversation.messages)
        try:
            prompt = self._tokenizer.apply_chat_template(
                self._as_read(self._with_reasoning(conversation.messages)),
                tools=conversation.tools or None,  # pyright: ignore[reportArgumentType]  # a list of either
                tokenize=False,
                add_generation_prompt=conversation.begins_output,
                continue_final_message=conversation.continues_last,
                **conversation.variables,
            )
        except Exception as error:  # templates are programs: whatever they raise is a fault of the messages
            reason = clipped(str(error))
            raise InvalidRequest("messages", f"the model's chat template refuses the messages: {reason}") from error
        return str(prompt)

    def _as_read(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The messages, texts as lists of one part where the template writes nothing else: those of some models that
        see take each content for a list, and would leave a text out.
        """
        if not self._needs_parts(self.chat_template):
            return messages
        return [
            {**message, "content": [{"type": "text", "text": content}]}
            if isinstance(content := message.get("content"), str) and content
            else message
            for message in messages
        ]

    def _needs_parts(self, template: str) -> bool:
        return "type" in template and drops_texts(self._tokenizer, template)

    def _with_reasoning(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The messages, with their reasoning in the field that the chat template reads: families name it differently.

        Beside calls, content keeps its place: gpt-oss's template refuses a message with both.
        """
        read = [name for name in REASONING_FIELDS if name in self.chat_template]
        found = []
        for message in messages:
            given = next((message[name] for name in REASONING_FIELDS if message.get(name)), None)
            is_read = not read or given is None or any(message.get(name) for name in read)
            has_both = bool(message.get("tool_calls") and message.get("content"))
            found.append({**message} if is_read or has_both else {**message, read[0]: given})
        return found

    def _names_role(self, role: str) -> bool:
        return re.search(rf"['\"]{re.escape(role)}['\"]", self.chat_template) is not None

    def _check_roles(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Raise InvalidRequest for a role that neither the API nor the model's chat template knows: the template would
        skip the message, or write the role unchanged.
        """
        for index, message in enumerate(messages):
            role = str(message.get("role"))
            if role in ROLES or self._names_role(role):
                continue
            near = difflib.get_close_matches(role[:64], ROLES, n=1)
            hint = f"did you mean {near[0]}?" if near else f"it must be {', '.join(ROLES)}"
            where = f"messages[{index}].role"
            raise InvalidRequest(
                where, f"{where} is {clipped(role)!r}, which this model's chat template does not know; {hint}"
            )

    def bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The token sequences that bad words must not appear as, with vLLM's meaning.

        Each word is banned at the beginning of a text and after a space. Most vocabularies spell these differently, so
        the tokens with and without a leading space are both banned. Other spellings (other cases, or divided into other
        tokens) are not.
        """
        sequences: dict[tuple[int, ...], None] = {}
        bare = [word.lstrip() or word for word in words]
        spelt = self.encode_now([text for word in bare for text in (word, f" {word}")], add_special_tokens=False)
        for plain, spaced in zip(map(tuple, spelt[::2]), map(tuple, spelt[1::2]), strict=True):
            if not plain:  # no token contains any of it: it can't be generated
                continue
            sequences[plain] = None
            if spaced[-len(plain) :] != plain:  # otherwise it is caught already
                sequences[spaced] = None
        return tuple(sequences)

    def offsets(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> list[int]:
        """Offset in the text of all tokens at which each of them begins."""
        stream = self.text_stream(skip_special_tokens=skip_special_tokens)
        offsets = []
        for token_id in token_ids:
            offsets.append(stream.position)
            stream.push(token_id)
        return offsets

    def text_stream(
        self,
        stops: Sequence[str] = (),
        *,
        skip_special_tokens: bool = True,
        include_stop: bool = False,
        min_tokens: int = 0,
        marks: str = "",
    ) -> TextStream:
        """A new stream that turns tokens into text; its joined text equals `decode` of all tokens.

        marks: special tokens that are written out instead of skipped.
        """
        special = self._special if skip_special_tokens else frozenset()
        if special and marks:
            special -= set(self.specials_in(marks).values())
        spelt = self.vocabulary.spelt
        if self.vocabulary.is_bytes:
            decoder: Decoder = ByteDetokenizer(lambda token_id: b"" if token_id in special else spelt(token_id) or b"")
        else:
            decode = partial(self.backend.decode, skip_special_tokens=False)
            decoder = Detokenizer(
                decode, lambda token_id: token_id in special or spelt(token_id) is None, self.vocabulary.byte_tokens.get
            )
        return TextStream(decoder, stops, include_stop=include_stop, min_tokens=min_tokens)
