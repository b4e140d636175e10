"""Routes of other servers that there are none of here: what is asked for there, and what to do instead."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from ..errors import ApiError

_VECTORS = "language models are served here, which write text and give no vectors or scores; vLLM serves such models"
_SOUND = "speech is neither read nor spoken here; vLLM serves Whisper and others"
_IMAGES = "images are neither read nor drawn here"
_FILES = "no files are kept here; chorus batch answers a file of requests, or send them one by one, many at once"
_STORED = "no response is stored here; send the whole conversation as input of POST /v1/responses"
_TRAINING = "adapters are served here, not trained; PEFT trains them, and POST /v1/adapters takes what it saves"

_OF_VECTORS = (
    "/classify",
    "/pooling",
    "/rerank",
    "/score",
    "/v1/embeddings",
    "/v1/moderations",
    "/v1/rerank",
    "/v1/score",
    "/v2/embed",
    "/v2/rerank",
)

ABSENT: dict[str, tuple[tuple[str, ...], str]] = {
    **dict.fromkeys(_OF_VECTORS, (("POST",), _VECTORS)),
    **{f"/v1/audio/{noun}": (("POST",), _SOUND) for noun in ("speech", "transcriptions", "translations")},
    **{f"/v1/images/{noun}": (("POST",), _IMAGES) for noun in ("edits", "generations", "variations")},
    **dict.fromkeys(("/v1/batches", "/v1/files", "/v1/messages/batches"), (("GET", "POST"), _FILES)),
    "/v1/responses/{id}": (("GET", "DELETE"), _STORED),
    "/v1/responses/{id}/cancel": (("POST",), _STORED),
    "/v1/fine_tuning/jobs": (("POST",), _TRAINING),
}
"""By path: the methods that clients use there, and the reason."""


async def absent(request: Request) -> Response:
    """Refuse a request with the reason."""
    _, reason = ABSENT[request.scope["route"].path]
    raise ApiError(501, f"{request.url.path} is not served: {reason}", code="not_supported")
