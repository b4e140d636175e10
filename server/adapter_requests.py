"""The bodies of the calls that change the adapters."""

from __future__ import annotations

from typing import Annotated, TypeVar

from pydantic import AfterValidator, BaseModel, Field, ValidationError

from .errors import from_validation

MAX_NAME_CHARACTERS = 256

AnyBody = TypeVar("AnyBody", bound="_Body")


def _check_name(name: str) -> str:
    if not name or not name.isprintable() or name != name.strip():
        raise ValueError("a name is printable characters without blanks around them, and at least one")
    if any(part in ("", ".", "..") for part in name.split("/")):
        raise ValueError("a name's parts between slashes can't be empty, '.' or '..'")
    return name


AdapterName = Annotated[str, Field(max_length=MAX_NAME_CHARACTERS), AfterValidator(_check_name)]
AdapterPath = Annotated[str, Field(min_length=1)]


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
    base_model_name: str | None = None


class UnloadLoraAdapter(_Body):
    """POST /v1/unload_lora_adapter. `lora_int_id` may come along, as vLLM's clients send it, and means nothing."""

    lora_name: str
