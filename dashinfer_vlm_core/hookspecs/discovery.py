"""Installed plugins: their entry points, what imports them, and what refuses one for another version of the API."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from importlib.metadata import Distribution, EntryPoint, entry_points

import pluggy

from .. import hookspecs
from ..errors import MissingDependency, PluginError
from . import API_VERSION, GROUP

DISTRIBUTION = "dashinfer-vlm-adapters"

logger: logging.Logger = logging.getLogger(__name__)


def plugin_entries() -> list[EntryPoint]:
    """Entry points of plugins; ours come first, so that nobody takes a built-in part's name."""
    return sorted(entry_points(group=GROUP), key=lambda entry: (owner(entry) != DISTRIBUTION, entry.name, entry.value))


def owner(entry: EntryPoint) -> str:
    """The distribution that declares an entry point."""
    return identity(entry.dist)[0] if entry.dist else "unknown"


@functools.lru_cache(maxsize=64)
def identity(distribution: Distribution) -> tuple[str, str]:
    """Name and version. A distribution parses its metadata anew for each of them, which was half of `load_plugins`."""
    metadata = distribution.metadata
    return metadata["Name"], metadata["Version"]


def import_plugin(entry: EntryPoint) -> object:
    """The object that an entry point names.

    Raises:
        MissingDependency: something that it imports is not installed; the message says what to install.
        PluginError: its own code fails.
    """
    try:
        return entry.load()
    except ImportError as error:
        raise missing(entry, error) from error
    except Exception as error:
        raise PluginError(f"Plugin {entry.name!r} ({entry.value}) failed while it was imported: {error}") from error


def missing(entry: EntryPoint, error: ImportError) -> MissingDependency:
    wanted = f"{owner(entry)}{f'[{entry.extras[0]}]' if entry.extras else ''}"
    return MissingDependency(f"{entry.name!r} ({entry.value}) cannot be imported: {error}. Try: pip install '{wanted}'")


def call_hooks(entry: EntryPoint, use: Callable[[pluggy.HookRelay], None]) -> bool:
    """Let `use` call hooks of one plugin, and return whether it could.

    One that is broken is left out, since `load_plugins` tells what mends it.
    """
    try:
        use(manager_of(entry.load(), entry.name).hook)
    except Exception as error:  # noqa: BLE001 - whatever a plugin's code raises
        logger.debug("plugin %s is left out: %s", entry.name, error)
        return False
    return True


def manager_of(plugin: object, name: str) -> pluggy.PluginManager:
    """A manager that calls the hooks of one plugin.

    Raises:
        PluginError: it was written for another version of the plugin API, or a hook is misspelt or has other arguments.
    """
    version = getattr(plugin, "dashinfer_vlm_api", API_VERSION)
    if version != API_VERSION:
        raise PluginError(
            f"Plugin {name!r} was written for version {version!r} of the plugin API, and this is version {API_VERSION}:"
            " install a release of it that fits."
        )
    manager = pluggy.PluginManager(GROUP)
    manager.add_hookspecs(hookspecs)
    try:
        manager.register(plugin, name=name)
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        raise PluginError(f"Plugin {name!r} failed while registering: {error}") from error
    return manager
