"""The model's tokenizer: text to tokens, conversations to text, tokens back to text."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.sampling_params import InvalidRequest
from .detokenizer import ByteDetokenizer, Decoder, Detokenizer, TextStream
from .vocabulary import Vocabulary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

THREAD_CHARACTERS = 8192
"""Texts longer than this are encoded beside the event loop, which they would hold up for milliseconds."""


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
        self._backend = backend
        self._special = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)
        self.vocabulary = Vocabulary(backend)

    @classmethod
    def load(cls, model: Path) -> Tokenizer:
        """Reads the tokenizer of a checkpoint directory; raises ValueError or OSError for what is no fast tokenizer."""
        from transformers import AutoTokenizer

        if not (model / "tokenizer.json").is_file():
            raise ValueError(f"{model} has no tokenizer.json; save the model's fast tokenizer there")
        return cls(AutoTokenizer.from_pretrained(str(model), local_files_only=True))

    @property
    def has_chat_template(self) -> bool:
        return bool(self._tokenizer.chat_template)

    async def encode(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """The tokens of each text; long texts don't hold up the event loop."""
        if sum(map(len, texts)) > THREAD_CHARACTERS:
            return await asyncio.to_thread(self.encode_now, texts, add_special_tokens=add_special_tokens)
        return self.encode_now(texts, add_special_tokens=add_special_tokens)

    async def encode_chat(self, messages: list[dict[str, Any]]) -> list[int]:
        """The tokens of the prompt that asks the model to continue a conversation; see `apply_chat_template`."""
        if sum(len(message["content"]) for message in messages) > THREAD_CHARACTERS:
            return await asyncio.to_thread(self.encode_chat_now, messages)
        return self.encode_chat_now(messages)

    def encode_now(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """The tokens of each text."""
        # In batches even if there is one only: unlike `encode`, they run without the interpreter lock.
        return [e.ids for e in self._backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)]

    def encode_chat_now(self, messages: list[dict[str, Any]]) -> list[int]:
        """The tokens of a conversation's prompt. The template writes the special tokens itself."""
        return self.encode_now([self.apply_chat_template(messages)], add_special_tokens=False)[0]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of tokens, as the vocabulary spells it (no clean-up of spaces)."""
        return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def apply_chat_template(self, messages: list[dict[str, Any]]) -> str:
        """The prompt that asks the model to continue a conversation.

        Raises InvalidRequest for models without a template and for conversations that the template refuses.
        """
        if not self.has_chat_template:
            raise InvalidRequest("messages", "this model has no chat template; send a plain prompt (/v1/completions)")
        try:
            prompt = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # templates are programs: whatever they raise is about the messages
            raise InvalidRequest("messages", f"the model's chat template refuses the messages: {error}") from error
        return str(prompt)

    def bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The token sequences that words must not appear as, as vLLM understands them.

        Each word is meant at the beginning of a text and after a space, which most vocabularies spell differently, so
        that its tokens with and without a leading space are both taken. Other spellings of it (other cases, or
        divided into tokens in another way) are not.
        """
        sequences: dict[tuple[int, ...], None] = {}
        for word in words:
            bare = word.lstrip() or word
            plain, spaced = map(tuple, self.encode_now([bare, f" {bare}"], add_special_tokens=False))
            if not plain:  # no token has any of it: it can't be said
                continue
            sequences[plain] = None
            if spaced[-len(plain) :] != plain:  # else it is caught already
                sequences[spaced] = None
        return tuple(sequences)

    def offsets(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> list[int]:
        """Where in the text of all tokens each of them begins."""
        stream = self.text_stream(skip_special_tokens=skip_special_tokens)
        offsets = []
        for token_id in token_ids:
            offsets.append(stream.position)
            stream.push([token_id])
        return offsets

    def text_stream(
        self,
        stops: Sequence[str] = (),
        *,
        skip_special_tokens: bool = True,
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> TextStream:
        """A fresh stream that turns tokens into text; its text joined equals `decode` of all tokens."""
        special = self._special if skip_special_tokens else frozenset()
        spelt = self.vocabulary.spelt
        if self.vocabulary.is_bytes:
            decoder: Decoder = ByteDetokenizer(lambda token_id: b"" if token_id in special else spelt(token_id) or b"")
        else:

            def decode(token_ids: list[int]) -> str:
                return self._backend.decode(token_ids, skip_special_tokens=False)

            def is_silent(token_id: int) -> bool:
                return token_id in special or spelt(token_id) is None

            decoder = Detokenizer(decode, is_silent, self.vocabulary.byte_tokens.get)
        return TextStream(decoder, stops, include_stop=include_stop, min_tokens=min_tokens)
