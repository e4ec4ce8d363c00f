"""Logs: which request a line belongs to, and lines as JSON. No line holds a prompt, a picture or a key."""

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

logger: logging.Logger = logging.getLogger(__name__)

REQUEST_ID: contextvars.ContextVar[str] = contextvars.ContextVar("dashinfer_vlm_request_id", default="")
"""The request that is being served; set in the engine's stages too."""

LogFormat = Literal["text", "json"]

TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class TextFormatter(logging.Formatter):
    """As ever, with the request's id at the end where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        line, request = super().format(record), REQUEST_ID.get()
        return f"{line} [{request}]" if request else line


class JsonFormatter(logging.Formatter):
    """One JSON object a line: `time` (UTC), `level`, `logger`, `message`, `request_id`, and the fields of a visit."""

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
    """Have the handlers of the root logger write so; JSON, warnings of libraries too."""
    formatter = JsonFormatter() if log_format == "json" else TextFormatter(TEXT)
    for handler in logging.getLogger().handlers:
        handler.setFormatter(formatter)
    logging.captureWarnings(log_format == "json")


def writes_json() -> bool:
    """Whether what the program says is for a program to read."""
    return any(isinstance(handler.formatter, JsonFormatter) for handler in logging.getLogger().handlers)


def last_line(message: str) -> str:
    """What a program says that ends at once, and that has no time for handlers."""
    if not writes_json():
        return f"dashinfer-vlm: {message}\n"
    record = logging.LogRecord(__name__, logging.INFO, __file__, 0, message, None, None)
    return JsonFormatter().format(record) + "\n"


@contextlib.contextmanager
def endings_as_records() -> Iterator[None]:
    """Where lines are JSON, the error that ends the program is one of them, and the exit code is as ever."""
    try:
        yield
    except (click.ClickException, click.exceptions.Exit, click.Abort):
        raise
    except DashInferVLMError as error:
        if not writes_json():
            raise
        logger.error("%s", error.message)  # noqa: TRY400 - it is for people, who are told what to do
        sys.exit(SETUP_FAILED)
    except Exception:
        if not writes_json():
            raise
        logger.exception("the program failed")
        sys.exit(1)
