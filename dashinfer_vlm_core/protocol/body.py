"""Base classes of whole requests, as opposed to the objects in them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import ClassVar

from pydantic import ValidationError, model_validator
from typing_extensions import Self

from .base import Name, RequestModel
from .fields import RejectedFields, reject_fields
from .name_log import NameLog
from .validation_errors import explain

logger: logging.Logger = logging.getLogger(__name__)

_LOG = NameLog(
    logger,
    "Requests have unknown fields, which are ignored: %s.",
    "Further unknown fields of requests are not logged.",
)


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
        unknown: list[str] = []
        try:
            request = cls.model_validate(data, context=unknown)
        except ValidationError as error:
            raise explain(error) from None
        _LOG.log(unknown)
        return request


class ModelRequest(RequestBody):
    """A request to load or to unload a model, by its name or an alias."""

    model: Name


class CheckedBody(RequestBody):
    """Base class of requests with unsupported fields, which are rejected."""

    _rejected_fields: ClassVar[RejectedFields]

    @model_validator(mode="before")
    @classmethod
    def _reject_fields(cls, data: object) -> object:
        reject_fields(data if isinstance(data, dict) else {}, cls._rejected_fields)
        return data
