"""Files of adapters that a program gives as bytes or tensors, stored like uploads over HTTP."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...core.requests.request_params import InvalidRequest
from ...memory.files.config import CONFIG_FILE
from ...memory.files.form import WEIGHTS_FILE
from ...memory.files.tokens.added_tokens import TEXT_FILES
from ...memory.files.uploads.content_store import StagedUpload, StoreFull, TooLarge
from ..engine.backend_adapters import BackendAdapters
from ..engine.loaded_adapters import LoadedAdapters
from ..settings import Settings


class AdapterFiles:
    """A directory for adapters without one: `adapter_uploads`, or a temporary one until the LLM is closed."""

    def __init__(self, settings: Settings, adapters: BackendAdapters) -> None:
        self._made: tempfile.TemporaryDirectory[str] | None = None
        if settings.adapter_uploads is None:
            self._made = tempfile.TemporaryDirectory(prefix="chorus-adapters-", ignore_cleanup_errors=True)
            settings = settings.model_copy(update={"adapter_uploads": Path(self._made.name)})
        loaded = LoadedAdapters.of(settings, adapters)
        assert loaded is not None  # the settings name a directory
        self.loaded = loaded

    @contextmanager
    def draft(self, config: Any, weights: Any, more: Mapping[str, Any] | None = None) -> Iterator[StagedUpload]:
        """The files of an adapter, for a load within the `with` block. more: those of its own tokenizer and template,
        by name. Raises InvalidRequest.
        """
        files = {CONFIG_FILE: _config_bytes(config), WEIGHTS_FILE: _weight_bytes(weights), **_more_bytes(more or {})}
        try:
            with self.loaded.draft(sum(map(len, files.values()))) as draft:
                for name, data in files.items():
                    draft.write(name, data)
                yield draft
        except TooLarge as error:
            raise InvalidRequest("weights", f"{error}; max_adapter_bytes allows more") from None
        except StoreFull as error:
            raise InvalidRequest("weights", f"{error}; max_uploaded_bytes allows more") from None

    def close(self) -> None:
        if self._made is not None:
            self._made.cleanup()
            self._made = None


def _more_bytes(more: Mapping[str, Any]) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for name, data in more.items():
        if name not in TEXT_FILES:
            raise InvalidRequest("files", f"files has {name!r}; it may have {', '.join(TEXT_FILES)}")
        if not isinstance(data, str | bytes | bytearray | memoryview):
            raise InvalidRequest("files", f"files[{name!r}] must be text or bytes, not {type(data).__name__}")
        found[name] = data.encode() if isinstance(data, str) else bytes(data)
    return found


def _config_bytes(config: Any) -> bytes:
    if config is None:
        raise InvalidRequest(
            "config", "config is missing; give the contents of adapter_config.json, as a dict, text or bytes"
        )
    if callable(to_dict := getattr(config, "to_dict", None)):  # peft's LoraConfig
        config = to_dict()
    if isinstance(config, Mapping):
        try:
            return json.dumps(config, default=_listed).encode()
        except (TypeError, ValueError) as error:
            raise InvalidRequest("config", f"config can't be written as JSON: {error}") from None
    if isinstance(config, str):
        return config.encode()
    if isinstance(config, bytes | bytearray | memoryview):
        return bytes(config)
    raise InvalidRequest("config", f"config must be a dict, text or bytes, not {type(config).__name__}")


def _listed(value: Any) -> Any:
    """Convert sets of module names, and enumerations, of peft's configurations."""
    return sorted(value) if isinstance(value, set | frozenset) else str(getattr(value, "value", value))


def _weight_bytes(weights: Any) -> bytes:
    if weights is None:
        raise InvalidRequest(
            "weights", "weights are missing; give tensors by name, or adapter_model.safetensors' bytes"
        )
    if isinstance(weights, bytes | bytearray | memoryview):
        return bytes(weights)
    if not isinstance(weights, Mapping) or not weights:
        raise InvalidRequest("weights", f"weights must be bytes, or tensors by name, not {type(weights).__name__}")
    import torch
    from safetensors.torch import save

    tensors = {}
    for name, tensor in weights.items():
        try:
            tensors[str(name)] = torch.as_tensor(tensor).detach().to("cpu").contiguous().clone()
        except (TypeError, ValueError, RuntimeError) as error:
            raise InvalidRequest("weights", f"weights[{name!r}] must be a tensor: {error}") from None
    return save(tensors)
