"""Unexpected exceptions become an error that does not expose internals."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from ..errors import DashInferVLMError, EngineError

logger: logging.Logger = logging.getLogger(__name__)


@contextlib.contextmanager
def hide_internal_errors() -> Iterator[None]:
    """Log unexpected exceptions, and replace them with an error that does not expose internals."""
    try:
        yield
    except DashInferVLMError:
        raise
    except Exception as error:
        logger.exception("A request failed.")
        raise EngineError(
            "The engine failed on this request; see its log for the cause. Other requests are not affected.",
            code="internal_error",
        ) from error
