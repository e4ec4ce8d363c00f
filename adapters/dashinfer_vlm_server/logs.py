"""Logs: which request a line belongs to, and lines as JSON. No line holds a prompt, a picture or a key."""

from __future__ import annotations

import json
import logging
import time
from typing import Any, Literal

from .visits import REQUEST_ID

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
    """Have the handlers of the root logger write so."""
    formatter = JsonFormatter() if log_format == "json" else TextFormatter(TEXT)
    for handler in logging.getLogger().handlers:
        handler.setFormatter(formatter)
