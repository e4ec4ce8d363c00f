"""Plugins: found by entry points, and what they register."""

from .loader import (
    ADAPTER_GROUP,
    DISTRIBUTION,
    PluginRow,
    Registry,
    add_commands,
    load_adapter,
    load_plugins,
    new_manager,
)

__all__ = [
    "ADAPTER_GROUP",
    "DISTRIBUTION",
    "PluginRow",
    "Registry",
    "add_commands",
    "load_adapter",
    "load_plugins",
    "new_manager",
]
