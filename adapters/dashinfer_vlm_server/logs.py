"""Log formats: lines with request IDs, as text or JSON. No line contains a prompt, an image or a key."""

from __future__ import annotations

import contextlib
import contextvars
import json
import logging
import sys
import time
from collections.abc import Iterator
from typing import Any, Literal

import click

from dashinfer_vlm_core.cli.main import SETUP_FAILED
from dashinfer_vlm_core.errors import DashInferVLMError
from dashinfer_vlm_core.progress import Progress

logger: logging.Logger = logging.getLogger(__name__)

REQUEST_ID: contextvars.ContextVar[str] = contextvars.ContextVar("dashinfer_vlm_request_id", default="")
"""The ID of the current request; also set while the engine processes it."""

LogFormat = Literal["text", "json"]

TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class TextFormatter(logging.Formatter):
    """Text lines that end with the request ID, if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        request = REQUEST_ID.get()
        return super().format(record) + (f" [{request}]" if request else "")


class JsonFormatter(logging.Formatter):
    """A JSON object per line: `time` (UTC), `level`, `logger`, `message`, `request_id`, and the fields of a request."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request := REQUEST_ID.get():
            entry["request_id"] = request
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry | getattr(record, "fields", {}))


def set_format(log_format: LogFormat) -> None:
    """Set the format of the root logger's handlers. With JSON, warnings of libraries and progress are logged too."""
    formatter = JsonFormatter() if log_format == "json" else TextFormatter(TEXT)
    for handler in logging.getLogger().handlers:
        handler.setFormatter(formatter)
    logging.captureWarnings(log_format == "json")
    Progress.uses_bars = log_format == "text"


def writes_json() -> bool:
    """Return whether logs are written as JSON."""
    return any(isinstance(handler.formatter, JsonFormatter) for handler in logging.getLogger().handlers)


def last_line(message: str) -> str:
    """Format the last message of a process that exits at once, without its log handlers."""
    if not writes_json():
        return f"dashinfer-vlm: {message}\n"
    record = logging.LogRecord(__name__, logging.INFO, __file__, 0, message, None, None)
    return JsonFormatter().format(record) + "\n"


@contextlib.contextmanager
def errors_as_records() -> Iterator[None]:
    """If logs are JSON, log the error that ends the program as JSON too. The exit code does not change."""
    try:
        yield
    except (click.ClickException, click.exceptions.Exit, click.Abort):
        raise
    except DashInferVLMError as error:
        if not writes_json():
            raise
        logger.error("%s", error.message)  # noqa: TRY400 - the message is for the operator
        sys.exit(SETUP_FAILED)
    except Exception:
        if not writes_json():
            raise
        logger.exception("Unexpected error.")
        sys.exit(1)
