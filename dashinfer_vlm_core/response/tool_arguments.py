"""The arguments of tool calls as JSON values, for protocols that do not send them as text."""

from __future__ import annotations

from typing import Any

import pydantic_core


def read_arguments(text: str) -> Any:
    """Return the arguments of a tool call, which may be incomplete; none if what the model wrote is not JSON."""
    try:
        return pydantic_core.from_json(text or "{}", allow_partial=True, allow_inf_nan=False)
    except ValueError:
        return {}
