"""Discovery of plugins by entry points, and the registry of what they provide."""

from ..hookspecs.discovery import DISTRIBUTION
from .loader import (
    ADAPTER_GROUP,
    PluginRow,
    Registry,
    add_commands,
    load_adapter,
    load_plugins,
)

__all__ = [
    "ADAPTER_GROUP",
    "DISTRIBUTION",
    "PluginRow",
    "Registry",
    "add_commands",
    "load_adapter",
    "load_plugins",
]
