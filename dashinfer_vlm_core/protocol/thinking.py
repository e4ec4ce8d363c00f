"""Thinking: whether a model reasons, in the form of Anthropic's and other providers' APIs."""

from __future__ import annotations

from typing import Literal

from .base import Count, RequestModel


class Thinking(RequestModel):
    """Whether the model reasons before it responds; with `adaptive`, its chat template decides.

    `budget_tokens` has no effect. `display` applies to the Messages API only.
    """

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Count | None = None
    display: Literal["summarized", "omitted"] = "summarized"
