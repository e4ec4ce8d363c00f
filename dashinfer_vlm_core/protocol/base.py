"""What all objects of a request have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, ClassVar, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, model_validator

LARGEST = 2**31 - 1
"""Largest count, size or token id that a request may name."""


class LenientModel(BaseModel):
    """Base of every object in a request: unknown keys are kept, nulls are absent, nothing is converted."""

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="allow", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: object) -> object:
        return {key: value for key, value in data.items() if value is not None} if isinstance(data, dict) else data


class StrictModel(LenientModel):
    """An object whose every key changes the answer: unknown ones are refused rather than ignored."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid")


def encodable(text: str) -> str:
    """Refuse what JSON can spell but no tokenizer can read: half of a surrogate pair."""
    if not text.isascii():  # answered from the string's header, so that megabytes of base64 are not looked at
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ValueError("must be valid Unicode, without lone surrogates") from None
    return text


Text: TypeAlias = Annotated[str, AfterValidator(encodable)]
Name: TypeAlias = Annotated[str, Field(min_length=1, max_length=256), AfterValidator(encodable)]
Label: TypeAlias = Annotated[str, Field(min_length=1, max_length=128), AfterValidator(encodable)]
Count: TypeAlias = Annotated[int, Field(ge=1, le=LARGEST)]


def _string_or_array(value: object) -> str | None:
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, (list, tuple)) else None


STRING_OR_ARRAY = Discriminator(
    _string_or_array, custom_error_type="string_or_array", custom_error_message="must be a string or an array"
)
"""Tells pydantic by what was given which member of a union is meant, so that a fault is reported once, at its place."""


def string_or_object(kind: Callable[[object], str | None]) -> Discriminator:
    """As `STRING_OR_ARRAY`, for a union whose members `kind` names."""
    return Discriminator(
        kind, custom_error_type="string_or_object", custom_error_message="must be a string or an object"
    )


TAGS = frozenset({"string", "array", "object", "part"})
"""Names of union members: they show up in pydantic's locations, but not in the request."""
