"""Routes of other servers that do not exist here, with the reason and an alternative."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from ..errors import ApiError

_VECTORS = "vectors and scores have routes of their own: /v1/embeddings, /classify, /score and /rerank"
_SOUND = "this server does not process speech; vLLM serves Whisper and others"
_IMAGES = "this server makes no images; GET /health tells whether it reads those that chats send, or why it does not"
_FILES = "this server stores no files; run a file of requests with chorus batch, or send them concurrently"
_STORED = "this server stores no responses; send the whole conversation as input of POST /v1/responses"
_SCALES = "scales are a request's own; give them in its field lora, or in model, as A*0.7+B*0.5"
_WEIGHTS = (
    "the base model's weights can't be replaced while the server runs; train adapters, and load each version with "
    "POST /v1/load_lora_adapter"
)
_SLEEP = "POST /sleep frees the memory of the KV cache and of adapters' pages, and POST /wake_up ends the sleep"
_METHODS = "no methods of workers can be called over HTTP; GET /openapi.json lists what the server does"
_VERSIONS = (
    "versions are those of adapters: POST /v1/load_lora_adapter names one as NAME@LABEL, and GET /v1/adapters lists "
    "them, each with its content_hash"
)
_TENSORS = (
    "an adapter comes as its files, in one request: POST /v1/load_lora_adapter takes them in a form, names their "
    "directory, which may be in /dev/shm, or takes a memory file over the Unix socket of --unix-socket"
)
_ABORTS = (
    "a request ends when its client closes the connection; DELETE /v1/adapters/NAME?force=true ends those of an adapter"
)
_TRAINING = "this server does not train adapters; train with PEFT, and load the result with POST /v1/adapters"

_OF_VECTORS = (
    "/pooling",
    "/v1/moderations",
    "/v2/embed",
)

_OF_WEIGHTS = (
    "/update_weights_from_disk",
    "/update_weights_from_distributed",
    "/update_weights_from_tensor",
    "/init_weights_update_group",
    "/update_weights_from_ipc",
    "/init_communicator",
    "/close_communicator",
    "/update_named_param",
    "/batch_update_named_params",
    "/update_weights",
    "/init_weight_transfer_engine",
    "/shutdown_weight_transfer_engine",
    "/start_weight_update",
    "/start_draft_weight_update",
    "/finish_weight_update",
)

_OF_SLEEP = ("/release_memory_occupation", "/resume_memory_occupation", "/release_kv_cache_memory")

_OF_TENSORS = (
    "/register_lora_adapter",
    "/load_lora_adapter_from_tensors",
    "/load_lora_adapter_from_distributed",
)

ABSENT: dict[str, tuple[tuple[str, ...], str]] = {
    **dict.fromkeys(_OF_VECTORS, (("POST",), _VECTORS)),
    **{f"/v1/audio/{noun}": (("POST",), _SOUND) for noun in ("speech", "transcriptions", "translations")},
    **{f"/v1/images/{noun}": (("POST",), _IMAGES) for noun in ("edits", "generations", "variations")},
    **dict.fromkeys(("/v1/batches", "/v1/files", "/v1/messages/batches"), (("GET", "POST"), _FILES)),
    "/lora-adapters": (("POST",), _SCALES),
    **dict.fromkeys(("/abort_request", "/abort_requests"), (("POST",), _ABORTS)),
    **dict.fromkeys(_OF_SLEEP, (("POST",), _SLEEP)),
    "/collective_rpc": (("POST",), _METHODS),
    **dict.fromkeys(("/update_weight_version", "/weight_checker"), (("POST",), _VERSIONS)),
    "/weight_info": (("GET",), _VERSIONS),
    **dict.fromkeys(_OF_WEIGHTS, (("POST",), _WEIGHTS)),
    **dict.fromkeys(_OF_TENSORS, (("POST",), _TENSORS)),
    "/v1/responses/{id}": (("GET", "DELETE"), _STORED),
    "/v1/responses/{id}/cancel": (("POST",), _STORED),
    "/v1/fine_tuning/jobs": (("POST",), _TRAINING),
}
"""By path: the methods that clients use there, and the reason for the refusal."""


async def no_tokenizer_info(_: Request) -> Response:
    """Refuse vLLM's tokenizer_info on a server that does not serve it."""
    message = (
        "GET /tokenizer_info is served only with --enable-tokenizer-info-endpoint, as in vLLM; start the server with it"
    )
    raise ApiError(404, message, code="tokenizer_info_disabled")


async def absent(request: Request) -> Response:
    """Refuse a request with the reason."""
    _, reason = ABSENT[request.scope["route"].path]
    raise ApiError(501, f"{request.url.path} is not served: {reason}", code="not_supported")
