"""Discovery of plugins by entry points, and the registry of what they provide."""

from .discovery import ALLOWED_VARIABLE, DISTRIBUTION
from .loader import ADAPTER_GROUP, add_commands, installed_options, load_adapter, load_plugins
from .options import resolve_options
from .registry import PluginRow, Registry

__all__ = [
    "ADAPTER_GROUP",
    "ALLOWED_VARIABLE",
    "DISTRIBUTION",
    "PluginRow",
    "Registry",
    "add_commands",
    "installed_options",
    "load_adapter",
    "load_plugins",
    "resolve_options",
]
