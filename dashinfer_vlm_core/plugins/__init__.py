"""Discovery of plugins by entry points, and the registry of what they provide."""

from .discovery import ALLOWED_VARIABLE
from .loader import ADAPTER_GROUP, add_commands, load_adapter, load_plugins, options_registry
from .registry import PluginRow, Registry

__all__ = [
    "ADAPTER_GROUP",
    "ALLOWED_VARIABLE",
    "PluginRow",
    "Registry",
    "add_commands",
    "load_adapter",
    "load_plugins",
    "options_registry",
]
