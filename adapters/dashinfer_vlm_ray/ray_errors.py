"""Convert Ray's errors to those of this package."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from dashinfer_vlm_core.errors import DashInferVLMError, EngineClosed, QueueFull

REPLICA_LOST = "replica_lost"
"""The `code` of requests whose replica ended."""


@contextlib.contextmanager
def translate_errors() -> Iterator[None]:
    """Raise the error that a replica raised, as the same class and without Ray's traceback in its message.

    Errors of Ray itself become `EngineClosed` or `QueueFull`. Unexpected exceptions of a replica are raised unchanged.
    """
    from ray.exceptions import RayError, RayTaskError
    from ray.serve.exceptions import BackPressureError, RayServeException

    try:
        yield
    except BackPressureError as error:
        raise QueueFull("Too many requests are waiting for a replica. Try again later.") from error
    except RayTaskError as error:
        if isinstance(error.cause, DashInferVLMError):
            raise error.cause from None
        raise
    except (RayError, RayServeException) as error:
        raise _replica_lost() from error
    except asyncio.CancelledError:
        if _is_canceled():
            raise
        raise _replica_lost() from None  # Ray raises it too if the replica was stopped, not the caller


def _replica_lost() -> EngineClosed:
    return EngineClosed("The replica that served the request has ended. Try again.", code=REPLICA_LOST)


def _is_canceled() -> bool:
    # Before Python 3.11, tasks do not know.
    count = getattr(asyncio.current_task(), "cancelling", None)  # codespell:ignore cancelling
    return count is None or count() > 0
