"""Base classes and types shared by all objects of a request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, ClassVar, TypeAlias, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, Strict, Tag, model_validator

LARGEST = 2**31 - 1
"""Maximum of counts, sizes and token IDs in a request."""


class RequestModel(BaseModel):
    """Base class of all objects in a request: unknown keys are ignored, nulls are absent, values are not converted.

    `strict=True` of pydantic disables conversions; it does not concern unknown keys.
    """

    model_config: ClassVar[ConfigDict] = ConfigDict(
        frozen=True, extra="allow", strict=True, allow_inf_nan=False, serialize_by_alias=True
    )

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: object) -> object:
        return {key: value for key, value in data.items() if value is not None} if isinstance(data, dict) else data


class ClosedModel(RequestModel):
    """Base class of `media_io_kwargs` and `mm_processor_kwargs`, where unknown keys are rejected instead of ignored."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid")


def encodable(text: str) -> str:
    """Reject lone surrogates, which JSON can express but no tokenizer can encode."""
    if not text.isascii():  # reads a flag of the string, so that megabytes of base64 are not scanned
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ValueError("must be valid Unicode, without lone surrogates") from None
    return text


Text: TypeAlias = Annotated[str, AfterValidator(encodable)]
Name: TypeAlias = Annotated[str, Field(min_length=1, max_length=256), AfterValidator(encodable)]
Label: TypeAlias = Annotated[str, Field(min_length=1, max_length=128), AfterValidator(encodable)]
Count: TypeAlias = Annotated[int, Field(ge=1, le=LARGEST)]


def _shape(value: object) -> str | None:
    if isinstance(value, str):
        return "string"
    if isinstance(value, (list, tuple)):
        return "array"
    return "object" if isinstance(value, (dict, BaseModel)) else None


def _number_or_array(value: object) -> str:
    return "array" if isinstance(value, (list, tuple)) else "number"


def string_or_object(get_tag: Callable[[object], str | None]) -> Discriminator:
    """Return a discriminator for a union whose tag `get_tag` returns."""
    return Discriminator(
        get_tag, custom_error_type="string_or_object", custom_error_message="must be a string or an object"
    )


FirstT = TypeVar("FirstT")
SecondT = TypeVar("SecondT")

# Pydantic selects the member of these unions by the value's type, so that it reports an error once, at its location.
Array: TypeAlias = Annotated[tuple[FirstT, ...], Strict(False), Field(fail_fast=True)]
StringOrArray: TypeAlias = Annotated[
    Annotated[FirstT, Tag("string")] | Annotated[SecondT, Tag("array")],
    Discriminator(_shape, custom_error_type="string_or_array", custom_error_message="must be a string or an array"),
]
StringOrObject: TypeAlias = Annotated[
    Annotated[FirstT, Tag("string")] | Annotated[SecondT, Tag("object")], string_or_object(_shape)
]
NumberOrArray: TypeAlias = Annotated[
    Annotated[FirstT, Tag("number")] | Annotated[SecondT, Tag("array")], Discriminator(_number_or_array)
]

TAGS = frozenset({"string", "array", "object", "number", "subset"})
"""Tags of union members, which pydantic's locations contain although the request does not."""
