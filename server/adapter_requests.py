"""The bodies of the calls that change the adapters."""

from __future__ import annotations

from typing import Annotated, TypeVar

from pydantic import AfterValidator, BaseModel, Field, ValidationError

from ..memory.adapters.adapter import MAX_NAME_CHARACTERS, check_name
from ..memory.files.directory import MAX_PATH_BYTES
from .errors import from_validation

AnyBody = TypeVar("AnyBody", bound="_Body")


def _check_path(path: str) -> str:
    if "\0" in path or len(path.encode(errors="surrogatepass")) > MAX_PATH_BYTES:
        raise ValueError(f"a path has at most {MAX_PATH_BYTES} bytes, none of them zero")
    return path


AdapterName = Annotated[str, Field(max_length=MAX_NAME_CHARACTERS), AfterValidator(check_name)]
AdapterPath = Annotated[str, Field(min_length=1, max_length=MAX_PATH_BYTES), AfterValidator(_check_path)]


class _Body(BaseModel):
    @classmethod
    def parse(cls: type[AnyBody], body: bytes) -> AnyBody:
        """Reads a body; raises an ApiError that names the field."""
        try:
            return cls.model_validate_json(body)
        except ValidationError as error:
            raise from_validation(error) from None


class AddAdapter(_Body):
    """POST /v1/adapters. `path` is a directory on the server."""

    name: AdapterName
    path: AdapterPath


class LoadLoraAdapter(_Body):
    """POST /v1/load_lora_adapter."""

    lora_name: AdapterName
    lora_path: AdapterPath
    load_inplace: bool | None = False
    base_model_name: Annotated[str, Field(max_length=MAX_PATH_BYTES)] | None = None


class UnloadLoraAdapter(_Body):
    """POST /v1/unload_lora_adapter. `lora_int_id` may come along, as vLLM's clients send it, and means nothing."""

    lora_name: Annotated[str, Field(max_length=MAX_NAME_CHARACTERS)]
