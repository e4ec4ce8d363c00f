"""Requests of operators, which name a model."""

from __future__ import annotations

from .base import Name
from .body import RequestBody


class ModelRequest(RequestBody):
    """A request to load or to unload a model, by its name or an alias."""

    model: Name
