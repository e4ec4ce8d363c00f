"""Find and import installed plugins by their entry points, and check the API version that they declare."""

from __future__ import annotations

import functools
import logging
import os
import sys
import traceback
from collections.abc import Callable
from importlib.metadata import Distribution, EntryPoint, entry_points
from pathlib import Path
from types import ModuleType

import pluggy

from ..errors import MissingDependency, PluginError
from ..hooks import API_VERSION, GROUP
from ..installation import DISTRIBUTION, install_step
from . import hookspecs

ALLOWED_VARIABLE = "DASHINFER_VLM_PLUGINS"
"""Names of the plugins of other distributions that may be imported. Not an option: plugins define options, and are
imported before these are read."""

logger: logging.Logger = logging.getLogger(__name__)


def plugin_entries() -> list[EntryPoint]:
    """Return the entry points of the plugins that may be imported, the first of each name, as `installed_entries`."""
    allowed = allowed_names()
    entries: dict[str, EntryPoint] = {}
    for entry in installed_entries():
        if is_allowed(entry, allowed):
            entries.setdefault(entry.name, entry)
    return list(entries.values())


def allowed_names() -> frozenset[str] | None:
    """Return the names in `DASHINFER_VLM_PLUGINS`, which are separated by commas; None if it is not set."""
    value = os.environ.get(ALLOWED_VARIABLE)
    return None if value is None else frozenset(filter(None, map(str.strip, value.split(","))))


def is_allowed(entry: EntryPoint, allowed: frozenset[str] | None) -> bool:
    return allowed is None or owner(entry) == DISTRIBUTION or entry.name in allowed


def installed_entries() -> list[EntryPoint]:
    """Return the entry points of plugins, built-in ones first, so that no other plugin can take their names.

    The metadata of the installed distributions are read again only after a folder of `sys.path` has changed, since
    that takes 10 ms where 200 are installed.
    """
    return list(_read_entries(tuple(map(id, sys.meta_path)), tuple((path, _modified(path)) for path in sys.path)))


@functools.lru_cache(maxsize=4)
def _read_entries(finders: tuple[int, ...], folders: tuple[tuple[str, int], ...]) -> tuple[EntryPoint, ...]:
    """Read the entry points; the arguments are what they depend on."""
    entries = entry_points(group=GROUP)
    return tuple(sorted(entries, key=lambda entry: (owner(entry) != DISTRIBUTION, entry.name, entry.value)))


def _modified(path: str) -> int:
    try:
        return Path(path).stat().st_mtime_ns
    except OSError:
        return 0


def owner(entry: EntryPoint) -> str:
    """Return the name of the distribution that declares an entry point."""
    return identity(entry.dist)[0] if entry.dist else "unknown"


@functools.lru_cache(maxsize=64)
def identity(distribution: Distribution) -> tuple[str, str]:
    """Return name and version. Cached, since each access parses the metadata."""
    metadata = distribution.metadata
    return metadata["Name"], metadata["Version"]


def import_plugin(entry: EntryPoint) -> object:
    """Import the object that an entry point names.

    Raises:
        MissingDependency: a package that it imports is not installed; the message contains the command to install it.
        PluginError: its code raises an exception.
    """
    try:
        return entry.load()
    except MissingDependency:
        raise
    except ImportError as error:
        raise missing_dependency(entry, error) from error
    except Exception as error:
        raise PluginError(f"Plugin {entry.name!r} ({entry.value}) failed during import: {located(error)}") from error


def missing_dependency(entry: EntryPoint, error: ImportError) -> MissingDependency:
    extra = entry.extras[0] if entry.extras else ""
    step = f"Try: pip install '{owner(entry)}{f'[{extra}]' if extra else ''}'"
    if owner(entry) == DISTRIBUTION:
        step = install_step(extra)
    return MissingDependency(f"{entry.name!r} ({entry.value}) cannot be imported: {error}. {step}")


def located(error: Exception) -> str:
    """Return the message of an error with the file and line that raised it."""
    if isinstance(error, PluginError | SyntaxError):  # ours states the cause; that of a syntax error has file and line
        return str(error)
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{error} ({type(error).__name__} in {frame.filename}, line {frame.lineno})"


def call_hooks(entry: EntryPoint, use: Callable[[pluggy.HookRelay], None]) -> bool:
    """Pass the hooks of one plugin to `use`, and return whether that succeeded.

    A broken plugin is skipped here; `load_plugins` reports it with the fix.
    """
    try:
        use(create_manager(entry.load(), entry.name).hook)
    except Exception as error:  # noqa: BLE001 - a plugin's code can raise anything
        logger.debug("skipping plugin %s: %s", entry.name, error)
        return False
    return True


def create_manager(plugin: object, name: str) -> pluggy.PluginManager:
    """Return a manager that calls the hooks of one plugin.

    That of a module is created once per process: managers have no state, and those of the built-in plugins take
    milliseconds to create.

    Raises:
        PluginError: it was written for another version of the plugin API, or a hook has an unknown name or argument.
    """
    return _module_manager(plugin, name) if isinstance(plugin, ModuleType) else _new_manager(plugin, name)


@functools.lru_cache(maxsize=64)
def _module_manager(module: ModuleType, name: str) -> pluggy.PluginManager:
    return _new_manager(module, name)


def _new_manager(plugin: object, name: str) -> pluggy.PluginManager:
    version = getattr(plugin, "dashinfer_vlm_api", API_VERSION)
    if version != API_VERSION:
        raise PluginError(
            f"Plugin {name!r} was written for version {version!r} of the plugin API, but this is version {API_VERSION}."
            " Install a compatible release of the plugin."
        )
    manager = pluggy.PluginManager(GROUP)
    manager.add_hookspecs(hookspecs)
    try:
        manager.register(plugin, name=name)
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        raise PluginError(f"Plugin {name!r} failed during registration: {error}") from error
    return manager
