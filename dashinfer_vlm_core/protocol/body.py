"""Base classes of whole requests, as opposed to the objects in them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import ClassVar

from pydantic import ValidationError, model_validator
from typing_extensions import Self

from .base import RequestModel
from .fields import RejectedFields, reject_fields
from .unknown_fields import handle_unknown_fields
from .validation_errors import explain


class RequestBody(RequestModel):
    """Base class of requests."""

    @classmethod
    def parse(cls, data: object) -> Self:
        """Validate a request from JSON. An instance is returned unchanged.

        Raises:
            InvalidParameter: a value has the wrong type, range or shape; `param` is the innermost invalid field, in
                OpenAI's notation, such as `messages[1].content[0].image_url.url`.
            UnsupportedParameter: a known field requests an unsupported feature.
        """
        if isinstance(data, Mapping) and not isinstance(data, dict):
            data = dict(data)
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            raise explain(error) from None


class CheckedBody(RequestBody):
    """Base class of requests whose unsupported and misspelled fields are rejected, and unknown ones logged.

    Attributes:
        _rejected_fields: the unsupported fields.
        _accepted_fields: further fields that may be set.
    """

    _rejected_fields: ClassVar[RejectedFields]
    _accepted_fields: ClassVar[Collection[str]]

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, data: object) -> object:
        given = data if isinstance(data, dict) else {}
        reject_fields(given, cls._rejected_fields)
        known = {*cls.model_fields, *cls._rejected_fields, *cls._accepted_fields}
        unknown = [name for name, value in given.items() if value is not None and name not in known]
        handle_unknown_fields(unknown, cls.model_fields)
        return data
