"""Base classes and types shared by all objects of a request."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Annotated, Any, ClassVar, TypeAlias, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Strict,
    Tag,
    ValidationInfo,
    model_validator,
)

from .field_names import FieldNames, UnknownMedia
from .fields import RETURNED_FIELDS

LARGEST = 2**31 - 1
"""Maximum of counts, sizes and token IDs in a request."""


class RequestModel(BaseModel):
    """Base class of all objects in a request: unknown keys are ignored, nulls are absent, values are not converted.

    `strict=True` of pydantic disables conversions; it does not concern unknown keys, which `FieldNames` checks.

    Attributes:
        _accepted_fields: fields that may be set in addition to those of the class.
        _unknown_media: detects media in other fields.
    """

    _accepted_fields: ClassVar[Collection[str]] = RETURNED_FIELDS
    _unknown_media: ClassVar[UnknownMedia | None] = None
    _field_names: ClassVar[FieldNames]

    model_config: ClassVar[ConfigDict] = ConfigDict(
        frozen=True, extra="allow", strict=True, allow_inf_nan=False, serialize_by_alias=True
    )

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        fields = [field.alias or name for name, field in cls.model_fields.items()]
        cls._field_names = FieldNames(fields, cls._accepted_fields, cls._unknown_media)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls_and_check_names(cls, data: object, info: ValidationInfo) -> object:
        if not isinstance(data, dict):
            return data
        given = {key: value for key, value in data.items() if value is not None}
        cls._field_names.check(given, [] if info.context is None else info.context)
        return given


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
