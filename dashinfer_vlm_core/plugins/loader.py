"""Load plugins, and skip broken ones. Built-in components use the same hooks."""

from __future__ import annotations

import functools
import logging
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any

from ..errors import MissingDependency, PluginError
from ..hooks import GROUP
from ..installation import DISTRIBUTION, install_step
from .discovery import (
    ALLOWED_VARIABLE,
    allowed_names,
    call_hooks,
    identity,
    import_plugin,
    installed_entries,
    is_allowed,
    owner,
    plugin_entries,
)
from .registry import PluginRow, Registry, lookup

if TYPE_CHECKING:
    import click

    from ..config import PluginOptions

ADAPTER_GROUP = f"{GROUP}.adapters"

logger: logging.Logger = logging.getLogger(__name__)


def load_plugins(*, strict: bool = False) -> Registry:
    """Register every plugin that an installed distribution declares: built-in ones first, then by name.

    If the environment variable DASHINFER_VLM_PLUGINS is set, it names the plugins of other distributions that may be
    imported. A broken plugin is skipped, logged, and listed in `Registry.rows` with the fix.

    Raises:
        PluginError, MissingDependency: with `strict`, for the first plugin that is broken.
    """
    registry = Registry()
    seen: set[str] = set()
    allowed = allowed_names()
    entries = installed_entries()
    for name in sorted((allowed or frozenset()) - {entry.name for entry in entries}):
        logger.warning("%s names %r, but no plugin with this name is installed.", ALLOWED_VARIABLE, name)
    for entry in entries:
        if is_allowed(entry, allowed):
            row = _load(entry, registry, seen, strict=strict)
        else:
            row = _row(entry, status="disabled", problem=f"To use it, add it to the variable {ALLOWED_VARIABLE}.")
        seen.add(entry.name)
        registry.rows.append(row)
    return registry


def add_commands(group: click.Group) -> None:
    """Add the commands of all plugins. Only the commands of broken plugins are missing."""
    for entry in plugin_entries():
        call_hooks(entry, lambda hook: hook.register_commands(group=group))


def options_registry() -> Registry:
    """Return a registry of the options of all plugins. Those of a broken plugin, or with a name that is taken, are
    missing."""
    found = Registry()
    for entry in plugin_entries():
        own = _options(entry)
        if found.options.keys().isdisjoint(own):
            found.options |= own
    return found


def _options(entry: EntryPoint) -> dict[str, type[PluginOptions]]:
    own = Registry()
    is_usable = call_hooks(entry, lambda hook: hook.register_options(register=own.add_options))
    return own.options if is_usable else {}


def load_adapter(name: str) -> Any:
    """Import the object that an adapter's entry point names, such as the server's `create_app`.

    Raises:
        PluginError: no adapter with that name is installed, or its code raises an exception.
        MissingDependency: its extra is not installed.
    """
    entries = {entry.name: entry for entry in entry_points(group=ADAPTER_GROUP)}
    entry = lookup("adapter", name, entries)
    return import_plugin(entry)


def _load(entry: EntryPoint, registry: Registry, seen: set[str], *, strict: bool) -> PluginRow:
    if entry.name in seen:
        problem = "Another distribution has a plugin with this name. Uninstall one of the two."
        return _row(entry, status="duplicate", problem=problem)
    try:
        return _row(entry, status="ok", provides=registry.add_plugin(import_plugin(entry), name=entry.name))
    except (PluginError, MissingDependency) as error:
        if strict:
            raise
        is_complete = isinstance(error, MissingDependency)  # it has the command that installs what is missing
        problem = error.message if is_complete else f"{error.message.removesuffix('.')}. {_step(entry)}"
        _warn(problem)
        return _row(entry, status="broken", problem=problem)


@functools.cache
def _warn(problem: str) -> None:
    """Log a problem once per process, although several parts of a program load the plugins."""
    logger.warning("%s", problem)


def _step(entry: EntryPoint) -> str:
    if owner(entry) == DISTRIBUTION:
        return install_step()
    return (
        f"Correct its code, uninstall {owner(entry)}, or set {ALLOWED_VARIABLE} to the names of the plugins to import,"
        " separated by commas."
    )


def _row(entry: EntryPoint, **fields: Any) -> PluginRow:
    distribution = " ".join(identity(entry.dist)) if entry.dist else "unknown"
    return PluginRow(name=entry.name, value=entry.value, distribution=distribution, **fields)
