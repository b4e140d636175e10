"""The routes between text and tokens, and those that gateways ask how busy the server is."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ..core.requests.sampling_params import InvalidRequest
from .generation_api import GenerationApi
from .json_text import encode
from .text_requests import ChatToTokens, TokensToText, tokenize_request
from .tokenizer import Tokenizer
from .worker import EngineWorker


class TextApi:
    """vLLM's /tokenize, /detokenize, /ping and /load."""

    def __init__(self, worker: EngineWorker, tokenizer: Tokenizer, generation: GenerationApi) -> None:
        self._worker = worker
        self._tokenizer = tokenizer
        self._generation = generation

    async def tokenize(self, request: Request) -> Response:
        asked = await self._generation.parse(tokenize_request, request)
        limit = self._worker.model.max_model_len
        if isinstance(asked, ChatToTokens):
            tokens = await self._tokenizer.encode_chat(asked.conversation(), limit)
        else:
            specials = asked.add_special_tokens
            (tokens,) = await self._tokenizer.encode([asked.prompt], add_special_tokens=specials, most=limit)
        names = self._tokenizer.names(tokens) if asked.return_token_strs else None
        body = {"count": len(tokens), "max_model_len": limit, "tokens": tokens, "token_strs": names}
        return Response(await self._generation.beside(encode, body), media_type="application/json")

    async def detokenize(self, request: Request) -> Response:
        asked = await self._generation.parse(TokensToText.parse, request)
        vocab = self._worker.model.vocab_size
        if asked.tokens and max(asked.tokens) >= vocab:
            raise InvalidRequest("tokens", f"token id {max(asked.tokens)} is outside the vocabulary of {vocab}")
        text = await self._generation.beside(self._text, asked.tokens)
        return JSONResponse({"prompt": text})

    def _text(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=False)

    async def ping(self, _: Request) -> Response:
        """SageMaker's health check: only the status counts."""
        return Response(status_code=200 if self._worker.healthy else 503)

    async def load(self, _: Request) -> Response:
        """Number of calls that are being answered."""
        return JSONResponse({"server_load": self._generation.num_open})
